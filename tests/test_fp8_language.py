"""Floats of 8 bits in epilogues: results, operands, coda.saturate, and what is refused."""

import ctypes
import functools
import pathlib
import subprocess

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError
from tests.test_fp8_rounding import edges

ROOT = pathlib.Path(__file__).resolve().parents[1]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FP8 = (E4M3, E5M2)
M, K, N = 48, 32, 64
RNG = np.random.default_rng(7)
# Of small integers: sums of products are exact in any order.
A, B = (jnp.asarray(RNG.integers(-4, 5, shape), jnp.bfloat16) for shape in ((M, K), (K, N)))
X8 = jnp.asarray(RNG.standard_normal((M, N)), E4M3)
ACC = np.asarray(A, np.float32) @ np.asarray(B, np.float32)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def same_bits(got, want):
    assert np.dtype(got.dtype) == np.dtype(want.dtype) and got.shape == want.shape
    np.testing.assert_array_equal(bits(got), bits(want))


def cast(x, dtype):
    """By ml_dtypes."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(x, np.float32).astype(dtype)


def saturated(x, dtype):
    largest = float(jnp.finfo(dtype).max)
    return cast(np.clip(x, -largest, largest), dtype)


def wide(x):
    return np.asarray(x, np.float32)


# An epilogue of (acc, x), and the same with NumPy.
VALUES = {
    "astype": (lambda acc, x: (acc * 7).astype(E4M3), lambda acc, x: cast(acc * 7, E4M3)),
    "astype e5m2": (lambda acc, x: (acc * 900).astype(E5M2), lambda acc, x: cast(acc * 900, E5M2)),
    "saturate": (lambda acc, x: coda.saturate(acc * 7, E4M3), lambda acc, x: saturated(acc * 7, E4M3)),
    "saturate e5m2": (lambda acc, x: coda.saturate(acc * 900, E5M2), lambda acc, x: saturated(acc * 900, E5M2)),
    "subnormal": (lambda acc, x: (acc / 4096).astype(E4M3), lambda acc, x: cast(acc / 4096, E4M3)),
    "operand": (lambda acc, x: (acc + x / 8).astype(E5M2), lambda acc, x: cast(acc + x / 8, E5M2)),
    "captured": (
        lambda acc, x: (acc + X8.astype(jnp.float32)).astype(E4M3),
        lambda acc, x: cast(acc + wide(X8), E4M3),
    ),
    "of 16 bits": (
        lambda acc, x: (acc / 3).astype(jnp.bfloat16).astype(E4M3),
        lambda acc, x: cast((acc / 3).astype(jnp.bfloat16), E4M3),
    ),
    "one from the other": (
        lambda acc, x: coda.saturate(acc / 3, E4M3).astype(E5M2),
        lambda acc, x: cast(saturated(acc / 3, E4M3), E5M2),
    ),
    "of a condition": (lambda acc, x: (acc > x).astype(E4M3), lambda acc, x: cast(acc > x, E4M3)),
    "of an index": (
        lambda acc, x: lax.broadcasted_iota(jnp.int32, acc.shape, 1).astype(E4M3),
        lambda acc, x: cast(np.broadcast_to(np.arange(N), acc.shape), E4M3),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_results(name):
    epilogue, expected = VALUES[name]
    got = jax.jit(lambda *x: coda.gemm(*x, epilogue=epilogue))(A, B, X8)
    same_bits(got, expected(ACC, wide(X8)))


@pytest.mark.parametrize("name", ["astype", "saturate", "astype e5m2"])
def test_xla_keeps_the_rounding(name):
    """XLA keeps the rounding of a value that the epilogue, or the program behind it, reads again in float32."""
    epilogue, expected = VALUES[name]
    want = wide(expected(ACC, wide(X8)))
    inside = jax.jit(
        lambda *x: coda.gemm(*x, epilogue=lambda *x: epilogue(*x).astype(jnp.float32), out_dtype="float32")
    )
    np.testing.assert_array_equal(inside(A, B, X8), want)
    behind = jax.jit(lambda *x: coda.gemm(*x, epilogue=epilogue).astype(jnp.float32))
    np.testing.assert_array_equal(behind(A, B, X8), want)
    stored = jax.jit(lambda a, b: coda.gemm(a, b, epilogue=lambda acc: acc * 7, out_dtype=E4M3).astype(jnp.float32))
    np.testing.assert_array_equal(stored(A, B), wide(cast(ACC * 7, E4M3)))
    for program in (inside.lower(A, B, X8), behind.lower(A, B, X8), stored.lower(A, B)):
        assert "reduce_precision" in program.as_text()  # a pair of conversions XLA may drop


def test_dtypes_of_results():
    """A result that the epilogue makes a float of 8 bits stays one, all others have a's dtype; out_dtype comes last."""

    def epilogue(acc):
        return {"q": coda.saturate(acc, E4M3), "t": acc.astype(E5M2), "h": acc.astype(jnp.float16), "y": acc}

    def dtypes(out_dtype=None):
        outputs = jax.eval_shape(lambda a, b: coda.gemm(a, b, epilogue=epilogue, out_dtype=out_dtype), A, B)
        return {name: x.dtype for name, x in outputs.items()}

    assert dtypes() == {"q": E4M3, "t": E5M2, "h": jnp.bfloat16, "y": jnp.bfloat16}
    assert dtypes(E4M3) == dict.fromkeys("qthy", E4M3)
    assert dtypes({"q": jnp.float32, "t": None, "h": E5M2, "y": None}) == {
        "q": jnp.float32,
        "t": E5M2,
        "h": E5M2,
        "y": jnp.bfloat16,
    }
    with pytest.raises(TypeError, match=r"float8_e4m3b11fnuz; a tile is bfloat16, .*float8_e4m3fn or float8_e5m2"):
        dtypes(jnp.float8_e4m3b11fnuz)


@pytest.mark.parametrize("dtype", FP8)
def test_one_rounding_at_the_store(dtype):
    got = jax.jit(lambda a, b: coda.gemm(a, b, epilogue=lambda acc: acc / 3, out_dtype=dtype))(A, B)
    same_bits(got, cast(ACC / np.float32(3), dtype))


@functools.cache
def compiled(dtype, epilogue):
    return jax.jit(lambda a, b, x: coda.gemm(a, b, x, epilogue=epilogue, out_dtype=dtype))


def rounded_at_once(acc, x):
    return acc + x


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.floats(width=32, allow_subnormal=False), min_size=8, max_size=8), st.sampled_from(FP8), st.booleans()
)
def test_any_value(values, dtype, saturates):
    x = jnp.asarray(np.float32(values).reshape(2, 4))
    nothing = jnp.zeros((2, 4), jnp.bfloat16), jnp.zeros((4, 4), jnp.bfloat16)
    saturate = functools.partial(_saturated_sum, dtype=np.dtype(dtype).name)
    epilogue = _EPILOGUES.setdefault(dtype, saturate) if saturates else rounded_at_once
    got = compiled(dtype, epilogue)(*nothing, x)
    want = (saturated if saturates else cast)(np.float32(x) + 0, dtype)
    is_nan = np.isnan(wide(want))
    np.testing.assert_array_equal(np.isnan(wide(got)), is_nan)
    np.testing.assert_array_equal(bits(got)[~is_nan], bits(want)[~is_nan])


_EPILOGUES = {}


def _saturated_sum(acc, x, *, dtype):
    return coda.saturate(acc + x, dtype)


# --- coda.saturate outside of epilogues


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("dtype", FP8)
def test_saturate(dtype, jitted):
    x = edges(dtype)
    function = lambda x: coda.saturate(x, dtype)  # noqa: E731
    got = (jax.jit(function) if jitted else function)(x)
    same_bits(got, saturated(x, dtype))
    of_bf16 = jnp.asarray(x).astype(jnp.bfloat16)
    same_bits(jax.vmap(function)(of_bf16), saturated(wide(of_bf16), dtype))


@pytest.mark.parametrize("dtype", FP8)
def test_saturate_in_the_kernel(tmp_path, dtype):
    """The form that the host compiles."""
    source, library = tmp_path / "saturate.cc", tmp_path / "saturate.so"
    name = {E4M3: "e4m3", E5M2: "e5m2"}[dtype]
    source.write_text(
        '#include "elementwise.cuh"\nextern "C" void apply(int n, float* x) '
        f"{{ for (int i = 0; i < n; ++i) x[i] = coda::saturate_to_{name}(x[i]); }}\n"
    )
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'cuda'}"]
    subprocess.run(["g++", *options, "-o", str(library), str(source)], check=True)
    x = edges(dtype)
    got = x.copy()
    ctypes.CDLL(str(library)).apply(len(x), got.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_array_equal(got, wide(saturated(x, dtype)))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


def test_derivative_of_saturate():
    """1 where nothing is clipped, also at the largest value."""
    x = jnp.asarray([-jnp.inf, -500.0, -448.0, -3.3, 0.0, 448.0, 449.0])
    ct = jnp.asarray([1, 2, 3, 4, 5, 6, 7], E4M3)
    _, pullback = jax.vjp(lambda x: coda.saturate(x, E4M3), x)
    (dx,) = pullback(ct)
    assert dx.dtype == jnp.float32
    np.testing.assert_array_equal(dx, [0, 0, 3, 4, 5, 6, 0])
    tangent = jax.jvp(lambda x: coda.saturate(x, E5M2), (x,), (jnp.full_like(x, 1.1),))[1]
    same_bits(tangent, cast(np.full(7, 1.1) * np.isfinite(x), E5M2))


def test_saturate_refuses_other_dtypes():
    with pytest.raises(TypeError, match="saturate: dtype = float16; it must be float8_e4m3fn or float8_e5m2"):
        coda.saturate(jnp.zeros(3), jnp.float16)
    with pytest.raises(TypeError, match="saturate: x is int32; it must be bfloat16, float16 or float32"):
        coda.saturate(jnp.zeros(3, jnp.int32), E4M3)
    with pytest.raises(TypeError, match="saturate: x is float8_e5m2"):
        coda.saturate(jnp.zeros(3, E5M2), E4M3)
    with pytest.raises(TypeError, match="saturate: x is float;"):
        coda.saturate(1.0, E4M3)


# --- refused everywhere

COMPUTES = "computes in float8_e4m3fn, which an epilogue only converts to and from"
REFUSED = {
    "product": lambda q: q * 2,
    "sum": lambda q: q + q,
    "negation": lambda q: -q,
    "exp": lambda q: jnp.exp(q),
    "maximum": lambda q: jnp.maximum(q, q),
    "where": lambda q: jnp.where(q.astype(jnp.float32) > 0, q, jnp.zeros_like(q)),
    "comparison": lambda q: (q > jnp.zeros_like(q)).astype(jnp.float32),
    "absolute": lambda q: jnp.abs(q),
    "saturate again": lambda q: coda.contraction_order(jnp.abs(q)),
}


@pytest.mark.parametrize("implementation", ["auto", "cuda", "xla"])
@pytest.mark.parametrize("name", REFUSED)
def test_arithmetic(name, implementation):
    def epilogue(acc):
        return REFUSED[name](acc.astype(E4M3))

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=epilogue, implementation=implementation)

    with pytest.raises(NotTileLocalError, match=COMPUTES + r".*x.astype\(jnp.float32\)"):
        jax.make_jaxpr(multiply)(A, B)


def test_reductions_and_operands():
    def of(epilogue, *operands):
        return jax.make_jaxpr(lambda a, b, *x: coda.gemm(a, b, *x, epilogue=epilogue))(A, B, *operands)

    with pytest.raises(NotTileLocalError, match=r"reduction of float8_e4m3fn values.*Convert them to float32 first"):
        of(lambda acc: jnp.max(acc.astype(E4M3), axis=1))
    with pytest.raises(NotTileLocalError, match=r"operand 'x' of shape .* has dtype float8_e5m2; vectors and scalars"):
        of(lambda acc, x: acc * x, jnp.ones(N, E5M2))
    heads = lambda acc, x: (acc.reshape(M, -1, 16) * x[:, None]).reshape(M, N)  # noqa: E731
    with pytest.raises(NotTileLocalError, match="float8_e5m2; arrays over heads are bfloat16, float16 or float32"):
        of(heads, jnp.ones((M, 16), E5M2))
    with pytest.raises(TypeError, match="operand 0 has dtype float8_e4m3b11fnuz"):
        of(lambda acc, x: acc * x, jnp.ones((M, N), jnp.float8_e4m3b11fnuz))


# --- gradients


def train(multiply):
    """The gradient of a sum of what these are beside weights."""

    def loss(*arguments):
        outputs = jax.tree.leaves(multiply(*arguments))
        return sum(jnp.sum(x.astype(jnp.float32) * (1 + jnp.arange(x.size).reshape(x.shape) % 3)) for x in outputs)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def plainly(epilogue):
    return lambda a, b, x: epilogue(jnp.dot(a, b, preferred_element_type=jnp.float32), x.astype(jnp.float32))


GRADIENTS = {
    "astype": lambda acc, x: jnp.square(acc + x).astype(E4M3),
    "saturate": lambda acc, x: coda.saturate(jnp.square(acc) * x, E4M3),
    "two users": lambda acc, x: (q := coda.saturate(acc * x, E5M2), q.astype(jnp.float32) * 2),
    "converted back": lambda acc, x: jnp.square((acc * x).astype(E5M2).astype(jnp.float32)),
}


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, residuals):
    """As JAX has them: the cotangent of what is converted to a float of 8 bits is one."""
    epilogue, arguments = GRADIENTS[name], (A / 2, B / 4, (jnp.arange(M * N).reshape(M, N) % 5 - 2) / 2)
    out_dtype = None if name == "astype" or name == "saturate" else (E5M2, None) if name == "two users" else "float32"
    fused = functools.partial(coda.gemm, epilogue=epilogue, out_dtype=out_dtype, residuals=residuals)
    got, want = train(fused)(*arguments), train(plainly(epilogue))(*arguments)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(wide(one), wide(other), rtol=2e-2, atol=2e-2 * np.abs(wide(other)).max())
        assert np.abs(wide(other)).max() > 0


def test_gradient_of_an_operand_of_8_bits():
    def f(multiply):
        return jax.jit(jax.grad(lambda x: jnp.sum(multiply(x).astype(jnp.float32) * ACC)))

    got = f(lambda x: coda.gemm(A, B, x, epilogue=lambda acc, x: acc * x, out_dtype=jnp.float32))(X8)
    want = f(lambda x: jnp.asarray(ACC) * x.astype(jnp.float32))(X8)
    same_bits(got, want)
