"""Maps of attention's gradients that its kernels make in their place: values on the host, in a block, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from benchmarks.lab.machine_code import resource_usage
from coda_jax import ffi
from coda_jax.attend import kernel
from coda_jax.attend.gradients import unsupported
from coda_jax.attend.primitive import backward_primitives
from coda_jax.attend.spec import AttentionSpec, MaskSpec
from coda_jax.epilogue import Axis, trace
from coda_jax.graph import plan
from coda_jax.jaxprs.walk import equations_of
from coda_jax.tiles import arch
from flax_layers import LlamaBlock
from tests.attention_cases import (
    OF_GRADIENTS,
    UNBOUNDED,
    Fault,
    Kernel,
    Mask,
    Schedule,
    case,
    common_headers,
    gradients_of,
    run,
)
from tests.attention_on_cpus import partitioned_on_cpus
from tests.nvrtc import needs_nvrtc
from tests.test_block_fp8 import distance
from tests.tolerance import check

CAUSAL = Mask(right=0)
LATE_COPIES, AT_RANDOM = Schedule(1, -1, 0, 1, 0), Schedule(3, 7, 0, 0, 1)
E4M3 = np.dtype(jnp.float8_e4m3fn)
B, T, H, K, D = 2, 32, 4, 2, 64
DELAYED, CURRENT = coda.fp8.Recipe(scaling="delayed", history=2), coda.fp8.Recipe()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return common_headers(tmp_path_factory.mktemp("attention"))


# ---- the kernels on the host


def operands_of(one):
    """Scale, a factor of each row, tables of angles, q, k and v as matrices, and scales of norms."""
    random, (batch, rows, _, width) = np.random.default_rng(3), one.q.shape
    angles = random.uniform(0, 7, (rows, width // 2))
    factor = random.uniform(0.5, 2, (batch * rows, 1)).astype(np.float32)
    tables = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    norms = random.uniform(0.5, 2, (2, width)).astype(np.float32)
    return [np.float32(16), factor, *tables, *(x.reshape(batch * rows, -1) for x in (one.q, one.k, one.v)), *norms]


def joined_case(name, kernel, mask=CAUSAL, batch=1, rows=200, heads=2, groups=1):
    sizes = (batch, rows, heads, heads // groups)
    kernel = dataclasses.replace(kernel, gradients=name, sizes=sizes)
    return case(kernel, mask, batch=batch, queries=rows, heads=heads, groups=groups)


def check_joined(one, folder, schedule=AT_RANDOM, fault=None):
    """Tiles and maxima are bit for bit those of passes over dq, dk and dv; sums of rows have another order.

    So have sums of heads, and behind a norm some elements of a tile are neighbours.
    """
    operands, kernel = operands_of(one), one.kernel
    plain = dataclasses.replace(one, kernel=dataclasses.replace(kernel, gradients=None, sizes=()))
    gradients = [run(plain, folder, schedule)[name] for name in ("dq", "dk", "dv")]
    expected = kernel.of_gradients.by_xla([jnp.asarray(x) for x in gradients], [jnp.asarray(x) for x in operands])
    found = run(one, folder, schedule, fault, operands)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        y = np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        if x.dtype == np.float32 and x.ndim:
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)
        elif OF_GRADIENTS[kernel.gradients].is_normed:
            assert_neighbours(x, y)
        else:
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def assert_neighbours(x, y):
    """Equal but for a few in a thousand, which are neighbours or, as differences of larger ones, nearly 0."""
    x, y, dtype = np.asarray(x, np.float64), np.asarray(y, np.float64), x.dtype
    if dtype == np.float32:
        return np.testing.assert_allclose(x, y, rtol=1e-6)
    info = jnp.finfo(dtype)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(y), float(info.smallest_normal))))) * float(info.eps)
    assert (np.abs(x - y) <= unit + 1e-6 * np.abs(y).max()).all() and (x != y).mean() < 2e-3


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_kernels_make_what_passes_make(folder, name, head):
    rows = 208 if OF_GRADIENTS[name].dtype == E4M3 else 200
    check_joined(joined_case(name, Kernel(head, head), batch=2, rows=rows, heads=4, groups=2), folder)


@pytest.mark.parametrize("head, name", [(64, "normed"), (128, "normed"), (64, "normed_apart")])
def test_cotangents_of_norms_are_those_of_float64(folder, name, head):
    """Behind dq and dk as they would be stored; a tile is as near as its dtype."""
    one = joined_case(name, Kernel(head, head), batch=2, rows=150, heads=4, groups=2)
    operands = [np.asarray(x, np.float64) for x in operands_of(one)]
    _, factor, cos, sin, q, k, _, *norms = operands
    plain = run(dataclasses.replace(one, kernel=dataclasses.replace(one.kernel, gradients=None, sizes=())), folder)
    found = run(one, folder, AT_RANDOM, operands=operands_of(one))
    tiles = [found[0]] if name == "normed" else found[:2]
    joined = np.concatenate([np.asarray(x, np.float64) for x in tiles], axis=-1)
    sums = [x for x in found if x.shape in ((4 * head,), (2 * head,))][:2]  # along columns, of q and k
    assert len(sums) == (2 if name == "normed" else 0)
    first = 0
    for i, (z, gradient, norm) in enumerate(zip((q, k), ("dq", "dk"), norms, strict=True)):
        t = np.asarray(plain[gradient], np.float64).reshape(len(z), -1, head)
        if name == "normed":
            c, s = (np.tile(x, (2, 1))[:, None] for x in (cos, sin))
            a, b = t[..., : head // 2], t[..., head // 2 :]
            t = np.concatenate([a * c + b * s, b * c - a * s], axis=-1)
        z = z.reshape(t.shape)
        rstd = 1 / np.sqrt(np.mean(z * z, axis=-1, keepdims=True) + 1e-6)
        inner = np.mean(t * norm * z, axis=-1, keepdims=True)
        expected = (rstd * (t * norm - z * rstd**2 * inner)).reshape(len(z), -1) * factor
        columns = joined[..., first : first + expected.shape[1]].reshape(expected.shape)
        first += expected.shape[1]
        error = np.abs(columns - expected) / np.sqrt(np.mean(expected**2))
        assert np.sqrt(np.mean(error**2)) < 2**-9
        if sums:
            exact = np.sum(t * z * rstd, axis=0).reshape(-1)
            np.testing.assert_allclose(sums[i], exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize(
    "name, head, value_head", [("joined", 40, 24), ("joined_in_8_bits", 80, 112), ("keys_and_values", 48, 40)]
)
def test_heads_of_other_widths(folder, name, head, value_head):
    check_joined(joined_case(name, Kernel(head, value_head), rows=144, heads=2), folder)


@pytest.mark.parametrize("head, rows", [(64, 16), (64, 129), (128, 65), (128, 300)])
def test_odd_lengths(folder, head, rows):
    check_joined(joined_case("turned", Kernel(head, head), batch=2, rows=rows), folder, LATE_COPIES)


def test_queries_that_see_nothing_have_zeros(folder):
    """Tiles of queries to which no tile of keys was added."""
    one = joined_case("turned", Kernel(), Mask(UNBOUNDED, -150), rows=200)
    check_joined(one, folder)
    joined, *_ = run(one, folder, operands=operands_of(one))
    assert not np.asarray(joined[:, :128, :64], np.float32).any()


def test_float16(folder):
    check_joined(joined_case("turned", Kernel(dtype="f16"), rows=130), folder)


def test_additions_in_any_order(folder):
    check_joined(joined_case("turned", Kernel(deterministic=False), rows=150, heads=2), folder, Schedule(1, 0, 0, 0, 1))


PLANTED = {  # a fault in a header, and what it gives
    "columns_of_another_head": ("results", "* columns + column;", "* columns;", "wrote beside|not equal"),
    "another_row_of_a_transposed_tile": (
        "results",
        "column + of_column) * batches",
        "of_column) * batches",
        "not equal",
    ),
    "half_a_head_of_another_run": ("results", "* (width / 2) + first / 2", "* (width / 2) + first", "not equal|beside"),
    "columns_of_dk_for_dv": (
        "backward_sm90",
        "columns_of<Of>(which) + key_head",
        "columns_of<Of>(1) + key_head",
        "not equal",
    ),
    "the_first_part_twice": ("passes", "(from + j / 8 * part)", "(from)", "not equal"),
    "a_tile_of_another_half": ("results", "access.half * half_groups + j", "j", "Not equal"),
    "sums_of_another_lane": (
        "results",
        "combine_lanes<access.op, 1 | 2>",
        "combine_lanes<access.op, 2 | 4>",
        "Not equal",
    ),
    "sums_of_another_column": ("results", "2 * (lane % 4) + own", "2 * (lane % 4)", "Not equal"),
    "sums_of_another_half": ("results", "access.half * half_groups + group", "group", "Not equal"),
    "heads_of_another_lane": (
        "results",
        "combine_lanes<Epilogue::head_op[index], 1 | 2>",
        "combine_lanes<Epilogue::head_op[index], 2 | 4>",
        "Not equal|all",
    ),
    "heads_of_another_row": ("results", "= of_head[r][index]", "= of_head[0][index]", "Not equal|all"),
    "heads_of_the_first_half_alone": (
        "results",
        "total[r][index], terms[index]",
        "total[r][index], first == 0 ? terms[index] : 0",
        "Not equal|all",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_found(folder, name):
    header, right, wrong, what = PLANTED[name]
    of = {"sums": "turned_apart", "heads": "normed"}.get(name.split("_")[0], "turned_in_8_bits")
    one = joined_case(of, Kernel(128, 128), batch=2, rows=80)
    with pytest.raises(AssertionError, match=f"(?i){what}"):
        check_joined(one, folder, fault=Fault(header, right, wrong))


# ---- in a block


def heads_turned(z, cos, sin):
    """q, k and v of a product with the columns of all; q and k turned."""
    q, k, v = jnp.split(z, (H * D, (H + K) * D), axis=1)
    cos, sin = (jnp.tile(jax.lax.stop_gradient(table), (z.shape[0] // T, 1)) for table in (cos, sin))
    q, k = (coda.rotary(x.reshape(len(x), -1, D), cos, sin).reshape(x.shape) for x in (q, k))
    return q, k, v


def attention(q, k, v, **options):
    heads = (y.reshape(*y.shape[:-1], -1, D) for y in (q, k, v))
    return coda.attention(*heads, is_causal=True, **options).reshape(q.shape)


def lines(x, scale, qkv, out, history, cos, sin, recipe=None, attend=attention, change=lambda x, q, k, v: (q, k, v)):
    def product(x, w):
        return x @ w if recipe is None else x.matmul(w, fp8=recipe, history=history)

    q, k, v = change(x, *product(coda.rms_norm(x, scale), qkv).map(heads_turned, cos, sin))
    return x + coda.opaque(attend, q, k, v) @ out


def block(**options):
    """A new one, which has planned nothing yet."""
    return coda.block(name="attended", dtype=jnp.bfloat16)(functools.partial(lines, **options))


@pytest.fixture
def arrays(monkeypatch):
    """Arrays of a size that is enough for a GPU of two multiprocessors, so that dk and dv are no sums of parts."""
    monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(arch.SM90, sms=2),))
    return block_arrays()


def block_arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, T, 64), (64,), (64, (H + 2 * K) * D), (H * D, 64)
    x, scale, qkv, out = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    angles = jnp.arange(T)[:, None] * 10.0 ** -jnp.linspace(0, 4, D // 2)
    return x.astype(jnp.bfloat16), scale, qkv / 4, out / 8, jnp.full((2, 2), 3.0), jnp.cos(angles), jnp.sin(angles)


def gradients(function):
    def loss(*arrays):
        return jnp.sum(jnp.sin(function(*arrays).astype(jnp.float32)))

    return jax.value_and_grad(loss, (0, 1, 2, 3, 4))


def made_of_gradients(function, *arrays):
    """`AttentionSpec.gradients` of the one backward pass."""
    found, _ = equations_of(function, *arrays)
    (spec,) = [one.params["spec"] for one, _ in found if one.primitive in backward_primitives]
    return spec.gradients


@pytest.fixture
def in_passes(monkeypatch):
    """Puts passes of XLA's in the place of what the kernels make."""

    def instead():
        monkeypatch.setattr(plan, "behind_attention", lambda *arguments: {})

    return instead


def assert_alike(found, expected):
    """Bit for bit but for the orders in which XLA sums in float32."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        if x.dtype == np.float32:
            assert distance(x, y) < 1e-6
        else:
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.smoke
def test_kernels_store_gradients_as_the_product_reads_them(arrays):
    """Joined columns with the sums of the norm's derivative; in 8 bits the transposed copy and the maximum too."""
    made = made_of_gradients(gradients(block()), *arrays)
    assert [x.transposed for x in made.programs[0].stores] == [False] and made.dtypes == (jnp.bfloat16,)
    assert [len(x.reductions) for x in made.programs] == [1, 1, 1]
    made = made_of_gradients(gradients(block(recipe=DELAYED)), *arrays)
    assert [x.transposed for x in made.programs[0].stores] == [False, True] and made.dtypes == (E4M3, E4M3)
    assert [len(x.reductions) for x in made.programs] == [2, 2, 2]


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["bfloat16", "8 bits"])
def test_explain_leaves_no_pass_between_attention_and_the_product(arrays, recipe, in_passes):
    def found():
        return coda.explain(gradients(block(recipe=recipe)), *arrays, platform="cuda", device="NVIDIA H100 80GB HBM3")

    def behind(explained):
        return [x for x in explained.passes if "attention" in x.after and x.bytes > B * T * (H + K) * D]

    explained = found()
    assert not behind(explained)
    (line,) = [line for line in str(explained).splitlines() if "in the place of its results" in line]
    assert "heads_turned backward, inner product, rms_norm backward" in line
    in_passes()
    assert behind(found())


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", [None, DELAYED, CURRENT], ids=["bfloat16", "delayed", "current"])
def test_values_and_gradients_are_those_of_passes(arrays, recipe, in_passes):
    """By XLA on both sides. A scale that is the maximum's own is not known before, so that nothing joins."""
    function = gradients(block(recipe=recipe))
    assert (made_of_gradients(function, *arrays) is None) == (recipe is CURRENT)
    found = jax.jit(function)(*arrays)
    in_passes()
    assert made_of_gradients(gradients(block(recipe=recipe)), *arrays) is None
    assert_alike(found, jax.jit(gradients(block(recipe=recipe)))(*arrays))


def test_batches_are_those_of_passes(arrays, in_passes):
    def run_batch():
        more = jnp.stack([arrays[0], arrays[0] * 2])
        function = jax.vmap(gradients(block(recipe=DELAYED)), in_axes=(0, *(None,) * 6))
        return jax.jit(function)(more, *arrays[1:])

    found = run_batch()
    in_passes()
    assert_alike(found, run_batch())


def test_second_derivatives_are_those_of_passes(arrays, in_passes):
    def second():
        function = block()
        first = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x).astype(jnp.float32))), 2)
        return jax.jit(jax.grad(lambda *x: jnp.sum(first(*x) ** 2), (0, 2, 3)))(*arrays)

    found = second()
    in_passes()
    for x, y in zip(found, second(), strict=True):  # XLA keeps more than 16 bits in other places
        assert distance(x, y) < 0.01


def test_sinks_keep_their_gradient(arrays, in_passes):
    """delta, which they have it of, is a result beside what is made of the gradients."""
    sinks = jnp.linspace(-1, 1, H)

    def step():
        def lines(x, qkv, out, sinks):
            q, k, v = (x @ qkv).map(lambda z: jnp.split(z, (H * D, (H + K) * D), axis=1))
            return coda.opaque(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks), q, k, v, sinks) @ out

        function = coda.block(lines, dtype=jnp.bfloat16)
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(function(*x).astype(jnp.float32))), (0, 1, 2, 3))

    given = arrays[0], *arrays[2:4], sinks
    assert made_of_gradients(step(), *given) is not None
    found = jax.jit(step())(*given)
    in_passes()
    assert_alike(found, jax.jit(step())(*given))


def scaled_behind(q, k, v):
    return attention(q, k, v) * 2


def by_xla(q, k, v):
    return attention(q, k, v, implementation="xla")


def queries_changed(q, k, v):
    return attention(q * 2, k, v)


OTHERS = {
    "attention by XLA": ({"attend": by_xla}, False),
    "queries that are no view": ({"attend": queries_changed}, False),
    "a result that is changed": ({"attend": scaled_behind}, True),
    "another map": ({"change": lambda _, q, k, v: (q.map(lambda q, v: q * jnp.mean(v), v), k, v)}, False),
    "another product": ({"change": lambda x, q, k, v: (q, k + x @ jnp.ones((64, K * D)), v)}, False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_only_maps_of_the_kernels_gradients_are_joined(arrays, name, in_passes):
    options, joins = OTHERS[name]
    found = jax.jit(gradients(block(**options)))(*arrays)
    assert (made_of_gradients(gradients(block(**options)), *arrays) is not None) == joins
    in_passes()
    assert_alike(found, jax.jit(gradients(block(**options)))(*arrays))


# ---- in coda.fuse, whose weights are apart or one


def rotated_heads(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def sliced(z):
    z = z.reshape(B, T, -1, D)
    return z[:, :, :H], z[:, :, H : H + K], z[:, :, H + K :]


SPLIT = {  # the result of one product as heads of q, k and v
    "columns": lambda z: [y.reshape(B, T, -1, D) for y in jnp.split(z, (H * D, (H + K) * D), axis=-1)],
    "heads": lambda z: jnp.split(z.reshape(B, T, -1, D), (H, H + K), axis=2),
    "slices": sliced,
}


def normalised(x, scale):
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def plain_loss(x, weights, *, biases=False, split=None, norms=False, attend=coda.attention):
    """A layer of attention as a model writes it, in 16 bits: an RMSNorm, a product for each of q, k and v, angles.

    Args:
      biases: of the three products.
      split: of `SPLIT`, where q, k and v have one product.
      norms: whether the heads of q and k are normalised, as in Qwen3.
    """
    h = normalised(x, weights["scale"])
    angles = jnp.arange(T)[:, None] * 10.0 ** -jnp.linspace(0, 4, D // 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    if split is None:
        q, k, v = (h @ weights[name] + (weights[f"{name}_bias"] if biases else 0) for name in "qkv")
        q, k, v = (z.reshape(B, T, -1, D) for z in (q, k, v))
    else:
        w, bias = (jnp.concatenate([weights[name + end] for name in "qkv"], axis=-1) for end in ("", "_bias"))
        q, k, v = SPLIT[split](h @ w + (bias if biases else 0))
    if norms:
        q, k = normalised(q, weights["q_norm"]), normalised(k, weights["k_norm"])
    y = attend(rotated_heads(q, cos, sin), rotated_heads(k, cos, sin), v, is_causal=True)
    out = x + y.reshape(B, T, -1) @ weights["out"]
    return jnp.sum(jnp.sin(out.astype(jnp.promote_types(x.dtype, jnp.float32))))


def apart_arrays():
    x, scale, qkv, out, *_ = block_arrays()
    parts = jnp.split(qkv.astype(jnp.bfloat16), (H * D, (H + K) * D), axis=1)
    weights = dict(zip("qkv", parts, strict=True))
    biases = {f"{name}_bias": jnp.linspace(-1, 1, w.shape[1], dtype=jnp.bfloat16) for name, w in weights.items()}
    norms = {f"{name}_norm": jnp.linspace(0.5, 1.5, D, dtype=jnp.bfloat16) for name in "qk"}
    return x, {"scale": scale, "out": out.astype(jnp.bfloat16), **weights, **biases, **norms}


def doors(**options):
    """The value and gradient of the layer, by both ways to `coda.fuse`; new functions, which have planned nothing."""
    loss = functools.partial(plain_loss, **options)
    return {
        "grad(fuse)": jax.value_and_grad(coda.fuse(loss), (0, 1)),
        "fuse(grad)": coda.fuse(jax.value_and_grad(loss, (0, 1))),
    }


APART = [(door, biases) for door in ("grad(fuse)", "fuse(grad)") for biases in (False, True)]


@pytest.mark.parametrize("door, biases", APART)
def test_each_product_has_a_tile_of_its_own(arrays, door, biases, in_passes):
    """Gradients of biases are reductions along columns."""
    del arrays

    def found():
        explained = coda.explain(doors(biases=biases)[door], *apart_arrays(), platform="cuda")
        return [x for x in explained.passes if "attention" in x.after and x.bytes > B * T * H * D]

    made = made_of_gradients(doors(biases=biases)[door], *apart_arrays())
    assert sorted(made.members) == [(0,), (1,), (2,)] and set(made.dtypes) == {np.dtype(jnp.bfloat16)}
    assert [len(x.reductions) for x in made.programs] == [biases] * 3
    assert not found()
    in_passes()
    assert found()


@pytest.mark.parametrize("door, biases", APART)
def test_values_and_gradients_of_apart_weights_are_those_of_passes(arrays, door, biases, in_passes):
    del arrays
    found = jax.jit(doors(biases=biases)[door])(*apart_arrays())
    in_passes()
    assert made_of_gradients(doors(biases=biases)[door], *apart_arrays()) is None
    expected = jax.jit(doors(biases=biases)[door])(*apart_arrays())
    if door == "grad(fuse)":
        assert_alike(found, expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):  # XLA keeps more than 16 bits of casts
        assert distance(x, y) < 0.005


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_the_product_of_joined_weights_has_one_tile(arrays, door, split, biases, in_passes):
    """Slices have derivatives that are zeros elsewhere: their sum is the tile of all columns."""
    del arrays
    options = {"biases": biases, "split": split}
    made = made_of_gradients(doors(**options)[door], *apart_arrays())
    assert made.members == ((0, 1, 2),)
    assert [len(x.reductions) for x in made.programs] == [biases] * 3
    found = jax.jit(doors(**options)[door])(*apart_arrays())
    in_passes()
    expected = jax.jit(doors(**options)[door])(*apart_arrays())
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):  # XLA keeps more than 16 bits of casts
        assert distance(x, y) < 0.005


# ---- norms of heads


def layer_step(recipe=None, qk_norm=True):
    """The value and gradient of a layer of a Qwen3 that has planned nothing yet, and its arguments."""
    block = LlamaBlock(
        64, 96, H, num_kv_heads=K, head_dim=D, qk_norm=qk_norm, dtype=jnp.bfloat16, fp8=recipe, rngs=nnx.Rngs(0)
    )
    graphdef, state = nnx.split(block)
    x = jax.random.normal(jax.random.key(1), (B, T, 64), jnp.bfloat16)

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x).astype(jnp.float32)))

    return jax.value_and_grad(coda.fuse(loss), (0, 1), allow_int=True), (state, x)


NORMED = ("a layer", "a layer in 8 bits", "grad(fuse)", "fuse(grad)")


def with_norms(name):
    """A new function with norms of heads, and its arguments."""
    if name in ("grad(fuse)", "fuse(grad)"):
        return doors(norms=True)[name], apart_arrays()
    return layer_step(DELAYED if "8 bits" in name else None)


@pytest.mark.smoke
@pytest.mark.parametrize("name", NORMED)
def test_norms_of_heads_are_pulled_back_by_attentions_kernels(arrays, name, in_passes):
    """Sums of each head are in the programs of dq and dk, and the gradients of the norms' scales come with them."""
    del arrays

    def behind():
        function, given = with_norms(name)
        explained = coda.explain(function, *given, platform="cuda")
        return [x for x in explained.passes if "attention" in x.after and x.bytes > B * T * H * D]

    function, given = with_norms(name)
    made = made_of_gradients(function, *given)
    assert [len(x.head_levels) > 0 for x in made.programs] == [True, True, False]
    of_columns = [[x for x in program.reductions if x.axis is Axis.COLUMN] for program in made.programs]
    assert list(map(len, of_columns)) == [1, 1, 0]
    assert not behind()
    in_passes()
    assert behind()


@pytest.mark.parametrize("name", NORMED)
def test_values_and_gradients_behind_norms_are_those_of_passes(arrays, name, in_passes):
    del arrays
    function, given = with_norms(name)
    found = jax.jit(function)(*given)
    in_passes()
    function, given = with_norms(name)
    assert made_of_gradients(function, *given) is None
    for x, y in zip(*map(jax.tree.leaves, (found, jax.jit(function)(*given))), strict=True):
        assert x.dtype == y.dtype
        if x.dtype != jax.dtypes.float0:
            assert distance(x, y) < 0.005


def test_norms_over_all_heads_stay_with_a_reason(arrays):
    """As OLMo 2's: a kernel has one head of a row at a time."""
    del arrays
    function, given = layer_step(qk_norm="width")
    assert made_of_gradients(function, *given) is None
    text = str(coda.explain(function, *given, platform="cuda"))
    assert text.count("it reads what is summed over all heads of a row") == 2
    function, given = layer_step()
    assert "summed over all heads" not in str(coda.explain(function, *given, platform="cuda"))


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_gradients_behind_norms_are_as_near_to_float64_as_plain_jax(arrays, door):
    del arrays
    function, (x, weights) = with_norms(door)
    used = {name: w for name, w in weights.items() if "bias" not in name}
    found = jax.jit(function)(x, used)

    def plain(q, k, v, is_causal):
        k, v = (jnp.repeat(y, H // K, axis=2) for y in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    step = jax.value_and_grad(functools.partial(plain_loss, norms=True, attend=plain), (0, 1))
    rough = jax.jit(step)(x, used)
    with jax.enable_x64(True):
        exact = step(*jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (x, used)))
    for one in zip(*map(jax.tree.leaves, (found, exact, rough)), strict=True):
        check(*one)


# ---- meshes


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])


def test_devices_of_an_automatic_mesh_have_passes(arrays):
    """Each device has the kernels of its own part; the maps of all columns are XLA's."""
    step = jax.jit(gradients(block(recipe=DELAYED)))
    expected = step(*arrays)
    mesh = mesh_of(AxisType.Auto)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = [jax.device_put(arrays[0], NamedSharding(mesh, P("data"))), *arrays[1:]]
        found = jax.jit(gradients(block(recipe=DELAYED)))(*placed)
    specs = [spec for is_backward, spec, *_ in records if is_backward]
    assert specs and all(spec.gradients is None for spec in specs)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert distance(x, y) < 0.05


def test_explicit_axes_have_passes(arrays):
    mesh = mesh_of(AxisType.Explicit)
    expected = jax.jit(gradients(block()))(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(arrays[0], NamedSharding(mesh, P("data"))), *arrays[1:]]
        function = gradients(block())
        assert made_of_gradients(function, *placed) is None
        assert "in the place of its results" not in str(coda.explain(function, *placed, platform="cuda"))
        found = jax.jit(function)(*placed)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert distance(x, y) < 0.05


# ---- what the kernels take


def rotated(x, *tables):
    cos, sin = tables
    return coda.rotary(x.reshape(len(x), -1, cos.shape[1] * 2), cos, sin).reshape(x.shape)


TABLES = [np.zeros((32, 32))] * 2
UNSUPPORTED = {
    "it reads a row_vector": (lambda x, b: x + b, [np.zeros(128)], np.float32),
    "it reads a tile of float32": (lambda x, y: x + y, [np.zeros((32, 128))], np.float32),
    "it takes columns apart, or reads the position of an element": (
        lambda x: x + jnp.arange(128.0),
        [],
        np.float32,
    ),
    "it combines or reduces columns of other heads than of 64 or 128, or adjacent ones": (
        rotated,
        [np.zeros((32, 16))] * 2,
        np.float32,
    ),
    "it has a reduction other than those along rows, sums along columns, and the maximum of all": (
        lambda x: (x, coda.logsumexp(x, axis=1)),
        [],
        np.float32,
    ),
    "it stores bfloat16 transposed": (lambda x: x.T, [], jnp.bfloat16),
    "an output is no tile": (lambda x: jnp.sum(x, axis=1), [], np.float32),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_gradient_maps_have_a_reason(reason):
    function, operands, dtype = UNSUPPORTED[reason]
    types = [jax.ShapeDtypeStruct(x.shape, np.float32) for x in operands]
    program = trace(function, jax.ShapeDtypeStruct((32, 128), np.float32), types)[0].program
    width = 128 if function is rotated else 64
    assert unsupported(program, [np.dtype(dtype)] * len(program.stores), width, 1) == reason


def launches(monkeypatch, name, batch, rows, heads, key_heads, width, keys=None, made=True):
    """The backward pass's launches, and the types of its results."""
    calls = []

    def launched(arrays, types, call, aliases=None):
        calls.append((call, aliases))
        return [jnp.zeros(x.shape, x.dtype) for x in types]

    monkeypatch.setattr(kernel, "_launched", launched)
    of_gradients = gradients_of(name, batch, rows, heads, key_heads, width, width) if made else None
    q, k = (
        jax.ShapeDtypeStruct((batch, n, h, width), jnp.bfloat16) for n, h in ((rows, heads), (keys or rows, key_heads))
    )
    lse = jax.ShapeDtypeStruct((batch, heads, rows), np.float32)
    matrices = [jax.ShapeDtypeStruct((batch * x.shape[1], x.shape[2] * width), x.dtype) for x in (q, k, k)]
    tables = [jax.ShapeDtypeStruct((rows, width // 2), np.float32)] * 2
    scalars = [jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((batch * rows, 1), np.float32)]
    spec = AttentionSpec(MaskSpec(right=0), 0.125, gradients=of_gradients)
    norms = [jax.ShapeDtypeStruct((width,), np.float32)] * 2
    operands = [*scalars, *tables, *matrices, *norms] if made else []
    types = jax.eval_shape(functools.partial(kernel.backward, spec=spec), q, k, k, q, lse, q, lse, *operands)
    return calls, types


def test_both_kernels_write_the_same_tiles(monkeypatch):
    """The tiles that the second kernel makes of dk and dv are arguments of the third, which adds the columns of dq."""
    calls, types = launches(monkeypatch, "turned_in_8_bits", 2, 2176, 16, 8, 64)
    assert [aliases for _, aliases in calls] == [None, None, {1: 0, 2: 1}]
    assert [x.shape for x in types[:2]] == [(2, 2176, 2048), (2048, 2, 2176)]
    assert [x.shape for x in types[2:]] == [(2, 2176), ()] * 3


def test_tiles_of_dq_alone_are_made_by_the_last_kernel(monkeypatch):
    calls, types = launches(monkeypatch, "turned_apart_in_8_bits", 2, 2176, 16, 8, 64)
    assert [aliases for _, aliases in calls] == [None, None, {}]
    assert [x.shape for x in types[:3]] == [(2, 2176, 1024), (2, 2176, 512), (2, 2176, 512)]
    assert [x.shape for x in types[3:6]] == [(1024, 2, 2176), (512, 2, 2176), (512, 2, 2176)]
    calls, types = launches(monkeypatch, "queries_and_keys", 2, 2176, 16, 8, 64)
    assert [aliases for _, aliases in calls] == [None, None, {1: 0, 2: 1}]
    assert [x.shape for x in types[:4]] == [(2, 2176, 1536), (2, 2176, 512), (1536, 2, 2176), (512, 2, 2176)]


KEPT = {  # sizes whose dq, dk and dv the kernels store as before
    "parts of dk that are summed": ("turned", 1, 256, 8, 2, 64),
    "rows that are no whole words": ("turned_in_8_bits", 2, 200, 4, 4, 64),
    "heads that are no whole words": ("joined_in_8_bits", 2, 256, 4, 4, 40),
    "heads of 256": ("joined", 2, 256, 4, 4, 256),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_sizes_have_the_kernels_without_maps(monkeypatch, name):
    calls, types = launches(monkeypatch, *KEPT[name])
    plain, _ = launches(monkeypatch, *KEPT[name], made=False)
    assert [call for call, _ in calls] == [call for call, _ in plain]
    made = gradients_of(*KEPT[name], KEPT[name][-1])
    _, batch, rows, heads, key_heads, width = KEPT[name]
    assert [x.shape for x in types] == made.shapes((batch, rows, heads, width), (batch, rows, key_heads, width))


@needs_nvrtc
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_maps_take_no_registers_of_the_loop(monkeypatch, name, width):
    spilled = []
    for made in (False, True):
        calls, _ = launches(monkeypatch, name, 2, 2176, 16, 8, width, made=made)
        logs = [ffi.compile(call.source, "attention", arch.SM90.target).log for call, _ in calls[1:]]
        assert "serialized" not in "".join(logs)
        backward, of_dq = map(resource_usage, logs)
        spilled.append(backward.spilled_bytes)
        assert of_dq.spilled_bytes == 0
    of = OF_GRADIENTS[name]
    assert spilled[1] <= spilled[0] + (96 if of.is_normed else 40 if of.sums else 8)  # behind the loop
