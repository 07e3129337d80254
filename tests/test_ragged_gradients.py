"""Gradients of products of groups beside JAX's of a formula that gathers each row's matrix, in float64."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.primitives.pullback import Pullback
from tests import tolerance
from tests.ragged_cases import CASES, OF_GROUPS, OF_ROWS, SETTINGS, K, N, arguments, grouped, poisoned, random, sizes_of

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


class _ByGroup:
    """jax.numpy, whose reductions over rows are of each group; extremes of no rows are large and finite."""

    def __init__(self, member):
        self.member = member  # (M, G)

    def __getattr__(self, name):
        return getattr(jnp, name)

    def _each(self, x, neutral):
        axes = (slice(None), slice(None), *[None] * (x.ndim - 1))
        return jnp.where(self.member[axes], x[:, None], neutral)

    def sum(self, x, axis=None, **options):
        if axis == 1:
            return jnp.sum(x, axis=1, **options)
        summed = jnp.sum(self._each(x, 0), axis=0)
        return summed if axis == 0 else summed.reshape(summed.shape[0], -1).sum(axis=1)

    def max(self, x, axis, **options):
        if axis == 1:
            return jnp.max(x, axis=1, **options)
        each = self._each(x, -1e30)  # XLA may compute it twice, and unlike: so a place, and no comparison of values
        return jnp.take_along_axis(each, jnp.argmax(each, axis=0)[None], axis=0)[0]

    def min(self, x, axis):
        return -self.max(-x, axis)


def formula(case, group, *arrays):
    """With a matrix for each row; `group` of those in none is -1."""
    function, kinds = CASES[case]
    a, b, *operands = arrays
    own = [
        x[group].reshape(a.shape[0], -1) if kind in OF_GROUPS else x for kind, x in zip(kinds, operands, strict=True)
    ]
    acc = jnp.einsum("mk,mkn->mn", a, b[group])
    acc = acc.astype(jnp.promote_types(acc.dtype, F32))
    if a.dtype == BF16:  # XLA would drop it
        acc = jax.lax.reduce_precision(acc, 8, 7)
    if function is None:
        return [acc]
    member = group[:, None] == jnp.arange(b.shape[0])
    return jax.tree.leaves(function(_ByGroup(member), acc, *own))


def of_rows(case, m, outputs):
    """Whether each output has a row for each of the product; no case has as many groups."""
    return [x.shape[0] == m for x in outputs]


def groups_of(m, sizes, first=0, count=None):
    group = np.repeat(np.arange(len(sizes)), sizes) - first
    group = np.concatenate([group, np.full(m - len(group), -1)]).astype(np.int32)
    return np.where((group >= 0) & (group < (count or len(sizes))), group, -1)


@functools.cache
def vjp_of_formula(case):
    def run(group, arrays, cotangents):
        outputs, pull = jax.vjp(functools.partial(formula, case, group), *arrays)
        return pull([x.astype(y.dtype) for x, y in zip(cotangents, outputs, strict=True)])

    return jax.jit(run)


@functools.cache
def vjp_of_ours(case, options=()):
    def run(sizes, first, arrays, cotangents):
        def f(a, b, *operands):
            return grouped(case, a, b, sizes, *operands, group_offset=first, out_dtype=F32, **dict(options))

        return jax.vjp(f, *arrays)[1](cotangents)

    return jax.jit(run)


def check_gradients(case, m, groups, dtype, sizes, residuals, *, first=None, transpose_b=False):
    """Rows in no group hold NaN and infinity in all arguments and cotangents."""
    count = groups if first is None else groups - 2
    arrays = arguments(case, m, count, dtype)
    group = groups_of(m, sizes, first or 0, count)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in arrays]
        shapes = [x.shape for x in formula(case, group, *wide)]
        cotangents = [np.random.default_rng(7 + i).normal(size=shape) for i, shape in enumerate(shapes)]
        is_there = np.bincount(group[group >= 0], minlength=count) > 0
        for x in cotangents:
            x[(group < 0) if x.shape[0] == m else ~is_there] = 0
        exact = vjp_of_formula(case)(group, wide, cotangents)
    cotangents = [jnp.asarray(x, F32) for x in cotangents]
    plain = vjp_of_formula(case)(group, arrays, cotangents)
    a, b, *operands = poisoned(case, arrays, sizes, first or 0)
    b = jnp.swapaxes(b, 1, 2) if transpose_b else b
    given = [
        jnp.where((group < 0).reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x) if x.shape[0] == m else x
        for x in cotangents
    ]
    options = (("residuals", residuals), ("transpose_b", transpose_b))
    found = [*vjp_of_ours(case, options)(sizes, first, [a, b, *operands], given)]
    found[1] = jnp.swapaxes(found[1], 1, 2) if transpose_b else found[1]
    for i, (got, one, other, x) in enumerate(zip(found, exact, plain, arrays, strict=True)):
        slack = 1e-6 * np.abs(one).max(initial=0) + 2e-6 * np.sqrt(m * N) * (i > 1)  # of sums of terms that cancel
        rough = np.asarray(other).astype(np.float64) + slack
        tolerance.check(got, np.asarray(one), rough, dtype=x.dtype, name=f"of argument {i}")
        if (kind := ("tile", "groups", *CASES[case].kinds)[i]) in OF_ROWS:
            assert not np.asarray(got)[group < 0].any()
        elif kind in ("groups", *OF_GROUPS):
            assert not np.asarray(got)[~is_there].any()


PROBLEMS = [
    ("bare", 37, 5, BF16, "preactivation"),
    ("bias", 37, 5, BF16, "preactivation"),
    ("every kind", 40, 17, F32, "preactivation"),
    ("every kind", 24, 3, F32, "recompute"),
    ("swiglu", 24, 4, F16, "preactivation"),
    ("of each group", 37, 5, F32, "recompute"),
    ("fragile", 37, 5, F32, "preactivation"),
]


@pytest.mark.smoke
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gradients(problem):
    case, m, groups, dtype, residuals = problem

    @SETTINGS
    @hypothesis.given(sizes_of(m, groups))
    @hypothesis.example(np.zeros(groups, np.int32))
    @hypothesis.example(np.array([0] * (groups - 1) + [m - 1], np.int32))
    def of_sizes(sizes):
        check_gradients(case, m, groups, dtype, sizes, residuals, transpose_b=groups % 2 == 0)

    of_sizes()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("m", "groups"), [(1, 2), (129, 64), (200, 33)])
def test_gradients_of_many(case, m, groups, dtype, residuals):
    @hypothesis.settings(SETTINGS, max_examples=10)
    @hypothesis.given(sizes_of(m, groups))
    def of_sizes(sizes):
        check_gradients(case, m, groups, dtype, sizes, residuals, transpose_b=len(case) % 2 == 0)

    of_sizes()


@pytest.mark.parametrize("case", ["every kind", "fragile"])
@pytest.mark.parametrize("sizes", [[7, 0, 9, 1, 12, 6], [20, 0, 0, 0, 0, 20], [0, 40, 0, 0, 0, 0], [0] * 6])
def test_a_group_offset(case, sizes):
    """The gradients hold where b has four of six groups, from the first, second or third on.

    Rows in front are in none too.
    """
    for first in (0, 1, 2):
        check_gradients(case, 40, 6, F32, np.array(sizes, np.int32), "preactivation", first=first)


def test_the_derivative_in_the_epilogue(monkeypatch):
    """With "recompute" and no operand by group it runs there; sums for vectors are of each group, and then of all."""

    def epilogue(acc, column, row, one):
        return jnp.log(jnp.abs(acc * row)) / column * one, jnp.sum(jnp.tanh(acc) * row, axis=1)

    m, groups, sizes = 24, 4, jnp.asarray([5, 0, 9, 7], jnp.int32)
    a, b, column, row, one = random(0, m, K), random(1, groups, K, N), random(2, m, 1), random(3, N), random(4)

    def gradients(a, column, cotangents, residuals):
        def f(a, b, column, row, one):
            return coda.ragged_gemm(a, b, sizes, column, row, one, epilogue=epilogue, residuals=residuals)

        return jax.vjp(f, a, b, column, row, one)[1](cotangents)

    cotangents = random(5, m, N).at[21:].set(jnp.nan), random(6, m).at[21:].set(jnp.nan)
    poisoned = a.at[21:].set(0), column.at[21:].set(0)  # where the derivative is not finite
    expected = gradients(*poisoned, cotangents, "preactivation")
    monkeypatch.setattr(Pullback, "__call__", None)
    for x, y in zip(gradients(*poisoned, cotangents, "recompute"), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
        assert np.abs(y).max() > 0.1


def test_a_row_in_no_group_stands_for_one_with_its_own_group():
    """The gradients are finite, though the epilogue is not for a row of one group and an operand of another."""
    sizes, first = jnp.asarray([2, 5, 0, 4, 0, 6, 3], jnp.int32), 1
    group = np.array([1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 5, 5, 6, 6, 6, 7, 7])
    a, b = random(0, 22, K), random(1, 5, K, N)  # of the groups 1 to 5

    def epilogue(acc, column, scalar, one):
        return acc * one / jnp.where(column == scalar, 1.0, 0.0)

    def loss(one, a):
        column, scalar = jnp.asarray(group, F32)[:, None], coda.ByGroup(jnp.arange(1, 6, dtype=F32))
        return jnp.sum(coda.ragged_gemm(a, b, sizes, column, scalar, one, epilogue=epilogue, group_offset=first))

    member = np.where((np.arange(22) >= 2) & (group < 6), group, 0)
    of_row = np.einsum("mk,mkn->m", a, np.concatenate([np.zeros((1, K, N)), b])[member])
    np.testing.assert_allclose(jax.grad(loss)(jnp.float32(2), a), of_row.sum(), rtol=1e-4)


def test_ties_of_a_group_have_the_same_shares():
    acc = jnp.asarray([[1.0, 2], [1, 0], [0, 2], [5, 5], [9, 9]])
    sizes = jnp.asarray([3, 0, 1], jnp.int32)
    b = jnp.broadcast_to(jnp.eye(2), (3, 2, 2))

    def f(a):
        return coda.ragged_gemm(a, b, sizes, epilogue=lambda acc: (acc.max(0), acc.min(0)))

    (most, least), pull = jax.vjp(f, acc)
    np.testing.assert_array_equal(most, [[1, 2], [-np.inf] * 2, [5, 5]])
    np.testing.assert_array_equal(least, [[0, 0], [np.inf] * 2, [5, 5]])
    (da,) = pull((jnp.ones((3, 2)), jnp.zeros((3, 2))))
    np.testing.assert_array_equal(da, [[0.5, 0.5], [0.5, 0], [0, 0.5], [1, 1], [0, 0]])


@pytest.mark.parametrize(("rows", "groups", "dtype"), [(37, 5, F32), (40, 17, BF16)])
def test_gradients_of_contractions(rows, groups, dtype):
    a, b, weights = random(0, rows, K, dtype=dtype), random(1, rows, N, dtype=dtype), random(2, groups, K, N)

    def contraction(group, a, b):
        member = (group[:, None] == jnp.arange(groups)).astype(a.dtype)
        return jnp.einsum("rg,rm,rn->gmn", member, a, b, preferred_element_type=jnp.promote_types(a.dtype, F32))

    @jax.jit
    def ours(sizes, a, b):
        return jax.vjp(lambda a, b: coda.ragged_contraction(a, b, sizes, out_dtype=F32), a, b)[1](weights)

    def reference(group, a, b, weights):
        return jax.vjp(functools.partial(contraction, group), a, b)[1](weights)

    @SETTINGS
    @hypothesis.given(sizes_of(rows, groups))
    @hypothesis.example(np.zeros(groups, np.int32))
    def of_sizes(sizes):
        group, used = groups_of(rows, sizes), int(sizes.sum())
        with jax.enable_x64(True):
            exact = reference(group, *(x.astype(jnp.float64) for x in (a, b, weights)))
        plain = reference(group, a, b, weights.astype(dtype) if dtype == F32 else weights)
        found = ours(sizes, a.at[used:].set(jnp.nan), b.at[used:].set(jnp.inf))
        for got, one, other in zip(found, exact, plain, strict=True):
            tolerance.check(got, np.asarray(one), np.asarray(other, np.float64) + 1e-6, dtype=dtype)
            assert not np.asarray(got)[used:].any()

    of_sizes()


@pytest.mark.slow
def test_second_derivatives():
    m, groups, sizes = 24, 4, np.array([5, 0, 9, 7], np.int32)
    group = groups_of(m, sizes)

    def twice(f, arrays):
        def norm(*arrays):
            gradients = jax.grad(lambda *xs: sum(jnp.sum(jnp.sin(x)) for x in f(*xs)), range(len(xs)))(*arrays)
            return sum(jnp.vdot(x, x) for x in gradients)

        xs = arrays
        return jax.jit(jax.grad(norm, range(len(arrays))))(*arrays)

    def finite(outputs, group):
        """Keeps rows and groups that are there; the others are 0."""
        each = [
            (group >= 0) if x.shape[0] == m else np.bincount(group[group >= 0], minlength=groups) > 0 for x in outputs
        ]
        return [jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for keep, x in zip(each, outputs, strict=True)]

    for case in ("bias", "of each group"):
        arrays = arguments(case, m, groups, F32)

        def expected(*arrays, case=case):
            return finite(formula(case, group, *arrays), group)

        def ours(a, b, *operands, case=case):
            return finite(grouped(case, a, b, jnp.asarray(sizes), *operands), group)

        for x, y in zip(twice(ours, arrays), twice(expected, arrays), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * np.abs(y).max())

    def contraction(a, b):
        return [coda.ragged_contraction(a, b, jnp.asarray(sizes))]

    def plain(a, b):
        member = (group[:, None] == np.arange(groups)).astype(np.float32)
        return [jnp.einsum("rg,rm,rn->gmn", member, a, b)]

    arrays = random(0, m, K), random(1, m, N)
    for x, y in zip(twice(contraction, arrays), twice(plain, arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * np.abs(y).max())


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.slow
def test_gradients_under_vmap(residuals):
    """The vmap of a gradient and the gradient of a vmap, with b shared and not."""
    m, groups, count = 24, 4, 3
    sizes = jnp.asarray([[5, 0, 9, 7], [0, 0, 0, 0], [1, 20, 1, 2]], jnp.int32)
    a, b, x = random(0, count, m, K), random(1, count, groups, K, N), random(2, groups, N)

    def loss(a, b, x, sizes):
        return jnp.sum(jnp.sin(grouped("bias", a, b, sizes, x, residuals=residuals)[0]))

    gradients = jax.grad(loss, (0, 1, 2))
    for shared in (False, True):
        of_b, axis = (b[0], None) if shared else (b, 0)
        each = [gradients(a[i], of_b if shared else b[i], x, sizes[i]) for i in range(count)]
        got = jax.jit(jax.vmap(gradients, in_axes=(0, axis, None, 0)))(a, of_b, x, sizes)
        for one, *expected in zip(got, *each, strict=True):
            np.testing.assert_allclose(one, np.stack(expected), rtol=1e-4, atol=1e-5)

        def summed(a, b, x, axis=axis):
            return jnp.sum(jax.vmap(loss, in_axes=(0, axis, None, 0))(a, b, x, sizes))

        da, db, dx = jax.jit(jax.grad(summed, (0, 1, 2)))(a, of_b, x)
        expected = [np.stack(one) for one in zip(*each, strict=True)]
        np.testing.assert_allclose(da, expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(db, expected[1].sum(0) if shared else expected[1], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dx, expected[2].sum(0), rtol=1e-4, atol=1e-4)


def test_halves_apart_and_what_an_epilogue_closes_over():
    m, groups, sizes = 24, 4, jnp.asarray([5, 0, 9, 7], jnp.int32)
    a, b, scale = random(0, m, K), random(1, groups, K, N), random(2, N // 2)

    def loss(a, b, scale, form):
        def gate(acc):
            gate, up = jnp.split(acc, 2, axis=1)
            return jax.nn.silu(gate) * up * scale

        return jnp.sum(jnp.sin(coda.ragged_gemm(a, form(b), sizes, epilogue=gate)))

    forms = [
        lambda b: b,
        lambda b: b.reshape(groups, K, 2, N // 2),
        lambda b: [b[:, :, : N // 2], b[:, :, N // 2 :]],
    ]
    one, *others = (jax.jit(jax.grad(functools.partial(loss, form=form), (0, 1, 2)))(a, b, scale) for form in forms)
    assert all(np.abs(x).max() > 0.1 for x in one)
    for other in others:
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_several_factors():
    a, b, sizes = random(0, 24, K), random(1, 4, K, N), jnp.asarray([5, 0, 9, 7], jnp.int32)

    def apart(x):
        return jnp.split(jnp.tanh(x), [4, 6], axis=1)

    def gradients(f):
        return jax.grad(lambda a, b: sum(jnp.sum(x * (i + 1)) for i, x in enumerate(f(a, b))), (0, 1))(a, b)

    got = gradients(lambda a, b: coda.ragged_gemm(a, jnp.split(b, [4, 6], axis=2), sizes, epilogue=apart))
    expected = gradients(lambda a, b: apart(jax.lax.ragged_dot(a, b, sizes)))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_b_is_rounded_once():
    """It is a contraction of each group, of factors in the dtype of the product, written in b's dtype."""
    a, b, sizes = jnp.ones((24, K), BF16), jnp.ones((4, K, N), F16), jnp.asarray([5, 0, 9, 7], jnp.int32)
    for first, second in ((a, b), (a, b.astype(BF16)), (a.astype(F32), b)):
        gradient = jax.grad(lambda b, a=first: jnp.sum(coda.ragged_gemm(a, b, sizes, out_dtype=F32)))
        text = str(jax.make_jaxpr(gradient)(second))
        (contraction,) = [line for line in text.split("coda_gemm[")[1:] if "ragged=Dimension.K" in line]
        assert f"out_dtypes=(dtype({jnp.dtype(second.dtype).name}),)" in contraction.replace("'", "")
        np.testing.assert_array_equal(gradient(second)[:, 0, 0], [5, 0, 9, 7])
