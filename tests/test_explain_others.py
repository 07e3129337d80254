"""Products that are not coda_jax's, as coda.explain tells them: of groups, of attention, and whose the others are."""

import inspect
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.jaxprs.source_lines import line_of

HEADS = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.bfloat16)
SIZE = 2 * 2 * 64 * 4 * 16  # bytes of q


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def line(function, text):
    lines, first = inspect.getsourcelines(function)
    (at,) = (i for i, one in enumerate(lines) if text in one)
    return f"test_explain_others.py:{first + at}"


def experts(x, w, sizes):
    return jnp.sum(jax.lax.ragged_dot(x, w, sizes).astype(jnp.float32) ** 2)


def test_products_of_groups_are_counted():
    """Each row goes through one group's matrix, forward and in both products of the backward pass."""
    m, k, n, groups = 4096, 512, 1024, 8
    types = array(m, k), array(groups, k, n), array(groups, dtype=jnp.int32)
    found = coda.explain(jax.grad(experts, argnums=(0, 1)), *types, platform="cuda")
    assert found.others == 3 and found.attention_products == 0
    assert {one.flops for one in found.other_products} == {2 * m * n * k}
    assert {one.bytes for one in found.other_products} == {2 * (m * k + groups * k * n + m * n)}
    assert {one.source for one in found.other_products} == {line(experts, "ragged_dot")}
    assert sorted(one.is_backward for one in found.other_products) == [False, True, True]
    assert found.totals.other_flops == 3 * 2 * m * n * k
    general = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    (weights,) = coda.explain(
        lambda x, dy, sizes: jax.lax.ragged_dot_general(x, dy, sizes, general), array(m, k), array(m, n), types[2]
    ).other_products
    assert weights.flops == 2 * m * n * k and weights.out == f"bfloat16[{groups},{k},{n}]"
    with_rows = coda.explain(experts, *types).as_dict()
    assert with_rows["others"] == 1 and with_rows["other_products"][0]["count"] == 1


def test_other_products_are_told_with_their_lines():
    def f(x, w, image, filters):
        y = jnp.tanh(x @ w)
        y = jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), y, length=3)[0]
        return y, jax.lax.conv(image, filters, (1, 1), "SAME"), jnp.einsum("bik,bkj->bij", x[None, :8], w[None])

    found = coda.explain(f, array(64, 32), array(32, 32), array(1, 4, 8, 8), array(16, 4, 3, 3))
    each = {one.source: (one.operation, one.flops, count) for one, count in found.other_products.items()}
    assert each == {
        line(f, "y = jnp.tanh"): ("dot_general", 2 * 64 * 32 * 32, 1),
        line(f, "lax.scan"): ("dot_general", 2 * 64 * 32 * 32, 3),
    } | {line(f, "lax.conv"): each[line(f, "lax.conv")]}
    kinds = {(one.operation, one.flops) for one in found.other_products}
    assert ("conv_general_dilated", 2 * 16 * 8 * 8 * 4 * 9) in kinds and ("dot_general", 2 * 8 * 32 * 32) in kinds
    assert found.others == sum(found.other_products.values()) == 6


def test_the_largest_are_printed():
    def f(x, *weights):
        for w in weights:
            x = x @ w
        return x

    widths = [64, 128, 192, 256, 320, 384, 448, 512]
    types = [array(a, b) for a, b in itertools.pairwise(widths)]
    found = coda.explain(f, array(64, 64), *types, device="H200")
    lines = str(found).splitlines()
    at = next(i for i, one in enumerate(lines) if one.startswith("7 products that are not coda_jax's: "))
    assert lines[at + 1].split() == ["count", "product", "GFLOP", "MB", "made", "in"]
    assert "bfloat16[64,448] @ bfloat16[448,512]" in lines[at + 2] and lines[at + 2].endswith(line(f, "x @ w"))
    assert lines[at + 7].startswith("    2  smaller ones, ")
    assert json.loads(json.dumps(found.as_dict()))["totals"]["other_flops"] == found.totals.other_flops
    as_given = coda.Explanation(products={}, others=9, other_products=found.other_products, attention_products=2)
    assert as_given.totals.other_flops == found.totals.other_flops
    none = coda.explain(coda.gemm, array(64, 64), array(64, 64))
    assert none.other_products == {} and "    0  products that are not coda_jax's" in str(none)


def test_an_optimizers_products_have_its_line():
    optax = pytest.importorskip("optax")
    muon = pytest.importorskip("optax.contrib").muon(1e-3)
    params = {"w": array(64, 32, dtype=jnp.float32)}
    state = jax.eval_shape(muon.init, params)
    found = coda.explain(lambda g, state: optax.apply_updates(g, muon.update(g, state, g)[0]), params, state)
    assert found.others > 10 and all("optax/contrib/_muon.py:" in one.source for one in found.other_products)


def linear(layer, x):
    return layer(x) * 2


def test_a_layers_product_has_the_programs_line_too():
    layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    (found,) = coda.explain(lambda x: linear(layer, x), array(8, 64)).other_products
    of_flax, of_program = found.source.split(", from ")
    assert of_flax.startswith("flax/nnx/") and of_program == line(linear, "layer(x)")


def twice(layer, x):
    x = layer(x) * 2
    return layer(x) + 1


def test_a_fused_layer_has_the_line_of_each_call():
    """Though it is traced once."""
    layer = layers.RMSNorm(256, rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(lambda x: twice(layer, x))(array(8, 256)).jaxpr
    found = [line_of(e) for e in jaxpr.eqns if e.primitive.name == "rsqrt"]
    of_layers, of_program = zip(*(one.split(", from ") for one in found), strict=True)
    assert of_program == (line(twice, "layer(x) * 2"), line(twice, "layer(x) + 1"))
    assert all(one.startswith("flax_layers/norm.py:") for one in of_layers)


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jax.custom_vjp
def with_a_rule(q, k, v):
    return attention(q, k, v)


def _forward(q, k, v):
    return attention(q, k, v), (q, k, v)


def _backward(kept, dy):
    return jax.vjp(attention, *kept)[1](dy)


with_a_rule.defvjp(_forward, _backward)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "form",
    [
        attention,
        jax.jit(attention),
        jax.checkpoint(attention),
        with_a_rule,
        jax.checkpoint(with_a_rule),
        jax.jit(with_a_rule),
    ],
    ids=["plain", "jit", "checkpoint", "custom_vjp", "checkpoint_custom_vjp", "jit_custom_vjp"],
)
def test_attention_has_its_products(form, steps):
    """Forward and backward, however it is differentiated, and in a scan; of a program's own none is taken for it."""

    def loss(q, k, v, w):
        def layer(q, _):
            y = form(q, k, v)
            return (y.reshape(2, 64, 64) @ w).reshape(y.shape), None

        y = jax.lax.scan(layer, q, length=steps)[0] if steps > 1 else layer(q, None)[0]
        return jnp.sum(y.astype(jnp.float32) ** 2)

    found = coda.explain(jax.grad(loss, argnums=(0, 1, 2, 3)), HEADS, HEADS, HEADS, array(64, 64), platform="cuda")
    assert found.attention_products in (6 * steps, 7 * steps)
    assert sum(found.other_products.values()) == 3 * steps == found.others - found.attention_products
    assert {one.out for one in found.other_products} == {"bfloat16[2,64,64]", "bfloat16[64,64]"}
    assert sum(count for one, count in found.attention.items() if not one.is_backward) == steps
    assert sum(count for one, count in found.attention.items() if one.is_backward) == steps
    if steps == 1:
        assert {(one.bytes_read, one.bytes_written) for one in found.attention} == {
            (3 * SIZE, SIZE),
            (4 * SIZE, 3 * SIZE),
        }
    told = f"they have {found.attention_products} products inside"
    assert told in str(found) and f"{3 * steps} products that are neither coda_jax's nor attention's" in str(found)


def test_a_programs_own_einsum_is_not_attention():
    def own(q, k, v):
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores).astype(v.dtype), v) + attention(q, k, v)

    found = coda.explain(jax.vmap(own), *(jax.ShapeDtypeStruct((3, *HEADS.shape), HEADS.dtype),) * 3)
    assert found.attention_products == 2 and sum(found.other_products.values()) == 2
