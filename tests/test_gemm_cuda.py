"""The CUDA lowering, read as text on any machine: custom calls, their attributes and shapes, and fallbacks."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import coda_jax as coda
from coda_jax import ffi
from coda_jax.lowering import select
from coda_jax.primitives import fallbacks
from flax_layers import GatedMLP
from tests.gemm_cases import residual_sumsq, swiglu
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc
M, N, K = 128, 256, 64


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """As on a machine without a GPU, and with no fallback reported yet."""

    def devices(platform=None):
        if platform == "cuda":
            raise RuntimeError("no cuda backend")
        return jax.local_devices()

    monkeypatch.setattr(select.jax, "devices", devices)
    monkeypatch.setattr(fallbacks, "_reported", set())


def typed(*shapes, dtype=jnp.bfloat16):
    return [x if isinstance(x, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(x, dtype) for x in shapes]


def text(function, *types):
    """StableHLO for CUDA, without the kernels' sources."""
    lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r'source = "(\\.|[^"\\])*"', "source = ...", lowered)


def calls(lowered):
    """The lines of the custom calls."""
    return [line for line in lowered.split("\n") if "@coda_gemm(" in line]


def operands_and_results(line):
    arguments, results = re.search(r" : \((.*)\) -> (.*)$", line).groups()
    return re.findall(r"tensor<([^>]*)>", arguments), re.findall(r"tensor<([^>]*)>", results)


def test_one_call_with_its_attributes():
    lowered = text(lambda a, b, x: coda.gemm(a, b, x, epilogue=residual_sumsq), *typed((M, K), (K, N), (M, N)))
    (call,) = calls(lowered)
    assert operands_and_results(call) == (["128x64xbf16", "64x256xbf16", "128x256xbf16"], ["128x256xbf16", "4x128xf32"])
    for attribute in (
        f"abi = {ffi.ABI}",
        'arch = "sm_90a"',
        'name = "residual_sumsq"',
        "transpose_a = false",
        "halves = 1",
    ):
        assert attribute in call
    assert "dot_general" not in lowered
    # But for the row sums, and for what tells the gradient of a batch, which has no size.
    assert "xf32>" not in lowered.replace("tensor<0xf32>", "").replace("128xf32>", "").replace("4x128xf32>", "")


def test_split_k():
    """A workspace and flags come last, in the results as among the kernel's pointers; no one else sees them."""
    config = coda.GemmConfig(tile_m=128, tile_n=128, split_k=True)
    lowered = text(
        lambda a, b, x: coda.gemm(a, b, x, epilogue=residual_sumsq, config=config), *typed((M, K), (K, N), (M, N))
    )
    (call,) = calls(lowered)
    tile, partials, workspace, flags = operands_and_results(call)[1]
    assert (tile, partials) == ("128x256xbf16", "2x128xf32")
    assert (workspace, flags) == ("132x128x128xf32", "132x4xi32")
    assert "flags = 6 : i32" in call and "pointers = dense<[4, 5, 6]>" in call
    assert workspace not in lowered.replace(call, "")


def maps_of(call):
    """A row of each tensor map: buffer, halves, split rows, the box's columns and rows, swizzle."""
    numbers = [int(one) for one in re.search(r"maps = dense<\[([^]]*)\]>", call)[1].split(", ")]
    return [numbers[i : i + 6] for i in range(0, len(numbers), 6)]


@pytest.mark.parametrize(
    "m, rows, transpose_a",
    [(2, 8, False), (16, 16, False), (61, 64, False), (200, 128, False), ("m", 128, False), (16, 16, True)],
)
def test_of_few_rows_only_those_are_loaded(m, rows, transpose_a):
    """Boxes of a, and of the tile operand, 64 rows at most; an a stored by columns has boxes of 64 of them."""
    if m == "m":
        (m,) = jax.export.symbolic_shape("m")
    config = coda.GemmConfig(tile_m=128, tile_n=128)
    product = functools.partial(coda.gemm, epilogue=residual_sumsq, transpose_a=transpose_a, config=config)
    (call,) = calls(text(product, *typed((K, m) if transpose_a else (m, K), (K, N), (m, N))))
    of_a, _, of_x, of_y = maps_of(call)
    assert (of_a[4], of_x[4], of_y[4]) == (64 if transpose_a else rows, min(64, rows), 16)


def test_symbolic_rows_are_not_split():
    (m,) = jax.export.symbolic_shape("m")
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, 4096), (4096, 512)))
    (call,) = calls(text(lambda a, b: coda.gemm(a, b), a, b))
    assert "flags = -1 : i32" in call
    (call,) = calls(text(lambda a, b: coda.gemm(a, b), a.update(shape=(512, 4096)), b))
    assert "flags = -1 : i32" not in call


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_transposes_are_attributes(transpose_a, transpose_b):
    """Forward and backward: no array is transposed, whatever the layout; no float32 tile exists outside the kernels."""
    a, b = typed((K, M) if transpose_a else (M, K), (N, K) if transpose_b else (K, N))

    def loss(a, b):
        y = coda.gemm(a, b, epilogue=jax.nn.silu, transpose_a=transpose_a, transpose_b=transpose_b)
        return y, jax.vjp(
            lambda a, b: coda.gemm(a, b, epilogue=jax.nn.silu, transpose_a=transpose_a, transpose_b=transpose_b), a, b
        )[1](y)

    lowered = text(loss, a, b)
    assert "stablehlo.transpose" not in lowered
    flags = [tuple(re.findall(r"transpose_[ab] = (\w+)", call)) for call in calls(lowered)]
    assert len(flags) == 4
    results = [operands_and_results(call)[1] for call in calls(lowered)]
    assert ["128x256xbf16", "128x256xbf16"] in results  # y and the pre-activation
    assert not any("f32" in result for line in results for result in line)


def test_weight_gradient_is_float32_straight_from_the_kernel():
    x, dy = typed((M, K), (M, N))
    lowered = text(lambda x, dy: coda.gemm(x, dy, transpose_a=True, out_dtype=jnp.float32), x, dy)
    (call,) = calls(lowered)
    assert operands_and_results(call)[1] == ["64x256xf32"]


def test_recompute_runs_the_derivative_in_an_epilogue():
    def f(acc, x):
        y = jnp.sin(acc) * x
        return y, jnp.sum(y * acc, axis=1), jnp.sum(acc * acc, axis=0)

    def gradient(a, b, x, dy, drows, dcolumns):
        _, pullback = jax.vjp(lambda *xs: coda.gemm(*xs, epilogue=f, residuals="recompute"), a, b, x)
        return pullback((dy, drows, dcolumns))

    reductions = [jax.ShapeDtypeStruct((M,), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.float32)]
    lowered = text(gradient, *typed((M, K), (K, N), (M, N), (M, N), *reductions))
    shapes = [operands_and_results(call) for call in calls(lowered)]
    # The product again, with x and the cotangents in and dacc and dx out; then da and db. Nothing elementwise is left
    # to XLA; the forward product, whose result nobody reads, is gone.
    tile = "128x256xbf16"
    assert (["128x64xbf16", "64x256xbf16", tile, tile, "128x1xf32", "256xf32"], [tile, tile]) in shapes
    assert len(shapes) == 3
    assert "stablehlo.cosine" not in lowered and "stablehlo.multiply" not in lowered


def test_acc_is_stored_once():
    """An output that is acc already serves as the kept pre-activation."""

    def gradient(a, b, dy):
        outputs, pullback = jax.vjp(lambda *xs: coda.gemm(*xs, epilogue=lambda acc: (acc, jnp.sin(acc))), a, b)
        return outputs, pullback((dy, dy))

    first, *_ = calls(text(gradient, *typed((M, K), (K, N), (M, N))))
    assert operands_and_results(first)[1] == ["128x256xbf16"] * 2


def test_halves():
    lowered = text(
        lambda a, b, r: coda.gemm(a, b, r, epilogue=swiglu),
        *typed((M, K), (K, 2 * 72), jax.ShapeDtypeStruct((M, 1), jnp.float32)),
    )
    (call,) = calls(lowered)
    assert "halves = 2" in call
    assert operands_and_results(call)[1] == ["128x72xbf16"]


def test_shared_b_folds_the_batch_into_rows():
    def f(a, b, x):
        return coda.gemm(a, b, x, epilogue=residual_sumsq)

    lowered = text(jax.vmap(f, in_axes=(0, None, 0)), *typed((3, M, K), (K, N), (3, M, N)))
    (call,) = calls(lowered)
    assert operands_and_results(call) == (["384x64xbf16", "64x256xbf16", "384x256xbf16"], ["384x256xbf16", "2x384xf32"])


@pytest.mark.parametrize(
    ("epilogue", "axes", "operand"),
    [
        (residual_sumsq, (0, 0, 0), (3, M, N)),  # batched b
        (residual_sumsq, (0, None, None), (M, N)),  # a tile that the batch shares
        (lambda acc, x: acc + x, (0, None, 0), (3, N)),  # batched row vectors
        (lambda acc, x: (acc + x, jnp.sum(acc, axis=0)), (0, None, 0), (3, M, 1)),  # column sums
        (
            lambda acc, x: jnp.where(jax.lax.broadcasted_iota(jnp.int32, acc.shape, 0) < 8, acc, x),
            (0, None, 0),
            (3, M, 1),
        ),
    ],
    ids=["batched b", "cooperative tile", "row vectors", "column sums", "row index"],
)
def test_unfoldable_batches_are_one_batched_call(epilogue, axes, operand):
    b = (3, K, N) if axes[1] == 0 else (K, N)
    lowered = text(
        jax.vmap(lambda a, b, x: coda.gemm(a, b, x, epilogue=epilogue), in_axes=axes), *typed((3, M, K), b, operand)
    )
    (call,) = calls(lowered)
    arguments, results = operands_and_results(call)
    assert arguments[0] == "3x128x64xbf16" and results[0] == "3x128x256xbf16"


def test_in_place():
    """The operand's buffer becomes the result's, also inside a scan."""

    def accumulate(a, b, c):
        def step(c, ab):
            return coda.gemm(*ab, c, epilogue=jnp.add, out_dtype=jnp.float32, input_output_aliases={0: 0}), None

        return jax.lax.scan(step, c, (a, b))[0]

    types = typed((4, M, K), (4, K, N), jax.ShapeDtypeStruct((M, N), jnp.float32))
    (call,) = calls(text(accumulate, *types))
    assert re.search(r"output_operand_alias<output_tuple_indices = \[\], operand_index = 2,", call)

    def both(acc, c):
        return jnp.sum(acc, axis=1), acc, acc + c

    def second(a, b, c):
        return coda.gemm(a, b, c, epilogue=both, out_dtype=(None, None, jnp.float32), input_output_aliases={0: 2})

    (call,) = calls(text(second, *typed((M, K), (K, N), jax.ShapeDtypeStruct((M, N), jnp.float32))))
    assert re.search(
        r"output_operand_alias<output_tuple_indices = \[1\], operand_index = 2,", call
    )  # stores come first


def test_dead_gradients_are_not_computed():
    """Only what the user asks for is in the optimised program: custom calls have no side effects."""
    lowered = text(
        lambda a, b: jax.grad(lambda a: jnp.sum(coda.gemm(a, b).astype(jnp.float32)))(a), *typed((M, K), (K, N))
    )
    assert "has_side_effect = true" not in lowered


FALLBACKS = {
    "float32": (coda.gemm, typed((M, K), (K, N), dtype=jnp.float32), "a is float32"),
    "pitch": (coda.gemm, typed((M, K), (K, 257)), "257"),
    "buffers": (
        # One after the other: their sum alone would be made before the kernel.
        lambda a, b, **options: coda.gemm(
            a, b, *[1.0] * 500, epilogue=lambda acc, *s: functools.reduce(jnp.add, s, acc), **options
        ),
        typed((M, K), (K, N)),
        "have 503 arrays, 3 of them matrices; a launch takes 4080 bytes",
    ),
    "rows of a batch": (
        lambda a, b, **options: jax.vmap(lambda a: coda.gemm(a, b, **options))(a),
        typed((1024, 2**21, 8), (8, 256)),
        r"a: shape \(2147483648, 8\) is beyond",
    ),
    "empty": (coda.gemm, typed((M, 0), (0, N)), "an empty product needs no kernel"),
}


@pytest.mark.parametrize("multiply, types, reason", FALLBACKS.values(), ids=FALLBACKS)
@pytest.mark.usefixtures("nothing_said_yet")
def test_fallback_is_said_once(multiply, types, reason):
    def twice(a, b):
        return multiply(a, b), multiply(-a, b)

    with pytest.warns(coda.FallbackWarning, match=reason) as caught:
        lowered = text(twice, *types)
    assert len(caught) == 1
    assert not calls(lowered) and lowered.count("dot_general") == 2
    with pytest.raises(NotImplementedError, match=reason):
        text(lambda a, b: multiply(a, b, implementation="cuda"), *types)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text(twice, *types)
        text(lambda a, b: multiply(a, b, implementation="xla"), *types)


def test_the_fallback_warning_is_at_the_user_s_line(monkeypatch):
    """The warning is at the call that made the product, wherever it is lowered; for a layer's, at the layer's call."""
    layer = GatedMLP(64, 40, param_dtype=jnp.float32, rngs=nnx.Rngs(0))

    def multiply(a, b):
        return coda.gemm(a, b)  # the second line

    def apply(a, b):
        return layer(a)

    def chain(a, b):
        return coda.gated_mlp(coda.DeferredNorm(a, a[:, 0], a[0]), b, b[:, :128].T).x

    def loop(a, b):
        return jax.lax.fori_loop(0, 3, lambda _, y: y + multiply(a, b), jnp.zeros((M, N)))

    def in_flax(a, b):
        return nnx.Sequential(layer)(a)

    called = {multiply: multiply, jax.jit(lambda a, b: jax.jit(multiply)(a, b)): multiply, loop: multiply}
    for f, line in {
        **called,
        jax.vmap(multiply, (None, None), axis_size=2): multiply,
        apply: apply,
        in_flax: in_flax,
        chain: chain,
    }.items():
        monkeypatch.setattr(fallbacks, "_reported", set())
        traced = jax.jit(f).trace(*typed((M, K), (K, N), dtype=jnp.float32))
        with pytest.warns(coda.FallbackWarning) as caught:
            traced.lower(lowering_platforms=("cuda",))
        assert (caught[0].filename, caught[0].lineno) == (__file__, line.__code__.co_firstlineno + 1)


def test_unread_tiles_have_no_tensor_map():
    def f(a, b, *tiles):
        return coda.gemm(a, b, *tiles, epilogue=lambda acc, *tiles: acc + tiles[17], implementation="cuda")

    (call,) = calls(text(f, *typed((M, K), (K, N), *[(M, N)] * 32)))
    (maps,) = re.findall(r"maps = dense<\[(.*?)\]>", call)
    assert len(maps.split(",")) == 6 * 4
    assert [int(x) for x in maps.split(",")][::6] == [0, 1, 2 + 17, 2 + 32]  # a, b, the tile, the output


def test_other_gpus_take_the_xla_form(monkeypatch):
    class Device:
        compute_capability = "8.0"

    monkeypatch.setattr(select.jax, "devices", lambda platform=None: [Device()])
    with pytest.warns(coda.FallbackWarning, match=r"compute capability 8\.0; the kernel needs 9\.0"):
        lowered = text(coda.gemm, *typed((M, K), (K, N)))
    assert not calls(lowered)


NO_NVRTC = "NVRTC was not found (pip install nvidia-cuda-nvrtc, or set CUDA_HOME). Tried:\n  libnvrtc.so.13"


class Hopper:
    compute_capability, device_kind = "9.0", "NVIDIA H100"


def test_a_hopper_gpu_without_nvrtc_takes_the_xla_form(monkeypatch):
    monkeypatch.setattr(select.ffi, "unavailable_reason", lambda: NO_NVRTC)
    monkeypatch.setattr(select.jax, "devices", lambda platform=None: [Hopper()])
    with pytest.warns(coda.FallbackWarning, match="NVRTC was not found"):
        lowered = text(
            lambda a, b: coda.gemm(a, b), *typed((M, K), (K, 2 * N))
        )  # of no other test: JAX keeps what it lowered
    assert not calls(lowered)
    with pytest.raises(NotImplementedError, match="but NVRTC was not found"):
        text(lambda a, b: coda.gemm(a, b, implementation="cuda"), *typed((M, K), (K, 2 * N)))
    table = str(coda.explain(coda.gemm, *typed((M, K), (K, N)), platform="cuda"))
    assert sum("XLA: NVRTC was not found" in line for line in table.splitlines()) == 1


def test_xla_form_when_asked():
    assert not calls(text(lambda a, b: coda.gemm(a, b, implementation="xla"), *typed((M, K), (K, N))))


def test_same_mathematics_is_one_kernel():
    """Two functions, one key; the backward products of all operators share their kernels."""

    def doubled(x):
        return x * 2

    def f(a, b):
        return coda.gemm(a, b, epilogue=lambda acc: acc * 2), coda.gemm(a, b, epilogue=doubled)

    keys = [re.search(r'key = "(\w+)"', call).group(1) for call in calls(text(f, *typed((M, K), (K, N))))]
    assert len(keys) == 2 and keys[0] == keys[1]
