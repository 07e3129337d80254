"""`coda.fuse` of a language model's loss: logits never exist where they are read at labels alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.common_utils import onehot
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from coda_jax.jaxprs.walk import equations
from tests import plain_models, tolerance
from tests.plain_models import WIDTH, rms_norm
from tests.test_fuse import largest_error

VOCABULARY = 1040


def picked(logprobs, labels):
    return jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]


LOSSES = {
    "integer_labels": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y),
    "one_hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, VOCABULARY)),
    "log_softmax": lambda z, y: -picked(jax.nn.log_softmax(z), y),
    "log_softmax_one_hot": lambda z, y: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, VOCABULARY), axis=-1),
    "training_one_hot": lambda z, y: -jnp.sum(onehot(y, VOCABULARY) * jax.nn.log_softmax(z), axis=-1),
    "einsum_one_hot": lambda z, y: -jnp.einsum("...v,...v->...", jax.nn.log_softmax(z), jax.nn.one_hot(y, VOCABULARY)),
    "logsumexp": lambda z, y: jax.nn.logsumexp(z, axis=-1) - picked(z, y),
    "negative": lambda z, y: -(picked(z, y) - jax.nn.logsumexp(z, axis=-1)),
    "by_hand": lambda z, y: jnp.log(jnp.sum(jnp.exp(z - z.max(-1, keepdims=True)), -1)) + z.max(-1) - picked(z, y),
}


def arguments(dtype=jnp.float32):
    new = plain_models.Weights(3, dtype)
    w = {"scale": new(WIDTH, mean=1.0), "head": new(WIDTH, VOCABULARY), "tied": new(VOCABULARY, WIDTH)}
    x = plain_models.inputs(dtype)[:, :24]  # fewer tokens than columns
    labels = jnp.asarray(np.random.default_rng(4).integers(0, VOCABULARY, x.shape[:2]))
    return w, x, labels


def of_model(loss, *, is_tied=False):
    def function(w, x, labels):
        h = rms_norm(x, w["scale"])
        z = (jnp.einsum("btd,vd->btv", h, w["tied"]) if is_tied else h @ w["head"]).astype(jnp.float32)
        weights = (labels % 3 != 0).astype(jnp.float32)
        return jnp.sum(weights * loss(z, labels)) / jnp.sum(weights)

    return function


def with_gradients(f):
    return jax.value_and_grad(f, argnums=(0, 1))


def arrays_of_logits(f, *args):
    """True if an array of all tokens' logits, or their cotangents, is made outside of the loss's own chunks."""
    shapes = [v.aval.shape for equation, _ in equations(jax.make_jaxpr(f)(*args).jaxpr) for v in equation.outvars]
    return any(shape[-1:] == (VOCABULARY,) and len(shape) > 2 for shape in shapes)


@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_one_of_chunks(name, is_tied):
    args, f = arguments(), of_model(LOSSES[name], is_tied=is_tied)
    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    assert arrays_of_logits(with_gradients(f), *args) and not arrays_of_logits(with_gradients(fused), *args)
    assert [one.epilogue for one in coda.fuse.report(f, *args).products] == [("token_logprobs",)]


MEANS = {
    "mean": lambda loss, y: jnp.mean(loss),
    "weighted": lambda loss, y: jnp.sum(loss * jnp.sin(y)) / 7,
    "masked": lambda loss, y: jnp.sum(jnp.where(y % 3 == 0, loss, 0.0)) / jnp.sum(y % 3 == 0),
    "masked_out": lambda loss, y: jnp.sum(jnp.where(y % 3 == 0, 0.0, -2.0 * loss)),
    "of_rows": lambda loss, y: jnp.mean(jnp.mean(loss, axis=1)),
    "with_its_square": lambda loss, y: jnp.mean(loss) + jnp.mean(loss**2),
    "times_its_square": lambda loss, y: jnp.mean(loss) * jnp.mean(loss**2),
}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", ["integer_labels", "one_hot", "log_softmax"])
def test_a_sum_of_losses(name, mean):
    """A sum over all tokens forms its gradients in the forward pass; any other function of the losses does not."""
    w, x, labels = arguments()
    x = jnp.concatenate([x, 1 - x])
    labels = jnp.concatenate([labels, labels // 2])

    def f(w, x):
        return MEANS[mean](LOSSES[name](rms_norm(x, w["scale"]) @ w["head"], labels), labels)

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(w, x), jax.jit(with_gradients(f))(w, x)) < 1e-5
    is_summed = "linear_cross_entropy" in str(jax.make_jaxpr(fused)(w, x))
    assert is_summed == (mean not in ("of_rows", "times_its_square"))


def test_in_16_bits():
    args, f = arguments(jnp.bfloat16), of_model(LOSSES["integer_labels"])
    exact = with_gradients(f)(*jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args))
    own, found = (
        largest_error(
            jax.tree.map(lambda x: x.astype(jnp.float32), jax.jit(with_gradients(g))(*args)),
            exact,
        )
        for g in (f, coda.fuse(f))
    )
    assert found < 1.2 * own


def small_arguments(tokens=24, width=16):
    """x, w, labels on both sides of the vocabulary and beyond, weights some of which are 0, a mask."""
    new = plain_models.Weights(5, jnp.float32)
    rng = np.random.default_rng(6)
    labels = rng.integers(0, VOCABULARY, tokens)
    labels[:8] = -1, -VOCABULARY, -VOCABULARY - 1, VOCABULARY, VOCABULARY + 7, 2**31 - 1, -(2**31), 0
    weights = jnp.asarray(rng.normal(size=tokens) * (np.arange(tokens) % 5 != 4), jnp.float32)
    mask = jnp.asarray(np.arange(tokens) % 3 != 0)
    return new(tokens, width), new(width, VOCABULARY), jnp.asarray(labels, jnp.int32), weights, mask


def picked_as(**options):
    return lambda z, y: jnp.take_along_axis(z, y[..., None], axis=-1, **options)[..., 0]


def picked_by_product(z, y):
    return jnp.sum(z * jax.nn.one_hot(y, VOCABULARY), axis=-1)


PICKS = {
    "clip": picked_as(mode="clip"),
    "fill": picked_as(mode="fill"),
    "fill_3": picked_as(mode="fill", fill_value=3.0),
    "one_hot": picked_by_product,
}
SPELLINGS = LOSSES | {
    f"{name}_{pick}": (lambda z, y, form=form, pick=pick: form(z, y, PICKS[pick]))
    for name, form in {
        "of_logits": lambda z, y, pick: jax.nn.logsumexp(z, axis=-1) - pick(z, y),
        "of_log_softmax": lambda z, y, pick: -pick(jax.nn.log_softmax(z), y),
    }.items()
    for pick in PICKS
}


@pytest.mark.smoke
@pytest.mark.parametrize("door", ["gradient_of_fused", "fused_gradient"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_labels_that_are_not_in_the_vocabulary(name, door):
    """They are what plain JAX makes of them, in value and gradient, in each loss and in sums of losses."""
    x, w, labels, weights, mask = small_arguments()
    loss = SPELLINGS[name]

    def f(x, w, weights):
        each, mean, kept, left = (loss((i + 1) * x @ w, labels) for i in range(4))
        sums = jnp.mean(mean), jnp.sum(jnp.where(mask, kept, 0.0) * weights), jnp.sum(jnp.where(mask, 0.0, left))
        return each, *sums

    cotangents = (jnp.cos(jnp.arange(24.0)), jnp.float32(2.0), jnp.float32(-1.5), jnp.float32(0.5))

    def with_cotangents(f):
        def g(*args):
            outputs, pull = jax.vjp(f, *args)
            return outputs, pull(cotangents)

        return g

    fused = with_cotangents(coda.fuse(f)) if door == "gradient_of_fused" else coda.fuse(with_cotangents(f))
    found, expected = (jax.tree.leaves(jax.jit(g)(x, w, weights)) for g in (fused, with_cotangents(f)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.nanmax(jnp.abs(other))))
    operators = sorted(name for one in coda.fuse.report(f, x, w, weights).products for name in one.epilogue)
    assert operators == ["linear_cross_entropy"] * 3 + ["token_logprobs"]


@pytest.mark.smoke
def test_either_sign_and_either_mask_of_a_sum():
    x, w, _, weights, mask = small_arguments()
    labels = jnp.arange(24) * 7

    def f(x, w):
        z = [(i + 1) * x @ w for i in range(4)]
        losses = [LOSSES[name](z, labels) for name, z in zip(("logsumexp", "negative") * 2, z, strict=True)]
        kept = [jnp.sum(jnp.where(mask, one, 0.0) * weights) for one in losses[:2]]
        return *kept, *(jnp.sum(jnp.where(mask, 0.0, one)) for one in losses[2:])

    np.testing.assert_allclose(jax.jit(coda.fuse(f))(x, w), jax.jit(f)(x, w), rtol=1e-5, atol=1e-5)
    assert [one.epilogue for one in coda.fuse.report(f, x, w).products] == [("linear_cross_entropy",)] * 4


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.float32])
def test_an_array_that_is_one_hot_by_chance_alone(dtype):
    """Integers of few bits count columns from 0 again, so that a label has several; floats are no labels."""
    x, w, labels, *_ = small_arguments()

    def f(x, w):
        is_label = (labels % 100).astype(dtype)[:, None] == jax.lax.iota(dtype, VOCABULARY)
        return jnp.sum(optax.softmax_cross_entropy(x @ w, is_label))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16])
def test_numbers_of_columns_in_another_shape(dtype):
    """They may be reshaped and cast, but for those of few bits, which count from 0 again."""
    x, w, labels, *_ = small_arguments()

    def f(x, w):
        columns = jnp.arange(VOCABULARY).astype(dtype).astype(jnp.int32).reshape(1, -1)
        is_label = (labels % 100)[:, None] == columns
        return jnp.sum(optax.softmax_cross_entropy(x @ w, is_label.astype(jnp.float32)))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5
    is_taken = "linear_cross_entropy" in str(jax.make_jaxpr(fused)(x, w))
    assert is_taken == (dtype == jnp.uint16)


LOGITS_IN_FLOAT32 = {
    "padded": lambda z: jnp.where(jnp.arange(VOCABULARY) < 1000, z, -1e9),
    "capped": lambda z: 3.0 * jnp.tanh(z / 3.0),
    "padded and capped": lambda z: jnp.where(jnp.arange(VOCABULARY) < 1000, 3.0 * jnp.tanh(z / 3.0), -1e9),
    "scaled": lambda z: 3.0 * z,
}


@pytest.mark.parametrize("door", ["gradient_of_fused", "fused_gradient"])
@pytest.mark.parametrize("name", LOGITS_IN_FLOAT32)
def test_logits_that_stay_are_kept_as_the_product_is(name, door):
    """Passes read the product in bfloat16, and not what is made of it in float32."""
    x, w, labels = sizes()
    x, w, labels = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), labels % 1000

    def loss(x, w):
        return jnp.mean(LOSSES["integer_labels"](LOGITS_IN_FLOAT32[name]((x @ w).astype(jnp.float32)), labels))

    plain = with_gradients(loss)
    is_inner = door == "gradient_of_fused"
    fused = with_gradients(coda.fuse(loss, chunk_losses=False)) if is_inner else coda.fuse(plain, chunk_losses=False)
    found, expected = (jax.jit(g)(x, w) for g in (fused, plain))
    assert largest_error(found, expected) < 2e-2
    moved = [coda.explain(g, x, w, platform="cuda").totals.passes_bytes for g in (fused, plain)]
    assert moved[0] < moved[1]


def test_logits_that_something_else_reads_stay():
    def f(w, x, labels):
        z = x @ w["head"]
        return jnp.mean(LOSSES["integer_labels"](z, labels)) + jnp.mean(jnp.abs(z))

    args = arguments()
    fused = coda.fuse(f)
    assert largest_error(with_gradients(fused)(*args), with_gradients(f)(*args)) < 1e-5
    assert arrays_of_logits(fused, *args)


def test_the_loss_as_it_was():
    args, f = arguments(), of_model(LOSSES["integer_labels"])
    for fused in (coda.fuse(f, exact=True), coda.fuse(f, chunk_losses=False)):
        assert arrays_of_logits(fused, *args)
        assert largest_error(with_gradients(fused)(*args), with_gradients(f)(*args)) < 1e-5


def test_a_loss_in_a_scan():
    def f(w, x, labels):
        losses = jax.lax.scan(lambda c, xy: (c + of_model(LOSSES["log_softmax"])(w, *xy), None), 0.0, (x, labels))[0]
        return losses / x.shape[0]

    w, x, labels = arguments()
    args = w, jnp.stack([x, 2 * x]), jnp.stack([labels, labels])
    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    assert not arrays_of_logits(with_gradients(fused), *args)


def with_a_gradient_of_the_shift(z, y):
    shift = z.max(-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(z - jax.lax.stop_gradient(shift)), -1)) + shift[..., 0] - picked(z, y)


def with_one_shift(z, y):
    shifted = z - jnp.max(z)
    return jnp.log(jnp.sum(jnp.exp(shifted), -1)) - picked(shifted, y)


def beside_numbers(z, y):
    """Numbers in the places of arrays."""
    shifted = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    logarithm = jnp.log(jnp.sum(jnp.exp(shifted), -1))
    return jnp.sum(2.0 * z, -1) + (logarithm + 1.0) - picked(1.0 - shifted, y)


@pytest.mark.parametrize("loss", [with_a_gradient_of_the_shift, with_one_shift, beside_numbers])
def test_a_loss_of_another_form_is_not_replaced(loss):
    args, f = arguments(), of_model(loss)
    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(*args), jax.jit(with_gradients(f))(*args)) < 1e-5
    assert arrays_of_logits(fused, *args)


def test_a_number_of_tokens_that_is_not_known():
    (w, x, labels), f = arguments(), of_model(LOSSES["integer_labels"])
    batch = jax.export.symbolic_shape("batch")
    types = [jax.ShapeDtypeStruct((*batch, *y.shape[1:]), y.dtype) for y in (x, labels)]
    exported = jax.export.export(jax.jit(coda.fuse(f)))(w, *types)
    assert largest_error(exported.call(w, x, labels), f(w, x, labels)) < 1e-5


USED = 1030  # columns of the vocabulary, beside which the others are padding


def padded(fill, *, is_flipped=False, rank=1, used=USED):
    def logits(z):
        columns = jax.lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + z.shape[-1:], rank - 1)
        z = jnp.where(columns >= used, fill, z) if is_flipped else jnp.where(columns < used, z, fill)
        return z

    return logits


PADDINGS = {
    "number": padded(-1e9),
    "flipped": padded(-1e9, is_flipped=True),
    "infinite": padded(-jnp.inf),
    "least": padded(jnp.finfo(jnp.float32).min),
    "of_rows": padded(-1e4, rank=2),
    "all_rows": lambda z: jnp.where(jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) > USED - 1, -1e9, z),
}


def both_doors(f):
    """Value and gradients of a function of x and w in plain JAX, of the fused function, and the fused gradient."""
    plain = with_gradients(f)
    return {"plain": plain, "gradient_of_fused": with_gradients(coda.fuse(f)), "fused_gradient": coda.fuse(plain)}


def check_loss(f, x, w, *, operators, of_gradient=None):
    """Values and gradients are plain JAX's by both doors, and the backward pass keeps no more; in bfloat16 too."""
    found = {name: jax.jit(g)(x, w) for name, g in both_doors(f).items()}
    for name in ("gradient_of_fused", "fused_gradient"):
        for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(found["plain"]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.nanmax(jnp.abs(other))))
    narrow = jax.tree.map(lambda y: y.astype(jnp.bfloat16), (x, w))
    with jax.enable_x64(True):
        exact = jax.jit(with_gradients(f))(*jax.tree.map(lambda y: y.astype(jnp.float64), narrow))
        exact = jax.tree.map(np.asarray, exact)
    as_written = {"compiler_options": {"xla_allow_excess_precision": False}}  # plain JAX rounds the logits then
    doors = both_doors(f).items()
    in_16_bits = {name: jax.jit(g, **as_written if name == "plain" else {})(*narrow) for name, g in doors}
    for name in ("gradient_of_fused", "fused_gradient"):
        leaves = (jax.tree.leaves(tree) for tree in (in_16_bits[name], exact, in_16_bits["plain"]))
        for out, reference, plain in zip(*leaves, strict=True):
            tolerance.check(out, reference.astype(np.float64), plain, name=name)
    report = coda.fuse.report(f, *narrow)
    assert sorted(name for one in report.products for name in one.epilogue) == sorted(operators)
    assert report.fused.totals.kept_bytes <= report.plain.totals.kept_bytes
    assert gradient_operators(with_gradients(f), *narrow) == (operators if of_gradient is None else of_gradient)


def gradient_operators(f, *args):
    """The operators of losses in a function that holds their gradients; fused it moves no more bytes."""
    report = coda.fuse.report(f, *args)
    fused, plain = (one.totals for one in (report.fused, report.plain))
    names = [name for one in report.products for name in one.epilogue if name in OPERATORS]
    assert fused.passes_bytes <= plain.passes_bytes
    assert not names or fused.kept_bytes <= plain.kept_bytes  # else it is not told apart what that is
    assert len(names) in (0, len(report.products))  # those of the gradients are parts of it
    return sorted(set(names))


OPERATORS = "linear_cross_entropy", "token_logprobs"


@pytest.mark.parametrize("name", PADDINGS)
def test_a_padded_vocabulary(name):
    """Padding is set to a number far below all logits, as -1e9; it is not computed then."""
    x, w, labels, _, mask = small_arguments(tokens=64)
    labels = labels.at[:8].set(jnp.arange(8) * 3)

    def f(x, w):
        z = PADDINGS[name]((x @ w).astype(jnp.promote_types(x.dtype, jnp.float32)))
        return jnp.sum(jnp.where(mask, LOSSES["integer_labels"](z, labels), 0.0)) / jnp.sum(mask)

    check_loss(f, x, w, operators=["linear_cross_entropy"])


@pytest.mark.parametrize("loss", ["integer_labels", "log_softmax", "one_hot", "logsumexp", "of_log_softmax_clip"])
def test_labels_in_padding(loss):
    """The padding's number is picked there, without a gradient; beyond it, what plain JAX has outside."""
    x, w, labels, *_ = small_arguments()
    labels = labels.at[8:12].set(jnp.asarray([USED - 1, USED, USED + 3, VOCABULARY - 1]))

    def f(x, w):
        each, summed = (SPELLINGS[loss](padded(-2e4)((i + 1) * x @ w), labels) for i in range(2))
        return each, jnp.sum(summed[9:12]), jnp.sum(jnp.where(jnp.isnan(summed), 0.0, summed))

    def with_cotangents(f):
        def g(*args):
            outputs, pull = jax.vjp(f, *args)
            return outputs, pull((jnp.cos(jnp.arange(24.0)), jnp.float32(2.0), jnp.float32(0.5)))

        return g

    found, expected = (jax.tree.leaves(jax.jit(with_cotangents(g))(x, w)) for g in (coda.fuse(f), f))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert all(one.epilogue == ("token_logprobs",) for one in coda.fuse.report(f, x, w).products)


MASKS = {
    "near_logits": padded(-100.0),
    "beyond_the_columns": padded(-1e9, used=VOCABULARY + 9),
    "of_few_columns": padded(-1e9, used=99),
    "of_other_columns": lambda z: jnp.where(jnp.arange(VOCABULARY) % 2 == 0, z, -1e9),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_no_padding_stay(name):
    x, w, labels, *_ = small_arguments(tokens=64)
    labels = labels.at[:8].set(jnp.arange(8) * 2)

    def f(x, w):
        z = MASKS[name]((x @ w).astype(jnp.promote_types(x.dtype, jnp.float32)))
        return jnp.mean(LOSSES["integer_labels"](z, labels))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5
    assert "linear_cross_entropy" not in str(jax.make_jaxpr(fused)(x, w))


def in_maxtext(z, y):
    total = jax.scipy.special.logsumexp(z, axis=-1, keepdims=True)
    loss = -jnp.sum(jax.nn.one_hot(y, VOCABULARY) * (z - total), axis=-1)
    return loss + 1e-2 * jax.lax.square(jnp.squeeze(total, axis=-1))


def mean_and_square(z, y):
    total = jax.nn.logsumexp(z, axis=-1)
    return jnp.mean(total - picked(z, y)) + 1e-2 * jnp.mean(total**2)


Z_LOSSES = {
    "of_each": lambda z, y: jnp.mean(LOSSES["integer_labels"](z, y) + 1e-2 * jax.nn.logsumexp(z, axis=-1) ** 2),
    "maxtext": lambda z, y: jnp.mean(in_maxtext(z, y)),
    "two_means": mean_and_square,
    "weighted": lambda z, y: jnp.sum(jnp.sin(y) * in_maxtext(z, y)) / 7,
    "two_masks": lambda z, y: (
        jnp.sum(jnp.where(y % 3 != 0, LOSSES["logsumexp"](z, y), 0.0)) / jnp.sum(y % 3 != 0)
        - jnp.mean(1e-2 * jnp.square(jax.nn.logsumexp(z, axis=-1))) / -2
    ),
    "log_softmax": lambda z, y: jnp.mean(LOSSES["log_softmax"](z, y) + 1e-2 * jax.nn.logsumexp(z, axis=-1) ** 2),
}


def sizes():
    """x (64, 16), w, and labels of the vocabulary."""
    x, w, *_ = small_arguments(tokens=64)
    return x, w, jnp.arange(64) * 37 % USED


def widened(z):
    return z.astype(jnp.promote_types(z.dtype, jnp.float32))


@pytest.mark.parametrize("name", Z_LOSSES)
def test_a_z_loss(name):
    x, w, labels = sizes()
    check_loss(lambda x, w: Z_LOSSES[name](widened(x @ w), labels), x, w, operators=["linear_cross_entropy"])


def test_sums_that_are_read_one_by_one():
    """Two sums of which something else reads one are no sum; the numbers of each token are made all the same."""
    x, w, labels = sizes()

    def f(x, w):
        z = x @ w
        total = jax.nn.logsumexp(z, axis=-1)
        loss, square = jnp.mean(total - picked(z, labels)), jnp.mean(total**2)
        return loss + square, square

    def with_gradients(f):
        return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)

    found, expected = (jax.jit(with_gradients(g))(x, w) for g in (coda.fuse(f), f))
    assert largest_error(found, expected) < 1e-5
    assert [one.epilogue for one in coda.fuse.report(f, x, w).products] == [("token_logprobs",)]


def biased(z, b):
    return z + b


BIASES = {
    "of_columns": biased,
    "of_rows": lambda z, b: z + jnp.reshape(b, (1, -1)),
    "in_float32": lambda z, b: widened(z) + widened(b),
    "in_front": lambda z, b: jnp.broadcast_to(b, z.shape) + z,
    "padded": lambda z, b: PADDINGS["number"](z + b),
}


@pytest.mark.parametrize("reduction", ["mean", "each"])
@pytest.mark.parametrize("name", BIASES)
def test_a_head_with_a_bias(name, reduction):
    x, w, labels = sizes()
    b = jnp.sin(jnp.arange(VOCABULARY, dtype=jnp.float32) ** 1.5)

    def f(x, w):
        w, b = w
        loss = LOSSES["integer_labels"](widened(BIASES[name](x @ w, b)), labels)
        return jnp.mean(loss) if reduction == "mean" else jnp.sum(loss) ** 2 / jnp.sum(jnp.abs(loss))

    check_loss(f, x, (w, b), operators=["linear_cross_entropy" if reduction == "mean" else "token_logprobs"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_bias_of_more_bits_than_the_factors(dtype):
    """It is added in float32, as are its gradients."""
    x, w, labels = sizes()
    x, w, b = x.astype(dtype), w.astype(dtype), 50 + jnp.sin(jnp.arange(VOCABULARY, dtype=jnp.float32))

    def f(x, b):
        return jnp.mean(LOSSES["integer_labels"](jnp.matmul(x, w, preferred_element_type=jnp.float32) + b, labels))

    found, expected = (jax.jit(with_gradients(g))(x, b) for g in (coda.fuse(f), f))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1][1], expected[1][1], atol=1e-2 * float(jnp.max(jnp.abs(expected[1][1]))))
    assert found[1][1].dtype == jnp.float32 and [x.epilogue for x in coda.fuse.report(f, x, b).products] == [
        ("linear_cross_entropy",)
    ]


@pytest.mark.parametrize("array", ["of_rows", "of_tokens"])
def test_an_array_that_is_no_bias_of_columns(array):
    x, w, labels = sizes()
    more = jnp.sin(jnp.arange(64.0 * VOCABULARY)).reshape(64, VOCABULARY) if array == "of_tokens" else x[:, :1]

    def f(x, w):
        return jnp.mean(LOSSES["integer_labels"](x @ w + more, labels))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5
    assert "linear_cross_entropy" not in str(jax.make_jaxpr(fused)(x, w))


CAPS = {
    "divided": lambda z, c: 2.0 * jnp.tanh(widened(z) / 2.0),
    "multiplied": lambda z, c: jnp.tanh(widened(z) * 0.25) * 4.0,
    "in_16_bits": lambda z, c: jnp.tanh(z / 2) * 2,
    "of_an_array": lambda z, c: c * jnp.tanh(widened(z) / c),
    "padded": lambda z, c: PADDINGS["flipped"](2.0 * jnp.tanh(widened(z) / 2.0)),
    "with_a_bias": lambda z, c: 2.0 * jnp.tanh((widened(z) + jnp.sin(jnp.arange(VOCABULARY) ** 1.5)) / 2.0),
}


@pytest.mark.parametrize("reduction", ["mean", "each"])
@pytest.mark.parametrize("name", CAPS)
def test_capped_logits(name, reduction):
    x, w, labels = sizes()

    def f(x, w):
        w, c = w
        loss = LOSSES["integer_labels"](CAPS[name](3 * x @ w, widened(c)), labels)
        return jnp.mean(loss) if reduction == "mean" else jnp.sum(loss) ** 2 / jnp.sum(jnp.abs(loss))

    operators = ["linear_cross_entropy" if reduction == "mean" else "token_logprobs"]
    # A cap that is an argument has a gradient too, a sum over all logits, which stay where JAX has derived it.
    of_gradient = [] if name == "of_an_array" else operators
    check_loss(f, x, (w, jnp.float32(1.5)), operators=operators, of_gradient=of_gradient)


@pytest.mark.parametrize(
    "curve",
    [
        lambda z: 2.0 * jnp.tanh(z / 3.0),
        lambda z: 2.0 * jnp.tanh(z * 2.0),
        lambda z: -2.0 * jnp.tanh(z / -2.0),
        lambda z: 2.0 / jnp.tanh(z / 2.0),
        lambda z: jnp.tanh(z),
    ],
)
def test_curves_that_are_no_cap(curve):
    x, w, labels = sizes()

    def f(x, w):
        return jnp.mean(LOSSES["integer_labels"](curve(x @ w), labels))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5
    assert "linear_cross_entropy" not in str(jax.make_jaxpr(fused)(x, w))


MOVED = {
    "all_but_the_last": (lambda z: z[:, :-1], lambda y: y[:, 1:]),
    "all_but_the_first": (lambda z: z[1:], lambda y: y[1:]),
    "every_other": (lambda z: z[:, ::2], lambda y: y[:, 1::2]),
    "flat": (lambda z: z.reshape(-1, z.shape[-1]), lambda y: y.reshape(-1)),
    "flat_but_the_last": (lambda z: z[:, :-1].reshape(-1, z.shape[-1]), lambda y: y[:, 1:].reshape(-1)),
    "apart": (lambda z: z.reshape(32, -1, z.shape[-1])[:30, 1:], lambda y: y.reshape(32, -1)[:30, 1:]),
    "first_columns": (lambda z: z[:, 1:, :USED], lambda y: y[:, 1:]),
}


@pytest.mark.parametrize("reduction", ["mean", "each"])
@pytest.mark.parametrize("name", MOVED)
def test_rows_that_are_taken_behind_the_head(name, reduction):
    """The tokens without a label, as the last of each text, are left out of the product."""
    x, w, labels = sizes()
    x, labels = jnp.concatenate([x, 1 - x]).reshape(4, 32, -1), jnp.tile(labels, 2).reshape(4, 32)
    of_logits, of_labels = MOVED[name]

    def f(x, w):
        w, b = w
        loss = LOSSES["integer_labels"](widened(of_logits(x @ w + b)), of_labels(labels))
        return jnp.mean(loss) if reduction == "mean" else jnp.sum(loss) ** 2 / jnp.sum(jnp.abs(loss))

    operators = ["linear_cross_entropy" if reduction == "mean" else "token_logprobs"]
    check_loss(f, x, (w, jnp.sin(jnp.arange(VOCABULARY) ** 1.5)), operators=operators)


def test_rows_in_another_order_stay():
    x, w, labels = sizes()

    def f(x, w):
        z = (x.reshape(4, 16, -1) @ w).transpose(1, 0, 2)
        return jnp.mean(LOSSES["integer_labels"](z, labels.reshape(16, 4)))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5


def mixed(logprobs, y, share=0.1):
    return -((1 - share) * picked(logprobs, y) + share * jnp.mean(logprobs, axis=-1))


def smooth_labels(y, share=0.1):
    return optax.smooth_labels(jax.nn.one_hot(y, VOCABULARY), share)


SMOOTHED = {
    "optax": lambda z, y: optax.softmax_cross_entropy(z, smooth_labels(y)),
    "mixed": lambda z, y: mixed(jax.nn.log_softmax(z), y),
    "mixed_logits": lambda z, y: (
        jax.nn.logsumexp(z, axis=-1) - 0.9 * picked(z, y) - 0.1 * jnp.sum(z, axis=-1) / VOCABULARY
    ),
    "chosen": lambda z, y: (
        -jnp.sum(jnp.where(jnp.arange(VOCABULARY) == y[..., None], 0.9, 1e-4) * jax.nn.log_softmax(z), axis=-1)
    ),
    "of_logits": lambda z, y: jax.nn.logsumexp(z, axis=-1) - jnp.sum((0.9 * smooth_labels(y) - 1e-5) / 3 * z, axis=-1),
    "capped": lambda z, y: mixed(jax.nn.log_softmax(2.0 * jnp.tanh(z / 2.0)), y),
}


@pytest.mark.parametrize("reduction", ["mean", "each"])
@pytest.mark.parametrize("name", SMOOTHED)
def test_smoothed_labels(name, reduction):
    x, w, labels = sizes()
    labels = labels.at[:3].set(jnp.asarray([0, VOCABULARY - 1, 7]))

    def f(x, w):
        loss = SMOOTHED[name](widened(3 * x @ w), labels)
        return jnp.mean(loss) if reduction == "mean" else jnp.sum(loss) ** 2 / jnp.sum(jnp.abs(loss))

    check_loss(f, x, w, operators=["linear_cross_entropy" if reduction == "mean" else "token_logprobs"])


@pytest.mark.parametrize("name", ["optax", "chosen", "of_logits"])
def test_smoothed_labels_that_are_not_in_the_vocabulary(name):
    x, w, labels, *_ = small_arguments()

    def f(x, w):
        return jnp.sum(jnp.sin(jnp.arange(24.0)) * SMOOTHED[name](x @ w, labels))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5
    assert [one.epilogue for one in coda.fuse.report(f, x, w).products] == [("linear_cross_entropy",)]


def test_smoothed_labels_of_a_padded_vocabulary_stay():
    """The padding's number is a part of their sums."""
    x, w, labels = sizes()

    def f(x, w):
        return jnp.mean(mixed(jax.nn.log_softmax(padded(-1e4)(x @ w)), labels))

    fused = coda.fuse(f)
    assert largest_error(jax.jit(with_gradients(fused))(x, w), jax.jit(with_gradients(f))(x, w)) < 1e-5
    assert "linear_cross_entropy" not in str(jax.make_jaxpr(fused)(x, w))


HEADS = {
    "of_vectors": lambda x, w: jax.vmap(jax.vmap(lambda v: w.T @ v))(x),
    "of_rows": lambda x, w: jax.vmap(lambda v: w.T @ v)(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1),
    "columns_first": lambda x, w: jnp.einsum("vd,btd->btv", w.T, x),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_with_its_factors_in_the_other_order(name):
    """Equinox's Linear multiplies its weight (V, D) with one vector, under vmap."""
    x, w, labels = sizes()
    x, labels = x.reshape(4, 16, -1), labels.reshape(4, 16)

    def f(x, w):
        return jnp.mean(LOSSES["integer_labels"](widened(HEADS[name](x, w.T)), labels))

    check_loss(f, x, w.T, operators=["linear_cross_entropy"])


PREDICTIONS = {
    "of_logits": lambda z: jnp.argmax(z, axis=-1),
    "of_logprobs": lambda z: jnp.argmax(jax.nn.log_softmax(z), axis=-1),
    "of_padded_logits": lambda z: jnp.argmax(z, axis=-1),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_an_accuracy_beside_a_loss(name):
    """The largest logit of each token is found in the chunks; the first of several, as JAX has it."""
    x, w, labels = sizes()
    w = w.at[:, 5].set(w[:, 3]).at[:, VOCABULARY - 1].set(9 * w[:, 7])
    labels = labels.at[::2].set(jnp.argmax(x @ w, axis=-1)[::2])

    def f(x, w):
        z = widened(x @ w)
        z = PADDINGS["number"](z) if name == "of_padded_logits" else z
        best = PREDICTIONS[name](z)
        weights = jnp.where(best == labels, 1.0, 0.5) if x.dtype == jnp.float32 else 1.0
        return jnp.mean(weights * LOSSES["log_softmax"](z, labels)), (best, jnp.mean(best == labels))

    def with_gradients(f):
        return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)

    for g in (with_gradients(coda.fuse(f)), coda.fuse(with_gradients(f))):
        for dtype in (jnp.float32, jnp.bfloat16):
            narrow = jax.tree.map(lambda y, dtype=dtype: y.astype(dtype), (x, w))
            (found, aux), grads = jax.jit(g)(*narrow)
            (expected, expected_aux), expected_grads = jax.jit(with_gradients(f))(*narrow)
            assert aux[0].dtype == jnp.int32 and expected_aux[1] > 0.2
            bound = 1e-5 if dtype == jnp.float32 else 2e-2
            if dtype == jnp.float32:
                np.testing.assert_array_equal(aux[0], expected_aux[0])
                assert aux[1] == expected_aux[1]
            else:  # of two logits that are rounded to one either is the largest
                z = np.asarray(jnp.matmul(*narrow, preferred_element_type=jnp.float32))[
                    :, : USED if "padded" in name else None
                ]
                assert np.all(np.take_along_axis(z, np.asarray(aux[0])[:, None], 1)[:, 0] >= z.max(1) * (1 - 2**-7))
            assert largest_error((found, grads), (expected, expected_grads)) < bound
    assert [one.epilogue for one in coda.fuse.report(f, x, w).products] == [("token_logprobs",)]
    kept = [coda.explain(with_gradients(g), x, w, platform="cuda").totals.kept_bytes for g in (coda.fuse(f), f)]
    assert kept[0] < kept[1] / 4


ENTROPIES = {  # of each token's distribution
    "of_exponentials": lambda z: -jnp.sum(jnp.exp(jax.nn.log_softmax(z)) * jax.nn.log_softmax(z), axis=-1),
    "of_softmax": lambda z: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.softmax(z), axis=-1),
    "of_logits": lambda z: jax.nn.logsumexp(z, axis=-1) - jnp.sum(jax.nn.softmax(z) * z, axis=-1),
}


@pytest.mark.parametrize("is_differentiated", [True, False], ids=["", "beside"])
@pytest.mark.parametrize("name", ENTROPIES)
def test_an_entropy_in_a_loss(name, is_differentiated):
    """A bonus for entropy, as policies are trained with, or its mean beside the loss."""
    x, w, labels = sizes()

    def f(x, w):
        z = PADDINGS["number"](widened(x @ w)) if name == "of_softmax" else widened(x @ w)
        entropy = jnp.mean(ENTROPIES[name](z))
        loss = jnp.mean(LOSSES["log_softmax"](z, labels))
        return (loss - 0.1 * entropy, 0.0) if is_differentiated else (loss, entropy)

    def with_gradients(f):
        return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)

    found, expected = (jax.jit(with_gradients(g))(x, w) for g in (coda.fuse(f), f))
    assert largest_error(found, expected) < 1e-5
    products = coda.fuse.report(f, x, w).products
    assert [one.epilogue for one in products] == [("linear_cross_entropy" if is_differentiated else "token_logprobs",)]
    kept = [coda.explain(with_gradients(g), x, w, platform="cuda").totals.kept_bytes for g in (coda.fuse(f), f)]
    assert kept[0] < kept[1] / 2


@pytest.mark.parametrize("name", ["integer_labels", "one_hot"])
def test_passes_of_an_accuracy_beside_a_loss(name):
    """A chunk's logits are kept in the dtype that they are rounded to; in float32 they were more than all others."""

    def f(x, w, y):
        z = widened(x @ w)
        one_hot = jax.nn.one_hot(y, 32000)
        loss = picked(jax.nn.log_softmax(z), y) if name == "integer_labels" else jnp.sum(one_hot * z, axis=-1)
        loss = loss - jax.nn.logsumexp(z, axis=-1) if name == "one_hot" else loss
        return -jnp.mean(loss), jnp.mean(jnp.argmax(z, axis=-1) == y)

    def with_gradients(f):
        return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2048), (2048, 32000))]
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)
    plain, outside, inside = (
        coda.explain(g, *shapes, labels, platform="cuda").totals.passes_bytes
        for g in (with_gradients(f), coda.fuse(with_gradients(f)), with_gradients(coda.fuse(f)))
    )
    logits = 2 * 8192 * 32000
    assert inside < outside < 0.7 * plain
    assert inside < 2 * logits  # they are read once for the largest, and the gradient of w is rounded


def of_any_form(x, w, b, y):
    """A loss of each form."""
    z = [(i + 1) * x @ w for i in range(7)]
    return jnp.stack(
        [
            jnp.mean(LOSSES["integer_labels"](2.0 * jnp.tanh((z[0] + b) / 2.0), y)),
            mean_and_square(z[1], y),
            jnp.mean(LOSSES["integer_labels"](PADDINGS["number"](z[2]), y)),
            jnp.mean(LOSSES["integer_labels"](z[3][:, :-1], y[:, 1:])),
            jnp.mean(SMOOTHED["optax"](z[4], y)),
            jnp.mean(LOSSES["log_softmax"](z[5], y)) + jnp.mean(jnp.argmax(z[5], axis=-1) == y),
            jnp.mean(LOSSES["log_softmax"](z[6].reshape(-1, VOCABULARY), y.reshape(-1))),
        ]
    )


def summed_with_gradients(f):
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(jnp.arange(7.0)) * f(*args)), argnums=(0, 1, 2))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("kind, columns", [("Auto", None), ("Auto", "model"), ("Explicit", None)])
def test_losses_of_all_forms_over_a_mesh(kind, columns):
    """Over explicit axes logits whose rows are given other axes stay, for the labels cannot be given those of x."""
    x, w, labels = sizes()
    b, x, labels = jnp.sin(jnp.arange(VOCABULARY) ** 1.5), x.reshape(4, 16, -1), labels.reshape(4, 16)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    specs = jax.P("data"), jax.P(None, columns), jax.P(), jax.P("data")
    with jax.set_mesh(mesh):
        args = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip((x, w, b, labels), specs, strict=True)]
        fused = coda.fuse(of_any_form)
        found, expected = (jax.jit(summed_with_gradients(g))(*args) for g in (fused, of_any_form))
        operators = str(jax.make_jaxpr(fused)(*args))
    assert largest_error(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected)) < 1e-5
    assert "linear_cross_entropy" in operators and "token_logprobs" in operators


def cross_entropy(z, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z, labels))


def smoothed_and_padded(z, labels):
    targets = 0.9 * jax.nn.one_hot(labels, VOCABULARY) + 0.1 / VOCABULARY
    logprobs = jax.nn.log_softmax(jnp.where(jnp.arange(VOCABULARY) < 1030, z, -1e9))
    return -jnp.mean(jnp.sum(targets * logprobs, axis=-1))


WHOLE = {
    "returned": (lambda z, y: (cross_entropy(z, y), z), "they are a result"),
    "top_k": (lambda z, y: (cross_entropy(z, y), jax.lax.top_k(z, 5)[1]), "top_k reads them too: test_fuse_loss.py"),
    "largest_probability": (
        lambda z, y: (cross_entropy(z, y), jnp.max(jax.nn.softmax(z), axis=-1)),
        "reduce_max reads them too: test_fuse_loss.py",
    ),
    "sorted": (lambda z, y: cross_entropy(jnp.sort(z, axis=-1), y), "sort stands between their product and the exp"),
    "clipped": (lambda z, y: cross_entropy(jnp.clip(z, -3, 3), y), "stands between their product and the exponentials"),
    "no_label": (lambda z, y: jnp.mean(jax.nn.logsumexp(z, axis=-1)), "no label's logit is picked of them"),
    "soft": (lambda z, y: jnp.sum(jnp.sin(z) * jax.nn.log_softmax(z)), "stands between"),
    "all": (lambda z, y: jnp.max(jax.nn.log_softmax(z)), "no label's logit is picked of their log-probabilities"),
    "smoothed": (smoothed_and_padded, "labels are smoothed over a padded vocabulary"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_report_says_why_logits_stay_whole(name):
    (w, x, labels), (loss, reason) = arguments(), WHOLE[name]
    report = coda.fuse.report(lambda w, x: loss(jnp.float32(x @ w["head"]), labels), w, x)
    (found,) = report.logits
    assert reason in found.reason and "test_fuse_loss.py" in found.line
    assert found.bytes == 4 * VOCABULARY * labels.size
    assert found.reason in str(report) and "logits that stay whole" in str(report)


def test_why_other_logits_stay_whole():
    w, x, labels = arguments()

    def loss(w, x):
        return cross_entropy(x @ w["head"], labels)

    def reasons(f):
        return [one.reason for one in coda.fuse.report(f, w, x).logits]

    def precise(w, x):
        return cross_entropy(jnp.matmul(x, w["head"], precision="highest"), labels)

    assert reasons(coda.fuse(loss)) == []
    assert reasons(coda.fuse(loss, exact=True)) == ["exact=True"]
    assert reasons(coda.fuse(loss, chunk_losses=False)) == ["chunk_losses=False"]
    assert "precision" in reasons(precise)[0]


def test_logits_that_stay_whole_come_by_their_size():
    w, x, labels = arguments()

    def loss(w, x):
        first = jax.nn.logsumexp(jnp.sort(x[:, :8] @ w["head"], axis=-1), axis=-1)
        return jnp.sum(first) + jnp.mean(jax.nn.logsumexp(jnp.sort(x @ w["head"], axis=-1), axis=-1))

    assert [one.bytes // (4 * VOCABULARY) for one in coda.fuse.report(loss, w, x).logits] == [labels.size, 8 * len(x)]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0, 8)])
def test_a_loss_of_no_tokens(shape):
    x, w = jnp.zeros(shape), jnp.ones((8, 1024))

    def loss(x, w):
        labels = jnp.zeros(x.shape[:-1], jnp.int32)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1))

    for gradient in (jax.grad(coda.fuse(loss), (0, 1)), coda.fuse(jax.grad(loss, (0, 1)))):
        found, of_weight = gradient(x, w)
        assert found.shape == shape
        assert not of_weight.any()
