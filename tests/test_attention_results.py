"""Maps of attention's result that its kernel makes beside it, in a block: which they are, values, gradients, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from benchmarks.lab.machine_code import resource_usage
from benchmarks.sharded_step import collectives
from coda_jax import ffi
from coda_jax.attend import kernel
from coda_jax.attend.primitive import _bind, attention_forward_p, forward_primitives
from coda_jax.attend.results import unsupported
from coda_jax.attend.spec import AttentionSpec, MaskSpec
from coda_jax.epilogue import trace
from coda_jax.graph import plan
from coda_jax.jaxprs.walk import equations_of
from coda_jax.tiles.arch import SM90
from tests.attention_cases import EPILOGUES, results_of
from tests.attention_on_cpus import partitioned_on_cpus
from tests.block_cases import thirds
from tests.nvrtc import needs_nvrtc
from tests.test_block_fp8 import distance

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, T, H, D = 4, 16, 4, 8
E4M3 = np.dtype(jnp.float8_e4m3fn)
DELAYED, CURRENT = coda.fp8.Recipe(scaling="delayed", history=2), coda.fp8.Recipe()


def attention(q, k, v, **options):
    heads = (y.reshape(*y.shape[:-1], H, D) for y in (q, k, v))
    return coda.attention(*heads, is_causal=True, **options).reshape(q.shape)


def lines(x, qkv, out, history, recipe=DELAYED, attend=attention):
    q, k, v = (x @ qkv).map(thirds)
    return x + coda.opaque(attend, q, k, v).matmul(out, fp8=recipe, history=history)


def block(**options):
    """A new one, which has planned nothing yet."""
    return coda.block(name="attended", dtype=jnp.bfloat16)(functools.partial(lines, **options))


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, H * D), (H * D, 3 * H * D), (H * D, H * D)
    x, qkv, out = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x.astype(jnp.bfloat16), qkv / 4, out / 4, jnp.full((2, 2), 3.0)


def gradients(function):
    def loss(*arrays):
        return jnp.sum(jnp.sin(function(*arrays).astype(jnp.float32)))

    return jax.value_and_grad(loss, (0, 1, 2, 3))


def forward_specs(function, *arrays):
    found, _ = equations_of(function, *arrays)
    return [one.params["spec"] for one, times in found if one.primitive in forward_primitives for _ in range(times)]


@pytest.fixture
def in_passes(monkeypatch):
    """Puts passes of XLA's in the place of what the kernel makes."""

    def instead():
        monkeypatch.setattr(plan, "is_attended", lambda y: False)

    return instead


def assert_same_bits(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.smoke
def test_copies_for_a_product_in_8_bits_are_made_beside_y(arrays):
    """With y, which the backward pass reads, and without it where nobody reads it."""
    (spec,) = forward_specs(gradients(block()), *arrays)
    assert [x.transposed for x in spec.results.program.stores] == [False, True] and spec.results.keeps_y
    assert spec.results.dtypes == (E4M3, E4M3) and len(spec.results.program.reductions) == 1
    (spec,) = forward_specs(block(), *arrays)
    assert [x.transposed for x in spec.results.program.stores] == [False] and not spec.results.keeps_y


def test_explain_leaves_no_pass_between_attention_and_the_product(arrays, in_passes):
    def between():
        found = coda.explain(gradients(block()), *arrays, platform="cuda", device="NVIDIA H100 80GB HBM3")
        return [x for x in found.passes if "attention" in x.after and not x.is_backward]

    assert not between()
    in_passes()
    assert between()


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_values_and_gradients_are_bit_for_bit_those_of_passes(arrays, recipe, in_passes):
    function = gradients(block(recipe=recipe))
    (spec,) = forward_specs(function, *arrays)
    assert [len(spec.results.dtypes), len(spec.results.program.reductions)] == ([2, 1] if recipe is DELAYED else [0, 1])
    found = jax.jit(function)(*arrays)
    in_passes()
    assert_same_bits(found, jax.jit(gradients(block(recipe=recipe)))(*arrays))


def test_batches_are_those_of_passes(arrays, in_passes):
    def run():
        more = jnp.stack([arrays[0], arrays[0] * 2])
        return jax.jit(jax.vmap(gradients(block()), in_axes=(0, None, None, None)))(more, *arrays[1:])

    found = run()
    in_passes()
    assert_same_bits(found, run())


def test_second_derivatives_are_those_of_passes(arrays, in_passes):
    """A map in 16 bits, whose product has a second derivative."""

    def lines(x, qkv, out):
        q, k, v = (x @ qkv).map(thirds)
        return coda.opaque(attention, q, k, v).map(jnp.tanh) @ out

    def second():
        function = coda.block(lines, dtype=jnp.bfloat16)
        (spec,) = forward_specs(function, *arrays[:3])
        first = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x).astype(jnp.float32))), 1)
        return spec.results, jax.jit(jax.grad(lambda *x: jnp.sum(first(*x) ** 2), (0, 1, 2)))(*arrays[:3])

    results, found = second()
    assert results.dtypes == (jnp.bfloat16,) and not results.keeps_y
    in_passes()
    results, expected = second()
    assert results is None
    for x, y in zip(found, expected, strict=True):  # XLA keeps more than 16 bits in other places
        assert distance(x, y) < 0.01


def test_a_checkpoint_runs_attention_no_more_often(arrays, in_passes):
    def step(names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return gradients(jax.checkpoint(block(), policy=policy))

    def counts():
        return [len(forward_specs(step(names), *arrays)) for names in ((), ("context",))]

    found, values = counts(), jax.jit(step(("context",)))(*arrays)
    in_passes()
    assert found == counts() == [2, 1]
    assert_same_bits(values, jax.jit(step(("context",)))(*arrays))


def test_another_reader_keeps_y(arrays):
    def lines(x, out, history):
        y = coda.opaque(attention, x, x, x)
        return y.matmul(out, fp8=DELAYED, history=history) + y

    (spec,) = forward_specs(coda.block(lines), arrays[0], *arrays[2:])
    assert spec.results.keeps_y and spec.results.dtypes == (E4M3,)


@pytest.mark.parametrize("option", ["xla", "scaled behind", "sum behind"])
def test_kernel_makes_maps_of_its_own_result_alone(arrays, option):
    """Attention by XLA, and an array that is no view of attention's result."""

    def attend(q, k, v):
        y = attention(q, k, v, implementation="xla" if option == "xla" else None)
        return y if option == "xla" else y * 2 if option == "scaled behind" else y + v

    (spec,) = forward_specs(block(attend=attend), *arrays)
    assert spec.results is None


# ---- meshes


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])


SCHEMES = {"sequences and heads": ("data", None, "model"), "queries": (None, "data", None)}


@pytest.mark.parametrize("name", SCHEMES)
def test_each_device_of_an_automatic_mesh_makes_its_own_part(name):
    """Values are those of one device; nothing is gathered but keys, and the maxima are those of all devices."""
    batch, rows, heads = SCHEMES[name]
    results, scale = results_of("copies_in_8_bits", B * T, H * D), jnp.float32(16)
    spec = AttentionSpec(MaskSpec(right=0), 0.5, results=results)
    q, k, v = (jax.random.normal(key, (B, T, H, D), jnp.bfloat16) for key in jax.random.split(jax.random.key(1), 3))

    def attended(q, k, v, scale):
        made = _bind(attention_forward_p, q, k, v, scale, spec=spec)
        return made[0], *results.outputs(made[2:], [scale], q.shape)  # sums of the log-sum-exp have another order

    expected = jax.jit(attended)(q, k, v, scale)
    mesh = mesh_of(AxisType.Auto)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        of_queries = NamedSharding(mesh, P(batch, rows, heads, None))
        placed = [jax.device_put(x, of_queries) for x in (q, k, v)]
        compiled = jax.jit(attended).lower(*placed, scale).compile()
        found = compiled(*placed, scale)
    (record,) = records
    sizes = {None: 1, "data": 2, "model": 2}
    assert record[2][0].shape == (B // sizes[batch], T // sizes[rows], H // sizes[heads], D)
    moved = set(collectives(compiled.as_text()))
    assert moved == ({"all-reduce"} if rows is None else {"all-gather", "all-reduce"}), moved
    assert_same_bits(jax.device_get(found), expected)


def test_explicit_axes_have_passes(arrays):
    mesh = mesh_of(AxisType.Explicit)
    expected = jax.jit(gradients(block()))(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(arrays[0], NamedSharding(mesh, P("data"))), *arrays[1:]]
        found = jax.jit(gradients(block()))(*placed)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.05, atol=0.2)


# ---- what the kernel takes


def program_of(function, *scalars):
    types = [jax.ShapeDtypeStruct(np.shape(x), np.float32) for x in scalars]
    return trace(function, jax.ShapeDtypeStruct((64, 32), np.float32), types)[0].program


UNSUPPORTED = {
    "it reads a row_vector beside scalars": (lambda y, b: y + b, [np.zeros(32)], np.float32),
    "it reads the position of an element": (lambda y: y + jnp.arange(32.0), [], np.float32),
    "it has a reduction other than the maximum of all elements": (lambda y: (y, jnp.sum(y, axis=1)), [], np.float32),
    "it stores bfloat16 transposed": (lambda y: y.T, [], jnp.bfloat16),
    "it stores in contraction order": (
        lambda y: coda.contraction_order(coda.saturate(y, E4M3)),
        [],
        E4M3,
    ),
    "it takes columns apart, or reduces heads": (lambda y: jnp.split(y, 2, axis=1)[0], [], np.float32),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_result_maps_have_a_reason(reason):
    function, operands, dtype = UNSUPPORTED[reason]
    program = program_of(function, *operands)
    assert unsupported(program, [np.dtype(dtype)] * len(program.stores)) == reason


def compiled(monkeypatch, width, length, results=None):
    """The resources of the forward kernel, and the source."""
    sources = []

    def launched(arrays, types, call):
        sources.append(call.source)
        return [jnp.zeros(x.shape, x.dtype) for x in types]

    monkeypatch.setattr(kernel, "_launched", launched)
    types = [jax.ShapeDtypeStruct((2, length, heads, width), jnp.bfloat16) for heads in (4, 2, 2)]
    scalars = [] if results is None else [jax.ShapeDtypeStruct((), np.float32)] * results.count
    spec = AttentionSpec(MaskSpec(right=0), 0.125, results=results)
    made = jax.eval_shape(functools.partial(kernel.forward, spec=spec), *types, *scalars)
    return sources[0], made


def test_transposed_rows_are_of_whole_16_bytes(monkeypatch):
    """Other lengths have passes behind the kernel, which is the one without results."""
    of_8_bits = results_of("copies_in_8_bits", 2 * 200, 4 * 64)
    source, made = compiled(monkeypatch, 64, 200, of_8_bits)
    assert "struct Epilogue" not in source and source == compiled(monkeypatch, 64, 200)[0]
    assert [x.shape for x in made[2:]] == [(2, 200, 4, 64), (4, 64, 2, 200), ()]


@needs_nvrtc
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", EPILOGUES)
def test_results_take_no_registers_of_the_loop(monkeypatch, name, width):
    if name == "in_many_dtypes" and width == 128:
        pytest.skip("those of 64 and of 256 are seen")
    usages = []
    for results in (None, results_of(name, 2 * 4096, 4 * width)):
        source, _ = compiled(monkeypatch, width, 4096, results)
        log = ffi.compile(source, "attention", SM90.target).log
        assert "serialized" not in log
        usages.append(resource_usage(log))
    plain, beside = usages
    assert beside.registers == plain.registers
    assert beside.spilled_bytes <= plain.spilled_bytes + (32 if name == "in_many_dtypes" and width == 256 else 0)
