"""With 64-bit types enabled an epilogue is the same program, with the same values and types."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue import NotTileLocalError, trace

M, N = 8, 16
RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((M, 24), (24, N)))
ROW, COLUMN = jnp.asarray(RNG.normal(size=N), jnp.float32), jnp.asarray(RNG.normal(size=(M, 1)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, N, size=(M, 1)), jnp.int32)


def _heads(acc, f):
    return f(acc.reshape(M, 2, N // 2)).reshape(acc.shape)


@jax.custom_vjp
def _doubled(x):
    return x * 2


_doubled.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct * np.float64(2) * jnp.ones(N) + 0 * jnp.arange(N) * x,))

FUNCTIONS = {
    "python_scalars": lambda acc: acc * 2 + 0.5 - 1 / 3,
    "numpy_scalar": lambda acc: acc * np.float64(0.7) + np.sqrt(2 / np.pi) + np.int64(3),
    "numpy_array": lambda acc: acc * np.linspace(0, 1, N) + np.arange(M)[:, None],
    "where": lambda acc: jnp.where(acc > 0, acc * 2, 0.5) + jnp.where(acc > 1, 1.0, 0),
    "causal": lambda acc: jnp.where(jnp.arange(M)[:, None] >= jnp.arange(N), acc, -jnp.inf),
    "arange": lambda acc: acc * jnp.arange(N) + jnp.arange(M)[:, None] % 3,
    "arange_float": lambda acc: acc * jnp.arange(0.0, N) + jnp.arange(N, dtype=float),
    "iota": lambda acc: acc + jax.lax.broadcasted_iota(int, acc.shape, 1),
    "tril": lambda acc: jnp.tril(acc) + jnp.triu(acc, 2),
    "one_hot": lambda acc, labels: (acc - jax.nn.one_hot(labels[:, 0], N), jnp.sum(acc * (jnp.arange(N) == labels), 1)),
    "counts": lambda acc: (jnp.sum(acc > 0, axis=1), jnp.count_nonzero(acc > 1), jnp.sum(acc > 0, axis=0)),
    "mean": lambda acc: (jnp.mean(acc, axis=1), jnp.mean(acc), jnp.mean(acc * acc, 1) - jnp.mean(acc, 1) ** 2),
    "var_of_heads": lambda acc: _heads(acc, lambda x: x * jnp.var(x, axis=-1, keepdims=True)),
    "softmax_of_heads": lambda acc: _heads(acc, lambda x: jax.nn.softmax(x, axis=-1)),
    "logsumexp": lambda acc: (jax.nn.logsumexp(acc, axis=1), coda.logsumexp(acc)),
    "finished": lambda acc: jnp.cumsum(jnp.sort(jnp.sum(acc, axis=0))) + jnp.argmax(jnp.max(acc, axis=1)),
    "extrema": lambda acc: (jnp.max(acc, axis=1), jnp.min(acc)),
    "rounded": lambda acc: jnp.round(acc, 2) + acc.astype(jnp.bfloat16) * 3,
    "zeros": lambda acc: acc + jnp.zeros(N) + jnp.ones((M, 1)) * jnp.full((), 2.0),
    "clip": lambda acc: jnp.clip(acc, -1, 1) + jnp.maximum(acc, 0),
    "powers": lambda acc: acc**2 + jnp.abs(acc) ** 0.5 + 2.0**acc,
    "gelu": jax.nn.gelu,
    "erf": lambda acc: jax.nn.gelu(acc, approximate=False),
    "softplus": jax.nn.softplus,
    "custom_vjp": _doubled,
    "select": lambda acc: jnp.select([acc > 1, acc > 0], [acc, 2 * acc], -7.0),
    "integers": lambda acc: acc * (acc.astype(int) // 3 + jnp.int32(2)),
    "halves": lambda acc: jnp.concatenate(jnp.split(acc, 2, axis=1)[::-1], axis=1) * jnp.arange(N) / 3,
    "operands": lambda acc, row, column: (acc + row) * column + 3,
}
OPERANDS = {"one_hot": (LABELS,), "operands": (ROW, COLUMN)}


@pytest.mark.parametrize(
    ("name", "residuals"),
    [
        *((name, "recompute") for name in FUNCTIONS),
        *((name, "preactivation") for name in ("where", "one_hot", "custom_vjp", "extrema")),
    ],
)
def test_same_program_values_and_gradients(name, residuals):
    def f(acc, *operands):  # anew each time: JAX would keep what it traced
        return FUNCTIONS[name](acc, *operands)

    def run():
        operands = OPERANDS.get(name, ())

        def loss(a, b):
            out = coda.gemm(a, b, *operands, epilogue=f, residuals=residuals)
            return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0)) for x in jax.tree.leaves(out)).astype(jnp.float32), out

        step = jax.value_and_grad(loss, (0, 1), has_aux=True)
        programs = re.findall(r"program=(.*?)batched", str(jax.make_jaxpr(step)(A, B)), re.DOTALL)
        assert programs
        return programs, jax.jit(step)(A, B)

    programs, results = run()
    with jax.enable_x64(True):
        programs_64, results_64 = run()
    assert programs_64 == programs
    for x, x_64 in zip(jax.tree.leaves(results), jax.tree.leaves(results_64), strict=True):
        assert x_64.dtype == x.dtype
        np.testing.assert_array_equal(x_64, x)


FLOAT64 = {
    "astype": lambda acc: acc.astype(jnp.float64),
    "dtype": lambda acc: acc + jnp.zeros(N, dtype=np.float64),
    "captured": lambda acc, ones=None: acc + ones,
}


@pytest.mark.parametrize("name", FLOAT64)
def test_float64_by_name_is_refused(name):
    line = FLOAT64[name].__code__.co_firstlineno
    with jax.enable_x64(True):
        f = FLOAT64[name] if name != "captured" else functools.partial(FLOAT64[name], ones=jnp.ones(N))
        with pytest.raises(NotTileLocalError, match=rf"test_epilogue_x64.py:{line} .* asks for float64"):
            trace(f, jax.ShapeDtypeStruct((M, N), jnp.float32), ())


def test_float64_operands_are_refused():
    acc = jax.ShapeDtypeStruct((M, N), jnp.float32)
    with jax.enable_x64(True):
        double = jnp.ones(N)
        with pytest.raises(NotTileLocalError, match=r"operand 'x' of shape .* has dtype float64"):
            trace(lambda acc, x: acc + x, acc, (double,))
        with pytest.raises(NotTileLocalError, match=r"captured array 0 of shape .* has dtype float64"):
            trace(lambda acc: acc + double.astype(jnp.float32), acc, ())
