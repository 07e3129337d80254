"""Attention's kernels on a device: against dense float64 attention, poisoned results, bits of a thousand runs, NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.attend.primitive import attention_backward_p, attention_forward_p
from coda_jax.attend.spec import AttentionSpec, MaskSpec
from coda_jax.graph import plan
from tests import test_attention_gradients as attended
from tests.attention_cases import EPILOGUES, OF_GRADIENTS, gradients_of, results_of
from tests.attention_scores import errors_of_rounding, exactly, is_float, learned, scores
from tests.gpu.poisoned import poisoned_launches
from tests.test_attention import dense

BF16 = jnp.bfloat16


def normal(seed, *shape, dtype=BF16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def problem(seed, batch, queries, keys, heads, kv_heads, width, value_width=None, dtype=BF16):
    """q, k, v, dy and dlse."""
    value_width = value_width or width
    return (
        normal(seed, batch, queries, heads, width, dtype=dtype),
        normal(seed + 1, batch, keys, kv_heads, width, dtype=dtype),
        normal(seed + 2, batch, keys, kv_heads, value_width, dtype=dtype),
        normal(seed + 3, batch, queries, heads, value_width, dtype=dtype),
        normal(seed + 4, batch, queries, heads, dtype=jnp.float32),
    )


def results(given, implementation="cuda", bias=None, **options):
    """y, lse, dq, dk, dv, and dbias."""

    @jax.jit
    def run(q, k, v, dy, dlse, bias, options):
        attend = functools.partial(
            coda.attention, return_residual=True, implementation=implementation, **static, **options
        )
        (y, lse), pullback = jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias), q, k, v, bias)
        return y, lse, *pullback((dy, dlse))

    static = {
        name: options.pop(name) for name in list(options) if not isinstance(options[name], jax.Array | coda.Intervals)
    }
    return run(*given, bias, options)


def distance(got, exact):
    got, exact = (np.asarray(x).astype(np.float64) for x in (got, exact))
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(got), finite)
    return np.linalg.norm(got[finite] - exact[finite]) / max(np.linalg.norm(exact[finite]), 1e-6)


def check(given, seen=True, bias=None, **options):
    """No result is further from float64's than twice XLA's form, and a rounding."""
    exact = dense(*given, bias=0.0 if bias is None else bias, seen=seen, scale=options.get("scale"))
    ours, plain = (results(given, name, bias, **options) for name in ("cuda", "xla"))
    unit = float(jnp.finfo(given[0].dtype).eps)
    for name, got, rough, one in zip(("y", "lse", "dq", "dk", "dv"), ours, plain, exact, strict=False):
        error, allowed = distance(got, one), 2 * distance(rough, one) + (1e-6 if name == "lse" else unit / 8)
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"
    return ours


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poisoned_launches(monkeypatch)
    jax.clear_caches()


def band(queries, keys, left=None, right=None):
    row, key = np.arange(queries)[:, None], np.arange(keys)
    seen = np.ones((queries, keys), bool)
    if left is not None:
        seen &= key >= row - left
    if right is not None:
        seen &= key <= row + right
    return seen


@pytest.mark.parametrize(
    "width",
    [(64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (40, 24), (64, 128)],
    ids=str,
)
def test_widths(width):
    check(problem(0, 2, 300, 300, 4, 2, *width), band(300, 300, right=0), is_causal=True)
    ids = jnp.asarray(np.repeat(np.arange(5), 60)[None].repeat(2, 0), jnp.int32)
    same = np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None]
    check(problem(7, 2, 300, 300, 4, 2, *width), same & band(300, 300, right=0), is_causal=True, segment_ids=ids)


@pytest.mark.parametrize("queries,keys", [(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (500, 333), (200, 777)])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
def test_sizes(queries, keys, heads):
    check(problem(1, 2, queries, keys, *heads, 64))
    check(problem(1, 2, queries, keys, *heads, 128), band(queries, keys, right=0), is_causal=True)


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (37, 130), (1000, 0)], ids=str)
@pytest.mark.parametrize("offset", [None, 150, -90])
def test_windows(window, offset):
    left, right = window
    seen = band(400, 500, left - (offset or 0), right + (offset or 0))
    check(problem(2, 1, 400, 500, 4, 2, 64), seen, local_window_size=window, query_offset=offset)


def lengths_of(kind, random, total):
    lengths = {"one": [total], "each": [1] * total, "edges": [1, 127, 128, 129, 1, 1, 250]}.get(kind)
    lengths = lengths or list(random.integers(1, 90, total))
    return np.repeat(np.arange(len(lengths)), lengths)[:total]


@pytest.mark.parametrize("kind", ["one", "each", "edges", "random", "unsorted", "shuffled"])
@pytest.mark.parametrize("width", [64, 128])
def test_documents(kind, width):
    """Ids, sorted or not, and with them a window."""
    random = np.random.default_rng(3)
    ids = np.stack([lengths_of(kind, random, 637), lengths_of(kind, random, 637)])
    if kind == "unsorted":
        ids = ids % 3
    if kind == "shuffled":
        ids = random.integers(0, 4, ids.shape)
    ids = jnp.asarray(ids, jnp.int32)
    same = np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None]
    given = problem(4, 2, 637, 637, 4, 2, width)
    check(given, same & band(637, 637, right=0), is_causal=True, segment_ids=ids)
    check(given, same, segment_ids=ids)
    check(given, same & band(637, 637, 50, 0), is_causal=True, local_window_size=50, segment_ids=ids)


def random_intervals(seed, batch, queries, keys):
    random = np.random.default_rng(seed)
    first = random.integers(0, keys, (batch, queries))
    last = np.minimum(first + random.integers(-20, 200, first.shape), keys - 1)
    return jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_intervals(heads, dtype):
    given, key = problem(5, 2, 500, 600, *heads, 64, dtype=dtype), np.arange(600)
    first, last = random_intervals(0, 2, 500, 600)
    one = (np.asarray(first)[..., None] <= key) & (key <= np.asarray(last)[..., None])
    check(given, one[:, None], mask=coda.Intervals(first, last))
    second_first, second_last = random_intervals(1, 2, 500, 600)
    two = one | ((np.asarray(second_first)[..., None] <= key) & (key <= np.asarray(second_last)[..., None]))
    check(given, two[:, None], mask=coda.Intervals(first, last, second_first, second_last))


def test_offsets_and_lengths():
    given = problem(6, 3, 200, 500, 4, 2, 64)
    offset, lengths, rows = np.array([0, 130, 299]), np.array([500, 301, 0]), np.array([200, 77, 200])
    row, key = np.arange(200)[:, None], np.arange(500)
    seen = (key <= row + offset[:, None, None]) & (key < lengths[:, None, None]) & (row < rows[:, None, None])
    check(
        given,
        seen[:, None],
        is_causal=True,
        query_offset=jnp.asarray(offset, jnp.int32),
        key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
        query_seq_lengths=jnp.asarray(rows, jnp.int32),
    )


@pytest.mark.parametrize("shape", [(2, 4, 300, 400), (1, 1, 300, 400), (2, 1, 1, 400), (1, 4, 300, 1)], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_dense_mask_and_bias(shape, width):
    given = problem(7, 2, 300, 400, 4, 2, width)
    mask = jnp.asarray(np.random.default_rng(8).random(shape) < 0.7)
    bias = normal(9, *shape, dtype=jnp.float32)
    check(given, np.asarray(mask), mask=mask)
    ours = check(given, np.asarray(mask) & band(300, 400, right=0), bias, mask=mask, is_causal=True)
    exact = dense(*given, bias=bias, seen=np.asarray(mask) & band(300, 400, right=0))[5]
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    assert distance(ours[5], exact.sum(axes, keepdims=True)) < 0.01


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_large_scores(dtype):
    """Scores of 60000, and cotangents of scores beyond float16's range."""
    q, k, v, dy, dlse = problem(10, 1, 256, 256, 2, 1, 64, dtype=dtype)
    q, k = (x * jnp.asarray(90, dtype) for x in (q, k))
    y, lse, *gradients = results((q, k, v, dy, dlse), is_causal=True, scale=1.0)
    assert np.max(np.abs(lse)) > 60_000
    exact = dense(q, k, v, dy, dlse, seen=band(256, 256, right=0), scale=1.0)
    assert distance(y, exact[0]) < 0.02 and distance(lse, exact[1]) < 1e-5
    for got, one in zip(gradients, exact[2:5], strict=False):
        assert np.isfinite(np.asarray(got, np.float32)[np.abs(one) < 60_000]).all()
    small = 2.0**-10  # of q and k, for their gradients to have room
    given = q * 0 + small, k * 0 + small, v * 100, dy * 3000, dlse
    for got in results(given, is_causal=True, scale=1.0)[2:4]:
        assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "dy"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_nan_stays_in_its_document(name, width, is_sorted):
    given = problem(11, 1, 700, 700, 4, 2, width)
    ids = np.repeat(np.arange(10), 70)[None]
    if not is_sorted:
        ids = ids % 4
    bad = 333
    clean = results(given, is_causal=True, segment_ids=jnp.asarray(ids, jnp.int32))
    place = ["q", "k", "v", "dy"].index(name)
    spoiled = list(given)
    spoiled[place] = given[place].at[0, bad, 1, 5].set(jnp.nan)
    got = results(spoiled, is_causal=True, segment_ids=jnp.asarray(ids, jnp.int32))
    others = ids[0] != ids[0, bad]
    for one, exact in zip((*got[:1], *got[2:5]), (*clean[:1], *clean[2:5]), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[0, others], np.asarray(exact)[0, others])
    if name != "dy":
        assert np.isnan(np.asarray(got[0], np.float32)[0, bad]).any()
    assert np.isnan(np.asarray(got[2], np.float32)[0, bad]).any()


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_bits(width, kind):
    """The same bits in each of many runs."""
    given = problem(12, 2, 1500, 1500, 8, 2, width)
    options = {"is_causal": True}
    if kind == "documents":
        options["segment_ids"] = jnp.asarray(
            lengths_of("random", np.random.default_rng(0), 1500)[None].repeat(2, 0), jnp.int32
        )

    @jax.jit
    def run(given):
        q, k, v, dy, dlse = given
        (y, lse), pullback = jax.vjp(
            functools.partial(coda.attention, return_residual=True, implementation="cuda", **options), q, k, v
        )
        return y, lse, *pullback((dy, dlse))

    @jax.jit
    def differ(a, b):
        return sum(
            jnp.sum(jax.lax.bitcast_convert_type(x, bits) != jax.lax.bitcast_convert_type(y, bits))
            for x, y in zip(a, b, strict=True)
            for bits in [jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32]
        )

    first = run(given)
    assert not sum(int(x) for x in [differ(first, run(given)) for _ in range(1000)])


def test_any_order():
    given = problem(13, 2, 700, 700, 4, 2, 64)
    check(given, band(700, 700, right=0), is_causal=True, config=coda.AttentionConfig(deterministic=False))


def test_a_long_row():
    """A row of a million tokens, in windows: the last queries are those of a short row."""
    length, window = 1 << 20, 300
    q, k, v, dy, dlse = problem(14, 1, length, length, 2, 1, 64)
    got = results((q, k, v, dy, dlse), is_causal=True, local_window_size=(window, 0))
    tail = 2048
    given = [x[:, -tail:] for x in (q, k, v, dy, dlse)]
    exact = dense(*given, seen=band(tail, tail, window, 0))
    for i in (0, 1, 2, 3, 4):
        part = slice(window, None) if i < 3 else slice(0, None)
        if i in (3, 4):
            part = slice(window + 1, None)
        assert distance(np.asarray(got[i])[:, -tail:][:, part], exact[i][:, part]) < 0.01


def results_beside(name, width, keeps_y, given):
    """A function of q, k, v and scalars by the kernel, the results as matrices that it makes, and the scalars."""
    q, _, v, *_ = given
    made = results_of(name, q.shape[0] * q.shape[1], q.shape[2] * v.shape[3], keeps_y)
    spec = AttentionSpec(MaskSpec(right=0), width**-0.5, "cuda", results=made)
    scalars = [jnp.float32(x) for x in (37.0, 0.5)[: made.count]]
    return jax.jit(functools.partial(attention_forward_p.bind, spec=spec)), made, scalars


@pytest.mark.parametrize("keeps_y", [True, False])
@pytest.mark.parametrize("width,value_width,queries", [(40, 24, 160), (64, 64, 2208), (64, 64, 400), (128, 128, 272)])
@pytest.mark.parametrize("name", EPILOGUES)
def test_results_beside_y_are_bit_for_bit_those_of_xla(name, width, value_width, queries, keeps_y):
    given = problem(3, 2, queries, queries, 4, 2, width, value_width)
    kernel, made, scalars = results_beside(name, width, keeps_y, given)
    y = jax.jit(functools.partial(coda.attention, is_causal=True, implementation="cuda"))(*given[:3])
    expected = jax.jit(made.by_xla)(y, scalars)
    for _ in range(3):
        results = kernel(*given[:3], *scalars)
        found = results[2:] if keeps_y else results[1:]
        for x, want in zip([*found, *results[: int(keeps_y)]], [*expected, *[y] * keeps_y], strict=True):
            assert x.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("width", [64, 256])
def test_results_beside_y_repeat(width):
    given = problem(5, 2, 2208, 2208, 4, 2, width)
    kernel, _, scalars = results_beside("copies_in_8_bits", width, True, given)
    first = kernel(*given[:3], *scalars)
    for _ in range(300):
        for x, one in zip(kernel(*given[:3], *scalars), first, strict=True):
            assert jnp.array_equal(x.astype(jnp.float32), one.astype(jnp.float32))


def made_of_gradients(name, batch, rows, heads, kv_heads, width, value_width=None, deterministic=True, **mask):
    """Functions by the kernels with maps of the gradients, and by XLA behind the kernels without, and the arguments."""
    q, k, v, dy, dlse = problem(3, batch, rows, rows, heads, kv_heads, width, value_width)
    attend = functools.partial(coda.attention, return_residual=True, implementation="cuda", is_causal=True, **mask)
    y, lse = jax.jit(attend)(q, k, v)
    made = gradients_of(name, batch, rows, heads, kv_heads, width, v.shape[3])
    angles = jnp.arange(rows)[:, None] * 10.0 ** -jnp.linspace(0, 4, width // 2)
    factor = jnp.exp(normal(9, batch * rows, 1, dtype=jnp.float32))
    operands = [jnp.float32(37), factor, jnp.cos(angles), jnp.sin(angles)]
    operands += [x.reshape(batch * rows, -1) for x in (q, k, v)]
    operands += [1 + normal(i, width, dtype=jnp.float32) / 4 for i in (10, 11)]
    config = coda.AttentionConfig(deterministic=deterministic)
    spec = AttentionSpec(MaskSpec(right=0), width**-0.5, "cuda", config)
    arguments = [q, k, v, y, jnp.moveaxis(lse, 2, 1), dy, jnp.moveaxis(dlse, 2, 1)]

    @jax.jit
    def by_kernels(arguments, operands):
        return attention_backward_p.bind(*arguments, *operands, spec=dataclasses.replace(spec, gradients=made))

    @jax.jit
    def gradients(arguments):
        return attention_backward_p.bind(*arguments, spec=spec)

    def by_xla(arguments, operands):
        return made.by_xla(gradients(arguments), operands)

    return by_kernels, by_xla, (arguments, operands)


def assert_made(found, expected, *, is_normed=False):
    """Bits of what is not turned; a fused multiplication may round what is turned, and its maximum, to a neighbour.

    Sums of rows have another order. Behind a norm their terms cancel: a cotangent is orthogonal to what is normalised.
    """
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        got, exact = (np.asarray(of, np.float32) for of in (x, y))
        assert np.isfinite(got).all()
        if x.dtype == np.float32:
            atol = max(2e-5 * np.abs(exact).max(), 1e-4 * is_normed)
            np.testing.assert_allclose(got, exact, rtol=2e-5, atol=atol)
        else:
            differs = got != exact
            assert differs.mean() < 0.002
            spacing = 2.0 ** -(7 if x.dtype == BF16 else 3)
            np.testing.assert_array_less(np.abs(got - exact)[differs], 1.01 * spacing * np.abs(exact)[differs] + 0.01)


# Batches, rows, heads and heads of keys whose dk and dv are not summed from parts.
JOINED = [(2, 2208, 16, 8), (2, 400, 4, 4), (1, 2064, 32, 16)]


@pytest.mark.parametrize("sizes", JOINED, ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_maps_of_gradients_are_those_of_xla(name, width, sizes):
    by_kernels, by_xla, given = made_of_gradients(name, *sizes, width)
    expected = by_xla(*given)
    for _ in range(3):
        found = by_kernels(*given)
        assert_made(found, expected, is_normed=OF_GRADIENTS[name].is_normed)
        if name.startswith("joined"):
            for x, y in zip(found, expected, strict=True):
                if x.dtype != np.float32 or x.ndim == 0:
                    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("width,value_width,rows", [(48, 32, 208), (80, 112, 208), (64, 128, 144), (128, 64, 144)])
@pytest.mark.parametrize("name", ["joined", "joined_in_8_bits"])
def test_maps_of_gradients_of_other_widths(name, width, value_width, rows):
    by_kernels, by_xla, given = made_of_gradients(name, 2, rows, 4, 4, width, value_width)
    assert_made(by_kernels(*given), by_xla(*given))


@pytest.mark.parametrize("rows", [17, 63, 65, 129, 1111])
@pytest.mark.parametrize("width", [64, 128])
def test_maps_of_gradients_of_odd_lengths(width, rows):
    by_kernels, by_xla, given = made_of_gradients("turned", 2, rows, 4, 4, width)
    assert_made(by_kernels(*given), by_xla(*given))


def test_maps_of_gradients_that_are_added_in_any_order():
    by_kernels, by_xla, given = made_of_gradients("turned", 2, 2208, 16, 8, 64, deterministic=False)
    for x, y in zip(by_kernels(*given), by_xla(*given), strict=True):
        assert distance(x, y) < 0.01


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["turned", "turned_in_8_bits", "normed", "normed_in_8_bits"])
def test_maps_of_gradients_repeat(name, width):
    by_kernels, _, given = made_of_gradients(name, 2, 2208, 16, 8, width)
    first = by_kernels(*given)
    for _ in range(300):
        for x, one in zip(by_kernels(*given), first, strict=True):
            assert jnp.array_equal(x.astype(jnp.float32), one.astype(jnp.float32))


@pytest.mark.parametrize("recipe", [None, attended.DELAYED], ids=["bfloat16", "8 bits"])
def test_a_block_with_maps_of_gradients(monkeypatch, recipe):
    """Its value and gradients are those of passes; sums of rows have another order."""
    for name, size in (("T", 2208), ("H", 16), ("K", 8)):
        monkeypatch.setattr(attended, name, size)
    arrays = attended.block_arrays()

    def step():
        function = attended.gradients(attended.block(recipe=recipe))
        return attended.made_of_gradients(function, *arrays), jax.jit(function)(*arrays)

    made, found = step()
    assert made is not None
    monkeypatch.setattr(plan, "behind_attention", lambda *arguments: {})
    made, expected = step()
    assert made is None
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert distance(x, y) < 0.005


@pytest.mark.parametrize("name", attended.NORMED)
def test_norms_of_heads_behind_attention(monkeypatch, name):
    """A layer of a Qwen3, and the same in plain JAX by `coda.fuse`: values and gradients are those of passes."""
    for size, value in (("T", 2208), ("H", 16), ("K", 8)):
        monkeypatch.setattr(attended, size, value)

    def step():
        function, given = attended.with_norms(name)
        return attended.made_of_gradients(function, *given), jax.jit(function)(*given)

    made, found = step()
    assert [len(x.head_levels) > 0 for x in made.programs] == [True, True, False]
    monkeypatch.setattr(plan, "behind_attention", lambda *arguments: {})
    made, expected = step()
    assert made is None
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if x.dtype != jax.dtypes.float0:
            assert distance(x, y) < 0.01


@pytest.mark.parametrize("door,biases", attended.APART)
def test_coda_fuse_with_maps_of_gradients(monkeypatch, door, biases):
    for name, size in (("T", 2208), ("H", 16), ("K", 8)):
        monkeypatch.setattr(attended, name, size)
    arrays = attended.apart_arrays()

    def step():
        function = attended.doors(biases=biases)[door]
        return attended.made_of_gradients(function, *arrays), jax.jit(function)(*arrays)

    made, found = step()
    assert sorted(made.members) == [(0,), (1,), (2,)]
    monkeypatch.setattr(plan, "behind_attention", lambda *arguments: {})
    made, expected = step()
    assert made is None
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert distance(x, y) < 0.005


def of_score(given, score, operands, implementation, **options):
    """y, and the gradients of q, k, v and the operands of floating dtypes."""

    @jax.jit
    def run(q, k, v, dy, *operands):
        places = [i for i, x in enumerate(operands) if is_float(x)]

        def attend(q, k, v, *differentiated):
            of = dict(enumerate(operands)) | dict(zip(places, differentiated, strict=True))
            of = [of[i] for i in range(len(operands))]
            return coda.attention(q, k, v, score=score, operands=of, implementation=implementation, **options)

        y, pullback = jax.vjp(attend, q, k, v, *(operands[i] for i in places))
        return y, *pullback(dy)

    return run(*given, *operands)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", scores(1, 1, 1, 1))
def test_scores(name, width):
    """No result is further from float64's than twice XLA's form and a rounding; the tanh of a kernel has 11 bits."""
    check_score(problem(15, 2, 500, 430, 4, 2, width)[:4], *scores(2, 4, 500, 430)[name])


def check_score(given, score, operands, seen=True, **options):
    exact, unit = exactly(*given, score, operands, seen), float(jnp.finfo(given[0].dtype).eps)
    ours, plain = (of_score(given, score, operands, form, **options) for form in ("cuda", "xla"))
    of_operands = errors_of_rounding(*given, score, operands, unit, seen)
    for i, (got, rough, one) in enumerate(zip(ours, plain, exact, strict=True)):
        drawn = of_operands[i - 4] / max(np.linalg.norm(one), 1e-6) if i >= 4 else 0
        error, allowed = distance(got, one), 2 * max(distance(rough, one), drawn) + unit / 8
        assert error <= allowed, f"result {i}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", learned(1, 1, 1, 1))
def test_gradients_of_operands(name, width):
    """Two blocks share the heads of queries of a head of keys; a block of keys has several tiles of queries."""
    seen = np.tri(500, 430, dtype=bool)
    check_score(problem(15, 2, 500, 430, 8, 2, width)[:4], *learned(2, 8, 500, 430)[name], seen, is_causal=True)


@pytest.mark.parametrize("name", ["slopes of heads", "tables", "everything"])
@pytest.mark.parametrize("kind", ["documents", "any order", "float16", "many"])
def test_gradients_of_operands_in_other_kernels(name, kind):
    length, heads, dtype, seen, options = 500, 4, BF16, True, {}
    if kind == "documents":
        ids = lengths_of("random", np.random.default_rng(0), length)[None].repeat(2, 0)
        seen = np.tri(length, dtype=bool) & (ids[:, None, :, None] == ids[:, None, None])
        options = {"is_causal": True, "segment_ids": jnp.asarray(ids, jnp.int32)}
    elif kind == "any order":
        options = {"config": coda.AttentionConfig(deterministic=False)}
    elif kind == "float16":
        dtype = jnp.float16
    else:
        length, heads = 900, 16
    check_score(
        problem(17, 2, length, length, heads, 4, 64, dtype=dtype)[:4],
        *learned(2, heads, length, length)[name],
        seen,
        **options,
    )


ONCE_MORE = ("soft cap", "ALiBi with slopes", "documents", "table of ids")


@pytest.mark.parametrize("name", [*ONCE_MORE, *learned(1, 1, 1, 1)])
def test_bits_of_scores(name):
    given = problem(16, 2, 1500, 1500, 8, 2, 64)[:4]
    score, operands = (scores(2, 8, 1500, 1500) | learned(2, 8, 1500, 1500))[name]
    first = of_score(given, score, operands, "cuda", is_causal=True)
    for _ in range(100):
        for got, one in zip(of_score(given, score, operands, "cuda", is_causal=True), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(one))


@pytest.mark.parametrize("name", ["q", "k", "v", "dy"])
def test_nan_stays_in_its_document_by_a_score(name):
    given = problem(17, 1, 700, 700, 4, 2, 64)[:4]
    ids = np.repeat(np.arange(10), 70)[None].astype(np.int32)
    score, bad = scores(1, 4, 700, 700)["documents"][0], 333
    spoiled = list(given)
    place = ["q", "k", "v", "dy"].index(name)
    spoiled[place] = given[place].at[0, bad, 1, 5].set(jnp.nan)
    clean, got = (of_score(x, score, (ids, ids), "cuda") for x in (given, spoiled))
    others = ids[0] != ids[0, bad]
    for one, exact in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[0, others], np.asarray(exact)[0, others])
    assert np.isnan(np.asarray(got[1], np.float32)[0, bad]).any()


def check_all(given, sinks=None, rate=0.0, seen=True, **options):
    """As `check`, with sinks and their gradient, and with dropout.

    A sink's gradient is a sum over all rows of p_sink (dlse - sum(y dy)), whose terms cancel, and y is rounded: the
    rounding of each y, taken as independent, may be of one unit where half a unit is the most.
    """
    q, k, v, dy, dlse = given
    options |= {"dropout_key": jax.random.PRNGKey(7), "dropout_rate": rate}
    ones = jnp.ones((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), jnp.float32)
    dropped = np.asarray(coda.dropout(options["dropout_key"], ones, rate), np.float64)
    exact = dense(*given, seen=seen, sinks=sinks, dropped=dropped)

    def run(implementation):
        def attend(q, k, v, sinks):
            arguments = {"return_residual": True, "implementation": implementation, **options}
            return coda.attention(q, k, v, sinks=sinks, **arguments)

        def passes(q, k, v, sinks, dy, dlse):
            results, pullback = jax.vjp(attend, q, k, v, sinks)
            return *results, *pullback((dy, dlse))

        return jax.jit(passes)(q, k, v, sinks, dy, dlse)

    ours, plain, unit = run("cuda"), run("xla"), float(jnp.finfo(q.dtype).eps)
    exact, rounding = (*exact[:5], *exact[6:]), {"lse": 1e-6}
    if sinks is not None:
        lse = np.where(exact[1] == -np.inf, np.inf, exact[1])  # a row without a sum has no gradient
        p_sink = np.exp(np.asarray(sinks, np.float64) - lse)  # (batch, queries, heads)
        terms = p_sink[..., None] * exact[0] * np.asarray(dy, np.float64)
        rounding["dsinks"] = unit * np.linalg.norm(terms) / np.linalg.norm(exact[5])
    for name, got, rough, one in zip(("y", "lse", "dq", "dk", "dv", "dsinks"), ours, plain, exact, strict=False):
        error, allowed = distance(got, one), 2 * distance(rough, one) + rounding.get(name, unit / 8)
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"
    return ours


@pytest.mark.parametrize("width", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_sinks(width, dtype):
    sinks = jnp.asarray([0.5, -jnp.inf, 20.0, -3.0], jnp.float32)
    given = problem(20, 2, 300, 300, 4, 2, *width, dtype=dtype)
    check_all(given, sinks, seen=band(300, 300, right=0), is_causal=True)
    ids = jnp.asarray(np.repeat(np.arange(5), 60)[None].repeat(2, 0), jnp.int32)
    same = np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None]
    check_all(given, sinks, seen=same & band(300, 300, 20, 0), is_causal=True, local_window_size=20, segment_ids=ids)
    y, lse, *_ = check_all(given, sinks, seen=band(300, 300, None, -10), is_causal=True, query_offset=-10)
    assert not np.asarray(y[:, :10], np.float32).any()  # of queries that see nothing
    np.testing.assert_allclose(lse[:, :10], np.broadcast_to(sinks, (2, 10, 4)), rtol=1e-6)


@pytest.mark.parametrize("width", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout(width, rate):
    """In heads that share keys, in documents, beside a bias, and with sinks."""
    given = problem(21, 2, 333, 333, 8, 2, *width)
    check_all(given, None, rate, band(333, 333, right=0), is_causal=True)
    ids = jnp.asarray(np.repeat(np.arange(9), 37)[None].repeat(2, 0), jnp.int32)
    same = np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None]
    check_all(given, normal(22, 8, dtype=jnp.float32), rate, same, segment_ids=ids)
    check_all(problem(23, 1, 2100, 700, 4, 4, *width, dtype=jnp.float16), None, rate)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_bits_with_dropout_and_sinks(width):
    q, k, v, dy, dlse = problem(24, 2, 1500, 1500, 8, 2, width)
    sinks = normal(25, 8, dtype=jnp.float32)

    @jax.jit
    def run(q, k, v, sinks):
        attend = functools.partial(coda.attention, return_residual=True, implementation="cuda", is_causal=True)
        results, pullback = jax.vjp(
            lambda q, k, v, s: attend(q, k, v, sinks=s, dropout_key=jax.random.PRNGKey(1), dropout_rate=0.1),
            *(q, k, v, sinks),
        )
        return *results, *pullback((dy, dlse))

    first = run(q, k, v, sinks)
    for _ in range(200):
        for a, b in zip(first, run(q, k, v, sinks), strict=True):
            assert jnp.array_equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", "dy"])
def test_nan_stays_in_its_document_beside_dropout(name):
    """All that see it are reached, and a dropped element too."""
    given, bad = dict(zip(("q", "k", "v", "dy", "dlse"), problem(26, 1, 700, 700, 4, 2, 64), strict=True)), 333
    ids = jnp.asarray(np.repeat(np.arange(10), 70)[None], jnp.int32)

    @jax.jit
    def run(q, k, v, dy, dlse):
        attend = functools.partial(coda.attention, segment_ids=ids, implementation="cuda")
        y, pullback = jax.vjp(lambda *x: attend(*x, dropout_key=jax.random.PRNGKey(1), dropout_rate=0.5), *(q, k, v))
        return y, *pullback(dy)

    spoiled = given | {name: given[name].at[0, bad].set(jnp.nan)}
    others = np.asarray(ids[0] != ids[0, bad])
    got, clean = run(**spoiled), run(**given)
    for one, exact in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32)[0, others], np.asarray(exact, np.float32)[0, others])
    reached = got[0] if name in ("k", "v") else got[2]  # y of the queries, or dk of the keys
    assert np.isnan(np.asarray(reached, np.float32)[0, ~others]).all()
