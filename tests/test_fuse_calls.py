"""`coda.fuse`: equal fused functions that a larger one calls, as its layers, stay calls where that costs nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import coda_jax as coda
from tests.test_fuse import largest_error
from tests.test_fuse_row_sums import rms_norm
from tests.test_tracing import DOORS as GRADIENTS

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
LAYERS, B, T, D, F, HEADS = 3, 2, 64, 128, 256, 2
SAVED = jax.checkpoint_policies.save_only_these_names("hidden")


def feed_forward(x, w):
    h = checkpoint_name(jax.nn.silu(rms_norm(x, w["scale"]) @ w["up"].astype(x.dtype)), "hidden")
    return x + h @ w["down"].astype(x.dtype)


def with_bias(x, w):
    return feed_forward(x, w) + w["bias"].astype(x.dtype)


def behind_gelu(x, w):
    """The epilogue that makes x could make its gelu too."""
    return x + jax.nn.silu(jax.nn.gelu(x) @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)


def named(x, w):
    return feed_forward(checkpoint_name(x, "layer_input"), w)


def post_norm(x, w):
    return x + rms_norm(jax.nn.silu(rms_norm(x, w["scale"]) @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), 1.0)


def in_rows(x):
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "data")))


def constrained(x, w):
    return in_rows(feed_forward(x, w))


def in_front_of_gelu(x, w):
    return x @ w["up"].astype(x.dtype) @ w["down"].astype(x.dtype)


LAYER_KINDS = {  # the layer, and whether its calls stay
    "feed forward": (feed_forward, True),
    "named": (named, True),
    "bias": (with_bias, False),
    "gelu in front": (behind_gelu, False),
    "gelu behind": (in_front_of_gelu, False),
    "post norm": (post_norm, False),
    "constrained": (constrained, True),
}


def loss_of(kind, *, is_fused, wrap=lambda f: f):
    layer = coda.fuse(LAYER_KINDS[kind][0]) if is_fused else LAYER_KINDS[kind][0]

    def layers(x, ws):
        for w in ws:
            x = jax.nn.gelu(layer(x, w)) if kind == "gelu behind" else layer(x, w)
        return x

    def loss(x, ws):
        if kind == "constrained":  # all layers are given arrays of one type then
            x = in_rows(x)
        return jnp.sum(jnp.sin(rms_norm(wrap(layers)(x, ws), 1.0).astype(jnp.float32)))

    return loss


def arguments(dtype=jnp.float32):
    generator = np.random.default_rng()

    def normal(*shape, mean=0.0):
        return jnp.asarray(mean + generator.standard_normal(shape) / shape[0] ** 0.5, dtype)

    shapes = {"up": (D, F), "down": (F, D), "bias": (D,)}
    ws = [{k: normal(*s) for k, s in shapes.items()} | {"scale": normal(D, mean=1.0)} for _ in range(LAYERS)]
    return normal(B, T, D), ws


def gradients(f):
    return jax.value_and_grad(f, (0, 1))


def explained(f):
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(jnp.bfloat16))
    found = coda.explain(f, *types, platform="cuda")
    return found.totals.passes_bytes, found.totals.kept_bytes, sum(found.products.values()), found.others


def counts(fused):
    return [piece.count for piece in fused.pieces.made]


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_values_and_gradients(kind):
    x, ws = arguments()
    found = jax.jit(gradients(coda.fuse(loss_of(kind, is_fused=True))))(x, ws)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: jnp.asarray(np.asarray(y), jnp.float64), (x, ws))
        exact = jax.tree.map(np.float32, jax.jit(gradients(loss_of(kind, is_fused=False)))(*wide))
    assert largest_error(found, exact) < 1e-5


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.checkpoint(f, policy=SAVED)])
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_calls_cost_nothing(kind, wrap):
    stays = LAYER_KINDS[kind][1]
    fused, plain = (coda.fuse(loss_of(kind, is_fused=flag, wrap=wrap), defer_norms=True) for flag in (True, False))
    found, expected = explained(gradients(fused)), explained(gradients(plain))
    assert all(x <= y for x, y in zip(found[:2], expected[:2], strict=True)) and found[2:] == expected[2:]
    is_checkpointed = any(piece.name == "checkpoint" for piece in fused.pieces.made)
    assert (LAYERS in counts(fused)) == (stays and not is_checkpointed)


@pytest.mark.parametrize("closes_over", [False, True])
def test_equal_layers_are_traced_once(closes_over):
    def loss(x, ws):
        scale = jnp.linspace(0.5, 1.5, D).astype(x.dtype) + ws[0]["bias"]
        one = coda.fuse(lambda x, w, s=None: feed_forward(x, w | {"scale": scale if s is None else s}))
        for w in (*ws, *ws, *ws):
            x = one(x, w) if closes_over else one(x, w, scale)
        return jnp.sum(rms_norm(x, 1.0))

    fused = coda.fuse(loss, defer_norms=True)
    jaxpr = jax.make_jaxpr(gradients(fused))(*arguments()).jaxpr
    assert counts(fused) == [3 * LAYERS, 1]
    calls = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit") and "lambda" in str(e.params["name"])]
    # The first and the last layer's differ from others': to JAX their sums have no tangents, or no cotangents.
    assert len(calls) == 6 * LAYERS and len({id(e.params["jaxpr"]) for e in calls}) <= 5


def test_a_mask_is_made_where_attention_reads_it():
    def attend(x, w, mask):
        q = (rms_norm(x, w["scale"]) @ w["up"][:, :D]).reshape(B, T, HEADS, -1)
        scores = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, q), -1e30)
        y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), q)
        return x + y.reshape(B, T, D) @ w["down"][:D]

    def found(layer):
        def loss(x, ws):
            mask = jnp.arange(T)[:, None] >= jnp.arange(T)
            for w in ws:
                x = layer(x, w, mask)
            return jnp.sum(rms_norm(x, 1.0).astype(jnp.float32))

        fused = coda.fuse(loss, defer_norms=True)
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(jnp.bfloat16))
        return fused, coda.explain(jax.grad(fused), *types, platform="cuda").attention_calls

    fused, calls = found(coda.fuse(attend))
    assert calls and calls == found(attend)[1] and LAYERS in counts(fused)


def test_a_report_counts_calls():
    x, ws = arguments()
    report = coda.fuse.report(coda.fuse(loss_of("feed forward", is_fused=True), defer_norms=True), x, ws)
    assert [(one.piece, one.count) for one in report.products] == [("feed_forward", LAYERS)] * 2
    assert f"{2 * LAYERS} of {2 * LAYERS} products" in str(report) and f"feed_forward, {LAYERS} calls" in str(report)


@pytest.mark.parametrize("door", GRADIENTS)
@pytest.mark.parametrize("kind", ["fused", "jitted", "checkpointed"])
def test_equal_layers_of_which_the_first_has_less_to_differentiate(kind, door):
    """Only weights behind the activations are trained: nothing of the first layer's input is differentiated."""
    layer = {"fused": coda.fuse, "jitted": jax.jit, "checkpointed": jax.checkpoint}[kind](feed_forward)

    def loss(trained, x, ws, layer=layer):
        for w, down in zip(ws, trained, strict=True):
            x = layer(x, {**w, "down": down})
        return jnp.sum(jnp.square(rms_norm(x, 1.0)))

    x, ws = arguments()
    args = [w["down"] for w in ws], x, ws
    found = jax.jit(GRADIENTS[door](loss))(*args)
    expected = jax.jit(jax.grad(functools.partial(loss, layer=feed_forward)))(*args)
    assert largest_error(found, expected) < 1e-5
