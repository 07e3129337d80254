"""`coda.fuse` of losses whose masks, signs and sums over tokens stand in front of the sum over the vocabulary.

So are losses of rows of log-probabilities, and those whose labels are picked under `vmap`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend import core

import coda_jax as coda
from coda_jax.fusion.narrow_views import with_narrow_views
from tests.test_fuse import largest_error
from tests.test_fuse_loss import (
    VOCABULARY,
    arrays_of_logits,
    picked,
    sizes,
    with_gradients,
)

SUMMED, EACH = ["linear_cross_entropy"], ["token_logprobs"]


def hot(labels):
    return jax.nn.one_hot(labels, VOCABULARY)


def column(mask, dtype=jnp.float32):
    return mask.astype(dtype)[..., None]


def over_all(product, mask):
    """The sum over tokens and columns at once, over the number of tokens that count."""
    return -jnp.sum(product) / (jnp.sum(mask) + 1e-8)


def reversed_logprobs(z):
    return jax.nn.logsumexp(z, axis=-1, keepdims=True) - z


def picked_under_vmap(logprobs, labels):
    pick = lambda row, label: row[label]  # noqa: E731
    for _ in range(labels.ndim):
        pick = jax.vmap(pick)
    return pick(logprobs, labels)


logprobs = jax.nn.log_softmax
LOSSES = {  # of logits, labels and a mask
    "one_hot_masked": lambda z, y, m: over_all(logprobs(z) * (hot(y) * column(m)), m),
    "mask_of_the_product": lambda z, y, m: over_all(logprobs(z) * hot(y) * column(m), m),
    "mask_first": lambda z, y, m: over_all(column(m) * hot(y) * logprobs(z), m),
    "mask_of_logprobs": lambda z, y, m: over_all(hot(y) * (column(m) * logprobs(z)), m),
    "no_mask": lambda z, y, m: over_all(logprobs(z) * hot(y), m),
    "selected": lambda z, y, m: over_all(jnp.where(m[..., None], logprobs(z) * hot(y), 0.0), m),
    "selected_out": lambda z, y, m: over_all(jnp.where(m[..., None], 0.0, hot(y) * logprobs(z)), m),
    "divided": lambda z, y, m: -jnp.sum(logprobs(z) * hot(y) * column(m) / (2 + jnp.sin(y))[..., None]),
    "scaled": lambda z, y, m: jnp.sum(-0.5 * logprobs(z) * hot(y) / jnp.sum(m)),
    "mean_of_all": lambda z, y, m: -VOCABULARY * jnp.mean(hot(y) * logprobs(z)),
    "masked_labels": lambda z, y, m: jnp.sum(optax.softmax_cross_entropy(z, hot(y) * column(m))) / jnp.sum(m),
    "smoothed": lambda z, y, m: over_all(logprobs(z) * optax.smooth_labels(hot(y), 0.1) * column(m), m),
    "uniform": lambda z, y, m: -0.9 * jnp.mean(picked(logprobs(z), y)) - 0.1 * jnp.mean(logprobs(z)),
    "contracted": lambda z, y, m: -jnp.einsum("...v,...v->", logprobs(z), hot(y)),
    "reversed": lambda z, y, m: jnp.mean(picked(reversed_logprobs(z), y)),
    "reversed_one_hot": lambda z, y, m: jnp.mean(jnp.sum(reversed_logprobs(z) * hot(y), axis=-1)),
    "reversed_over_all": lambda z, y, m: -over_all(column(m) * hot(y) * reversed_logprobs(z), m),
    "reversed_dot": lambda z, y, m: jnp.mean(jnp.einsum("...v,...v->...", hot(y), reversed_logprobs(z))),
    "negative": lambda z, y, m: jnp.sum(jnp.where(m, picked(-logprobs(z), y), 0.0)),
    "negative_one_hot": lambda z, y, m: jnp.sum(m * jnp.sum(-logprobs(z) * hot(y), axis=-1)),
    "vmap": lambda z, y, m: -jnp.mean(picked_under_vmap(logprobs(z), y)),
    "copied": lambda z, y, m: -jnp.mean(picked_under_vmap(jnp.copy(logprobs(jnp.copy(z))), y)),
}


def arguments(shape, dtype=jnp.float32):
    x, w, labels = sizes()
    mask = jnp.arange(labels.size) % 5 != 4
    return (x.reshape(*shape, -1).astype(dtype), w.astype(dtype)), labels.reshape(shape), mask.reshape(shape)


def doors(f):
    return with_gradients(coda.fuse(f)), coda.fuse(with_gradients(f))


def check_moves_less(of_logits, dtype, operators=(SUMMED, SUMMED)):
    """No array of all logits is a pass, by either door, at sizes of a language model."""
    types = [((4, 1024, 128), dtype), ((128, VOCABULARY), dtype), ((4, 1024), jnp.int32), ((4, 1024), jnp.bool_)]
    args = [jax.ShapeDtypeStruct(*one) for one in types]

    def f(x, w, labels, mask):
        return of_logits(x @ w, labels, mask)

    plain, *found = (
        coda.explain(g, *args, platform="cuda", device="H100").totals for g in (with_gradients(f), *doors(f))
    )
    for one in found:
        assert one.passes_bytes < plain.passes_bytes / 2 and one.kept_bytes < plain.kept_bytes
    for g, expected in zip((f, with_gradients(f)), operators, strict=True):
        products = coda.fuse.report(g, *args).products
        assert {name for one in products for name in one.epilogue} == set(expected)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(4, 16), (64,)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_factors_in_front_of_its_sum(name, shape):
    arrays, labels, mask = arguments(shape)

    def f(x, w):
        return LOSSES[name](x @ w, labels, mask)

    for g in doors(f):
        assert largest_error(jax.jit(g)(*arrays), jax.jit(with_gradients(f))(*arrays)) < 1e-5
    assert [one.epilogue for one in coda.fuse.report(f, *arrays).products] == [tuple(SUMMED)]
    if len(shape) > 1:
        check_moves_less(LOSSES[name], jnp.float32)


def test_a_head_with_its_factors_in_the_other_order():
    arrays, labels, mask = arguments((4, 16))

    def f(x, w):
        z = jax.vmap(jax.vmap(lambda row: w.T @ row))(x)
        return LOSSES["mask_of_the_product"](z, labels, mask)

    for g in doors(f):
        assert largest_error(jax.jit(g)(*arrays), jax.jit(with_gradients(f))(*arrays)) < 1e-5
        assert not arrays_of_logits(g, *arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_widened", [False, True])
@pytest.mark.parametrize(
    "name", ["one_hot_masked", "mask_of_the_product", "selected", "reversed_dot", "negative", "vmap"]
)
def test_in_16_bits_it_is_as_near_to_float32(name, is_widened, dtype):
    arrays, labels, mask = arguments((4, 16), dtype)

    def f(x, w):
        z = x @ w
        return LOSSES[name](jnp.float32(z) if is_widened else z, labels, mask)

    def in_float32(g, *arrays):
        return jax.tree.map(jnp.float32, jax.jit(g)(*arrays))

    exact = in_float32(with_gradients(f), *map(jnp.float32, arrays))
    own = largest_error(in_float32(with_gradients(f), *arrays), exact)
    for g in doors(f):
        assert largest_error(in_float32(g, *arrays), exact) < 2 * own + 1e-3
    if is_widened and dtype == "bfloat16":
        check_moves_less(lambda z, y, m: LOSSES[name](jnp.float32(z), y, m), dtype)


@pytest.mark.parametrize("pick", ["fill", "fill_3", "clip", "one_hot"])
@pytest.mark.parametrize("sign", ["reversed", "negative", "half"])
def test_labels_that_are_not_in_the_vocabulary(sign, pick):
    """A number that is filled in is no log-probability: no sign and no factor is behind it."""
    arrays, labels, mask = arguments((64,))
    labels = labels.at[:6].set(jnp.asarray([-1, -VOCABULARY, -VOCABULARY - 1, VOCABULARY, VOCABULARY + 7, 2**31 - 1]))
    options = {"fill": {"mode": "fill"}, "fill_3": {"mode": "fill", "fill_value": 3.0}, "clip": {"mode": "clip"}}
    signed = {"reversed": reversed_logprobs, "negative": lambda z: -logprobs(z), "half": lambda z: logprobs(z) * 0.5}

    def f(x, w):
        array = signed[sign](x @ w)
        if pick == "one_hot":
            return jnp.sum(jnp.sum(array * hot(labels) * column(mask), axis=-1) * jnp.sin(jnp.arange(64)))
        found = jnp.take_along_axis(array, labels[:, None], axis=-1, **options[pick])[:, 0]
        return jnp.sum(jnp.where(jnp.isnan(found), 0.0, found) * jnp.sin(jnp.arange(64)))

    for g in doors(f):
        assert largest_error(jax.jit(g)(*arrays), jax.jit(with_gradients(f))(*arrays)) < 1e-5
    assert [one.epilogue[0] in (*SUMMED, *EACH) for one in coda.fuse.report(f, *arrays).products] == [True]


STAYS = {  # the second factor is no one-hot array, or no factor of rows
    "soft_labels": lambda z, y, m: -jnp.sum(logprobs(z) * jax.nn.softmax(jnp.sin(y)[..., None] * hot(y))),
    "entropy": lambda z, y, m: -jnp.sum(jnp.exp(logprobs(z)) * logprobs(z)) + jnp.mean(picked(logprobs(z), y)),
    "columns": lambda z, y, m: -jnp.sum(logprobs(z) * hot(y) * jnp.sin(jnp.arange(VOCABULARY))),
    "two_labels": lambda z, y, m: -jnp.sum(logprobs(z) * hot(y) * column(m)) - jnp.sum(logprobs(z) * hot(y + 1)),
}


@pytest.mark.parametrize("name", STAYS)
def test_sums_with_other_factors_are_plain_jaxs(name):
    arrays, labels, mask = arguments((4, 16))

    def f(x, w):
        return STAYS[name](x @ w, labels, mask)

    for g in doors(f):
        assert largest_error(jax.jit(g)(*arrays), jax.jit(with_gradients(f))(*arrays)) < 1e-5
    (found,) = coda.fuse.report(f, *arrays).logits
    assert found.reason


ROWS = {
    "all_but_the_last": lambda z, y, m: -jnp.mean(picked(logprobs(z)[:, :-1], y[:, 1:])),
    "flat": lambda z, y, m: -jnp.mean(picked(logprobs(z).reshape(-1, VOCABULARY), y.reshape(-1))),
    "flat_but_the_last": lambda z, y, m: (
        -jnp.mean(picked_under_vmap(logprobs(z)[:, :-1].reshape(-1, VOCABULARY), y[:, 1:].reshape(-1)))
    ),
    "every_other": lambda z, y, m: -jnp.sum(hot(y[:, 1::2]) * logprobs(z)[:, ::2] * column(m[:, ::2])),
    "reversed": lambda z, y, m: jnp.mean(picked(reversed_logprobs(z)[1:], y[1:])),
    "turned": lambda z, y, m: -jnp.mean(picked(jnp.swapaxes(jnp.swapaxes(logprobs(z), 1, 2), 1, 2), y)),
    "capped": lambda z, y, m: -jnp.mean(picked(logprobs(2 * jnp.tanh(z / 2))[:, :-1], y[:, 1:])),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_log_probabilities(name):
    """They are log-probabilities of rows."""
    arrays, labels, mask = arguments((4, 16))

    def f(x, w):
        return ROWS[name](x @ w, labels, mask)

    for g in doors(f):
        assert largest_error(jax.jit(g)(*arrays), jax.jit(with_gradients(f))(*arrays)) < 1e-5
    assert [one.epilogue for one in coda.fuse.report(f, *arrays).products] == [tuple(SUMMED)]
    assert not arrays_of_logits(with_gradients(coda.fuse(f)), *arrays)


def test_rows_beside_all_stay():
    """Rows of log-probabilities are of no use where all of these are read too."""
    arrays, labels, _ = arguments((4, 16))

    def f(x, w):
        every = logprobs(x @ w)
        return -jnp.mean(picked(every[:, :-1], labels[:, 1:])) + jnp.mean(jnp.sort(every, axis=1)[:, 0])

    for g in doors(f):
        assert largest_error(jax.jit(g)(*arrays), jax.jit(with_gradients(f))(*arrays)) < 1e-5


VIEWS = {  # of logits in float32
    "all_but_the_last": lambda z, y: (jnp.float32(z)[:, :-1], y[:, 1:]),
    "flat": lambda z, y: (jnp.float32(z).reshape(-1, VOCABULARY), y.reshape(-1)),
    "flat_but_the_last": lambda z, y: (jnp.float32(z)[:, :-1].reshape(-1, VOCABULARY), y[:, 1:].reshape(-1)),
    "with_a_bias": lambda z, y: (jnp.float32(z)[:, 1:] + jnp.sin(jnp.arange(VOCABULARY)), y[:, 1:]),
}
WHOLE = {  # losses whose logits are read by something else too
    "top_k": lambda z, y: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(z, y) + jax.lax.top_k(z, 2)[0][..., 1]
    ),
    "integer_labels": lambda z, y: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z, y)),
    "one_hot": lambda z, y: -jnp.mean(jnp.sum(logprobs(z) * hot(y), axis=-1)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_logits_in_float32_are_viewed_as_the_product_is(name, view):
    """Passes read the product in bfloat16, and its cotangent is put back into all rows in bfloat16."""
    types = [((4, 1024, 128), jnp.bfloat16), ((128, VOCABULARY), jnp.bfloat16), ((4, 1024), jnp.int32)]
    args = [jax.ShapeDtypeStruct(*one) for one in types]

    def f(x, w, labels):
        return WHOLE[name](*VIEWS[view](x @ w, labels))

    def explained(g):
        return coda.explain(g, *args, platform="cuda", device="H100").totals

    plain = explained(with_gradients(f))
    for found in (with_gradients(coda.fuse(f, chunk_losses=False)), coda.fuse(with_gradients(f), chunk_losses=False)):
        assert explained(found).passes_bytes <= plain.passes_bytes
        assert explained(found).kept_bytes <= plain.kept_bytes
    arrays, labels, _ = arguments((4, 16), jnp.bfloat16)
    exact = with_gradients(f)(*map(jnp.float32, arrays), labels)
    own, *errors = (
        largest_error(jax.tree.map(jnp.float32, jax.jit(g)(*arrays, labels)), exact)
        for g in (with_gradients(f), with_gradients(coda.fuse(f)), coda.fuse(with_gradients(f), chunk_losses=False))
    )
    assert max(errors) < 2 * own + 1e-3


ALONE = {  # views of float32 arrays that are read in bfloat16, or made of it
    "of_a_cast": lambda x, y: jnp.float32(x)[1:],
    "cast_behind": lambda x, y: y[1:].astype(jnp.bfloat16),
    "both": lambda x, y: jnp.float32(x)[1:].reshape(-1).astype(jnp.bfloat16),
    "to_other_bits": lambda x, y: jnp.float32(x)[1:].astype(jnp.float16),
    "padded": lambda x, y: jax.lax.pad(y, jnp.float32(0), ((1, 0, 0), (0, 2, 1))).astype(jnp.bfloat16),
    "padded_with_ones": lambda x, y: jax.lax.pad(y, jnp.float32(1.1), ((1, 0, 0), (0, 2, 1))).astype(jnp.bfloat16),
    "read_in_two_dtypes": lambda x, y: (y.T.astype(jnp.bfloat16), y.T.astype(jnp.float16)),
    "read_wide_too": lambda x, y: (y[1:].astype(jnp.bfloat16), y[1:]),
    "twice": lambda x, y: jnp.float32(x)[1:].T[::2] + 1,
}


@pytest.mark.parametrize("name", ALONE)
def test_casts_move_through_views_bit_by_bit(name):
    x = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    args = x.astype(jnp.bfloat16), x
    closed = jax.make_jaxpr(ALONE[name])(*args)
    made = with_narrow_views(closed)
    assert closed.out_avals == made.out_avals
    pairs = zip(*(core.jaxpr_as_fun(one)(*args) for one in (made, closed)), strict=True)
    assert all(jnp.array_equal(one, other) for one, other in pairs)
    wide = [
        e for e in made.jaxpr.eqns if e.primitive.name in ("slice", "pad") and e.outvars[0].aval.dtype == jnp.float32
    ]
    assert bool(wide) == (name in ("padded_with_ones", "read_wide_too"))
