"""`coda.fuse` of losses with entropies, and beside entropies and ranks: no array of all logits, by both doors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from coda_jax.operators.head.shifted_heads import EntropyHead
from tests import tolerance
from tests.test_fuse import largest_error
from tests.test_fuse_loss import ENTROPIES, LOSSES, PADDINGS, VOCABULARY, picked, widened
from tests.test_fuse_loss import sizes as flat_sizes

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SIZES = 8192, 2048, 32000  # tokens, width, vocabulary of the counts
integer_labels = LOSSES["integer_labels"]


def sizes():
    """x (4, 16, 16), w, and labels of the vocabulary."""
    x, w, labels = flat_sizes()
    return x.reshape(4, 16, -1), w, labels.reshape(4, 16)


def both(f, has_aux=False):
    """Value and gradients in plain JAX, of the fused function, and the fused gradient."""
    plain, of_fused = (jax.value_and_grad(g, argnums=(0, 1), has_aux=has_aux) for g in (f, coda.fuse(f)))
    return {"plain": plain, "gradient_of_fused": of_fused, "fused_gradient": coda.fuse(plain)}


def check_leaf(found, exact, plain, *, name):
    """Gradients are judged by the rule of all tests, numbers of tokens by float32's rounding of a log-sum-exp too."""
    if found.dtype.itemsize == 2:
        tolerance.check(found, exact, plain, name=name)
    elif jnp.issubdtype(found.dtype, jnp.floating):
        error, allowed = (float(np.max(np.abs(y - exact))) for y in (found, plain))
        assert error <= 2 * allowed + 1e-5, name


def check_values(f, x, w, *args, has_aux=False, aux_is_exact=False):
    """Values and gradients are plain JAX's by both doors: in float32, and in 16 bits as near to float64 as they are."""
    doors = both(f, has_aux)
    for dtype in DTYPES:
        given = x.astype(dtype), w.astype(dtype), *args
        with jax.enable_x64(True):
            exact = jax.jit(doors["plain"])(*(y.astype(jnp.float64) for y in given[:2]), *args)
            exact = jax.tree.map(lambda y: np.asarray(y, np.float64), exact)
        as_written = {"compiler_options": {"xla_allow_excess_precision": False}}  # plain JAX rounds the logits then
        plain = jax.jit(doors["plain"], **as_written)(*given)
        for name in ("gradient_of_fused", "fused_gradient"):
            found = jax.jit(doors[name])(*given)
            if dtype == jnp.float32:
                assert largest_error(found, plain) < 1e-5
            if aux_is_exact:
                assert all(map(np.array_equal, *map(jax.tree.leaves, (found[0][1], plain[0][1]))))
            for leaves in zip(*map(jax.tree.leaves, (found, exact, plain)), strict=True):
                check_leaf(*leaves, name=f"{name} in {np.dtype(dtype)}")


def check_counts(f, *, has_aux=False, products):
    """Passes and kept bytes are no more than plain JAX's by either door, nor is there a product more but as said.

    Args:
      f: of x, w and labels.
      products: by door, in units of plain JAX's.
    """
    tokens, width, vocabulary = SIZES
    for dtype in DTYPES:
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((tokens, width), (width, vocabulary))]
        args = *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32)
        found = {name: coda.explain(g, *args, platform="cuda").totals for name, g in both(f, has_aux).items()}
        plain = found.pop("plain")
        for name, totals in found.items():
            assert totals.passes_bytes < 0.9 * plain.passes_bytes, (name, dtype)
            assert totals.kept_bytes <= plain.kept_bytes, (name, dtype)
            flops = (totals.flops + totals.other_flops) / (plain.flops + plain.other_flops)
            assert abs(flops - products[name]) < 0.01, (name, dtype)


ONE_LOOP = {"gradient_of_fused": 1.0, "fused_gradient": 1.0}
OF_TOKENS = {"gradient_of_fused": 4 / 3, "fused_gradient": 1.0}  # logits are made again for the gradient


def operators(f, *args):
    return {name for one in coda.fuse.report(f, *args).products for name in one.epilogue}


def of_one_log_softmax(z, y):
    logp = jax.nn.log_softmax(z)
    return jnp.mean(-picked(logp, y)) + 0.1 * jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))


def of_logits(z, y):
    """Written with one log-sum-exp."""
    lse = jax.nn.logsumexp(z, axis=-1)
    return jnp.mean(lse - picked(z, y)) - 0.1 * jnp.mean(lse - jnp.sum(jax.nn.softmax(z) * z, axis=-1))


def smoothed(z, y):
    logp = jax.nn.log_softmax(z)
    share = 0.1 / z.shape[-1]
    targets = jnp.where(jax.nn.one_hot(y, z.shape[-1], dtype=bool), 0.9 + share, share)
    return -jnp.mean(jnp.sum(targets * logp, axis=-1)) + 0.1 * jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))


def of_each_token(z, y):
    """A function of each token's loss and entropy, which are not summed apart."""
    return jnp.mean(integer_labels(z, y) * jnp.tanh(ENTROPIES["of_softmax"](z)))


LOSSES_WITH_ENTROPY = {
    **{
        name: (lambda z, y, entropy=entropy: jnp.mean(integer_labels(z, y)) - 0.1 * jnp.mean(entropy(z)))
        for name, entropy in ENTROPIES.items()
    },
    "of_one_log_softmax": of_one_log_softmax,
    "of_logits": of_logits,
    "one_hot": lambda z, y: (
        jnp.mean(optax.softmax_cross_entropy(z, jax.nn.one_hot(y, z.shape[-1])))
        - 0.1 * jnp.mean(ENTROPIES["of_softmax"](z))
    ),
    "smoothed": smoothed,
    "with_a_z_loss": lambda z, y: of_one_log_softmax(z, y) + 1e-3 * jnp.mean(jax.nn.logsumexp(z, axis=-1) ** 2),
    "of_each_token": of_each_token,
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", LOSSES_WITH_ENTROPY)
def test_a_loss_with_an_entropy(name):
    x, w, labels = sizes()

    def f(x, w, labels):
        return LOSSES_WITH_ENTROPY[name](widened(x @ w), labels)

    check_values(f, 3 * x, w, labels)
    check_counts(f, products=ONE_LOOP)
    assert operators(f, x, w, labels) == {"linear_cross_entropy"}
    assert operators(both(f)["plain"], x, w, labels) == {"linear_cross_entropy"}


CURVES = {
    "capped": lambda z: 3.0 * jnp.tanh(z / 3.0),
    "padded": PADDINGS["number"],
    "padded and capped": lambda z: PADDINGS["number"](3.0 * jnp.tanh(z / 3.0)),
    "biased": lambda z: z + jnp.sin(jnp.arange(VOCABULARY) ** 1.5),
    "first rows": lambda z: z[:, :-1],
}


@pytest.mark.parametrize("name", CURVES)
def test_an_entropy_of_changed_logits(name):
    x, w, labels = sizes()
    labels = labels % 900

    def f(x, w, labels):
        z = CURVES[name](widened(x @ w))
        y = labels[:, : z.shape[1]]
        return jnp.mean(integer_labels(z, y)) - 0.1 * jnp.mean(ENTROPIES["of_exponentials"](z))

    check_values(f, x, w, labels)
    for g in (f, both(f)["plain"]):
        assert operators(g, x, w, labels) == {"linear_cross_entropy"}


def test_two_loops_with_an_entropy():
    """The cotangent of the logits depends on the loss's own result: they are made twice."""
    x, w, labels = sizes()

    def f(x, w, labels):
        return of_one_log_softmax(widened(x @ w), labels) ** 2

    check_values(f, x, w, labels)
    assert operators(both(f)["plain"], x, w, labels) == {"token_logprobs"}


AUX = {
    "entropy_of_stopped": lambda z, y: ENTROPIES["of_softmax"](jax.lax.stop_gradient(z)),
    "stopped_entropy": lambda z, y: jax.lax.stop_gradient(ENTROPIES["of_exponentials"](z)),
    "entropy": lambda z, y: jnp.mean(ENTROPIES["of_logits"](z)),
    "entropy_and_accuracy": lambda z, y: (
        jnp.mean(jnp.argmax(z, axis=-1) == y),
        jnp.mean(ENTROPIES["of_softmax"](jax.lax.stop_gradient(z))),
    ),
    "perplexity": lambda z, y: jnp.exp(jnp.mean(-picked(jax.nn.log_softmax(z), y))),
    "perplexity_of_stopped": lambda z, y: jnp.exp(jnp.mean(integer_labels(jax.lax.stop_gradient(z), y))),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", AUX)
def test_an_entropy_beside_a_loss(name):
    x, w, labels = sizes()

    def f(x, w, labels):
        z = widened(x @ w)
        return jnp.mean(integer_labels(z, labels)), AUX[name](z, labels)

    check_values(f, x, w, labels, has_aux=True)
    check_counts(f, has_aux=True, products=OF_TOKENS)


def test_a_stopped_gradient_stays_one():
    """A stopped array has no gradient where it is mixed with another one."""
    x, w, labels = sizes()

    def f(x, w, labels):
        z = x @ w
        fixed = jax.lax.stop_gradient(z)
        entropy = ENTROPIES["of_softmax"](fixed) * jnp.sum(w[0]) + jnp.sin(ENTROPIES["of_exponentials"](z))
        return jnp.mean(jnp.exp(-integer_labels(fixed, labels)) * integer_labels(z, labels)) + jnp.mean(entropy)

    check_values(f, x, w, labels)
    assert operators(f, x, w, labels) == {"linear_cross_entropy"}


def own_logits(z, y):
    return picked(z, y)[..., None]


RANKS = {
    "larger": lambda z, y: jnp.sum(z > own_logits(z, y), axis=-1),
    "larger_of_stopped": lambda z, y: jnp.sum(
        jax.lax.stop_gradient(z) > own_logits(jax.lax.stop_gradient(z), y), axis=-1
    ),
    "not_smaller": lambda z, y: jnp.sum((z >= own_logits(z, y)).astype(jnp.float32), axis=-1),
    "flipped": lambda z, y: jnp.sum(own_logits(z, y) < z, axis=-1),
    "smaller": lambda z, y: jnp.sum(z < own_logits(z, y), axis=-1),
    "not_larger": lambda z, y: jnp.sum(z <= own_logits(z, y), axis=-1),
    "among_five": lambda z, y: jnp.mean(jnp.sum(z > own_logits(z, y), axis=-1) < 5),
    "reciprocal": lambda z, y: jnp.mean(1.0 / (1 + jnp.sum(z > own_logits(z, y), axis=-1))),
    "with_accuracy_and_entropy": lambda z, y: (
        jnp.sum(z > own_logits(z, y), axis=-1),
        jnp.argmax(z, axis=-1),
        jax.lax.stop_gradient(jnp.round(8 * ENTROPIES["of_softmax"](z)) < -1),
    ),
}


def tied_logits():
    """x, w, labels: many logits of a token are equal, and exact in 16 bits."""
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((4, 16, 16), (16, VOCABULARY)))
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(rng.integers(0, VOCABULARY, (4, 16)), jnp.int32)


@pytest.mark.smoke
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_beside_a_loss(name):
    """Logits are compared as they are rounded; of labels outside of the vocabulary, which are ignored, none is."""
    x, w, labels = tied_logits()
    labels = labels.at[1, 3].set(VOCABULARY + 3).at[:, 5].set(jnp.argmax(x @ w, axis=-1)[:, 5])

    def f(x, w, labels):
        z = widened(x @ w)
        each = jnp.where(labels < VOCABULARY, integer_labels(z, labels), 0.0)
        return jnp.mean(each), RANKS[name](z, labels)

    check_values(f, x, w, labels, has_aux=True, aux_is_exact=True)
    check_counts(f, has_aux=True, products=OF_TOKENS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_ranks_are_those_of_rounded_logits(dtype):
    """The sums are exact in float32, and many logits are one in 16 bits."""
    rng = np.random.default_rng(6)
    x, w = (jnp.asarray(rng.integers(-100, 101, shape) / 16, dtype) for shape in ((64, 16), (16, VOCABULARY)))
    labels = jnp.asarray(rng.integers(0, VOCABULARY, 64), jnp.int32)

    def f(x, w, rounded=True):
        z = widened(x @ w) if rounded else jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jnp.mean(integer_labels(z, labels)), RANKS["larger"](z, labels)

    options = {"xla_allow_excess_precision": False}
    plain = jax.jit(lambda x, w, rounded: f(x, w, rounded)[1], static_argnums=2, compiler_options=options)
    ranks = [np.asarray(plain(x, w, rounded)) for rounded in (True, False)]
    assert not np.array_equal(*ranks)
    for rounded, expected in zip((True, False), ranks, strict=True):
        for g in list(both(lambda x, w, rounded=rounded: f(x, w, rounded), has_aux=True).values())[1:]:
            assert np.array_equal(jax.jit(g)(x, w)[0][1], expected)


OTHER_RANKS = {
    "of_another_label": lambda z, y: jnp.sum(z > own_logits(z, (y + 1) % 1000), axis=-1),
    "of_a_number": lambda z, y: jnp.sum(z > 0.5, axis=-1),
    "two": lambda z, y: (jnp.sum(z > own_logits(z, y), axis=-1), jnp.sum(z >= own_logits(z, y), axis=-1)),
    "one_hot": lambda z, y: jnp.sum(z > jnp.sum(z * jax.nn.one_hot(y, z.shape[-1]), axis=-1, keepdims=True), axis=-1),
    "padded": lambda z, y: jnp.sum(PADDINGS["number"](z) > own_logits(PADDINGS["number"](z), y), axis=-1),
    "weighted": lambda z, y: jnp.sum((z > own_logits(z, y)) * jnp.arange(z.shape[-1]), axis=-1),
    "any": lambda z, y: jnp.any(z > own_logits(z, y), axis=-1),
    "mask": lambda z, y: (z > own_logits(z, y)).astype(jnp.int8),
}


@pytest.mark.parametrize("name", OTHER_RANKS)
def test_a_comparison_of_another_kind(name):
    x, w, labels = tied_logits()

    def f(x, w, labels):
        z = x @ w
        return jnp.mean(integer_labels(z, labels)), OTHER_RANKS[name](z, labels)

    for g in list(both(f, has_aux=True).values())[1:]:
        found, expected = (jax.jit(h)(x, w, labels) for h in (g, both(f, has_aux=True)["plain"]))
        assert all(map(np.array_equal, *map(jax.tree.leaves, (found[0][1], expected[0][1]))))
        assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize("lost", [90.0, -90.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_far_from_all_others(lost, dtype, monkeypatch):
    """One token's exponentials are out of range: all are made again by the head that keeps logits."""
    x, w, labels = sizes()
    x = jnp.concatenate([x, jnp.zeros_like(x[..., :1]).at[2, 7].set(lost)], axis=-1).astype(dtype)
    w = jnp.concatenate([w, jnp.ones_like(w[:1])]).astype(dtype)

    def f(x, w):
        return of_one_log_softmax((x @ w).astype(jnp.float32), labels)

    found = {name: jax.jit(g)(x, w) for name, g in both(f).items()}
    assert largest_error(found["gradient_of_fused"], found.pop("plain")) < 2e-2
    monkeypatch.setattr(EntropyHead, "of", lambda head, _: head)
    by_logits = both(lambda *args: f(*args))
    for name, one in found.items():
        assert all(map(np.array_equal, *map(jax.tree.leaves, (one, jax.jit(by_logits[name])(x, w)))))


def test_the_derivative_of_a_gradient():
    x, w, labels = sizes()

    def second(f):
        return jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x.astype(w.dtype)).astype(jnp.float32) ** 2))

    def f(w, x):
        return of_one_log_softmax(widened(x @ w), labels)

    exact = jax.jit(second(f))(w)
    found, plain = (jax.jit(second(g))(w.astype(jnp.bfloat16)).astype(jnp.float32) for g in (coda.fuse(f), f))
    assert jnp.linalg.norm(found - exact) < 1.5 * jnp.linalg.norm(plain - exact)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind, columns", [("Auto", None), ("Auto", "model"), ("Explicit", None)])
def test_over_a_mesh(kind, columns, dtype):
    """Entropies and ranks are finished over the axes that shard the vocabulary."""
    x, w, labels = tied_logits()

    def f(x, w, labels):
        z = (x @ w).astype(jnp.float32)
        return of_one_log_softmax(z, labels), jnp.sum(z > own_logits(z, labels), axis=-1)

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    specs = jax.P("data"), jax.P(None, columns), jax.P("data")
    given = x.astype(dtype) / 4, w.astype(dtype), labels
    doors = both(f, has_aux=True)
    expected = jax.jit(doors.pop("plain"))(*given)
    with jax.set_mesh(mesh):
        args = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(given, specs, strict=True)]
        for g in doors.values():
            found = jax.tree.map(np.asarray, jax.jit(g)(*args))
            assert np.array_equal(found[0][1], expected[0][1])
            assert largest_error(found, jax.tree.map(np.asarray, expected)) < (1e-5 if dtype == jnp.float32 else 2e-2)
