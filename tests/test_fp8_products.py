"""Products of factors of 8 bits: values, dtypes, transformations, what is refused, and the kernels that are lowered.

tests/gpu/test_fp8_kernels.py has what the kernels compute.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import coda_jax as coda
from tests.nvrtc import kernels, needs_nvrtc

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
SIZES = [(33, 40, 48), (1, 17, 5), (130, 64, 336)]
DEVICE = "NVIDIA H100 80GB HBM3"


def integers(shape, dtype, seed=0):
    """Small ones, which both dtypes have, so that products of them are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


def factors(m, n, k, dtypes=(E4M3, E4M3), transpose_a=False, transpose_b=True, batch=()):
    a = integers((*batch, *((k, m) if transpose_a else (m, k))), dtypes[0], 1)
    return a, integers((*batch, *((n, k) if transpose_b else (k, n))), dtypes[1], 2)


def exact(a, b, transpose_a=False, transpose_b=True):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


def types(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


gemm = functools.partial(coda.gemm, transpose_b=True)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_integers_are_exact(dtypes, transpose_a, transpose_b):
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    for sizes in SIZES:
        a, b = factors(*sizes, dtypes, **options)
        out = coda.gemm(a, b, out_dtype=jnp.float32, **options)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, exact(a, b, **options))


def test_all_values_of_a_factor_count():
    """Subnormal ones too: a row of each, by the identity."""
    for dtype in (E4M3, E5M2):
        values = jnp.asarray(np.arange(256, dtype=np.uint8).view(dtype))
        finite = values[np.isfinite(np.asarray(values, np.float32))]
        out = gemm(finite[:, None] * jnp.ones((1, 1), dtype), jnp.ones((1, 1), E4M3), out_dtype=jnp.float32)
        np.testing.assert_array_equal(out[:, 0], np.asarray(finite, np.float32))


def test_tiles_are_bfloat16_by_default():
    a, b = factors(16, 32, 48)

    def epilogue(acc, bias):
        y = acc * 0.5 + bias
        return y, jnp.sum(y, axis=1), {"z": jnp.tanh(acc)}

    y, sums, z = jax.tree.leaves(gemm(a, b, jnp.ones(32), epilogue=epilogue))
    assert [x.dtype for x in (y, sums, z)] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    np.testing.assert_array_equal(y, (exact(a, b) * 0.5 + 1).astype(jnp.bfloat16))
    np.testing.assert_array_equal(sums, (exact(a, b) * 0.5 + 1).sum(axis=1))
    asked = gemm(a, b, epilogue=lambda acc: (acc, acc), out_dtype=(jnp.float16, None))
    assert [x.dtype for x in asked] == [jnp.float16, jnp.bfloat16]


def test_several_factors_and_leading_axes():
    a, b = integers((2, 4, 16), E4M3), [integers((n, 16), E5M2, n) for n in (8, 24)]
    outputs = gemm(a, b, epilogue=lambda acc: jnp.split(acc, [8], axis=1), out_dtype=jnp.float32)
    for out, one in zip(outputs, b, strict=True):
        np.testing.assert_array_equal(out, exact(a, one))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_scan_and_remat(axes):
    a, b = factors(16, 24, 32, (E4M3, E5M2), batch=(3,))
    a, b = a if axes[0] == 0 else a[0], b if axes[1] == 0 else b[0]

    def body(total, scale):
        product = functools.partial(gemm, epilogue=lambda acc, scale: acc * scale)
        return total + jax.vmap(jax.checkpoint(product), (*axes, None))(a, b, scale).astype(jnp.float32), None

    out, _ = jax.jit(lambda: jax.lax.scan(body, jnp.zeros((3, 16, 24)), jnp.asarray([1.0, 2.0])))()
    np.testing.assert_array_equal(out, 3 * np.broadcast_to(exact(a, b), out.shape))


def test_export():
    a, b = factors(16, 32, 48)
    checks = [export.DisabledSafetyCheck.custom_call("coda_gemm")]
    exported = export.export(jax.jit(gemm), platforms=("cpu", "cuda"), disabled_checks=checks)(*types(a, b))
    called = export.deserialize(exported.serialize()).call(a, b)
    np.testing.assert_array_equal(called, exact(a, b).astype(jnp.bfloat16))


REFUSED = {
    "b in bfloat16": (E4M3, [jnp.bfloat16], r"a has dtype float8_e4m3fn and b bfloat16; .*a\.astype\(jnp\.bfloat16\)"),
    "a in float32": (jnp.float32, [E5M2], r"b has dtype float8_e5m2 and a float32; .* b\.astype"),
    "b of two dtypes": (E4M3, [E4M3, E5M2], r"dtypes b\[0\] float8_e4m3fn, b\[1\] float8_e5m2; .*one dtype"),
    "another float of 8 bits": (jnp.float8_e4m3b11fnuz, [E4M3], "a has dtype float8_e4m3b11fnuz; it must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_factors_that_are_refused(case):
    of_a, of_b, message = REFUSED[case]
    b = [jnp.ones((16, 16), dtype) for dtype in of_b]
    with pytest.raises(TypeError, match=message):
        gemm(jnp.ones((16, 16), of_a), b if len(b) > 1 else b[0])


# ---- gradients


def squares(a, b, scale):
    return jnp.sum(gemm(a, b, scale, epilogue=lambda acc, scale: jnp.sin(acc * scale)).astype(jnp.float32))


def quantised(x, y):
    """As a user may call it, without a rule of the gradient."""
    return squares(x.astype(E4M3), y, jnp.float32(1))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_a_factor_has_no_gradient(transform):
    a, b = factors(16, 24, 32)
    says = (
        r"gemm 'lambda': a is float8_e4m3fn, which has no gradient: .*jax\.custom_vjp.*coda\.fp8\.matmul.*stop_gradient"
    )
    with pytest.raises(TypeError, match=says):
        jax.grad(transform(quantised))(a.astype(jnp.float32), b)
    with pytest.raises(TypeError, match="b is float8_e4m3fn, which has no gradient"):
        jax.grad(transform(lambda y, x: quantised(x, y.astype(E4M3))))(
            b.astype(jnp.float32), jnp.asarray(a, jnp.float32)
        )
    with pytest.raises(TypeError, match="a is float8_e4m3fn"):
        jax.vmap(jax.grad(transform(quantised)), (0, None))(a.astype(jnp.float32)[None], b)


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("stopped", [False, True])
def test_operands_have_gradients(residuals, stopped):
    """Also where a factor was made of what is differentiated, and its gradient stopped."""
    a, b = factors(16, 24, 32)

    def f(product, scale):
        x = (a.astype(jnp.float32) * (1 + 0 * scale)).astype(E4M3) if stopped else a
        return jnp.sum(product(jax.lax.stop_gradient(x), b, scale).astype(jnp.float32))

    fused = functools.partial(gemm, epilogue=lambda acc, scale: jnp.sin(acc * scale), residuals=residuals)
    acc = exact(a, b)
    got = jax.jit(jax.grad(functools.partial(f, fused)))(jnp.float32(0.01))
    np.testing.assert_allclose(got, np.sum(np.cos(acc * 0.01) * acc), rtol=2e-2)
    batch = jax.vmap(jax.grad(functools.partial(f, fused)))(jnp.float32([0.01, 0.02]))
    np.testing.assert_allclose(batch[0], got, rtol=1e-4)


def test_kept_preactivation_is_bfloat16():
    a, b = factors(16, 24, 32)
    _, pull = jax.vjp(lambda scale: squares(a, b, scale), jnp.float32(0.1))
    kept = [x.dtype for x in jax.tree.leaves(pull) if x.shape == (16, 24)]
    assert jnp.bfloat16 in kept and jnp.float32 not in kept


def test_a_function_with_a_gradient_of_its_own():
    """As the message says."""

    @jax.custom_vjp
    def matmul(x, w):
        return gemm(x.astype(E4M3), w.astype(E4M3), out_dtype=jnp.float32)

    def backward(kept, dy):
        x, w = kept
        dy8, of_w = dy.astype(E5M2), w.T.astype(E4M3)
        return gemm(dy8, of_w, out_dtype=jnp.float32), gemm(dy8.T, x.T.astype(E4M3), out_dtype=jnp.float32)

    matmul.defvjp(lambda x, w: (matmul(x, w), (x, w)), backward)
    x, w = (v.astype(jnp.float32) for v in factors(16, 24, 32))
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(matmul(x, w)), (0, 1)))(x, w)
    np.testing.assert_array_equal(dx, np.broadcast_to(np.sum(np.asarray(w), 0), x.shape))
    np.testing.assert_array_equal(dw, np.broadcast_to(np.sum(np.asarray(x), 0), w.shape))


# ---- on a GPU


def lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@needs_nvrtc
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_the_kernel_takes_rows_along_k(dtypes):
    assert kernels(gemm, *types(*factors(33, 40, 48, dtypes))) == 1
    text = lowered(gemm, *types(*factors(33, 40, 48, dtypes)))
    names = ["e4m3" if dtype is E4M3 else "e5m2" for dtype in dtypes]
    assert re.search(f"DType input = coda::DType::{names[0]};.*input_b = coda::DType::{names[1]};", text)


@needs_nvrtc
@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("layout", [(False, False), (True, True), (True, False)])
def test_other_layouts_are_products_of_8_bits_by_xla(layout):
    a, b = types(*factors(32, 48, 64, (E5M2, E4M3), *layout))
    multiply = functools.partial(coda.gemm, transpose_a=layout[0], transpose_b=layout[1])
    with pytest.warns(
        coda.FallbackWarning, match=r"a is float8_e5m2 and b float8_e4m3fn; the kernel reads .* \(N, K\)"
    ):
        text = lowered(multiply, a, b)
    (product,) = re.findall(r"stablehlo\.dot_general.*", text)
    assert "f8E5M2>" in product and "f8E4M3FN>" in product and "xf32>" in product and "HIGHEST" not in product
    with coda.strict(), pytest.raises(coda.FallbackError, match="factors of 8 bits"):
        lowered(multiply, a, b)
    with pytest.raises(NotImplementedError, match="factors of 8 bits"):
        lowered(functools.partial(multiply, implementation="cuda"), a, b)
    widened = lowered(functools.partial(multiply, implementation="xla"), a, b)
    assert re.search(r"dot_general.*xbf16>", widened)
    long = types(*factors(32, 48, 4112, (E5M2, E4M3), *layout))
    assert "HIGHEST" in lowered(multiply, *long)  # cuBLAS then promotes


@needs_nvrtc
@pytest.mark.usefixtures("nothing_said_yet")
def test_rows_of_factors_are_multiples_of_16():
    with pytest.warns(
        coda.FallbackWarning, match="a row of 40 float8_e4m3fn is 40 bytes; TMA addresses multiples of 16"
    ):
        assert kernels(gemm, *types(*factors(32, 48, 40))) == 0


@needs_nvrtc
def test_explain():
    a, b = jax.ShapeDtypeStruct((16384, 4096), E4M3), jax.ShapeDtypeStruct((6144, 4096), E5M2)
    (product,) = coda.explain(gemm, a, b, device=DEVICE).products
    assert product.a == "float8_e4m3fn[16384,4096]" and product.b == "float8_e5m2[6144,4096]^T"
    assert product.tile == "128 x 192 (cost model)"
    wide = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (a, b)]
    (of_bfloat16,) = coda.explain(gemm, *wide, device=DEVICE).products
    assert 1.8 < of_bfloat16.cost.us / product.cost.us < 2
    # Of 1979 TFLOP/s.
    assert product.cost.share == pytest.approx(product.cost.tflops / 1978.8, rel=1e-3)
    assert product.cost.xla_us and "float8_e4m3fn" in str(coda.explain(gemm, a, b, device=DEVICE))


# ---- promotion


def config_of(k, **given):
    """Returns what explain says of the tile, and the promote_blocks of its source."""
    a, b = jax.ShapeDtypeStruct((8192, k), E4M3), jax.ShapeDtypeStruct((2048, k), E4M3)
    config = coda.GemmConfig(**given) if given else None
    (product,) = coda.explain(functools.partial(gemm, config=config), a, b, device=DEVICE, source=True).products
    assert product.reason is None, product.reason
    return product.tile, int(re.search(r"promote_blocks = (\d+);", product.source)[1])


@needs_nvrtc
@pytest.mark.parametrize(
    ("k", "given", "shown", "blocks"),
    [
        (4096, {}, "128 x", 0),
        (4112, {}, "128 x 192 cooperative, promoted every 512", 4),
        (16384, {"promote": False}, "128 x 256 (config)", 0),
        (16384, {"promote": 2048}, "128 x 192 cooperative, promoted every 2048", 16),
        (1024, {"promote": 128}, "128 x 192 cooperative, promoted every 128", 1),
        (1024, {"tile_n": 192, "cooperative": True}, "128 x 192 cooperative (config)", 0),
        (1024, {"tile_m": 128, "tile_n": 192, "cooperative": False}, "128 x 192 (config)", 0),
    ],
)
def test_promotion(k, given, shown, blocks):
    tile, promote_blocks = config_of(k, **given)
    assert tile.startswith(shown) and promote_blocks == blocks


BAD = {
    "no multiple": ({"promote": 100}, r"promote = 100; it must be False or a multiple of 128"),
    "no integer": ({"promote": 512.0}, r"promote = 512\.0; it must be False or a multiple of 128"),
    "true": ({"promote": True}, r"promote = True; it must be False or a multiple of 128"),
    "cooperative": ({"tile_m": 64, "tile_n": 256, "cooperative": True}, "cooperative = True with tiles of 64x256"),
    "always": ({"tile_m": 128, "tile_n": 256, "cooperative": False}, "128x256 are always cooperative"),
    "split": ({"tile_m": 128, "tile_n": 192, "cooperative": True, "split_k": True}, "split_k = True with cooperative"),
}


@pytest.mark.parametrize("case", BAD)
def test_configs_that_are_refused(case):
    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        coda.GemmConfig(**given)


@needs_nvrtc
def test_configs_that_a_product_does_not_have():
    a, b = (jax.ShapeDtypeStruct((256, 8192), E4M3),) * 2
    says = r"tile_n = 256, but factors of 8 bits and k = 8192 are promoted every 512 of k by default, .*promote=False"
    with pytest.raises(ValueError, match=says):
        lowered(functools.partial(gemm, config=coda.GemmConfig(tile_m=128, tile_n=256)), a, b)
    a, b = (jax.ShapeDtypeStruct((256, 256), jnp.bfloat16),) * 2
    with pytest.raises(ValueError, match="promote = 512 with factors of 16 bits; it must be False or None"):
        lowered(functools.partial(gemm, config=coda.GemmConfig(promote=512)), a, b)
