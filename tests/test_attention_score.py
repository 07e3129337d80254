"""Score functions of coda.attention by XLA: values and gradients against float64, what is refused, and transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_scores import SCORES, B, H, K, N, S, T, arrays, dense, exactly, is_float, normal, positions

import coda_jax as coda
from coda_jax.attend import blocks
from coda_jax.attend.score import trace
from coda_jax.jaxprs.walk import equations_of

pytestmark = pytest.mark.usefixtures("quick_to_compile")
AGE = np.arange(T)[:, None] - np.arange(S)


@pytest.fixture(params=["one block", "blocks"])
def sizes(request, monkeypatch):
    """Blocks of 4 queries in spans of 9, too."""
    if request.param == "blocks":
        for name, value in (("_MOST_CPU_BYTES", 4), ("_LEAST_ROWS", 4), ("_LEAST_SPAN", 9), ("_WINDOW_ROWS", 8)):
            monkeypatch.setattr(blocks, name, value)
    jax.clear_caches()  # sizes of blocks are no arguments of what is jitted
    yield request.param
    jax.clear_caches()


def decay_of_heads(s, slopes, of_keys):
    row, key = positions(s)
    return s - slopes[:, None, None] * jnp.abs(row - key) + of_keys[:, :, None]


def with_gradients(score, operands, **options):
    """y, and the gradients of q, k, v and the operands of floating dtypes."""

    @jax.jit
    def run(q, k, v, dy, *operands):
        places = [i for i, x in enumerate(operands) if is_float(x)]

        def attend(q, k, v, *differentiated):
            given = dict(enumerate(operands)) | dict(zip(places, differentiated, strict=True))
            return coda.attention(q, k, v, score=score, operands=[given[i] for i in range(len(operands))], **options)

        y, pullback = jax.vjp(attend, q, k, v, *(operands[i] for i in places))
        return y, *pullback(dy)

    return run(*arrays(), *operands)


def check(score, operands, seen=True, limit=3e-6, **options):
    got = with_gradients(score, operands, **options)
    for x, exact in zip(got, exactly(*arrays(), score, operands, seen), strict=True):
        np.testing.assert_allclose(x, exact, rtol=limit, atol=limit * np.max(np.abs(exact), initial=1))


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCORES)
def test_scores(sizes, name):
    check(*SCORES[name])


@pytest.mark.parametrize("name", ["soft cap", "decay", "documents", "2-D window"])
def test_scores_beside_masks(sizes, name):
    check(*SCORES[name], (AGE <= 7) & (AGE >= -3), local_window_size=(7, 3))
    lengths = np.array([20, 3], np.int32)
    check(*SCORES[name], np.arange(S) < lengths[:, None, None, None], key_value_seq_lengths=lengths)


def test_a_bias_is_added_behind_the_score():
    bias, (score, _) = normal(7, N, T, S), SCORES["soft cap"]
    got = coda.attention(*arrays()[:3], bias=bias, score=score)
    exact = exactly(*arrays(), lambda s, bias: score(s) + bias, (bias,))
    np.testing.assert_allclose(got, exact[0], rtol=1e-5, atol=1e-6)


def test_arrays_that_it_closes_over_have_gradients():
    slopes = jnp.array([0.1, 0.3, 0.02, 0.5])
    score, _ = SCORES["ALiBi with slopes"]
    q, k, v, dy = arrays()

    def loss(slopes):
        return jnp.vdot(coda.attention(q, k, v, score=lambda s: score(s, slopes)), dy)

    exact = exactly(q, k, v, dy, score, (slopes,))[-1]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(slopes), exact, rtol=1e-5)


def test_an_array_read_at_two_places():
    """Its gradient is the sum of both places'. A slice and a mean of it are computed before the call."""

    def score(s, x):
        normalised = x - jnp.mean(x, axis=-1, keepdims=True)
        return s * normalised[:, None, :, None] * x[:, None, None, :S]

    check(score, (normal(8, B, T),), limit=1e-5)


def test_16_bits_that_it_closes_over_are_computed_in_16_bits():
    x = jnp.asarray(normal(9, T, 1), jnp.bfloat16)
    q, k, v, _ = arrays()
    got = coda.attention(q, k, v, score=lambda s: s + (x * x).astype(jnp.float32))
    squared = np.asarray(x * x, np.float32)
    np.testing.assert_allclose(got, dense(q, k, v, lambda s: s + squared, ()), rtol=1e-5, atol=1e-6)


def test_rules_of_functions_with_a_derivative_of_their_own():
    """Half of what JAX would find."""

    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0]))
    q, k, v, dy = arrays()

    def gradients(f, factor):
        score = lambda s, x: f(s) + factor * f(x)  # noqa: E731
        attend = lambda q, x: jnp.vdot(coda.attention(q, k, v, score=score, operands=(x,)), dy)  # noqa: E731
        return jax.grad(attend, (0, 1))(q, jnp.asarray(normal(3, 1, S)))

    for ours, plain in zip(gradients(doubled, 1), gradients(lambda x: 2 * x, 1), strict=True):
        np.testing.assert_allclose(2 * ours, plain, rtol=1e-4, atol=1e-6)


def test_rows_that_see_nothing():
    """Whether by -inf, by float32's least number or by -1e30; and a derivative that is infinite there is not seen."""
    for least in (-jnp.inf, float(jnp.finfo(jnp.float32).min), -1e30):

        def score(s, least=least):
            row, key = positions(s)
            return jnp.where((row > 10) & (key < 20), s * jnp.log(row - 10.0), least)

        y, dq, *_ = with_gradients(score, ())
        assert (y[:, :11] == 0).all() and (dq[:, :11] == 0).all() and np.isfinite(dq).all()


def test_nan_and_infinity_stay_in_their_document():
    q, k, v, dy = arrays()
    score, (ids, key_ids) = SCORES["documents"]
    of_bad = key_ids == key_ids[:, 9:10]
    spoiled = k.at[:, 9].set(jnp.nan), v.at[:, 9].set(jnp.inf)

    def run(k, v):
        y, pullback = jax.vjp(lambda *x: coda.attention(*x, score=score, operands=(ids, key_ids)), q, k, v)
        return y, *pullback(dy)

    for got, clean, of in zip(run(*spoiled), run(k, v), (ids, ids, key_ids, key_ids), strict=True):
        others = of != key_ids[:, 9:10]
        np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(clean)[others])
    assert of_bad.any()


# ---- what is refused


def user_line(f, offset=1):
    return f"{__file__}:{f.__code__.co_firstlineno + offset}"


def refused(score, message, operands=()):
    with pytest.raises(coda.NotTileLocalError) as caught:
        coda.attention(*arrays()[:3], score=score, operands=operands)
    assert message in str(caught.value), str(caught.value)
    return str(caught.value)


def test_nonlocal_scores_are_refused_at_the_users_line():
    def softmax(s):
        return s - jnp.max(s, axis=-1, keepdims=True)

    def mirrored(s):
        return s + s[:, ::-1]

    def of_other_pairs(s):
        return s + jnp.swapaxes(jnp.broadcast_to(jnp.swapaxes(s, 0, 1), s.swapaxes(0, 1).shape), 0, 1)[:, :1]

    def sorted_(s):
        return jnp.sort(s)

    def diagonal(s, x):
        return s + x[jnp.arange(T), jnp.arange(T)][:, None]

    def table(s, x):
        row, key = positions(s)
        return s + x[jnp.abs(row - key)]

    for f, operation in ((softmax, "reduce_max"), (mirrored, "rev"), (sorted_, "sort")):
        text = refused(f, f"score '{f.__name__}': '{operation}'")
        assert user_line(f) in text and "is not local to a pair of a query and a key" in text
    refused(table, "reads a table of 300 entries at a computed index; 256 is the most", (normal(0, 300),))
    assert coda.attention(*arrays()[:3], score=diagonal, operands=(normal(0, T, T),)).shape == (B, T, N, H)


def test_python_on_values_is_refused_at_the_users_line():
    def branches(s):
        return s if s[0, 0, 0, 0] > 0 else -s

    assert user_line(branches) in refused(branches, "branches on a traced value")


def test_bad_arguments():
    q, k, v, _ = arrays()
    attend = functools.partial(coda.attention, q, k, v)
    with pytest.raises(ValueError, match="score is int; it must be a function or None"):
        attend(score=3)
    with pytest.raises(ValueError, match="1 operands without a score"):
        attend(operands=(q,))
    with pytest.raises(ValueError, match="operands is ArrayImpl; it must be a tuple"):
        attend(score=lambda s, x: s, operands=q)
    with pytest.raises(ValueError, match=r"'short' returns float32\[4,37,29\]; it must be one floating array"):

        def short(s):
            return s[0]

        attend(score=short)
    with pytest.raises(ValueError, match="the score's operand 'x' has dtype complex64"):
        attend(score=lambda s, x: s, operands=(jnp.zeros(T, jnp.complex64),))
    with pytest.raises(ValueError, match="implementation='cudnn' has no score functions"):
        attend(score=lambda s: s, implementation="cudnn")


def test_a_derivative_that_there_is_not_is_refused_where_it_is_asked_for():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    q, k, v, _ = arrays()
    assert coda.attention(q, k, v, score=lambda s: f(s)).shape == q.shape
    with pytest.raises(coda.NotTileLocalError, match=r"has no derivative here: .*custom_vjp"):
        jax.grad(lambda q: jnp.sum(coda.attention(q, k, v, score=lambda s: f(s))))(q)


# ---- transforms


def test_vmap():
    score, operands = SCORES["decay"]
    q, k, v, dy = arrays()

    def run(q, x):
        return jax.grad(
            lambda q, x: jnp.vdot(coda.attention(q, k, v, score=score, operands=(x, operands[1])), dy), (0, 1)
        )(q, x)

    qs, xs = jnp.stack([q, 2 * q, -q]), jnp.stack([operands[0], operands[0] * 0, -operands[0]])
    for i, each in enumerate(zip(*jax.vmap(run)(qs, xs), strict=True)):
        for got, one in zip(each, run(qs[i], xs[i]), strict=True):
            np.testing.assert_allclose(got, one, rtol=2e-4, atol=1e-5)


def test_vmap_shares_positions_of_sequences_and_heads():
    """They are those of the function that is mapped."""

    def score(s):
        batch, head = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (0, 1))
        return s * (1 + batch + 3 * head)

    q, k, v, _ = arrays()
    attend = functools.partial(coda.attention, score=score)
    got = jax.vmap(attend)(jnp.stack([q, -q]), jnp.stack([k, k]), jnp.stack([v, v]))
    for i, each in enumerate((q, -q)):
        np.testing.assert_allclose(got[i], dense(each, k, v, score, ()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (None, 0, None)])
def test_vmap_of_what_sequences_share(axes):
    """Each element has gradients of its own, be an array shared by its sequences, or by all elements."""
    score, operands = decay_of_heads, (normal(3, N), normal(4, 1, N, S))
    q, k, v, dy = arrays()

    def run(q, *x):
        return jax.grad(lambda q, *x: jnp.vdot(coda.attention(q, k, v, score=score, operands=x), dy), (0, 1, 2))(q, *x)

    given = [jnp.stack([x, 2 * x, -x]) if axis == 0 else x for x, axis in zip((q, *operands), axes, strict=True)]
    got = jax.jit(jax.vmap(run, in_axes=axes))(*given)
    for i in range(3):
        one = run(*(x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)))
        for x, of in zip(got, one, strict=True):
            np.testing.assert_allclose(x[i], of, rtol=2e-4, atol=1e-5)


def test_the_backward_pass_makes_gradients_that_are_asked_for():
    """But those of arrays of all pairs, and of a second array by which the derivative depends on the product."""

    def score(s, slopes, of_keys, gates, caps, pairs):
        row, key = positions(s)
        caps = caps[:, None, None]
        capped = caps * jnp.tanh(s * gates[:, None, None] / caps)
        return capped - slopes[:, None, None] * jnp.abs(row - key) + of_keys + pairs * key

    operands = normal(1, N), normal(2, S), normal(3, N), 2 + abs(normal(4, N)), normal(5, T, S)
    q, k, v, dy = arrays()

    def made(*numbers):
        def loss(*x):
            return jnp.sum(coda.attention(q, k, v, score=score, operands=x) * dy)

        every, _ = equations_of(jax.grad(loss, numbers), *operands)
        passes = [x for x, _ in every if x.primitive.name == "coda_attention_backward"]
        shapes = [x.aval.shape for one in passes for x in one.params["spec"].gradient_arrays(one.invars)]
        return shapes, any(x.primitive.name == "dot_general" for x, _ in every)

    assert made(0) == ([(1, N, 1, 1)], False)
    assert made(1) == ([(1, 1, 1, S)], False)
    both, is_by_xla = made(0, 1)
    assert sorted(both) == [(1, 1, 1, S), (1, N, 1, 1)] and not is_by_xla
    assert sorted([made(2), made(3)]) == [([], True), ([(1, N, 1, 1)], False)] and made(4) == ([], True)
    check(score, operands, limit=1e-5)


def test_second_derivatives():
    score, operands = SCORES["gate"]
    q, k, v, dy = arrays()

    def of(attend):
        def loss(q, x):
            return jnp.vdot(attend(q, k, v, x), dy)

        def first(q, x):
            return sum(jnp.vdot(one, jnp.cos(one)) for one in jax.grad(loss, (0, 1))(q, x))

        return jax.jit(jax.grad(first, (0, 1)))(q, jnp.asarray(operands[0]))

    ours = of(lambda q, k, v, x: coda.attention(q, k, v, score=lambda s, x: 2 * jnp.tanh(score(s, x)), operands=(x,)))
    plain = of(lambda q, k, v, x: dense(q, k, v, lambda s, x: 2 * jnp.tanh(score(s, x)), (x,)))
    for got, exact in zip(ours, plain, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-4)


def test_checkpoint_and_scan():
    score, operands = SCORES["ALiBi with slopes"]
    q, k, v, dy = arrays()

    def loss(slopes, policy=None):
        def layer(x, slope):
            attend = lambda x: x + coda.attention(x, k, v, score=score, operands=(slope,))  # noqa: E731
            return jax.checkpoint(attend, policy=policy)(x), None

        return jnp.vdot(jax.lax.scan(layer, q, slopes)[0], dy)

    slopes = jnp.stack([operands[0], 2 * operands[0]])
    want = jax.grad(
        lambda x: jnp.vdot(functools.reduce(lambda q, slope: q + dense(q, k, v, score, (slope,)), x, q), dy)
    )(slopes)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(slopes), want, rtol=1e-4, atol=1e-5)


def test_export_of_symbolic_sizes():
    batch, length = jax.export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((batch, length, heads, H), jnp.float32) for heads in (N, K, K)]
    score, _ = SCORES["ALiBi"]
    attend = jax.jit(lambda q, k, v: coda.attention(q, k, v, score=score))
    exported = jax.export.export(attend, platforms=("cpu",))(*types)
    q, k, v, _ = arrays()
    np.testing.assert_allclose(exported.call(q[:, :S], k, v), attend(q[:, :S], k, v), rtol=1e-5, atol=1e-6)


def test_memory_is_linear_in_the_sequence(monkeypatch):
    """No array of all pairs, in the gradients of its arrays either."""
    monkeypatch.setattr(blocks, "_MOST_CPU_BYTES", 4)
    monkeypatch.setattr(blocks, "_LEAST_ROWS", 4)
    jax.clear_caches()
    score, operands = SCORES["decay"]
    q, k, v, dy = arrays()
    loss = lambda q, *x: jnp.vdot(coda.attention(q, k, v, score=score, operands=x), dy)  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, *operands).as_text()
    assert f"x4x{S}xf32" in text and f"x{T}x{S}xf32" not in text and f"x40x{S}xf32" not in text
    jax.clear_caches()


def test_a_derivative_of_one_is_known():
    """So a sum has no derivative that a kernel multiplies by, and a band that a score hides is the mask's alone."""
    of = {name: trace(score, [jnp.asarray(x) for x in x], (B, N, T, S))[0] for name, (score, x) in SCORES.items()}
    assert {name for name, one in of.items() if not one.has_unit_slope} == {"soft cap", "gate", "table of ids"}
    every, _ = equations_of(lambda *x: coda.attention(*x, score=SCORES["causal"][0]), *arrays()[:3])
    (spec,) = (x.params["spec"] for x, _ in every if x.primitive.name == "coda_attention")
    assert spec.score is None and spec.mask.right == 0


def test_equal_functions_are_one():
    """Whatever their operands have: a kernel's text is one."""
    shape = (B, N, T, S)
    one = trace(SCORES["gate"][0], (normal(0, N),), shape)[0]
    other = trace(lambda s, g: s * jnp.tanh(g[:, None, None]), (normal(1, N),), shape)[0]
    assert one == other and hash(one) == hash(other)
    assert one != trace(SCORES["soft cap"][0], (), shape)[0]
