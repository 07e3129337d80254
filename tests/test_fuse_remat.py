"""Functions under `jax.checkpoint` with a policy, under `coda.fuse`: what the policy keeps of them is kept."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name

import coda_jax as coda
from coda_jax.fusion.kept_bytes import kept_by_jax, surely_kept_by_jax
from coda_jax.fusion.straight import straight
from coda_jax.jaxprs.walk import equations, jaxpr_of
from tests import plain_models
from tests.plain_models import Weights, loss_of, rms_norm
from tests.test_fuse import joined, largest_error, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
BATCH, LENGTH, D, F, HEADS = 2, 64, 32, 128, 2
policies = jax.checkpoint_policies


def weights(dtype=jnp.float32):
    new = Weights(0, dtype)
    made = {"up": new(D, F), "gate": new(D, F), "down": new(F, D), "bias": new(F), "norm": new(D, mean=1)}
    return made | {name: new(D, D) for name in ("q", "k", "v", "out")}


def inputs(dtype=jnp.float32):
    return Weights(1, dtype)(BATCH, LENGTH, D)


def mlp(w, x):
    """A name on a product and its bias, as in MaxText, and one behind the activation."""
    h = jnp.tanh(checkpoint_name(x @ w["up"] + w["bias"], "mlp_in"))
    return x + checkpoint_name(h, "act") @ w["down"]


def two(w, x):
    return jnp.tanh(mlp(w, jnp.tanh(mlp(w, x))))


def gated(w, x):
    gate, up = checkpoint_name(x @ w["gate"], "gate"), checkpoint_name(x @ w["up"], "up")
    return x + checkpoint_name(jax.nn.silu(gate) * up, "act") @ w["down"]


def attention(w, x):
    q, k, v = (checkpoint_name(x @ w[name], name).reshape(*x.shape[:-1], HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    y = checkpoint_name(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v), "context")
    return x + checkpoint_name(y.reshape(x.shape) @ w["out"], "out")


def block(w, x):
    return jnp.sin(gated(w, jnp.tanh(attention(w, x))))


def normed(w, x):
    x = x + 0.3 * mlp(w, rms_norm(x, w["norm"]))
    return x + 0.3 * gated(w, checkpoint_name(rms_norm(x, w["norm"]), "normed"))


BODIES = {f.__name__: f for f in (two, gated, block, normed)}
POLICIES = {
    "none": None,
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "dots_without_batch": policies.dots_with_no_batch_dims_saveable,
    "names_of_products": policies.save_only_these_names("mlp_in", "gate", "q", "normed"),
    "names_behind_epilogues": policies.save_only_these_names("act", "context"),
    "all_names": policies.save_only_these_names("mlp_in", "act", "gate", "up", "q", "k", "v", "context", "out"),
    "names_but_these": policies.save_any_names_but_these("mlp_in", "gate", "q"),
    "all_but_these": policies.save_anything_except_these_names("mlp_in", "gate"),
    "both": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("act", "context")
    ),
    "of_a_user": lambda primitive, *_, **params: primitive.name == "dot_general" and not params["out_sharding"],
    "all_but_exp": lambda primitive, *_, **__: primitive.name not in ("exp", "logistic"),
    "offloaded_names": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["mlp_in", "up"],
        names_which_can_be_offloaded=["act", "gate", "context"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offloaded_dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def products(f, *args):
    """How often products of both kinds are run."""
    every = equations(jaxpr_of(f, *args))
    return sum(times for e, times in every if e.primitive.name in ("dot_general", "coda_gemm"))


def kept(f, *args):
    """The bytes that are kept for the backward pass, beside the arguments."""
    found = kept_by_jax(jax.make_jaxpr(f)(*args), jax.tree.leaves(args))
    assert found < float("inf")
    return found


def compared(f, *args):
    """f's products in a gradient, and fused in both doors; and its bytes kept, and fused."""
    plain, fused = jax.grad(f, argnums=(0, 1)), coda.fuse(f)
    doors = jax.grad(fused, argnums=(0, 1)), coda.fuse(plain)
    return [products(one, *args) for one in (plain, *doors)], (kept(f, *args), kept(fused, *args))


def check(f, *args):
    """No product is run again that JAX does not run again, and no more bytes are kept, but for vectors of norms."""
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, *args)
    assert max(fused) <= own
    assert bytes_kept <= bytes_of_jax + 16 * BATCH * LENGTH
    return own, bytes_kept


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("body", BODIES)
def test_policies_rerun_no_more_products_nor_keep_more_bytes(body, policy):
    dtype = jnp.bfloat16 if body in ("gated", "normed") else jnp.float32
    check(loss_of(jax.checkpoint(BODIES[body], policy=POLICIES[policy])), weights(dtype), inputs(dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("policy", ["dots", "names_of_products", "names_behind_epilogues", "both", "offloaded_names"])
@pytest.mark.parametrize("body", ["block", "normed"])
def test_values_and_gradients(body, policy):
    f, args = loss_of(jax.checkpoint(BODIES[body], policy=POLICIES[policy])), (weights(), inputs())
    plain = jax.value_and_grad(f, argnums=(0, 1))
    expected = jax.jit(plain)(*args)
    for door in (jax.value_and_grad(coda.fuse(f), argnums=(0, 1)), coda.fuse(plain)):
        assert largest_error(jax.jit(door)(*args), expected) < 1e-5


@pytest.mark.parametrize("policy", ["dots", "names_of_products"])
def test_values_in_16_bits(policy):
    def gradient(f, dtype):
        found = jax.jit(jax.grad(f, argnums=(0, 1)))(weights(dtype), inputs(dtype))
        return joined(jax.tree.map(lambda x: x.astype(jnp.float32), found))

    f = loss_of(jax.checkpoint(normed, policy=POLICIES[policy]))
    exact = gradient(f, jnp.float32)
    own, *fused = (
        relative_error(gradient(one, jnp.bfloat16), exact) for one in (f, coda.fuse(f), coda.fuse(f, exact=True))
    )
    assert max(fused) < 1.5 * own + 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("policy", ["dots", "dots_without_batch"])
def test_layers_of_models_in_a_scan(name, policy):
    layer = jax.checkpoint(plain_models.PLAIN[name], policy=POLICIES[policy], prevent_cse=False)
    w = jax.tree.map(lambda x: jnp.stack([x, x]), plain_models.weights(jnp.bfloat16))
    f = loss_of(lambda w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0])
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, w, plain_models.inputs(jnp.bfloat16))
    taken = 16 if policy == "dots_without_batch" else 0  # by attention, whose scores "dots" keeps
    assert max(fused) == own - taken
    assert bytes_kept <= 1.05 * bytes_of_jax


def test_sums_are_not_kept_beside_all_that_they_are_made_of():
    """A residual stream behind a norm: kept beside the product that is normalised it would be a tile too many."""
    f = loss_of(jax.checkpoint(plain_models.gemma, policy=POLICIES["dots"]))
    w = jax.eval_shape(lambda: plain_models.weights(jnp.bfloat16, width=256, hidden=512, length=512))
    args = w, jax.ShapeDtypeStruct((8, 512, 256), jnp.bfloat16)
    names = [e.primitive.name for e, _ in equations(jaxpr_of(jax.grad(coda.fuse(f), argnums=(0, 1)), *args))]
    assert names.count("coda_gemm") == 21 and "dot_general" not in names
    assert kept(coda.fuse(f), *args) <= 1.01 * kept(f, *args)


def checkpointed(f, policy="dots"):
    return jax.checkpoint(f, policy=POLICIES[policy])


def repeated(f, x):
    return jax.lax.scan(lambda x, _: (f(x), None), x, None, length=3)[0]


def scan_of_layers(w, x):
    return repeated(lambda x: two(w, x), x)


HOLDERS = {
    "scan": lambda w, x: repeated(lambda x: checkpointed(two)(w, x), x),
    "checkpoint_of_scan": checkpointed(scan_of_layers),
    "checkpoint_of_fori_loop": checkpointed(lambda w, x: jax.lax.fori_loop(0, 3, lambda _, x: two(w, x), x)),
    "checkpoint_of_scan_and_product": checkpointed(lambda w, x: jnp.tanh(scan_of_layers(w, x)) @ w["out"]),
    "cond_in_checkpoint": checkpointed(
        lambda w, x: jax.lax.cond(x[0, 0, 0] > 9, jnp.tanh, lambda x: two(w, x), x) @ w["out"]
    ),
    "two_checkpoints": checkpointed(lambda w, x: jnp.tanh(checkpointed(two)(w, x))),
    "inside_of_one_that_keeps_nothing": checkpointed(lambda w, x: jnp.tanh(checkpointed(two)(w, x)), "none"),
    "around_one_that_keeps_nothing": checkpointed(lambda w, x: checkpointed(two, "none")(w, x) @ w["out"]),
    "beside_products": lambda w, x: checkpointed(two)(w, x @ w["q"]) @ w["out"],
    "jit": checkpointed(jax.jit(lambda w, x: jax.jit(two)(w, x))),
    "vmap": lambda w, x: jax.vmap(checkpointed(two), (None, 0))(w, x),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_checkpoints_in_control_flow_rerun_no_more_products(name):
    f, args = loss_of(HOLDERS[name]), (weights(), inputs())
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, *args)
    assert max(fused) <= own
    result = 4 * BATCH * LENGTH * D if name == "around_one_that_keeps_nothing" else 0  # of the inner one, kept beside
    assert bytes_kept <= bytes_of_jax + result
    gradients = [jax.jit(jax.grad(one, argnums=(0, 1)))(*args) for one in (coda.fuse(f), f)]
    assert largest_error(*gradients) < 1e-5


def with_callback(w, x):
    y = two(w, x)
    jax.debug.callback(lambda value: None, jnp.sum(y))
    return jnp.tanh(y) @ w["out"]


PARTS = {  # of a checkpoint, which computes their results again
    "scan": scan_of_layers,
    "scan_of_gated": lambda w, x: repeated(lambda x: gated(w, x), x),
    "two_scans": lambda w, x: scan_of_layers(w, jnp.sin(scan_of_layers(w, x))),
    "scan_and_product": lambda w, x: jnp.tanh(scan_of_layers(w, x)) @ w["out"],
    "fori_loop": lambda w, x: jax.lax.fori_loop(0, 3, lambda _, x: two(w, x), x) @ w["out"],
    "cond": lambda w, x: jax.lax.cond(x[0, 0, 0] > 9, jnp.tanh, lambda x: two(w, x), x) @ w["out"],
    "checkpoint": lambda w, x: jnp.tanh(checkpointed(two, "names_of_products")(w, x)),
    "callback": with_callback,
    "vmap": lambda w, x: jax.vmap(scan_of_layers, (None, 0))(w, x),
}


@pytest.mark.parametrize("policy", ["names_of_products", "all_names", "names_but_these", "dots"])
@pytest.mark.parametrize("name", PARTS)
def test_results_of_a_part_are_made_again_from_what_is_kept(name, policy):
    """No product runs again that JAX does not run again, and no array is kept beside what the policy keeps."""
    f, args = loss_of(checkpointed(PARTS[name], policy)), (weights(), inputs())
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, *args)
    assert max(fused) <= own
    assert bytes_kept <= bytes_of_jax


OTHERS = {  # checkpoints of another policy, and products in front of what JAX computes again
    "other_checkpoint": lambda w, x: jnp.tanh(checkpointed(two, "none")(w, x)) @ w["out"],
    "scan_of_other_checkpoints": lambda w, x: repeated(lambda x: checkpointed(two, "none")(w, jnp.tanh(x @ w["q"])), x),
    "product_and_scan": lambda w, x: scan_of_layers(w, jnp.tanh(x @ w["q"])),
}


@pytest.mark.parametrize("policy", ["names_of_products", "names_behind_epilogues", "names_but_these"])
@pytest.mark.parametrize("name", OTHERS)
def test_nested_checkpoints_are_recomputed_once(name, policy):
    """A checkpoint keeps for its own backward pass what the policies around it keep, and makes it again of nothing."""
    f, args = loss_of(checkpointed(OTHERS[name], policy)), (weights(), inputs())
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, *args)
    assert max(fused) <= own
    assert bytes_kept <= bytes_of_jax
    gradients = [jax.jit(jax.grad(one, argnums=(0, 1)))(*args) for one in (coda.fuse(f), f)]
    assert largest_error(*gradients) < 1e-5


@pytest.mark.parametrize("outer", ["dots", "names_of_products"])
@pytest.mark.parametrize("inner", ["none", "dots", "names_behind_epilogues"])
@pytest.mark.parametrize("body", ["two", "block"])
def test_checkpoints_in_a_checkpoint_keep_what_it_makes_again(body, inner, outer):
    """The inner one's policy keeps what the outer one makes again; both keep what both keep in a call."""
    layer = checkpointed(BODIES[body], inner)
    f, args = loss_of(checkpointed(lambda w, x: repeated(lambda x: layer(w, x), x), outer)), (weights(), inputs())
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, *args)
    assert max(fused) <= own
    assert bytes_kept <= bytes_of_jax


def test_values_of_checkpoints_in_a_checkpoint():
    f = loss_of(checkpointed(lambda w, x: repeated(lambda x: checkpointed(block)(w, x), x), "names_of_products"))
    args = weights(), inputs()
    found, expected = (jax.jit(jax.grad(one, argnums=(0, 1)))(*args) for one in (coda.fuse(f), f))
    assert largest_error(found, expected) < 1e-5
    batch = weights(), jnp.stack([inputs(), 2 * inputs()])
    found, expected = (
        jax.jit(jax.grad(lambda w, x, g=g: jnp.sum(jax.vmap(g, (None, 0))(w, x)), argnums=(0, 1)))(*batch)
        for g in (coda.fuse(f), f)
    )
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["scan", "cond", "scan_and_product"])
def test_parts_are_made_again_from_what_is_offloaded(name):
    f, args = loss_of(checkpointed(PARTS[name], "offloaded_names")), (weights(), inputs())
    (own, *fused), (bytes_of_jax, bytes_kept) = compared(f, *args)
    assert max(fused) <= own
    assert bytes_kept <= bytes_of_jax
    expected, *found = (
        jax.grad(f, argnums=(0, 1))(*args),
        jax.grad(coda.fuse(f), argnums=(0, 1))(*args),
        coda.fuse(jax.grad(f, argnums=(0, 1)))(*args),
    )
    assert max(largest_error(one, expected) for one in found) < 1e-5


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_values_of_what_is_made_again(name, dtype):
    f = loss_of(checkpointed(PARTS[name], "names_of_products"))
    wide = weights(), inputs()
    exact = jax.jit(jax.grad(f, argnums=(0, 1)))(*wide)
    args = jax.tree.map(lambda x: x.astype(dtype), wide)
    own, *fused = (
        relative_error(joined(jax.tree.map(lambda x: x.astype(jnp.float32), jax.jit(one)(*args))), joined(exact))
        for one in (jax.grad(f, (0, 1)), jax.grad(coda.fuse(f), (0, 1)), coda.fuse(jax.grad(f, (0, 1))))
    )
    assert max(fused) <= 1.5 * own + 1e-5


def test_offloaded_residuals_stay_in_host_memory():
    f = loss_of(checkpointed(block, "offloaded_dots"))

    def bytes_in_host_memory(f):
        jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(weights(), inputs()).jaxpr
        return sum(x.aval.size * x.aval.dtype.itemsize for x in jaxpr.outvars if "host" in str(x.aval))

    assert bytes_in_host_memory(coda.fuse(f)) == bytes_in_host_memory(f) > 0


def test_a_policy_is_asked_about_the_equations_of_the_function():
    """It has their primitives, types and parameters, and may tell products from each other."""

    def widest(primitive, *types, **params):
        if primitive.name != "dot_general":
            return False
        return types[1].shape == (D, F) and params["dimension_numbers"][0] == ((2,), (0,))

    f = loss_of(jax.checkpoint(two, policy=widest))
    own, bytes_kept = check(f, weights(), inputs())
    assert own == 14 and bytes_kept >= 2 * 4 * BATCH * LENGTH * F  # the two products with F columns


def test_a_policy_with_answers_of_several_types():
    def policy(primitive, *types, **_):
        if primitive.name != "dot_general":
            return Recompute if primitive.name == "tanh" else False
        return Saveable if types[1].shape == (D, F) else Offloadable("device", "pinned_host")

    own, bytes_kept = check(loss_of(jax.checkpoint(two, policy=policy)), weights(), inputs())
    assert own == 12 and bytes_kept >= 2 * 4 * BATCH * LENGTH * F


def test_a_policy_that_raises_does_so_where_jax_asks_it():
    def policy(*_, **__):
        raise ValueError("no answer")

    f = loss_of(jax.checkpoint(two, policy=policy))
    assert abs(coda.fuse(f)(weights(), inputs()) - f(weights(), inputs())) < 1e-5
    with pytest.raises(ValueError, match="no answer"):
        jax.grad(coda.fuse(f))(weights(), inputs())


def test_side_effects_in_a_checkpoint():
    """JAX cannot keep what a side effect reads; the fused function keeps other arrays than it does."""
    seen = []

    def f(w, x):
        y = mlp(w, x)
        jax.debug.callback(lambda *found: seen.append(found), y, jnp.sum(y))
        return mlp(w, jnp.tanh(y))

    args = weights(), inputs()
    found, expected = (
        jax.jit(jax.grad(one(loss_of(checkpointed(f))), argnums=(0, 1)))(*args) for one in (coda.fuse, lambda f: f)
    )
    jax.effects_barrier()
    assert largest_error(found, expected) < 1e-5 and seen


def test_names_of_products_reach_a_checkpoint_around_the_fused_function():
    args = weights(), inputs()
    for policy, count in {"none": 11, "names_of_products": 10, "all_names": 9}.items():
        plain, fused = (loss_of(checkpointed(f, policy)) for f in (gated, coda.fuse(gated)))
        own, again = (products(jax.grad(f, argnums=(0, 1)), *args) for f in (plain, fused))
        assert own == again == count
        assert kept(fused, *args) <= kept(plain, *args)


def test_integers_and_masks_with_names():
    def f(w, x):
        z = checkpoint_name(x @ w["up"], "up")
        mask = checkpoint_name(z > 0, "mask")
        number = checkpoint_name(jnp.int32(3) + jnp.sum(mask, dtype=jnp.int32), "number")
        return jnp.where(mask, z, 0.1 * z) @ w["down"] / number

    for names in ((), ("mask",), ("up", "mask", "number")):
        g = loss_of(jax.checkpoint(f, policy=policies.save_only_these_names(*names)))
        check(g, weights(), inputs())
        found, expected = (jax.grad(one, argnums=(0, 1))(weights(), inputs()) for one in (coda.fuse(g), g))
        assert largest_error(found, expected) < 1e-5


def test_explain_counts_as_few_bytes_and_products():
    def typed(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    w = {"up": typed(2048, 8192), "bias": typed(8192), "down": typed(8192, 2048)}
    x = typed(4, 2048, 2048)
    for policy, count in {"none": 7, "dots": 6, "names_of_products": 6}.items():
        f = loss_of(checkpointed(mlp, policy))
        found, plain = (coda.explain(jax.grad(one, argnums=(0, 1)), w, x, platform="cuda") for one in (coda.fuse(f), f))
        assert (found.kernels, found.others, plain.others) == (count, 0, count)
        assert found.totals.kept_bytes <= plain.totals.kept_bytes


@pytest.mark.parametrize("name", plain_models.PLAIN)
def test_bytes_that_jax_keeps_at_least_are_counted_without_a_trace(name):
    loss, args = plain_models.model(name, jnp.bfloat16)
    leaves = jax.tree.leaves(args)
    closed = straight(jax.make_jaxpr(loss)(*args), leaves)
    least, own = surely_kept_by_jax(closed.jaxpr), kept_by_jax(closed, leaves)
    assert 0.5 * own < least <= own


def test_bytes_in_front_of_a_rule_are_counted():
    """Cotangents reach the equations in front of a custom_vjp, whatever that keeps."""

    @jax.custom_vjp
    def rule(x):
        return jnp.sum(x * x)

    rule.defvjp(lambda x: (rule(x), x), lambda x, dy: (2 * x * dy,))
    x, w = inputs(), weights()["up"]
    closed = straight(jax.make_jaxpr(lambda x, w: rule(jnp.tanh(x @ w)))(x, w), [x, w])
    least, own = surely_kept_by_jax(closed.jaxpr), kept_by_jax(closed, [x, w])
    kept_by_tanh = sum(y.nbytes for y in jax.tree.leaves(jax.vjp(jnp.tanh, x @ w)[1]))
    assert 0 < kept_by_tanh == least <= own == 2 * BATCH * LENGTH * F * 4  # tanh and its derivative


@pytest.mark.parametrize("names", [("context",), ("context", "out"), ("q", "k", "v", "context"), ("out",)])
def test_attention_by_its_own_name(names):
    """`coda.attention` names its result and its log-sum-exp in its derivative: they are kept beside other names."""

    def layer(w, x):
        q, k, v = (checkpoint_name(x @ w[name], name).reshape(*x.shape[:-1], HEADS, -1) for name in "qkv")
        y = coda.attention(q, k, v, is_causal=True)
        return x + checkpoint_name(y.reshape(x.shape) @ w["out"], "out")

    def loss(w, x):
        return jnp.sum(jnp.sin(jax.checkpoint(layer, policy=policies.save_only_these_names(*names))(w, x)))

    w, x = weights(), inputs()
    plain, fused = jax.value_and_grad(loss), jax.value_and_grad(coda.fuse(loss))
    assert largest_error(jax.jit(fused)(w, x), jax.jit(plain)(w, x)) < 1e-5
    own, found = (coda.explain(f, w, x, platform="cuda") for f in (plain, fused))
    assert sum(found.attention_calls.values()) == sum(own.attention_calls.values()) == 2 + ("context" not in names)
    assert found.totals.kept_bytes <= own.totals.kept_bytes and found.others == 0
