"""`coda.fuse` of Flax models whose layers are scanned and rematerialised by Flax's own functions, with dropout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import coda_jax as coda
from coda_jax.jaxprs.walk import equations, jaxpr_of
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
D, F, LAYERS = 32, 64, 3
BATCH, TOKENS = 2, 24
ROWS = BATCH * TOKENS
policies = jax.checkpoint_policies
POLICIES = {"all": None, "dots": policies.dots_saveable, "names": policies.save_only_these_names("up")}


class Block(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32, rate=0.1):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.norm = nnx.RMSNorm(D, **options)
        self.up, self.down = nnx.Linear(D, F, **options), nnx.Linear(F, D, **options)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        h = checkpoint_name(self.up(self.norm(x)), "up")
        return x + self.dropout(self.down(nnx.gelu(h)))


class Normalised(nnx.Module):
    """A block with statistics that each call changes."""

    def __init__(self, rngs, dtype=jnp.float32):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.up, self.down = nnx.Linear(D, F, **options), nnx.Linear(F, D, **options)
        self.norm = nnx.BatchNorm(F, **options)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.norm(self.up(x))))


def stacked(block, **options):
    make = nnx.vmap(functools.partial(block, **options), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0))


def call(layer, x):
    return layer(x)


def scanned(layers, x, step=call):
    return nnx.scan(lambda x, layer: step(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)


def rematerialised(policy):
    return nnx.remat(call, policy=POLICIES[policy])


class Rematerialised(Block):
    @nnx.remat
    def __call__(self, x):
        return Block.__call__(self, x)


MODELS = {  # how a model is made, and its function
    "remat": (lambda **options: Block(nnx.Rngs(0), **options), lambda m, x: rematerialised("all")(m, m(x))),
    "remat of names": (lambda **options: Block(nnx.Rngs(0), **options), lambda m, x: rematerialised("names")(m, m(x))),
    "remat of a method": (lambda **options: Rematerialised(nnx.Rngs(0), **options), lambda m, x: m(m(x))),
    "scan": (functools.partial(stacked, Block), scanned),
    "scan of remat": (functools.partial(stacked, Block), functools.partial(scanned, step=rematerialised("all"))),
    "scan of dots": (functools.partial(stacked, Block), functools.partial(scanned, step=rematerialised("dots"))),
    "scan of statistics": (functools.partial(stacked, Normalised), scanned),
    "remat in cond": (
        lambda **options: Block(nnx.Rngs(0), **options),
        lambda m, x: nnx.cond(x[0, 0, 0] > 9, lambda m, x: m(m(x)), rematerialised("all"), m, x),
    ),
    "loop": (
        lambda **options: Block(nnx.Rngs(0), **options),
        lambda m, x: nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(x, m),
    ),
}


def mean_square(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def doors(loss, gradients):
    """The gradient of a loss, and of what is fused of it."""
    return {
        "plain": gradients(loss),
        "grad(fuse)": gradients(coda.fuse(loss)),
        "fuse(grad)": coda.fuse(gradients(loss)),
    }


def pure(f, model):
    """A function of a module's state, whose results are those of f and the state after; and the state."""
    graph, state = nnx.split(model)

    def function(state, x):
        module = nnx.merge(graph, state)
        value, gradient = f(module, x)
        return value, gradient, nnx.state(module)

    return function, state


def without_keys(tree):
    return [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def check(plain, fused, *args):
    """fused has the values of plain, no more products, each product a kernel, fewer passes, and keeps no more.

    But a checkpointed layer also keeps the row sum, in float32, that its norm begins with.
    """
    found, expected = (without_keys(jax.jit(f)(*args)) for f in (fused, plain))
    assert largest_error(found, expected) < 1e-5
    (own, _), (left, kernels) = (products(f, *args) for f in (plain, fused))
    assert (left, kernels) == (0, own)
    own_bytes, bytes_ = (coda.explain(f, *args, platform="cuda").totals for f in (plain, fused))
    assert bytes_.kept_bytes <= own_bytes.kept_bytes + LAYERS * ROWS * 4
    assert bytes_.passes_bytes < 0.5 * own_bytes.passes_bytes


def products(f, *args):
    """How often products run that are not coda_jax's, and that are."""
    every = list(equations(jaxpr_of(f, *args)))
    return [sum(times for e, times in every if e.primitive.name == name) for name in ("dot_general", "coda_gemm")]


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("name", MODELS)
def test_nnx(name, door):
    make, f = MODELS[name]
    x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, D))
    every = doors(lambda m, x: mean_square(f(m, x)), nnx.value_and_grad)
    plain, state = pure(every["plain"], make())
    fused, _ = pure(every[door], make())
    check(plain, fused, state, x)


class LinenBlock(nn.Module):
    rate: float = 0.1

    @nn.compact
    def __call__(self, x, _=None):
        h = checkpoint_name(nn.Dense(F)(nn.RMSNorm()(x)), "up")
        return x + nn.Dropout(self.rate, deterministic=False)(nn.Dense(D)(nn.gelu(h))), None


class LinenModel(nn.Module):
    policy: str = ""
    is_scanned: bool = False

    @nn.compact
    def __call__(self, x):
        layer = LinenBlock
        if self.policy:
            layer = nn.remat(layer, policy=POLICIES[self.policy], prevent_cse=not self.is_scanned)
        if self.is_scanned:
            splits = {"params": True, "dropout": True}
            layer = nn.scan(layer, variable_axes={"params": 0}, split_rngs=splits, length=LAYERS)
            return layer(name="layers")(x, None)[0]
        for i in range(2):
            x, _ = layer(name=f"layer_{i}")(x)
        return x


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("policy, is_scanned", [("all", False), ("names", False), ("", True), ("dots", True)])
def test_linen(policy, is_scanned, door):
    model, keys = LinenModel(policy, is_scanned), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    x = jax.random.normal(jax.random.key(2), (BATCH, TOKENS, D))
    every = doors(
        lambda w, x, key: mean_square(model.apply(w, x, rngs={"dropout": key})),
        functools.partial(jax.value_and_grad, argnums=(0, 1)),
    )
    check(every["plain"], every[door], model.init(keys, x), x, keys["dropout"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("policy", ["all", "dots"])
def test_flax_scan_costs_no_more_than_jax_scan(policy, door, dtype):
    """The functions of nnx are those of JAX once a module is its state."""
    layers = nnx.eval_shape(functools.partial(stacked, Block, dtype=dtype, rate=0.0))
    graph, state = nnx.split(layers)
    step = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x), policy=POLICIES[policy])

    def by_flax(state, x):
        return mean_square(scanned(nnx.merge(graph, state), x, rematerialised(policy)))

    def by_jax(state, x):
        return mean_square(jax.lax.scan(lambda x, state: (step(state, x), None), x, state)[0])

    def totals(f):
        gradients = functools.partial(jax.value_and_grad, argnums=(0, 1), allow_int=True)
        found = coda.explain(doors(f, gradients)[door], state, x, platform="cuda")
        return found.totals.passes_bytes, found.totals.kept_bytes, found.kernels, found.others

    x = jax.ShapeDtypeStruct((2, 512, D), dtype)
    (passes, kept, *by_kernels), (passes_of_jax, kept_of_jax, *expected) = totals(by_flax), totals(by_jax)
    assert by_kernels == expected
    assert passes <= 1.01 * passes_of_jax and kept <= kept_of_jax


class FeedForward(nnx.Module):
    """Two layers, made by `linear`."""

    def __init__(self, linear):
        self.up, self.down = linear(256, 1024), linear(1024, 256)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


def feed_forward(kind):
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layers = {
        "Linear": functools.partial(nnx.Linear, **options),
        "LoRALinear": functools.partial(nnx.LoRALinear, lora_rank=8, lora_param_dtype=jnp.bfloat16, **options),
        "LoRA": lambda m, n: nnx.LoRA(m, 8, n, base_module=nnx.Linear(m, n, **options), **options),
    }
    return FeedForward(layers[kind])


@pytest.mark.parametrize("kind", ["LoRALinear", "LoRA"])
def test_a_low_rank_adapter_costs_no_pass_and_no_gradient_of_what_it_adapts(kind):
    """The sum, x w + (x a) b, is kept as one array, and what follows it is made in epilogues of both passes."""

    def explained(kind, trained):
        graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: feed_forward(kind)), trained, ...)

        def loss(params, rest, x):
            return jnp.sum(nnx.merge(graphdef, params, rest)(x).astype(jnp.float32))

        x = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16)
        gradient = jax.value_and_grad(coda.fuse(loss), (0, 2))
        return coda.explain(gradient, params, rest, x, platform="cuda")

    dense, adapted = explained("Linear", nnx.Param), explained(kind, nnx.LoRAParam)
    bytes_of_rank = 4096 * 8 * 2
    assert adapted.totals.passes_bytes <= dense.totals.passes_bytes
    assert adapted.totals.kept_bytes <= dense.totals.kept_bytes + 2 * bytes_of_rank
    assert (adapted.kernels, adapted.others) == (
        2 * 8,
        0,
    )  # of each layer 3 forward; 1 with w, 2 with a and 2 with b backward
