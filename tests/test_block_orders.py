"""Transformer blocks with norms behind, around and beside their sub-layers: values, gradients, and how they are run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import coda_jax as coda
import flax_layers as layers
from flax_layers import sharding
from flax_layers.fused import fused_whole
from flax_layers.layer_stack import run_layers, stack
from flax_layers.remat import policy_of
from tests.chain_cases import normal
from tests.gemm_cases import assert_close
from tests.layer_checks import check_module, state_dict

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, T, D, F, HEADS, KV_HEADS, DIM = 2, 6, 16, 24, 4, 2, 4
EPSILON, THETA = 1e-5, 100.0
X = normal(0, B, T, D)
SEGMENTS = jnp.array([[3, 3, 3, 3, 1, 1], [0, 2, 2, 2, 2, 2]])
ORDERS = ("PostNormBlock", "NormBeforeSumBlock", "SandwichNormBlock", "ParallelBlock")
each_order = pytest.mark.parametrize("order", ORDERS)


def block_of(order, *, norm=layers.RMSNorm, mlp=layers.GatedMLP, dtype=None, mlp_dtype=None, seed=0, **attention):
    """A block whose scales and biases are no ones and zeros."""
    rngs = nnx.Rngs(seed)
    feed_forward = mlp(D, F, dtype=mlp_dtype or dtype, rngs=rngs)
    of = layers.Attention(
        D, HEADS, num_kv_heads=KV_HEADS, rope_theta=THETA, epsilon=EPSILON, dtype=dtype, rngs=rngs, **attention
    )
    first, second, third, fourth = (norm(D, epsilon=EPSILON, rngs=rngs) for _ in range(4))
    if order == "PostNormBlock":
        block = layers.PostNormBlock(attention=of, attention_norm=first, mlp=feed_forward, mlp_norm=second)
    elif order == "NormBeforeSumBlock":
        block = layers.NormBeforeSumBlock(attention=of, attention_norm=first, mlp=feed_forward, mlp_norm=second)
    elif order == "SandwichNormBlock":
        block = layers.SandwichNormBlock(
            attention_norm=first,
            attention=of,
            attention_out_norm=second,
            mlp_norm=third,
            mlp=feed_forward,
            mlp_out_norm=fourth,
        )
    else:
        block = layers.ParallelBlock(norm=first, attention=of, mlp=feed_forward)
    params = nnx.state(block, nnx.Param)
    moved = {1: lambda i, x: x + 0.3 * normal(100 + i, *x.shape), 2: lambda _, x: x, 3: lambda _, x: x}
    leaves, tree = jax.tree.flatten(params)
    nnx.update(block, jax.tree.unflatten(tree, [moved[x.ndim](i, x) for i, x in enumerate(leaves)]))
    return block


# --- the same in plain JAX, of a block's parameters as nested dictionaries


def plain_norm(x, p):
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    is_layer_norm = "bias" in p
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True) if is_layer_norm else wide
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON) * p["scale"].astype(wide.dtype)
    return (y + p["bias"].astype(wide.dtype) if is_layer_norm else y).astype(x.dtype)


def plain_linear(x, p):
    """With the low-rank part of an adapter."""
    if "base_module" in p:
        return plain_linear(x, p["base_module"]) + x @ p["lora_a"].astype(x.dtype) @ p["lora_b"].astype(x.dtype)
    y = x @ p["kernel"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def plain_rotary(y, positions):
    angle = positions[..., None] / THETA ** (jnp.arange(0, DIM, 2) / DIM)
    c, s = jnp.cos(angle)[..., None, :].astype(y.dtype), jnp.sin(angle)[..., None, :].astype(y.dtype)
    a, b = jnp.split(y, 2, axis=-1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def plain_attention(x, p, *, positions=None, segment_ids=None, mask=None, window=None, is_turned=True):
    if "qkv" in p:
        z = plain_linear(x, p["qkv"])
        q, k, v = jnp.split(z, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], axis=-1)
    else:
        q, k, v = (plain_linear(x, p[name]) for name in ("query", "key", "value"))
    q, k, v = (y.reshape(*y.shape[:-1], -1, DIM) for y in (q, k, v))
    q, k = (plain_norm(y, p[name]) if name in p else y for y, name in ((q, "q_norm"), (k, "k_norm")))
    if is_turned:
        positions = jnp.arange(x.shape[-2]) if positions is None else positions
        q, k = plain_rotary(q, positions), plain_rotary(k, positions)
    k, v = (jnp.repeat(y, HEADS // KV_HEADS, axis=-2) for y in (k, v))
    scores = jnp.einsum("...thd,...shd->...hts", q, k) / DIM**0.5
    index = jnp.arange(x.shape[-2])
    seen = index <= index[:, None]
    if window is not None:
        seen &= index > index[:, None] - window
    if segment_ids is not None:
        seen = seen & (segment_ids[..., :, None] == segment_ids[..., None, :])[..., None, :, :]
    if mask is not None:
        seen = seen & mask
    wide = scores if scores.dtype == jnp.float64 else scores.astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen, wide, -1e30), axis=-1).astype(x.dtype)
    y = jnp.einsum("...hts,...shd->...thd", weights, v)
    return plain_linear(y.reshape(*y.shape[:-2], -1), p["out"])


def plain_mlp(x, p, activation=jax.nn.silu):
    if "gate_up" in p or "gate" in p:
        if "gate" in p:
            gate, up = plain_linear(x, p["gate"]), plain_linear(x, p["up"])
        elif isinstance(p["gate_up"], dict):
            gate, up = jnp.split(plain_linear(x, p["gate_up"]), 2, axis=-1)
        else:
            gate, up = (x @ p["gate_up"][:, i].astype(x.dtype) for i in (0, 1))
        return plain_linear(activation(gate) * up, p["down"])
    return plain_linear(jax.nn.gelu(plain_linear(x, p["up"]), approximate=False), p["down"])


def plain(order, **options):
    def attention(x, p):
        return plain_attention(x, p["attention"], **options)

    def mlp(x, p):
        return plain_mlp(x, p["mlp"])

    def post_norm(p, x):
        x = plain_norm(x + attention(x, p), p["attention_norm"])
        return plain_norm(x + mlp(x, p), p["mlp_norm"])

    def before_sum(p, x):
        x = x + plain_norm(attention(x, p), p["attention_norm"])
        return x + plain_norm(mlp(x, p), p["mlp_norm"])

    def sandwich(p, x):
        x = x + plain_norm(attention(plain_norm(x, p["attention_norm"]), p), p["attention_out_norm"])
        return x + plain_norm(mlp(plain_norm(x, p["mlp_norm"]), p), p["mlp_out_norm"])

    def parallel(p, x):
        h = plain_norm(x, p["norm"])
        return x + attention(h, p) + mlp(h, p)

    return dict(zip(ORDERS, (post_norm, before_sum, sandwich, parallel), strict=True))[order]


def with_gradients(f):
    def loss(*args):
        y = f(*args)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def of_parameters(block, call):
    """call(block, x) as a function of nested dictionaries of parameters and x."""
    graphdef, state = nnx.split(block)

    def f(params, x):
        new = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(new, params)
        return call(nnx.merge(graphdef, new), x)

    return f


def compared(block, call, expected, x=X, rtol=1e-4):
    """The values and all gradients of call(block, x) beside those of expected(parameters, x)."""
    params = state_dict(block)
    (_, y), gradients = with_gradients(of_parameters(block, call))(params, x)
    (_, want), exact = with_gradients(expected)(params, x)
    assert_close(y, want, rtol)
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    for (path, got), of in zip(paths, jax.tree.leaves(exact), strict=True):
        assert float(jnp.linalg.norm(of)) > 0, path
        error = float(jnp.linalg.norm(got - of) / jnp.linalg.norm(of))
        assert error <= rtol, (jax.tree_util.keystr(path), error)


def called(block, x):
    return block(x)


GPT = functools.partial(layers.MLP, use_bias=True)
SEPARATE = functools.partial(layers.GatedMLP, separate_gate_up=True)
KINDS = {
    "RMSNorm, gated": {},
    "LayerNorm, biases": {"norm": layers.LayerNorm, "mlp": GPT, "use_bias": True},
    "separate, norms of heads": {"mlp": SEPARATE, "separate_qkv": True, "qk_norm": True},
    "separate, biases": {"mlp": SEPARATE, "separate_qkv": True, "use_bias": True},
    "norms of heads": {"qk_norm": True, "mlp": layers.MLP},
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
@each_order
def test_values_and_gradients(order, kind):
    compared(block_of(order, **KINDS[kind]), called, plain(order))


@each_order
def test_segments_masks_windows_and_positions_match_plain_jax(order):
    """Segments, a mask, a window; positions of one row and of all."""
    mask = normal(5, B, 1, T, T) > -1
    mask = mask | jnp.eye(T, dtype=bool)
    rows = jnp.arange(T) + jnp.array([[3], [40]])
    block = block_of(order, sliding_window=3)
    options = {"positions": rows, "mask": mask, "segment_ids": SEGMENTS}
    compared(block, lambda block, x: block(x, **options), plain(order, window=3, **options))
    block = block_of(order)
    of_one = rows[1] * 2
    assert not jnp.allclose(block(X, positions=of_one), block(X), atol=1e-3)
    assert_close(block(X, positions=of_one), plain(order, positions=of_one)(state_dict(block), X), 1e-4)


@each_order
def test_a_single_sequence(order):
    block = block_of(order)
    assert_close(block(X[0], segment_ids=SEGMENTS[0]), block(X, segment_ids=SEGMENTS)[0], 1e-5)


def test_attention_without_a_rotary_embedding():
    block = block_of("PostNormBlock")
    block.attention.rope_theta = None
    compared(block, called, plain("PostNormBlock", is_turned=False))


def test_scales_with_an_offset():
    """Gemma's: the same numbers, stored less 1."""
    block = block_of("SandwichNormBlock", norm=functools.partial(layers.RMSNorm, scale_offset=1.0))
    same = block_of("SandwichNormBlock")
    nnx.update(same, jax.tree.map(lambda x: x, nnx.state(block)))
    for name in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"):
        getattr(same, name).scale[...] = getattr(block, name).scale[...] + 1
    assert_close(block(X), same(X), 1e-5)


@pytest.mark.parametrize("separate", [False, True])
@each_order
def test_adapters(order, separate):
    """LoRA in the place of every Linear; the adapters and what they adapt have gradients."""
    block = block_of(order, separate_qkv=separate, mlp=SEPARATE if separate else layers.GatedMLP)
    layers.add_lora(block, 2, rngs=nnx.Rngs(7))
    for i, (path, x) in enumerate(nnx.to_flat_state(nnx.state(block, nnx.LoRAParam))):
        if path[-1] == "lora_b":
            x[...] = normal(50 + i, *x.shape)
    compared(block, called, plain(order), rtol=2e-4)


def test_adapters_of_flax():
    """nnx.LoRALinear, with a bias."""
    block = block_of("ParallelBlock", mlp=GPT, use_bias=True)
    adapted = nnx.LoRALinear(F, D, lora_rank=2, rngs=nnx.Rngs(3))
    adapted.kernel[...], adapted.bias[...] = block.mlp.down.kernel[...], block.mlp.down.bias[...]
    adapted.lora.lora_b[...] = normal(9, 2, D)
    whole = nnx.clone(block)
    whole.mlp.down.kernel[...] += adapted.lora.lora_a[...] @ adapted.lora.lora_b[...]
    block.mlp.down = adapted
    assert_close(block(X), whole(X), 1e-5)


@pytest.mark.parametrize("kind", ["RMSNorm, gated", "LayerNorm, biases"])
@each_order
@pytest.mark.slow
def test_bfloat16(order, kind):
    """Parameters are float32, and the stream is bfloat16."""
    block = block_of(order, dtype=jnp.bfloat16, **KINDS[kind])
    check_module(block, called, plain(order), X.astype(jnp.bfloat16))


@each_order
def test_dtypes(order):
    """The stream keeps its own, whatever the products compute in."""
    block = block_of(order)
    assert block(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    exact = block(X)
    narrow = block_of(order, dtype=jnp.bfloat16)(X)
    assert exact.dtype == narrow.dtype == jnp.float32
    error = float(jnp.max(jnp.abs(narrow - exact)))
    assert 1e-4 < error < 0.1 * float(jnp.max(jnp.abs(exact)))


@each_order
def test_scan_over_stacked_blocks(order):
    """With and without remat, as a list and as one module; values and gradients of all layers."""
    blocks = [block_of(order, seed=seed) for seed in (1, 2)]
    params = [state_dict(block) for block in blocks]
    for remat in (None, ("query_proj", "key_proj", "value_proj", "context", "mlpwi")):
        compared(
            stack(blocks),
            lambda module, x, remat=remat: run_layers(module, x, remat=remat, segment_ids=SEGMENTS),
            lambda p, x: functools.reduce(
                lambda x, i: plain(order, segment_ids=SEGMENTS)(jax.tree.map(lambda w: w[i], p), x), (0, 1), x
            ),
            rtol=2e-4,
        )
    in_turn = functools.reduce(lambda x, p: plain(order)(p, x), params, X)
    assert_close(run_layers(nnx.List(blocks), X, remat="full"), in_turn, 1e-4)
    assert_close(run_layers(stack(blocks), X), in_turn, 1e-4)


def products(block, remat):
    """Counts the products of a step, forward and backward, and the passes of its attention."""
    graphdef, state = nnx.split(block)
    f = lambda x, state: nnx.merge(graphdef, state)(x)  # noqa: E731
    if remat is not None:
        f = jax.checkpoint(f, policy=policy_of(remat))
    found = coda.explain(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1)), X, state)
    assert found.others == 0
    return sum(found.products.values()), sum(found.attention_calls.values())


@pytest.mark.parametrize("qk_norm", [False, True])
@each_order
def test_remat_policies_rerun_only_products_not_kept(order, qk_norm):
    block = block_of(order, qk_norm=qk_norm)
    whole, attention = products(block, None)
    again, attention_again = products(block, "full")
    assert whole == 12 and attention == 2 and attention_again == attention + 1
    assert products(block, "save_qkv") == (again - 1, attention_again)
    assert products(block, "save_attention")[1] == attention  # its backward pass reads the log-sum-exp that is kept


def test_all_names_keep_all_of_a_parallel_block():
    block = block_of("ParallelBlock")
    assert products(block, "full")[0] == 14
    assert products(block, ("qkv_proj",))[0] == 13
    assert products(block, ("qkv_proj", "context", "mlpwi"))[0] == 12


@each_order
def test_one_block_is_planned(order):
    """It is all that is there, forward and backward; the products are those of the two sub-layers."""
    found = coda.explain(nnx.grad(lambda block: jnp.sum(jnp.sin(block(X)))), block_of(order))
    first_lines = [text.splitlines()[0] for text in found.blocks]
    assert sorted(first_lines) == [f"block '{order}', backward", f"block '{order}', forward"]
    assert set(found.blocks.values()) == {1}
    forward = next(text for text in found.blocks if "forward" in text.splitlines()[0])
    assert forward.count(" @ ") == 4 and "split" in forward and "silu" in forward


@each_order
def test_it_is_traced_once(order, monkeypatch):
    """For all blocks of one structure, of arrays that are traced too."""
    count, cls = 0, getattr(layers, order)
    original = cls._ordered

    def counted(self, *args):
        nonlocal count
        count += 1
        return original(self, *args)

    monkeypatch.setattr(cls, "_ordered", counted)
    monkeypatch.setattr(cls, "__call__", fused_whole(cls.__call__.__wrapped__))
    block, other = block_of(order), block_of(order, seed=1)
    step = nnx.jit(nnx.grad(lambda block, x: jnp.sum(block(x, segment_ids=SEGMENTS))))
    block(X, segment_ids=SEGMENTS)
    step(block, X)
    assert not jnp.allclose(block(X, segment_ids=SEGMENTS), other(X, segment_ids=SEGMENTS))
    assert count == 1
    block(X)
    assert count == 2


@each_order
def test_a_cache(order):
    """Token by token, as all at once."""
    block = block_of(order)
    cache = block.attention.init_cache(B, T)
    made = []
    for i, j in ((0, 3), (3, 4), (4, T)):
        y, cache = block(X[:, i:j], cache=cache)
        made.append(y)
    assert_close(jnp.concatenate(made, axis=1), block(X), 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("separate", [False, True])
def test_rules_on_a_mesh(kind, separate):
    """Gradients lie as the parameters do; other rules are another trace."""

    def make():
        return block_of("ParallelBlock", separate_qkv=separate, mlp=SEPARATE if separate else layers.GatedMLP)

    def step(block, x):
        return nnx.value_and_grad(lambda block: jnp.sum(jnp.sin(block(x, segment_ids=SEGMENTS))))(block)

    want, exact = nnx.jit(step)(make(), X)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        block = sharding.create(make, sharding.FSDP_TENSOR)
        x = jax.device_put(X, sharding.array_sharding(mesh, sharding.FSDP_TENSOR, *sharding.STREAM))
        without = constraints(step, block, x)
        with sharding.axis_rules(sharding.FSDP_TENSOR):
            value, gradients = nnx.jit(step)(block, x)
            inside = constraints(step, block, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for got, of, p in zip(*map(jax.tree.leaves, (gradients, exact, nnx.state(block))), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(of), rtol=1e-4, atol=1e-4)
        assert got.sharding.spec == p.sharding.spec
    assert not any("tensor" in spec for _, spec in without)
    if kind is AxisType.Auto:  # the hidden activation and what the gate is made of, their cotangents; q and the context
        shapes = {f"{B},{T},{F}": "P('fsdp', None, 'tensor')"}
        shapes |= {} if separate else {f"{B},{T},2,{F}": "P('fsdp', None, None, 'tensor')"}  # else two products
        assert {(shape, spec) for shape, spec in inside if shape in shapes} == {*shapes.items()}
        assert sum(shape == f"{B},{T},{HEADS},{DIM}" and "tensor" in spec for shape, spec in inside) >= 2


def constraints(step, block, x):
    """The shapes of arrays whose sharding is said to XLA, and the sharding."""
    text = str(jax.make_jaxpr(lambda block, x: step(block, x))(block, x))  # anew
    return re.findall(r"\[([\d,]*)\] = sharding_constraint\[.*?spec=(P\(.*?\))\)\n", text, re.DOTALL)


class Logged(layers.Linear):
    """A Linear whose own call sees an array, whatever stands before it."""

    def __init__(self, inputs, features):
        super().__init__(inputs, features, rngs=nnx.Rngs(0))

    def __call__(self, x):
        assert isinstance(x, jax.Array)
        return super().__call__(x)


class Doubled(nnx.Module):
    """In the place of a Linear."""

    def __init__(self, inputs, features):
        self.linear = nnx.Linear(inputs, features, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return 2 * self.linear(x)


class Mixed(nnx.Module):
    """In the place of attention."""

    def __call__(self, h, *, positions=None, mask=None, segment_ids=None):
        return jnp.cumsum(h, axis=-2)


def replaced(name, **attributes):
    block = block_of("SandwichNormBlock")
    for attribute, module in attributes.items():
        setattr(getattr(block, name) if name else block, attribute, module)
    return block


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: block_of("PostNormBlock")(X, positions=jnp.arange(T + 1)),
            ValueError,
            r"positions has shape \(7,\) beside an input of shape \(2, 6, 16\)",
        ),
        (lambda: block_of("PostNormBlock")(X[None]), ValueError, r"attention wants \(B, T, D\) or \(T, D\)"),
        (
            lambda: block_of("PostNormBlock")(X, segment_ids=SEGMENTS[:1]),
            ValueError,
            r"segment_ids has shape \(1, 6\)",
        ),
        (lambda: block_of("ParallelBlock")(X[..., :8]), ValueError, "RMSNorm over 16 features got an input"),
    ],
)
def test_errors_name_the_layer_and_the_rule(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_norm_of_flax_beside_the_order():
    """It is nobody's business what other modules a block has."""
    block = block_of("PostNormBlock")
    block.probe = nnx.LayerNorm(D, rngs=nnx.Rngs(0))
    assert block.probe(block(X)).shape == X.shape


def with_flax_norms(block):
    for name in ("attention_norm", "mlp_out_norm"):
        setattr(block, name, nnx.RMSNorm(D, epsilon=EPSILON, rngs=nnx.Rngs(4)))
    return block


@pytest.mark.parametrize(
    ("make", "products"),
    [
        (lambda: replaced("mlp", down=Doubled(F, D)), 12),
        (lambda: replaced("mlp", gate_up=Doubled(D, 2 * F)), 12),
        (lambda: replaced("attention", out=Doubled(D, D)), 12),
        (lambda: replaced("attention", qkv=Logged(D, 32)), 12),
        (lambda: replaced("", attention=Mixed()), 6),
        (lambda: with_flax_norms(block_of("SandwichNormBlock")), 12),
    ],
)
def test_modules_of_ones_own_in_a_block(make, products):
    """In the place of a Linear, of a norm, of attention: all stays fused."""
    block = make()
    step = nnx.value_and_grad(lambda block: jnp.sum(jnp.sin(block(X))))
    found = coda.explain(step, block)
    assert (sum(found.products.values()), found.others) == (products, 0)
    norms = block.attention_norm, block.attention_out_norm, block.mlp_norm, block.mlp_out_norm

    def apart(block, x):
        x = x + norms[1](block.attention(norms[0](x)))
        return x + norms[3](block.mlp(norms[2](x)))

    assert_close(block(X), apart(block, X), 1e-3)
    gradients = [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(block, x))))(X) for f in (lambda block, x: block(x), apart)]
    assert_close(*gradients, 1e-2)


def test_layers_of_two_dtypes():
    """The products of one of both are kernels, and the block is what its layers are."""
    block = block_of("SandwichNormBlock", dtype=jnp.bfloat16, mlp_dtype=jnp.float32)
    found = coda.explain(nnx.value_and_grad(lambda block: jnp.sum(jnp.sin(block(X)))), block)
    assert (sum(found.products.values()), found.others) == (6, 6)
    assert_close(block(X), block_of("SandwichNormBlock")(X), 0.05)
