"""Every argument that coda.gemm refuses is named, with its value and the rule, on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda

A, B = jnp.ones((8, 16)), jnp.ones((16, 24))
X, DEEP = jnp.ones((8, 24)), jnp.ones((2, 4, 16))


def first(acc, *operands):
    return acc


def tile_and_sum(acc, *operands):
    return acc, jnp.sum(acc, axis=1)


SHAPES = {
    "vector a": (lambda: coda.gemm(A[0], B), ValueError, r"a has shape \(16,\); it must be a matrix"),
    "batched b": (lambda: coda.gemm(A, B[None]), ValueError, r"b \(1, 16, 24\) has K = 1; they .*jax.vmap"),
    "several b": (lambda: coda.gemm(A, (B, B.T)), ValueError, r"of shapes \(16, 24\), \(24, 16\); several must be"),
    "columns in heads": (
        lambda: coda.gemm(A, B.reshape(16, 3, 8), epilogue=lambda acc: jnp.split(acc, 2, axis=1)[0] * 2),
        ValueError,
        r"b has columns \(3, 8\), and epilogue '.*' works on halves; they must be one axis, or .*\(2, N / 2\)",
    ),
    "K": (
        lambda: coda.gemm(A, B.T),
        ValueError,
        r"a \(8, 16\) has K = 16, b \(24, 16\) has K = 24; they must be equal",
    ),
    "K with transposes": (
        lambda: coda.gemm(A, B, transpose_a=True, transpose_b=True),
        ValueError,
        r"a \(8, 16\) transposed has K = 8, b \(16, 24\) transposed has K = 24",
    ),
    "transposed leading axes": (
        lambda: coda.gemm(DEEP, B, transpose_a=True),
        ValueError,
        r"a has shape \(2, 4, 16\); with transpose_a it must be \(K, M\)",
    ),
    "(B, 1, N)": (
        lambda: coda.gemm(DEEP, B, jnp.ones((2, 1, 24)), epilogue=first),
        ValueError,
        r"operand 0 has shape \(2, 1, 24\); beside an output of shape \(2, 4, 24\) it must be a scalar \(\), "
        r"a row vector \(24,\) or \(1, 24\), a column vector \(2, 4, 1\) or a tile \(2, 4, 24\)",
    ),
    "flat tile": (lambda: coda.gemm(DEEP, B, X, epilogue=first), ValueError, r"operand 0 has shape \(8, 24\)"),
    "(M,)": (lambda: coda.gemm(A, B, jnp.ones(8), epilogue=first), coda.NotTileLocalError, r"\(M, 1\)"),
    "wrong row": (lambda: coda.gemm(A, B, jnp.ones(23), epilogue=first), coda.NotTileLocalError, r"\(23,\)"),
    "unlike captured": (
        lambda: coda.gemm(A, B, epilogue=lambda acc: acc + jnp.ones((2, 8, 24)).sum(0)),
        coda.NotTileLocalError,
        "reduce_sum|broadcast_in_dim",
    ),
    "not local": (lambda: coda.gemm(A, B, epilogue=jax.nn.softmax), coda.NotTileLocalError, "softmax"),
}

TYPES = {
    "float64": (lambda: coda.gemm(np.ones((8, 16)), B), TypeError, r"a has dtype float64; it must be bfloat16"),
    "int": (lambda: coda.gemm(A, B.astype(jnp.int32)), TypeError, r"b has dtype int32; it must be bfloat16"),
    "fp8": (lambda: coda.gemm(A.astype(jnp.float8_e4m3fn), B), TypeError, "a has dtype float8_e4m3fn"),
    "list": (lambda: coda.gemm([[1.0]], B), TypeError, "a is list; it must be an array"),
    "operand float64": (lambda: coda.gemm(A, B, np.ones(24), epilogue=first), TypeError, "operand 0 has dtype float64"),
    "operand int8": (
        lambda: coda.gemm(A, B, X.astype(jnp.int8), epilogue=first),
        TypeError,
        "operand 0 has dtype int8",
    ),
    "bool tile": (
        lambda: coda.gemm(A, B, X > 0, epilogue=first),
        coda.NotTileLocalError,
        "tiles are bfloat16",
    ),
    "None operand": (lambda: coda.gemm(A, B, None, epilogue=first), TypeError, "operand 0 is NoneType"),
    "key": (lambda: coda.gemm(A, B, jax.random.key(0), epilogue=first), TypeError, "operand 0 has dtype key"),
    "integer tile out": (
        lambda: coda.gemm(A, B, epilogue=lambda acc: acc > 0),
        coda.NotTileLocalError,
        "output 0 is a tile of dtype bool",
    ),
}

OPTIONS = {
    "epilogue": (lambda: coda.gemm(A, B, epilogue="relu"), TypeError, r"epilogue is str; it must be a function"),
    "residuals": (lambda: coda.gemm(A, B, residuals="all"), ValueError, "residuals = 'all'; it must be one of 'preact"),
    "implementation": (lambda: coda.gemm(A, B, implementation="triton"), ValueError, "implementation = 'triton'"),
    "config": (lambda: coda.gemm(A, B, config={"stages": 4}), TypeError, "config is dict; it must be a GemmConfig"),
    "operands without epilogue": (lambda: coda.gemm(A, B, X), TypeError, "1 operands without an epilogue"),
    "a function as operand": (lambda: coda.gemm(A, B, jax.nn.gelu), TypeError, "operand 0 is a function; .*epilogue="),
    "large integer": (
        lambda: coda.gemm(A, B, 2**40, epilogue=first),
        ValueError,
        "operand 0 = 1099511627776; .* int32",
    ),
    "out_sharding": (lambda: coda.gemm(A, B, out_sharding="x"), TypeError, "out_sharding is str; it must be a jax.P"),
    "out_sharding of more axes": (
        lambda: coda.gemm(A, B, out_sharding=jax.P(None, None, "x")),
        ValueError,
        r"out_sharding = .* is of 3 axes; the product has shape \(8, 24\)",
    ),
    "out_dtype name": (lambda: coda.gemm(A, B, out_dtype="bf16"), TypeError, "out_dtype = 'bf16' is not a dtype"),
    "aliases": (
        lambda: coda.gemm(A, B, X, epilogue=first, input_output_aliases=[(0, 0)]),
        TypeError,
        r"input_output_aliases = \[\(0, 0\)\]; it must be a dict",
    ),
    "out_dtype int": (lambda: coda.gemm(A, B, out_dtype=jnp.int8), TypeError, "out_dtype of output 0 is int8"),
    "out_dtype tree": (
        lambda: coda.gemm(A, B, epilogue=tile_and_sum, out_dtype=(jnp.float32,)),
        ValueError,
        "does not fit what epilogue 'tile_and_sum' returns, .*: 1 dtypes for 2 outputs",
    ),
    "out_dtype beyond the outputs": (
        lambda: coda.gemm(A, B, epilogue=tile_and_sum, out_dtype=(jnp.float32, None, jnp.float32)),
        ValueError,
        "out_dtype = .* does not fit what epilogue 'tile_and_sum' returns, .*: 3 dtypes for 2 outputs",
    ),
    "out_dtype of another kind": (
        lambda: coda.gemm(A, B, epilogue=tile_and_sum, out_dtype={"x": jnp.float32, "y": None}),
        ValueError,
        "(?s)does not fit what epilogue 'tile_and_sum' returns, .*dict",
    ),
    "out_dtype of a reduction": (
        lambda: coda.gemm(A, B, epilogue=tile_and_sum, out_dtype=(None, jnp.bfloat16)),
        TypeError,
        "out_dtype of output 1 .* is bfloat16; what is not a tile keeps the epilogue's dtype, float32",
    ),
    "cuda on cpu": (
        lambda: coda.gemm(A, B, implementation="cuda"),
        NotImplementedError,
        "implementation='cuda' was asked for on platform cpu",
    ),
}


def aliased(aliases, *operands, **options):
    return lambda: coda.gemm(A, B, *operands, epilogue=tile_and_sum, input_output_aliases=aliases, **options)


ALIASES = {
    "no such operand": (aliased({1: 0}, X), ValueError, "names operand 1; there are 1"),
    "a vector": (
        aliased({0: 0}, jnp.ones(24)),
        ValueError,
        r"operand 0, \(N,\) or \(1, N\) float32; only a float32 tile",
    ),
    "bfloat16": (aliased({0: 0}, X.astype("bfloat16")), ValueError, r"operand 0, \(M, N\) bfloat16; only a"),
    "a reduction": (aliased({0: 1}, X), ValueError, "operand 0 to output 1, which is not a float32 tile of its shape"),
    "a rounded tile": (aliased({0: 0}, X, out_dtype=jnp.bfloat16), ValueError, "output 0, which is not a float32 tile"),
    "no such output": (aliased({0: 5}, X), ValueError, "output 5, which is not a float32 tile"),
    "twice": (aliased({0: 0, 1: 0}, X, X), ValueError, "gives two operands to one output"),
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [pytest.param(*case, id=f"{name}") for cases in (SHAPES, TYPES, OPTIONS, ALIASES) for name, case in cases.items()],
)
def test_refusal(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refused_before_anything_is_bound():
    """Tracing is enough: no platform is needed to hear of a mistake."""
    with pytest.raises(coda.NotTileLocalError):
        jax.eval_shape(lambda a, b: coda.gemm(a, b, epilogue=lambda acc: jnp.cumsum(acc, axis=1)), A, B)


def test_python_scalars_are_operands():
    out = coda.gemm(A, B, np.float64(2.0), 3, True, epilogue=lambda acc, s, i, flag: jnp.where(flag, acc * s + i, 0))
    np.testing.assert_array_equal(out, jnp.full((8, 24), 35.0))
