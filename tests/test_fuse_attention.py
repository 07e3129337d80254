"""Attention in plain JAX under `coda.fuse`: what is recognised, and as what; values and gradients of both doors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.attend.primitive import FORMS, is_backward
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.walk import equations
from coda_jax.tools.attention import in_words
from tests import tolerance
from tests.attention_spellings import (
    BIASES,
    LEFT,
    MASKS,
    POSITIONS,
    RECOGNISED,
    SINKS,
    B,
    D,
    H,
    T,
    attended,
    causal,
    ids,
    index,
    masked,
    normal,
)
from tests.attention_spellings import k as key
from tests.attention_spellings import q as query
from tests.attention_spellings import v as value
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
PRODUCTS = 6  # of attention in a gradient


def calls(function, *args):
    """The equations of attention in a function, and the names of all others."""
    every = [e for e, _ in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    found = [e for e in every if e.primitive in FORMS]
    return found, [e.primitive.name for e in every]


def loss_of(function):
    """A number that depends on all results, differently on each element."""

    def loss(*args):
        results = [x for x in jax.tree.leaves(function(*args)) if is_float(x.dtype)]
        weights = (jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(results))
        return sum(jnp.sum(x.astype(jnp.float32) * w) for x, w in zip(results, weights, strict=True))

    return loss


def with_gradients(loss, args):
    floats = tuple(i for i, x in enumerate(args) if is_float(x.dtype))
    return jax.value_and_grad(loss, floats)


def doors(function, args):
    """Values and gradients in plain JAX, of the fused function, and of the fused gradient; and the latter two."""
    loss = loss_of(function)
    fused, gradient = coda.fuse(loss, memory=None), coda.fuse(with_gradients(loss, args))
    every = [with_gradients(loss, args), with_gradients(fused, args), gradient]
    return jax.jit(lambda *xs: [f(*xs) for f in every])(*args), (fused, gradient)


def taken(fused):
    """How many products of a fused function became attention."""
    return sum(operator == "attention" for piece in fused.pieces.made for _, operator in piece.taken)


def reasons(fused):
    return [reason for piece in fused.pieces.made for _, reason in piece.attentions.left]


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_spelling_becomes_attention(name):
    spelling = RECOGNISED[name]
    found, names = calls(coda.fuse(spelling.function), *spelling.arguments)
    assert [in_words(e.params["spec"].mask) for e in found] == [spelling.says]
    assert "dot_general" not in names or name in ("values that depend on other scores", "padding of keys, added")
    assert "exp" not in names or name in ("a learned scale of each head", "values that depend on other scores")


@pytest.mark.parametrize("name", POSITIONS)
def test_a_function_of_positions_is_no_array(name):
    """It is a score function, but for one of keys alone."""
    function, args, says = POSITIONS[name]
    every = [e for e, _ in equations(jax.make_jaxpr(coda.fuse(function))(*args).jaxpr)]
    (spec,) = [e.params["spec"] for e in every if e.primitive in FORMS]
    assert (spec.score is None) == ("a bias" in says)
    assert spec.score is None or "positions" in spec.score.name
    assert not [x for e in every if e.primitive not in FORMS for x in e.outvars if x.aval.shape[-2:] == (T, T)]


@pytest.mark.parametrize("name", RECOGNISED)
def test_values_and_gradients_are_those_of_plain_jax(name):
    function, args, _ = RECOGNISED[name]
    (plain, *others), (_, gradient) = doors(function, args)
    for found in others:
        assert largest_error(found, plain) < 1e-5
    assert taken(gradient) >= PRODUCTS, reasons(gradient)


@pytest.mark.parametrize(
    "name",
    [
        *BIASES,
        *POSITIONS,
        *SINKS,
        "a soft cap and causal",
        "ids and causal",
        "repeat",
        "float32 softmax, cast back",
        "padding of keys",
    ],
)
def test_values_in_16_bits_are_as_near_as_those_of_plain_jax(name):
    function, args, _ = RECOGNISED[name]
    narrow = [x.astype(jnp.bfloat16) if is_float(x.dtype) else x for x in args]
    (plain, *others), (fused, gradient) = doors(function, narrow)
    assert taken(fused) == 2 and taken(gradient) == PRODUCTS
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if is_float(x.dtype) else x for x in narrow]
        exact = with_gradients(loss_of(function), wide)(*wide)
    for found in others:
        for one, reference, rough in zip(*map(jax.tree.leaves, (found[1], exact[1], plain[1])), strict=True):
            tolerance.check(one, np.asarray(reference, np.float64), rough)


@pytest.mark.parametrize("name", LEFT)
def test_lookalikes_of_attention_are_left_with_a_reason(name):
    spelling = LEFT[name]
    fused = coda.fuse(spelling.function)
    found, _ = calls(fused, *spelling.arguments)
    assert not found and taken(fused) == 0
    assert not spelling.says or any(spelling.says in reason for reason in reasons(fused)), reasons(fused)


@pytest.mark.parametrize("name", ["entropy", "two sinks", "one query", "p + p^T"])
def test_lookalikes_of_attention_have_plain_jax_values(name):
    function, args, _ = LEFT[name]
    (plain, *others), fused = doors(function, args)
    assert not any(map(taken, fused))
    for found in others:
        assert largest_error(found, plain) < 1e-5


# --- rows that see nothing

HIDDEN = np.ones((B, 1, T, T), bool)
HIDDEN[0, 0, 3] = HIDDEN[1, 0, :, 5] = False
HIDDEN[1, 0, 7:9] = False
NOTHING = {
    "-inf": masked(lambda m: m),
    "a large number": masked(lambda m: m, -1e9),
    "the least float": masked(lambda m: m, jnp.finfo(jnp.float32).min),
    "added -inf": attended(lambda s, m: s + jnp.where(m, 0.0, -jnp.inf)),
    "added least float": attended(lambda s, m: s + jnp.where(m, 0.0, jnp.finfo(jnp.float32).min)),
    "where=": lambda q, k, v, m: jnp.einsum(
        "bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-1, where=m), v
    ),
    "zeros behind": lambda q, k, v, m: jnp.einsum(
        "bhts,bshd->bthd",
        jnp.where(m, jax.nn.softmax(jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k), -1e9)), 0),
        v,
    ),
    "two masks of one number": masked(lambda m: m & (index() < 14), -1e9),
    "ids, padding and lengths": masked(
        lambda m: m & (index() < 14) & (ids[:, :, None] == ids[:, None, :])[:, None] & (index() > 1)[:, None], -1e9
    ),
    "a window of no key": masked(lambda m: m & (index() > index()[:, None]) & (index() <= index()[:, None]), -1e9),
    "a window of no key alone": masked(lambda m: (index() > index()[:, None]) & (index() <= index()[:, None]), -1e9),
    "jax.nn": lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=m, implementation="xla"),
    "a bias that is -inf": attended(lambda s, m: s + jnp.log(m.astype(s.dtype))),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_row_that_sees_nothing_keeps_its_value(name):
    args = query, key, value, jnp.asarray(HIDDEN)
    fused = coda.fuse(NOTHING[name])
    found, expected = fused(*args), NOTHING[name](*args)
    assert taken(fused) == 2
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NOTHING if "inf" not in name])
def test_a_row_that_sees_nothing_keeps_its_gradient(name):
    args = query, key, value, jnp.asarray(HIDDEN)
    (plain, *others), _ = doors(NOTHING[name], args)
    for found in others:
        assert largest_error(found, plain) < 1e-5


def test_values_of_rows_that_are_not_numbers_have_gradients_that_are_none():
    args = query, key, value, jnp.asarray(HIDDEN)
    gradient = jax.grad(lambda *xs: jnp.sum(coda.fuse(NOTHING["-inf"])(*xs)), argnums=2)(*args)
    assert np.isnan(gradient).all()
    no_row = jnp.asarray(HIDDEN).at[:, :, [3, 7, 8]].set(True)
    gradient = jax.grad(lambda *xs: jnp.sum(coda.fuse(NOTHING["-inf"])(*xs)), argnums=2)(*args[:3], no_row)
    assert np.isfinite(gradient).all()


def test_rows_that_are_known_to_see_a_key_need_no_second_look():
    """Causal masks and ids hold on the diagonal, also beside each other."""
    for name, with_lse in {"causal tril, -1e9": False, "ids and causal": False, "padding of keys": True}.items():
        function, args, _ = MASKS[name]
        assert (
            "is_finite" in calls(coda.fuse(function), *args)[1] or "select_n" in calls_after(function, args)
        ) == with_lse


def calls_after(function, args):
    """Names of the equations behind attention."""
    names = calls(coda.fuse(function), *args)[1]
    place = max(i for i, name in enumerate(names) if name.startswith("coda_attention"))
    return names[place:]


def test_queries_before_the_first_key_see_nothing():
    """A causal mask that is aligned at the end, with more queries than keys."""
    q, k, v = normal(0, B, T, H, D), normal(1, B, 12, H, D), normal(2, B, 12, H, D)
    function = masked(lambda: index()[:, None] + (12 - T) >= index(12), -1e9)
    (plain, *others), (fused, _) = doors(function, (q, k, v))
    assert taken(fused) == 2
    for found in others:
        assert largest_error(found, plain) < 1e-5


# --- options


@pytest.mark.parametrize("options", [{"attention": False}, {"exact": True}])
def test_attention_may_be_left(options):
    found, names = calls(coda.fuse(attended(), **options), query, key, value)
    assert not found and names.count("dot_general") == 2


class Described:
    """A device that is described alone: nothing runs on it."""

    platform, device_kind, process_index = "cuda", "h100", 0

    def __init__(self, number):
        self.id, self.client = number, self


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("is_abstract", [True, False])
def test_constants_are_computed_beside_a_mesh_of_described_devices(is_abstract, kind):
    """The number of a mask, which is computed, too."""

    def attend(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        i = jnp.arange(s.shape[2])
        s = jnp.where(i[:, None] >= i, s, -1e30 * jnp.float32(2))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    axes, types = ("a", "b"), (jax.sharding.AxisType[kind],) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), axes, axis_types=types)
    if is_abstract:
        entered = jax.sharding.use_abstract_mesh(mesh)
    else:
        devices = np.array([Described(i) for i in range(4)], dtype=object).reshape(2, 2)
        entered = jax.set_mesh(jax.sharding.Mesh(devices, axes, axis_types=types))
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.float32)
    with entered:
        traced = jax.jit(coda.fuse(attend)).trace(x, x, x)
    assert sum(x.primitive in FORMS for x, _ in equations(traced.jaxpr.jaxpr)) == 1


def test_an_implementation_is_handed_on():
    found, _ = calls(coda.fuse(attended(), implementation="xla"), query, key, value)
    assert [e.params["spec"].implementation for e in found] == ["xla"]


def test_no_array_of_all_pairs_is_left():
    many = 256
    q, k, v = (normal(i, 1, many, 2, D) for i in range(3))
    function = masked(lambda: jnp.tril(jnp.ones((many, many), bool)))
    args = q, k, v
    for gradient in (
        with_gradients(loss_of(coda.fuse(function)), args),
        coda.fuse(with_gradients(loss_of(function), args)),
    ):
        jaxpr = jax.make_jaxpr(gradient)(*args).jaxpr
        assert max(x.aval.size for e, _ in equations(jaxpr) for x in e.outvars) < many * many // 2
        assert [is_backward(e.primitive) for e, _ in equations(jaxpr) if e.primitive in FORMS].count(True) == 1


def test_the_check_of_values_passes():
    checked = coda.fuse(loss_of(masked(causal)), check=True)
    gradients = jax.jit(jax.grad(checked, (0, 1, 2)))(query, key, value)
    jax.effects_barrier()
    assert all(np.isfinite(x).all() for x in gradients)


def test_the_report_says_what_became_of_it():
    report = coda.fuse.report(loss_of(masked(causal)), query, key, value)
    assert [one.epilogue for one in report.products] == [("attention",), ("attention",)]
    left = coda.fuse.report(loss_of(LEFT["precision"].function), *LEFT["precision"].arguments)
    assert all("precision" in one.reason for one in left.products) and len(left.products) == 2
