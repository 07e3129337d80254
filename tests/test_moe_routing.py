"""The order of rows by expert, its gather and its sum, and the router's choice, against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import check

from flax_layers import moe
from flax_layers.moe import router_product, routing

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def ids_of(tokens, k, experts, seed=0, only=None):
    """Distinct experts of each token, of all or of `only`."""
    rng = np.random.default_rng(seed)
    among = np.arange(experts) if only is None else np.array(only)
    found = [rng.permutation(among)[:k] for _ in range(tokens)]
    return jnp.asarray(np.reshape(found, (tokens, k)), jnp.int32)


def loop(x, ids, weights, expert):
    """sum over j of weights[t, j] * expert(ids[t, j], x[t])."""
    y = np.zeros_like(x)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            y[t] += weights[t, j] * expert(ids[t, j], x[t])
    return y


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 40), experts=st.integers(1, 20), k=st.integers(1, 4), seed=st.integers(0, 9))
@pytest.mark.slow
def test_order(tokens, experts, k, seed):
    k = min(k, experts)
    ids = ids_of(tokens, k, experts, seed)
    order = moe.order_by_expert(ids, experts)
    flat = np.asarray(ids).reshape(-1)
    np.testing.assert_array_equal(order.rows, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(order.places, np.argsort(np.asarray(order.rows)))
    np.testing.assert_array_equal(order.group_sizes, np.bincount(flat, minlength=experts))
    assert {x.dtype for x in order} == {jnp.dtype("int32")}


def test_order_at_the_largest_keys():
    """Distinct keys of 32 bits, unsigned; a stable sort takes their place where they have more."""
    for experts in (2**29, 2**30 - 1, 2**30 + 1, 2**31 - 1):
        ids = jnp.array([experts - 1, 0, experts - 1, 7], jnp.int32)
        rows, places = routing._sorted(ids, experts)
        np.testing.assert_array_equal(rows, [1, 3, 0, 2])
        np.testing.assert_array_equal(places, [2, 0, 3, 1])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_gather_and_sum_are_each_other_s_gradient(dtype, k):
    tokens, experts, width = 37, 6, 5
    order = moe.order_by_expert(ids_of(tokens, k, experts), experts)
    x = jax.random.normal(jax.random.key(0), (tokens, width)).astype(dtype)
    y = jax.random.normal(jax.random.key(1), (tokens * k, width)).astype(dtype)
    rows, pull = jax.vjp(lambda x: moe.gathered(x, order, k), x)
    np.testing.assert_array_equal(rows, np.asarray(x)[np.asarray(order.rows) // k])
    total, back = jax.vjp(lambda y: moe.combined(y, order, k), y)
    exact = np.zeros((tokens, width))
    np.add.at(exact, np.asarray(order.rows) // k, np.asarray(y).astype(np.float64))
    plain = jnp.zeros((tokens, width), dtype).at[order.rows // k].add(y)
    check(total, exact, plain)
    np.testing.assert_array_equal(pull(y)[0], total)
    np.testing.assert_array_equal(back(x)[0], rows)


def test_sums_are_float32():
    """No partial sum is rounded to bfloat16, of bfloat16 rows 1, 2^-9 and 2^-9 either."""
    order = moe.order_by_expert(ids_of(8, 3, 4), 4)
    routed = jnp.tile(jnp.array([1, 2**-9, 2**-9], jnp.bfloat16), 8)
    y = routed[order.rows][:, None] * jnp.ones((1, 3), jnp.bfloat16)
    total, pull = jax.vjp(lambda y: moe.combined(y, order, 3, jnp.float32), y)
    np.testing.assert_array_equal(total, np.full((8, 3), 1 + 2**-8, np.float32))
    assert pull(total)[0].dtype == jnp.bfloat16
    halves = jnp.tile(jnp.array([1, 2**-8, 2**-8], jnp.bfloat16), 8)[order.rows][:, None]
    np.testing.assert_array_equal(moe.combined(halves, order, 3), np.full((8, 1), 1 + 2**-7))


@pytest.mark.parametrize(("k", "only"), [(1, None), (1, (2,)), (2, (0, 5)), (3, None)])
def test_sorted_experts(k, only):
    """Values and gradients of an elementwise expert, also with experts that have no rows."""
    tokens, experts, width = 23, 6, 4
    ids = ids_of(tokens, k, experts, only=only)
    x = jax.random.normal(jax.random.key(0), (tokens, width))
    weights = jax.random.uniform(jax.random.key(1), (tokens, k))
    cotangent = jax.random.normal(jax.random.key(2), (tokens, width))

    def run(x, weights, slopes):
        def expert(rows, row_scale, group_sizes):
            of_rows = jnp.repeat(slopes, group_sizes, total_repeat_length=rows.shape[0])
            return row_scale[:, None] * jnp.sin(of_rows[:, None] * rows)

        return moe.sorted_experts(expert, x, ids, weights, experts)

    slopes = jnp.arange(1.0, experts + 1)
    y, pull = jax.vjp(run, x, weights, slopes)
    wide = [np.asarray(a).astype(np.float64) for a in (x, weights, slopes, cotangent)]
    want = loop(wide[0], np.asarray(ids), wide[1], lambda e, row: np.sin(wide[2][e] * row))
    np.testing.assert_allclose(y, want, atol=1e-5)
    dx, dweights, dslopes = pull(cotangent)
    of_ids = wide[2][np.asarray(ids)][..., None]  # (T, k, 1)
    rows, out = wide[0][:, None], wide[3][:, None]
    np.testing.assert_allclose(dx, (wide[1][..., None] * of_ids * np.cos(of_ids * rows) * out).sum(1), atol=1e-4)
    np.testing.assert_allclose(dweights, (np.sin(of_ids * rows) * out).sum(-1), atol=1e-5)
    by_choice = (wide[1][..., None] * rows * np.cos(of_ids * rows) * out).sum(-1)
    expected = [by_choice[np.asarray(ids) == e].sum() for e in range(experts)]
    np.testing.assert_allclose(dslopes, expected, atol=1e-4)


def test_neither_pass_scatters_with_additions():
    ids = ids_of(16, 2, 4)

    def loss(x, kernel):
        found = moe.route(x @ kernel, 2)
        y = moe.sorted_experts(lambda rows, scale, _: rows * scale[:, None], x, found.ids, found.weights, 4)
        return jnp.sum(jnp.square(y)) + jnp.sum(found.weights[:, 0] * ids[:, 0])

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((16, 8)), jnp.ones((8, 4))))
    assert "scatter" in text and "scatter-add" not in text and "scatter_add" not in text


def test_results_do_not_depend_on_chance():
    ids, x = ids_of(64, 4, 8), jax.random.normal(jax.random.key(0), (64, 16))
    weights = jax.random.uniform(jax.random.key(1), (64, 4))

    @jit
    def run(x, weights):
        def loss(x, weights):
            experts = lambda rows, scale, _: jnp.tanh(rows) * scale[:, None]  # noqa: E731
            return jnp.sum(jnp.square(moe.sorted_experts(experts, x, ids, weights, 8)))

        return jax.value_and_grad(loss, (0, 1))(x, weights)

    first = jax.tree.leaves(run(x, weights))
    for _ in range(5):
        for a, b in zip(first, jax.tree.leaves(run(x, weights)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("groups", [None, (4, 2), (2, 1)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_choice_against_a_loop(scoring, normalized, groups, with_bias):
    tokens, experts, k = 29, 8, 3
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(tokens, experts)).astype(np.float32)
    bias = rng.normal(size=experts).astype(np.float32) * 0.3 if with_bias else None
    number, kept = groups or (None, None)
    found = moe.route(
        jnp.asarray(logits),
        k,
        bias=None if bias is None else jnp.asarray(bias),
        scoring=scoring,
        normalized=normalized,
        scaling=2.5,
        groups=number,
        groups_kept=kept,
    )
    for t in range(tokens):
        z = logits[t].astype(np.float64)
        scores = np.exp(z) / np.exp(z).sum() if scoring == "softmax" else 1 / (1 + np.exp(-z))
        eligible = scores + (0 if bias is None else bias)
        if number is not None:
            of_groups = eligible.reshape(number, -1)
            best = np.argsort(-np.sort(of_groups, axis=-1)[:, -2:].sum(-1))[:kept]
            eligible = np.where(np.isin(np.arange(number), best)[:, None], of_groups, -np.inf).reshape(-1)
        ids = np.argsort(-eligible, kind="stable")[:k]
        np.testing.assert_array_equal(found.ids[t], ids)
        weights = scores[ids] / scores[ids].sum() if normalized else scores[ids]
        np.testing.assert_allclose(found.weights[t], 2.5 * weights, rtol=2e-6)
        np.testing.assert_allclose(found.probabilities[t], scores / scores.sum(), rtol=2e-6)


@pytest.mark.smoke
def test_gradient_of_the_weights():
    """The gradient of the weights is that of a gather of the scores; none goes to the bias."""
    logits = jax.random.normal(jax.random.key(0), (11, 6))
    cotangent = jax.random.normal(jax.random.key(1), (11, 2))

    def ours(logits, bias):
        return jnp.sum(moe.route(logits, 2, bias=bias).weights * cotangent)

    def plain(logits):
        scores, bias = jax.nn.softmax(logits), jnp.linspace(-0.2, 0.2, 6)
        weights = jnp.take_along_axis(scores, jax.lax.top_k(scores + bias, 2)[1], axis=-1)
        return jnp.sum(weights / weights.sum(-1, keepdims=True) * cotangent)

    got, of_bias = jax.grad(ours, (0, 1))(logits, jnp.linspace(-0.2, 0.2, 6))
    np.testing.assert_allclose(got, jax.grad(plain)(logits), atol=1e-6)
    assert not np.any(of_bias)


@pytest.mark.parametrize("of_kernel", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("of_x", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_logits_are_those_of_float32(of_x, of_kernel):
    """Values and the kernel's gradient to float32's rounding, the rows' to that of their own dtype."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 64)).astype(of_x)
    kernel = jax.random.normal(jax.random.key(1), (64, 8)).astype(of_kernel)
    cotangent = jax.random.normal(jax.random.key(2), (2, 16, 8))
    logits, pull = jax.vjp(router_product.router_logits, x, kernel)
    wide = [np.asarray(a).astype(np.float64) for a in (x, kernel, cotangent)]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, wide[0] @ wide[1], atol=2e-5)
    dx, dkernel = pull(cotangent)
    assert dx.dtype == of_x and dkernel.dtype == of_kernel
    want, eps = wide[2] @ wide[1].T, float(jnp.finfo(of_x).eps)
    np.testing.assert_allclose(np.asarray(dx).astype(np.float64), want, atol=2e-4, rtol=0.51 * eps)
    want, eps = np.tensordot(wide[0], wide[2], ((0, 1), (0, 1))), float(jnp.finfo(of_kernel).eps)
    np.testing.assert_allclose(np.asarray(dkernel).astype(np.float64), want, atol=5e-5, rtol=0.51 * eps)


def test_logits_of_bfloat16_rows_are_made_on_tensor_cores():
    """No float32 factor, and no row is kept in float32."""
    x, kernel, cotangent = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((64, 8)), jnp.ones((4, 8))

    def products(x):
        both = jax.make_jaxpr(lambda x, k: jax.vjp(router_product.router_logits, x, k)[1](cotangent))(x, kernel)
        return [str(both).count(text) for text in ("dot_general", "HIGHEST", "f32[4,64]")]

    assert products(x) == [3, 0, 1]  # one is dx before it is rounded
    assert products(x.astype(jnp.float32))[1] > 0


def test_three_parts_are_the_whole():
    x = jax.random.normal(jax.random.key(0), (1000,)) * jnp.exp(jnp.linspace(-20, 20, 1000))
    first, second, third = (
        np.asarray(part).astype(np.float64) for part in jax.jit(lambda x: router_product.parts(x, 3))(x)
    )
    np.testing.assert_array_equal(first + second + third, np.asarray(x).astype(np.float64))


BAD_ROUTERS = {
    "experts_per_token .*num_experts_per_tok.* is 5, of num_experts=4; it must be 1 to 4": (4, 5, {}),
    "experts_per_token=0; it must be an integer, 1 or more": (4, 0, {}),
    "experts_per_token=2.0; it must be an integer": (4, 2.0, {}),
    "num_experts=0; it must be an integer, 1 or more": (0, 1, {}),
    "scoring='tanh' is unknown": (4, 2, {"scoring": "tanh"}),
    "2 groups of experts of which None are kept; give both": (4, 2, {"groups": 2}),
    "4 experts do not make 3 equal groups": (4, 2, {"groups": 3, "groups_kept": 1}),
    "4 experts do not make 4 equal groups of two": (4, 2, {"groups": 4, "groups_kept": 1}),
    "3 of 2 groups are kept": (4, 2, {"groups": 2, "groups_kept": 3}),
    "3 experts a token are more than 1 groups of 2": (4, 3, {"groups": 2, "groups_kept": 1}),
}


@pytest.mark.parametrize("message", BAD_ROUTERS)
def test_routers_that_are_refused(message):
    experts, k, options = BAD_ROUTERS[message]
    with pytest.raises(ValueError, match=message):
        moe.Router(8, experts, k, **options, rngs=nnx.Rngs(0))


def test_arrays_that_are_refused():
    with pytest.raises(ValueError, match=r"ids are float32 of shape \(3, 2\)"):
        routing.order_by_expert(jnp.ones((3, 2)), 4)
    with pytest.raises(ValueError, match=r"ids are int32 of shape \(3,\)"):
        routing.order_by_expert(jnp.ones(3, jnp.int32), 4)
    with pytest.raises(ValueError, match=r"have shapes \(3, 4\), \(3, 2\) and \(3, 1\)"):
        moe.sorted_experts(None, jnp.ones((3, 4)), jnp.ones((3, 2), jnp.int32), jnp.ones((3, 1)), 4)
