"""Kernels that follow each other: one may begin before the last one has ended, and has to wait for its results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.lowering import kernel
from tests.gpu.poisoned import inline_headers

# One and a half tiles of 128 x 128 a multiprocessor: half of them begin the next product while the others still work.
ROWS, COLUMNS, LENGTH = 2560, 1280, 12
CONFIG = coda.GemmConfig(tile_m=128, tile_n=128, split_k=False)
WAIT = "ptx::wait_for_earlier_kernels();"


def _product(x, weight, before, scale, vector):
    def epilogue(acc, before, scale, vector):
        return jnp.tanh(acc * scale + 0.5 * before + vector).astype(jnp.bfloat16)

    return coda.gemm(x, weight, before, scale, vector, epilogue=epilogue, implementation="cuda", config=CONFIG)


def _row(vector, weight):
    """A product of one row."""
    return coda.gemm(vector, weight, implementation="cuda")


def _chain(product=_product, row=_row):
    """Each reads what the last ones have made: a, a tile operand, and a row vector, which every third time comes from a
    kernel of XLA's and else from the product right before.
    """

    def run(x, weights, scale):
        before, vector = x, None
        for i, weight in enumerate(weights):
            vector = row(vector, weight) if i % 3 else -before[i : i + 1]
            x, before = product(x, weight, before, scale, vector), x
        return x

    return run


def _arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (LENGTH, COLUMNS, COLUMNS)) / np.sqrt(COLUMNS)
    scale = 1 + 0.1 * jax.random.normal(keys[1], (ROWS, 1))
    xs = jax.random.normal(keys[2], (20, ROWS, COLUMNS))  # so that memory never holds the right values already
    return list(xs.astype(jnp.bfloat16)), list(weights.astype(jnp.bfloat16)), scale


def _apart(x, weights, scale):
    return _chain(*(_waiting(jax.jit(function)) for function in (_product, _row)))(x, weights, scale)


def _waiting(function):
    return lambda *args: jax.block_until_ready(function(*args))


def _without_graphs(run):
    return jax.jit(run, compiler_options={"xla_gpu_enable_command_buffer": ""})


def _count_wrong(run, repeats):
    xs, weights, scale = _arguments()
    right = [_apart(x, weights, scale) for x in xs]
    wrong = 0
    for _ in range(repeats):
        results = [run(x, weights, scale) for x in xs]  # in a row, too
        wrong += sum(int((one != of).any()) for one, of in zip(results, right, strict=True))
    return wrong


@pytest.mark.parametrize("jit", [jax.jit, _without_graphs], ids=["graphs", "launches"])
def test_products_in_a_row_give_the_bits_of_products_apart(jit):
    assert _count_wrong(jit(_chain()), repeats=50) == 0


def test_a_missing_wait_shows(monkeypatch):
    """The test above would catch a missing wait: without it, some results differ from those of products apart."""
    source_of = kernel._source

    def plant(*args, **options):
        source = inline_headers(source_of(*args, **options))
        assert source.count(WAIT) == 1
        return source.replace(WAIT, "")

    xs, weights, scale = _arguments()
    right = [_apart(x, weights, scale) for x in xs]
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_source", plant)
        broken = _without_graphs(_chain()).lower(xs[0], weights, scale).compile()
    found = [broken(x, weights, scale) for _ in range(10) for x in xs]
    assert any((one != right[i % len(xs)]).any() for i, one in enumerate(found))
