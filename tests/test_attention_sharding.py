"""Attention over meshes of CPU devices, by the lowering for GPUs: values, gradients, and what each device computes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from benchmarks.sharded_step import collectives
from coda_jax import ffi
from coda_jax.attend import costs, kernel
from coda_jax.attend.spec import MaskSpec
from tests.attention_on_cpus import partitioned_on_cpus, stand_in
from tests.gemm_cases import assert_close
from tests.nvrtc import needs_nvrtc

B, T, H, D = 4, 16, 8, 8
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
KINDS = pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=["explicit", "automatic"])
GATHERS = {"all-gather", "all-to-all", "collective-permute"}


def arrays(key_heads=4, heads=H, keys=T, dtype=jnp.float32):
    """q, k, v, the cotangent of y, and ids."""
    rng = np.random.default_rng(key_heads)
    shapes = ((B, T, heads, D), (B, keys, key_heads, D), (B, keys, key_heads, D), (B, T, heads, D))
    ids = np.sort(rng.integers(0, 3, (B, T)), axis=1)
    return *(jnp.asarray(rng.standard_normal(x), dtype) for x in shapes), jnp.asarray(ids, jnp.int32)


def causal(q, k, v, ids):
    return coda.attention(q, k, v, is_causal=True, segment_ids=ids, return_residual=True)


def passes(attend):
    """A function of `arrays` and others: y, lse, dq, dk and dv."""

    def run(q, k, v, dy, *others):
        (y, lse), pullback = jax.vjp(lambda *x: attend(*x, *others), q, k, v)
        lse_or_0 = jnp.where(jnp.isfinite(lse), lse, 0)  # of rows that see nothing
        return y, lse_or_0, *pullback((dy, jnp.cos(lse_or_0)))

    return run


def mesh_of(kind, data=2, model=4):
    devices = jax.devices("cpu")[: data * model]
    assert len(devices) == data * model, "conftest.py asks for them"
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def sharded(mesh, arguments, specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]


def compare(function, arguments, specs, kind, **options):
    """Compares with one device.

    Returns:
      The shapes of a device's q and k, and its pairs, of each pass; counts of collectives; the results.
    """
    mesh = mesh_of(kind)
    want = jax.jit(function)(*arguments)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = sharded(mesh, arguments, specs)
        compiled = jax.jit(function, **options).lower(*placed).compile()
        got = compiled(*placed)
    assert_close(jax.device_get(got), want, rtol=1e-5)
    parts = [(*(x.shape for x in types[:2]), seen) for _, _, types, seen in records]
    return parts, collectives(compiled.as_text()), got


PAIRS = costs.pairs(MaskSpec(right=0, has_ids=True), T, T)


class Scheme:
    """The mesh axes of the batch, of queries, of heads and of keys."""

    def __init__(self, batch=None, rows=None, heads=None, keys=None, expected=()):
        self.of_queries, self.of_keys = P(batch, rows, heads, None), P(batch, keys, heads, None)
        self.of_rows, self.of_ids = P(batch, rows, heads), P(batch)
        self.arguments = [self.of_queries, self.of_keys, self.of_keys, self.of_queries, self.of_ids]
        self.results = [self.of_queries, self.of_rows, self.of_queries, self.of_keys, self.of_keys]
        sizes = {None: 1, "data": 2, "model": 4}
        self.parts = [
            tuple(size // sizes[name] for size, name in zip(shape, names, strict=True))
            for shape, names in (((B, T, H, D), (batch, rows, heads, None)), ((B, T, 4, D), (batch, None, heads, None)))
        ]
        self.expected = set(expected)


SCHEMES = {
    "data": Scheme("data"),
    "tensor": Scheme(heads="model"),
    "both": Scheme("data", heads="model"),
    "rows": Scheme("data", rows="model", expected=["all-reduce"]),
    "rows and keys": Scheme("data", rows="model", keys="model", expected=["all-gather", "reduce-scatter"]),
    "rows, keys and heads": Scheme(rows="data", keys="data", heads="model", expected=["all-gather", "reduce-scatter"]),
}


@KINDS
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(kind, name):
    """Sharded batches and heads move nothing; where queries are sharded, keys are gathered and dk and dv summed."""
    scheme, mesh = SCHEMES[name], mesh_of(kind)
    # Over automatic axes what reads the gradients says how they are sharded.
    options = {"out_shardings": tuple(NamedSharding(mesh, x) for x in scheme.results)} if kind is AUTO else {}
    parts, moved, results = compare(passes(causal), arrays(), scheme.arguments, kind, **options)
    q_part, k_part = scheme.parts
    assert parts == [(q_part, k_part, PAIRS * q_part[1] // T)] * 2
    assert set(moved) == scheme.expected
    for x, spec in zip(results, scheme.results, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@KINDS
@pytest.mark.parametrize("key_heads, heads", [(1, 8), (2, 8), (3, 12), (6, 12)], ids=lambda x: str(x))
def test_heads_of_keys_that_the_shards_do_not_divide(kind, key_heads, heads):
    """A device has the heads of keys of its queries, each as often as the shards ask; dk and dv are sums over these."""
    specs = [P("data", None, "model"), P("data"), P("data"), P("data", None, "model"), P("data")]
    parts, moved, _ = compare(passes(causal), arrays(key_heads, heads), specs, kind)
    own = math.lcm(key_heads, 4) // 4
    assert parts == [((2, T, heads // 4, D), (2, T, own, D), PAIRS)] * 2
    assert set(moved) <= {"all-reduce", "all-gather"}


def window(q, k, v):
    return coda.attention(q, k, v, local_window_size=(3, 1), query_offset=2, return_residual=True)


def lengths(q, k, v):
    sizes = jnp.arange(B, dtype=jnp.int32) + 7
    return coda.attention(q, k, v, is_causal=True, key_value_seq_lengths=sizes, return_residual=True)


def two_intervals(q, k, v):
    rows = jnp.arange(T, dtype=jnp.int32)
    mask = coda.Intervals(rows - 2, rows, jnp.zeros_like(rows), rows // 4)
    return coda.attention(q, k, v, mask=mask, return_residual=True)


def dense(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(k.shape[1])
    bias = jnp.sin(jnp.arange(H, dtype=jnp.float32))[:, None, None] * (i - j)
    by_key = (j % 5 != 0)[None, None, None]
    return coda.attention(q, k, v, bias, by_key & (i % 7 != 3)[None, None], is_causal=True, return_residual=True)


def keys_alone(q, k, v):
    by_key = jnp.arange(k.shape[1]) + jnp.arange(B)[:, None] != 5
    bias = jnp.cos(jnp.arange(k.shape[1], dtype=jnp.float32))
    return coda.attention(q, k, v, bias[None, None, None], by_key[:, None, None], return_residual=True)


@KINDS
@pytest.mark.parametrize("mask", [window, lengths, two_intervals, dense, keys_alone], ids=lambda x: x.__name__)
def test_masks_of_sharded_queries_and_heads(kind, mask):
    """A band goes by the rows of all queries, and is intervals then; arrays are sharded as their axes are."""
    specs = [P(None, "data", "model"), P(), P(), P(None, "data", "model")]
    parts, _, _ = compare(passes(mask), arrays(keys=T + 3)[:4], specs, kind)
    assert [part[:2] for part in parts] == [((B, T // 2, 2, D), (B, T + 3, 1, D))] * 2


@KINDS
def test_columns_of_heads_are_gathered(kind):
    parts, moved, _ = compare(passes(causal), arrays(), [P(None, None, None, "model")] * 3 + [P(), P()], kind)
    assert [part[0] for part in parts] == [(B, T, H, D)] * 2
    assert "all-gather" in moved


@pytest.mark.smoke
def test_inside_shard_map():
    """The lowering is that of one device where all axes are manual: no plan, nothing moved."""
    mesh = mesh_of(EXPLICIT)
    spec = P("data", None, "model")

    def run(q, k, v, dy, ids):
        specs = (spec, spec, spec, spec, P("data"))
        return jax.shard_map(passes(causal), in_specs=specs, out_specs=(spec,) * 5)(q, k, v, dy, ids)

    want = jax.jit(passes(causal))(*arrays())
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*sharded(mesh, arrays(), (spec,) * 4 + (P("data"),))).compile()
        got = compiled(*sharded(mesh, arrays(), (spec,) * 4 + (P("data"),)))
    assert_close(jax.device_get(got), want, rtol=1e-5)
    assert [types[0].shape for _, _, types, _ in records] == [(2, T, 2, D)] * 2
    assert not collectives(compiled.as_text())


@KINDS
def test_inside_shard_map_over_some_axes(kind):
    mesh = mesh_of(kind)
    specs = [P("data", None, "model"), P("data"), P("data"), P("data", None, "model"), P("data")]

    def run(*arrays):
        by_data = jax.shard_map(passes(causal), in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        return by_data(*arrays)

    want = jax.jit(passes(causal))(*arrays(2))
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        got = jax.jit(run)(*sharded(mesh, arrays(2), specs))
    assert_close(jax.device_get(got), want, rtol=1e-5)
    assert [(types[0].shape, types[1].shape) for _, _, types, _ in records] == [((2, T, 2, D), (2, T, 1, D))] * 2


def test_without_a_mesh_in_use():
    """Arrays alone say how they are sharded; the partitioner is asked."""
    mesh = mesh_of(AUTO)
    spec = P("data", None, "model")
    want = jax.jit(passes(causal))(*arrays())
    with partitioned_on_cpus() as records:
        got = jax.jit(passes(causal))(*sharded(mesh, arrays(), (spec,) * 4 + (P("data"),)))
    assert_close(jax.device_get(got), want, rtol=1e-5)
    assert [types[0].shape for _, _, types, _ in records] == [(2, T, 2, D)] * 2


@KINDS
def test_fsdp(kind):
    """Weights that are sharded by the axis of the batch are gathered, and attention's arrays are not."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((B, T, 24)), jnp.float32)
    weights = [jnp.asarray(rng.standard_normal((24, n, D)), jnp.float32) / 5 for n in (H, 4, 4)]

    def loss(weights, x):
        on_each = [jax.sharding.reshard(w, P()) for w in weights] if kind is EXPLICIT else weights
        return jnp.sum(jnp.sin(coda.attention(*(jnp.einsum("btd,dnh->btnh", x, w) for w in on_each), is_causal=True)))

    want = jax.jit(jax.grad(loss))(weights, x) if kind is AUTO else None
    mesh = mesh_of(kind, 4, 1)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = sharded(mesh, weights, [P("data")] * 3), *sharded(mesh, [x], [P("data")])
        compiled = jax.jit(jax.grad(loss)).lower(*placed).compile()
        got = compiled(*placed)
    if want is not None:
        assert_close(jax.device_get(got), want, rtol=1e-5)
    assert [types[0].shape for _, _, types, _ in records] == [(1, T, H, D)] * 2
    gathered = re.findall(r"= \(?f32\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert gathered and not [x for x in gathered if x.startswith(f"{B},{T}")]


@KINDS
def test_a_batch_of_vmap(kind):
    several = [jnp.stack([x, x[::-1]]) for x in arrays()]
    specs = [P(None, "data", None, "model")] * 4 + [P(None, "data")]
    compare(jax.vmap(passes(causal)), several, specs, kind)


@KINDS
def test_kernels_of_several_devices_leave_room_for_collectives(kind, monkeypatch):
    launches = stand_in(monkeypatch)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        types = [
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None, "model")))
            for x in arrays()[:3]
        ]
        jax.jit(functools.partial(coda.attention, is_causal=True)).trace(*types).lower(lowering_platforms=("cuda",))
    # Over automatic axes the partitioner asks for the kernels when it compiles.
    assert launches == ([True] if kind is EXPLICIT else [])


def kernel_types(mesh, of_queries, of_keys, rows=T):
    """Types of q, k, v, dy and ids, which the kernels take."""
    shapes = [(B, rows, heads, D) for heads in (H, 4, 4, H)]
    specs = [of_queries, of_keys, of_keys, of_queries]
    types = [
        jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=NamedSharding(mesh, y))
        for x, y in zip(shapes, specs, strict=True)
    ]
    return [*types, jax.ShapeDtypeStruct((B, rows), jnp.int32, sharding=NamedSharding(mesh, P("data")))]


def for_gpus(function, types):
    return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))


@needs_nvrtc
@pytest.mark.parametrize("is_checked", [True, False])
def test_kernels_inside_shard_map(monkeypatch, is_checked):
    """Their results, and what is computed for their masks, vary over the mesh axes over which the arrays do."""
    monkeypatch.setattr(ffi, "compile_async", lambda source, name, arch: None)
    mesh, spec = mesh_of(EXPLICIT), P("data", None, "model")
    specs = (*(spec,) * 4, P("data"))
    with jax.set_mesh(mesh):
        on_each = jax.shard_map(passes(causal), in_specs=specs, out_specs=(spec,) * 5, check_vma=is_checked)
        text = for_gpus(on_each, kernel_types(mesh, spec, spec)).as_text()
    assert text.count("@coda_launch(") == 4  # the forward pass, and three of the backward pass


@needs_nvrtc
@pytest.mark.smoke
def test_kernels_that_the_partitioner_asks_for(monkeypatch, tmp_path):
    """They say their time after partitioning, each that of a device's part, and yield to collectives."""
    monkeypatch.setattr(ffi, "compile_async", lambda source, name, arch: None)
    told, original = [], kernel.forward

    def forward(*arrays, spec, yields):
        told.append(yields)
        return original(*arrays, spec=spec, yields=yields)

    monkeypatch.setattr(kernel, "forward", forward)
    mesh, spec = mesh_of(AUTO), P("data", None, "model")
    lowered = for_gpus(passes(causal), kernel_types(mesh, spec, spec, rows=1024))
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
    with pytest.raises(jax.errors.JaxRuntimeError, match="No FFI handler registered for coda_launch"):  # on CPUs
        lowered.compile(compiler_options=dump)
    (after,) = tmp_path.glob("*.after_spmd-partitioning.*.txt")
    calls = [line for line in after.read_text().splitlines() if 'custom_call_target="coda_launch"' in line]
    first, *others = [int(x) for line in calls for x in re.findall(r'latency_metadata="(\d+)"', line)]
    pairs = costs.pairs(MaskSpec(right=0, has_ids=True), 1024, 1024) * B * H / mesh.size
    results, backward_results = 3, 2 + 4  # which are taken of calls that have several, beside the calls
    assert first * (1 + results) == pytest.approx(pairs * 4 * D / 500e3, rel=0.2)
    assert others == [others[0]] * 3
    assert others[0] * (3 + backward_results) == pytest.approx(pairs * 10 * D / 430e3, rel=0.2)
    assert told == [True]


def test_on_a_mesh_without_devices(monkeypatch):
    """Explicit axes need none."""
    launches = stand_in(monkeypatch)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), (EXPLICIT,) * 2)
    spec = P("data", None, "model")
    with jax.sharding.use_abstract_mesh(mesh):
        text = for_gpus(passes(causal), kernel_types(mesh, spec, spec)).as_text()
    assert text.count("@coda_launch(") == 2 and launches == [True, True]


def test_sums_of_gradients_are_sent_as_products_send_theirs(monkeypatch):
    """bfloat16 as such, and float16 as float32."""
    stand_in(monkeypatch)
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        for dtype, sent in ((jnp.bfloat16, "bf16"), (jnp.float16, "f32")):
            types = kernel_types(mesh, P("data", "model"), P("data"))
            types = [x if x.dtype == jnp.int32 else x.update(dtype=dtype) for x in types]
            text = for_gpus(passes(causal), types).as_text()
            sums = re.findall(r'"stablehlo.all_reduce".*?\}\) : \(tensor<[\dx]*x(\w+)>\)', text, re.DOTALL)
            assert sums == [sent] * 2, text


def gated(s, gates, of_rows, of_keys, factor):
    """A score of heads, rows and positions: each device has its own of them; and what all devices share."""
    row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    head = jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    score = s * jnp.tanh(gates)[:, None, None] - 0.1 * head * jnp.abs(row - key) * factor + of_rows[..., None] + of_keys
    return jnp.where((row >= key) & ((row // 5 == key // 5) | (key < 3)), score, -jnp.inf)


@KINDS
@pytest.mark.parametrize("name", SCHEMES)
def test_scores(kind, name):
    """Positions are those of the whole arrays, and gradients of what a score reads are sums over devices."""
    scheme, rng = SCHEMES[name], np.random.default_rng(0)
    shapes = ((H,), (B, H, T), (T,), ())
    operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def run(q, k, v, dy, *operands):
        attend = lambda q, k, v, *x: coda.attention(q, k, v, score=gated, operands=x)  # noqa: E731
        y, pullback = jax.vjp(attend, q, k, v, *operands)
        return y, *pullback(dy)

    heads, rows = scheme.of_queries[2], scheme.of_queries[1]
    specs = [*scheme.arguments[:4], P(heads), P(scheme.of_queries[0], heads, rows), P(), P()]
    parts, _, _ = compare(run, [*arrays()[:4], *operands], specs, kind)
    assert [x[:2] for x in parts] == [tuple(scheme.parts)] * 2


def with_tables(s, of_distances, of_patches):
    """A table by distance of each head, and one of no distance that all heads share."""
    row, key = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
    by_distance = of_distances[jnp.clip(key - row + 6, 0, 11)].transpose(2, 0, 1)
    return s + by_distance * of_patches[row // 4 * 4 + key // 4]


@KINDS
@pytest.mark.parametrize("name", SCHEMES)
def test_tables_of_scores(kind, name):
    """Heads of a table are cut with heads, its entries never; indices are of positions in the whole arrays."""
    scheme, rng = SCHEMES[name], np.random.default_rng(1)
    operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((12, H), (16,))]

    def run(q, k, v, dy, *operands):
        attend = lambda q, k, v, *x: coda.attention(q, k, v, score=with_tables, operands=x)  # noqa: E731
        y, pullback = jax.vjp(attend, q, k, v, *operands)
        return y, *pullback(dy)

    specs = [*scheme.arguments[:4], P(None, scheme.of_queries[2]), P()]
    parts, _, _ = compare(run, [*arrays()[:4], *operands], specs, kind)
    assert [x[:2] for x in parts] == [tuple(scheme.parts)] * 2
