"""The custom calls: their text, what XLA makes of them, and the geometry that the handler computes from a product's.

The stages that need no GPU run through XLA's CPU backend, where the handlers are registered under names of their own.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from tests.ffi_functions import DTYPES, Functions
from tests.nvrtc import needs_nvrtc

SOURCE = 'extern "C" __global__ void coda_gemm(float* x) { x[threadIdx.x] *= 2; }'
M, N, K = 256, 192, 64


def product(a, b, *, aliases=None, source=SOURCE, pointers=(2,)):
    m = a.shape[0]
    call = ffi.GemmCall(
        name="gemm[test]",
        source=source,
        arch=SM90.target,
        maps=[0, 1, 0, 64, 128, 128, 1, 1, 0, 64, 64, 128],
        pointers=pointers,
        transpose_a=False,
        transpose_b=True,
        tile_m=128,
        tile_n=192,
        halves=1,
        cluster_m=2,
        threads=384,
        smem_bytes=200_000,
    )
    args = [a, b] if aliases is None else [a, b, jnp.zeros((m, N), jnp.bfloat16)]
    return ffi.gemm_call(args, [jax.ShapeDtypeStruct((m, N), jnp.bfloat16)], call, input_output_aliases=aliases)[0]


ATTENTION = 'extern "C" __global__ void coda_attention(float* x) { x[threadIdx.x] *= 2; }'


def launch(q, *, source=ATTENTION, aliases=None):
    call = ffi.LaunchCall(
        name="attention[test]",
        source=source,
        arch=SM90.target,
        grid=[0, 1, 128, 0, 2, 1],
        threads=384,
        smem_bytes=100_000,
        maps=[0, 64, 128, 1, 64, 64],
        pointers=[1, -1],
        sizes=[0, 1],
        words=[-7, 2**31 - 1],
        zeroed=[1],
    )
    return ffi.launch_call([q], [jax.ShapeDtypeStruct(q.shape, q.dtype)], call, input_output_aliases=aliases)[0]


Q = jax.ShapeDtypeStruct((2, 200, 4, 64), jnp.bfloat16)
A = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
B = jax.ShapeDtypeStruct((N, K), jnp.bfloat16)


def cuda_text(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("call", "types", "target"), [(product, (A, B), "coda_gemm"), (launch, (Q,), "coda_launch")])
def test_both_sides_name_the_same_attributes(call, types, target):
    """XLA hands them over sorted by name, as the handler reads them."""
    (equation,) = jax.make_jaxpr(call)(*types).eqns
    assert equation.params["target_name"] == target
    assert tuple(sorted(dict(equation.params["attributes"]))) == ffi._ffi.ATTRIBUTES[target]


def test_custom_call_carries_everything():
    text = cuda_text(product, A, B)
    assert "stablehlo.custom_call @coda_gemm(%arg0, %arg1)" in text
    for attribute in (
        f"abi = {ffi.ABI} : i32",
        'arch = "sm_90a"',
        f'headers = "{ffi.headers_hash()}"',
        f'key = "{ffi.kernel_key(SOURCE, SM90.target)}"',
        'name = "gemm[test]"',
        "maps = dense<[0, 1, 0, 64, 128, 128, 1, 1, 0, 64, 64, 128]> : tensor<12xi32>",
        "pointers = dense<2> : tensor<1xi32>",
        "transpose_a = false",
        "transpose_b = true",
        "tile_m = 128 : i32",
        "tile_n = 192 : i32",
        "halves = 1 : i32",
        "cluster_m = 2 : i32",
        "threads = 384 : i32",
        "smem_bytes = 200000 : i32",
        "flags = -1 : i32",
        "coda_gemm(float* x)",
    ):
        assert attribute in text, attribute


def test_launch_carries_everything():
    text = cuda_text(launch, Q)
    assert "stablehlo.custom_call @coda_launch(%arg0)" in text
    for attribute in (
        f"abi = {ffi.ABI} : i32",
        'arch = "sm_90a"',
        f'headers = "{ffi.headers_hash()}"',
        f'key = "{ffi.kernel_key(ATTENTION, SM90.target)}"',
        'name = "attention[test]"',
        "grid = dense<[0, 1, 128, 0, 2, 1]> : tensor<6xi32>",
        "maps = dense<[0, 64, 128, 1, 64, 64]> : tensor<6xi32>",
        "pointers = dense<[1, -1]> : tensor<2xi32>",
        "sizes = dense<[0, 1]> : tensor<2xi32>",
        "words = dense<[-7, 2147483647]> : tensor<2xi32>",
        "zeroed = dense<1> : tensor<1xi32>",
        "overlaps = false",
        "threads = 384 : i32",
        "smem_bytes = 100000 : i32",
        "coda_attention(float* x)",
    ):
        assert attribute in text, attribute


def test_alias_is_in_the_call():
    text = cuda_text(functools.partial(product, aliases={2: 0}), A, B)
    assert "operand_index = 2" in text
    assert "operand_index = 0" in cuda_text(functools.partial(launch, aliases={0: 0}), Q)


@pytest.mark.parametrize("length", [0, 1, 55, 56, 64, 120, 4000])
def test_key_is_a_digest_of_all_that_a_kernel_is_made_from(length):
    """Exported programs carry it: another digest would be refused."""
    source = "é" + "x" * length
    digest = hashlib.sha256()
    for part in (str(ffi.ABI), ffi.headers_hash(), *ffi._OPTIONS, SM90.target, source):
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    assert ffi.kernel_key(source, SM90.target) == digest.hexdigest()


def test_key_is_the_same_where_kernels_are_dumped(tmp_path, monkeypatch):
    """An export may run where somebody looks at its kernels, though they have line information then."""
    key = ffi.kernel_key(SOURCE, SM90.target)
    monkeypatch.setenv("CODA_JAX_DUMP_DIR", str(tmp_path))
    ffi._configure()
    assert ffi.kernel_key(SOURCE, SM90.target) == key
    monkeypatch.undo()
    ffi._configure()


def test_export_for_cuda_from_any_host():
    check = [export.DisabledSafetyCheck.custom_call("coda_gemm")]
    exported = export.export(jax.jit(product), platforms=["cuda"], disabled_checks=check)(A, B)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert "coda_gemm" in again.mlir_module()


def test_export_with_a_symbolic_size():
    (m,) = export.symbolic_shape("m")
    check = [export.DisabledSafetyCheck.custom_call("coda_gemm")]
    a = jax.ShapeDtypeStruct((m, K), jnp.bfloat16)
    exported = export.export(jax.jit(product), platforms=["cuda"], disabled_checks=check)(a, B)
    assert exported.out_avals[0].shape == (m, N)


@pytest.fixture
def on_cpu(monkeypatch):
    """Routes both calls to the CPU backend: instantiate runs there, initialize and execute want a GPU."""
    for variable in ("TARGET", "LAUNCH_TARGET"):
        target = getattr(ffi, variable)
        jax.ffi.register_ffi_target(f"{target}_on_cpu", ffi._ffi.handlers()[target], platform="cpu")
        monkeypatch.setattr(ffi, variable, f"{target}_on_cpu")


@needs_nvrtc
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("pointers", [(), (2,), (2, 0, 1)])
def test_instantiate_compiles_by_itself(pointers):
    jax.jit(functools.partial(product, pointers=pointers)).lower(A, B).compile()


@needs_nvrtc
@pytest.mark.usefixtures("on_cpu")
def test_instantiate_compiles_a_launch():
    """An error of the compiler shows that it does; the kernel itself compiles."""
    jax.jit(lambda q: launch(q)).lower(Q).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"attention\[test\].*\n.*undeclared"):
        jax.jit(functools.partial(launch, source="int x = undeclared;")).lower(Q).compile()
    with pytest.raises(jax.errors.JaxRuntimeError):  # there is no GPU
        jax.jit(lambda q: launch(q))(jnp.ones(Q.shape, Q.dtype)).block_until_ready()


@needs_nvrtc
@pytest.mark.usefixtures("on_cpu")
def test_compile_error_reaches_the_user_with_the_operators_name():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"gemm\[test\].*\n.*undeclared"):
        jax.jit(functools.partial(product, source="int x = undeclared;")).lower(A, B).compile()


@needs_nvrtc
@pytest.mark.usefixtures("on_cpu")
def test_program_of_another_version_is_refused(monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(ffi, "ABI", 77)
        lowered = jax.jit(lambda a, b: product(a, b)).lower(A, B)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"program ABI 77\).*program ABI {ffi.ABI}\. Export it again"):
        lowered.compile()
    here = ffi.headers_hash()
    with monkeypatch.context() as other:
        other.setattr(ffi, "headers_hash", lambda: "0123456789abcdef")
        lowered = jax.jit(lambda a, b: product(a, b, source=SOURCE + "// of other headers")).lower(A, B)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"headers 0123456789abcdef.*headers {here}"):
        lowered.compile()


@needs_nvrtc
@pytest.mark.usefixtures("on_cpu")
def test_kernel_under_another_kernels_key_is_refused(monkeypatch):
    """Else the honest program would run it, now and, from the disk, later."""
    honest, other = SOURCE.replace("2", "2.5f"), SOURCE.replace("2", "3.5f")
    key = ffi.kernel_key(honest, SM90.target)
    with monkeypatch.context() as forged:
        forged.setattr(ffi, "kernel_key", lambda source, arch: key)
        lowered = jax.jit(lambda a, b: product(a, b, source=other)).lower(A, B)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"gemm\[test\]: .* key {key} is not that of its source"):
        lowered.compile()
    assert ffi.compile(honest, "gemm[test]", SM90.target).cubin != ffi.compile(other, "gemm[test]", SM90.target).cubin
    jax.jit(lambda a, b: product(a, b, source=honest)).lower(A, B).compile()


@needs_nvrtc
@pytest.mark.usefixtures("on_cpu")
def test_without_a_gpu_execution_is_an_error_and_no_crash():
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(lambda a, b: product(a, b))(jnp.ones(A.shape, A.dtype), jnp.ones(B.shape, B.dtype)).block_until_ready()


BF16, F16, F32, FP8, E5M2 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    return Functions(tmp_path_factory.mktemp("functions"))


@pytest.fixture
def describe_map(functions):
    return functions.map_layout


@pytest.mark.parametrize(
    ("map_", "dtype", "dims", "expected_dims", "expected_strides", "box"),
    [
        # buffer, halves, split_rows, box_columns, box_rows, swizzle
        ((0, 1, 0, 64, 128, 128), BF16, (300, 72), (72, 1, 300, 1), (144, 144, 43200), (64, 1, 128, 1)),
        ((0, 1, 0, 32, 128, 128), F32, (5, 300, 72), (72, 1, 300, 5), (288, 288, 86400), (32, 1, 128, 1)),
        # b (K, 2F) split by columns: the up half starts F elements behind the gate half
        ((1, 2, 0, 64, 64, 128), F16, (64, 2 * 72), (72, 2, 64, 1), (144, 288, 18432), (64, 1, 64, 1)),
        # b (2F, K) split by rows: F rows behind
        ((1, 2, 1, 64, 64, 128), BF16, (2 * 72, 64), (64, 2, 72, 1), (72 * 128, 128, 144 * 128), (64, 1, 64, 1)),
        ((1, 2, 1, 64, 64, 128), BF16, (3, 144, 64), (64, 2, 72, 3), (72 * 128, 128, 144 * 128), (64, 1, 64, 1)),
        # strides along dimensions of 1 are rounded up
        ((0, 1, 0, 128, 64, 128), FP8, (300, 144), (144, 1, 300, 1), (144, 144, 43200), (128, 1, 64, 1)),
        ((1, 2, 1, 128, 64, 128), E5M2, (2 * 72, 64), (64, 2, 72, 1), (72 * 64, 64, 144 * 64), (128, 1, 64, 1)),
        ((0, 1, 0, 8, 1, 32), BF16, (1, 4), (4, 1, 1, 1), (16, 16, 16), (8, 1, 1, 1)),
        # no halves: (batch, rows, heads, columns)
        ((2, 0, 0, 64, 128, 128), BF16, (2, 300, 5, 72), (72, 5, 300, 2), (144, 720, 216000), (64, 1, 128, 1)),
        ((2, 0, 0, 64, 128, 128), F16, (1, 300, 1, 64), (64, 1, 300, 1), (128, 128, 38400), (64, 1, 128, 1)),
        ((2, 0, 0, 32, 64, 128), F32, (2, 300, 5, 32), (32, 5, 300, 2), (128, 640, 192000), (32, 1, 64, 1)),
    ],
)
def test_tensor_map(describe_map, map_, dtype, dims, expected_dims, expected_strides, box):
    layout = describe_map(map_, dtype, dims)
    assert tuple(layout.dims) == expected_dims
    assert tuple(layout.strides_bytes) == expected_strides
    assert tuple(layout.box) == box
    assert layout.type == {FP8: 0, E5M2: 0, F16: 6, F32: 7, BF16: 9}[dtype]
    assert layout.swizzle == {32: 1, 128: 3}[map_[5]]


@pytest.mark.parametrize("split_rows", [0, 1])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("dims", [(48, 64), (3, 48, 64)])
def test_tensor_map_addresses_every_element(describe_map, halves, split_rows, dims):
    """The map's (column, way, row, batch) order is that of the reshaped array."""
    layout = describe_map((0, halves, split_rows, 8, 8, 0), F32, dims)
    batch, rows, columns = (1, *dims)[-3:]
    array = np.arange(batch * rows * columns)
    if split_rows:
        expected = array.reshape(batch, halves, rows // halves, columns).transpose(3, 1, 2, 0)
    else:
        expected = array.reshape(batch, rows, halves, columns // halves).transpose(3, 2, 1, 0)
    np.testing.assert_array_equal(addressed(layout), expected)


def test_tensor_map_of_heads_addresses_every_element(describe_map):
    """The map's (column, head, row, batch) order is that of the transposed array."""
    dims = (3, 48, 5, 8)
    expected = np.arange(np.prod(dims)).reshape(dims).transpose(3, 2, 1, 0)
    np.testing.assert_array_equal(addressed(describe_map((0, 0, 0, 32, 8, 128), F32, dims)), expected)


def addressed(layout):
    """The number of the float32 that stands at each index of the map."""
    index = np.indices(tuple(layout.dims))
    return sum(i * s for i, s in zip(index, (4, *layout.strides_bytes), strict=True)) // 4


@pytest.mark.parametrize(
    ("map_", "dtype", "dims", "message"),
    [
        (
            (3, 1, 0, 8, 8, 0),
            BF16,
            (8, 50257),
            r"buffer 3 bf16\[8,50257\]: its row pitch, 100514 bytes, .*multiple of 16",
        ),
        ((1, 2, 0, 8, 8, 0), BF16, (8, 24), r"distance of its halves, 24 bytes"),
        ((1, 2, 0, 8, 8, 0), BF16, (8, 25), r"25 columns do not split into 2"),
        ((1, 2, 1, 8, 8, 0), BF16, (7, 8), r"7 rows do not split into 2"),
        ((0, 1, 0, 8, 8, 0), "int32", (8, 8), r"s32\[8,8\]: a tensor map needs one of bf16, f16, f32"),
        ((0, 1, 0, 8, 8, 0), BF16, (8,), r"rank 2 or 3"),
        ((0, 1, 0, 8, 8, 48), BF16, (8, 8), r"swizzle of 48 bytes"),
        ((0, 1, 0, 64, 8, 128), BF16, (2, 8, 4, 64), r"rank 2 or 3"),
        ((3, 0, 0, 64, 8, 128), BF16, (2, 8, 256), r"buffer 3 bf16\[2,8,256\]: a tensor map of heads needs rank 4"),
        (
            (3, 0, 0, 64, 8, 128),
            BF16,
            (2, 8, 4, 36),
            r"bf16\[2,8,4,36\]: the distance of its heads, 72 bytes, .* of 16",
        ),
        ((3, 0, 0, 64, 8, 128), BF16, (2, 8, 1, 36), r"its row pitch, 72 bytes"),
        ((3, 0, 0, 32, 8, 128), BF16, (2, 8, 4, 64), r"a row of a box has 32 columns, not 128 bytes"),
        ((3, 0, 0, 64, 8, 128), BF16, (2, 8, 0, 64), r"0 columns do not split into 0"),
        ((3, -1, 0, 64, 8, 128), BF16, (8, 64), r"64 columns do not split into -1"),
        ((3, 0, 0, 64, 8, 128), "int32", (2, 8, 4, 64), r"s32\[2,8,4,64\]: a tensor map needs one of bf16, f16, f32"),
    ],
)
def test_tensor_map_refused(describe_map, map_, dtype, dims, message):
    with pytest.raises(ValueError, match=message):
        describe_map(map_, dtype, dims)


@pytest.fixture
def geometry(functions):
    def of(a, b, transpose_a=False, transpose_b=False, **options):
        given = {
            "tile": (128, 128),
            "halves": 1,
            "cluster_m": 2,
            "flags": -1,
            "yields": 0,
            "multiprocessors": 132,
            "dtype": BF16,
            **options,
        }
        given["dtype"] = DTYPES[given["dtype"]]
        batch = () if given.pop("rows_in_groups", False) else given.pop("batch", max(a, b, key=len)[:-2])
        return functions.geometry(a, b, (*batch, 1, 1), (transpose_a, transpose_b, *given.pop("tile"), *given.values()))

    return of


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_sizes_are_read_off_the_operands(geometry, transpose_a, transpose_b):
    a, b = ((40, 300) if transpose_a else (300, 40)), ((200, 40) if transpose_b else (40, 200))
    for batch in ((), (5,)):
        sizes = geometry(batch + a, batch + b, transpose_a, transpose_b)
        assert (sizes.m, sizes.n, sizes.k, sizes.batch) == (300, 200, 40, 5 if batch else 1)
    assert geometry((5, *a), b, transpose_a, transpose_b).batch == 5  # a shared b
    assert geometry(a, (5, *b), transpose_a, transpose_b).batch == 5  # a shared a
    # Neither factor has the batch, only the epilogue's operands have.
    assert geometry(a, b, transpose_a, transpose_b, batch=(5,)).batch == 5


@pytest.mark.parametrize(
    ("a", "b", "options", "clusters", "blocks"),
    [
        ((256, 64), (64, 256), {}, 2, 4),
        ((257, 64), (64, 264), {}, 2 * 3, 12),  # 3 tiles of rows make 2 clusters; 3 tiles of columns
        ((128, 64), (64, 2 * 72), {"halves": 2}, 2, 4),  # 72 columns a half, 64 of a tile's 128
        ((16384, 64), (64, 4096), {}, 64 * 32, 132),  # persistent: as many clusters as fit
        ((16384, 64), (64, 4096), {"multiprocessors": 133}, 64 * 32, 132),
        ((16384, 640), (640, 4096), {"yields": 155}, 64 * 32, 264),  # 310 k blocks each: two blocks, in turn
        ((16384, 640), (640, 4096), {"yields": 311}, 64 * 32, 132),
        ((16384, 640), (640, 4096), {"yields": 1}, 64 * 32, 2 * 64 * 32),  # no more than there are tiles
        ((16384, 640), (640, 4096), {"flags": 3}, 64 * 32, 132),  # split-K counts on all of its blocks
        ((16384, 640), (640, 4096), {"yields": 155, "flags": 3}, 64 * 32, 264),  # tiles are claimed
        ((7, 256, 64), (64, 128), {"cluster_m": 1}, 14, 14),
        ((0, 64), (64, 128), {}, 0, 0),
        ((128, 64), (64, 0), {}, 0, 0),
        ((0, 128, 64), (64, 128), {}, 0, 0),
        ((1, 8), (8, 8), {"multiprocessors": 1}, 1, 2),
        ((16384, 1280), (1280, 4096), {"yields": 155, "dtype": FP8}, 64 * 32, 264),  # a k block is 128 bytes
        ((16384, 320), (320, 4096), {"yields": 155, "dtype": F32}, 64 * 32, 264),
        ((256, 640), (640, 256), {"flags": 3}, 2, 132),  # split-K
        ((0, 640), (640, 256), {"flags": 3}, 0, 0),
    ],
)
def test_grid(geometry, a, b, options, clusters, blocks):
    sizes = geometry(a, b, **options)
    assert (sizes.clusters, sizes.blocks) == (clusters, blocks)


@pytest.mark.parametrize(
    ("a", "b", "options", "clusters", "blocks"),
    [
        # Each group may end within a cluster's tiles, and so may the rows of no group before and behind them.
        ((256, 64), (3, 64, 256), {}, (1 + 4) * 2, 20),
        ((257, 64), (1, 64, 264), {}, (2 + 2) * 3, 24),
        ((257, 64), (1, 64, 264), {"cluster_m": 1}, (3 + 2) * 3, 15),
        ((1, 64), (30, 64, 8), {}, 1 + 31, 64),
        ((8192, 64), (8, 64, 28672), {"halves": 2, "tile": (128, 256)}, (32 + 9) * 112, 132),
        ((8192, 640), (8, 640, 4096), {"yields": 155}, (32 + 9) * 32, 132),
        ((16384, 640), (8, 640, 4096), {"yields": 155}, (64 + 9) * 32, 264),
        ((0, 64), (3, 64, 256), {}, 0, 0),
        ((256, 64), (3, 64, 0), {}, 0, 0),
    ],
)
def test_clusters_of_groups(geometry, a, b, options, clusters, blocks):
    """As many as the scheduler may have at most (`tests/test_grouped_scheduler.py`): else blocks would be missing."""
    sizes = geometry(a, b, rows_in_groups=True, **options)
    assert (sizes.m, sizes.k, sizes.n, sizes.batch) == (*a, b[2], b[0])
    assert (sizes.clusters, sizes.blocks) == (clusters, blocks)


def test_k_in_groups_is_a_batch(geometry):
    """a (k, m), b (k, n), and results (groups, m, n)."""
    sizes = geometry((300, 264), (300, 400), transpose_a=True, batch=(5,))
    assert (sizes.m, sizes.n, sizes.k, sizes.batch, sizes.clusters) == (264, 400, 300, 5, 5 * 2 * 4)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((8, 16), (24, 8), "k is 16 in a and 24 in b"),
        ((8,), (8, 8), "rank 2 or 3"),
        ((2, 8, 16), (3, 16, 8), "batch sizes differ"),
        ((2**31, 16), (16, 8), "exceeds"),
    ],
)
def test_geometry_refused(geometry, a, b, message):
    with pytest.raises(ValueError, match=message):
        geometry(a, b)
