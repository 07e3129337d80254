"""Kernels of products of groups compiled for Hopper: registers suffice for what an expert's layers run."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.epilogues import EpilogueCase
from benchmarks.lab.machine_code import resource_usage
from benchmarks.programs import gated_backward, lowered, spec_of
from coda_jax import ffi
from coda_jax.epilogue import ByGroup, trace
from coda_jax.operators.feed_forward import gated
from coda_jax.primitives.axes import Dimension
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc
BF16, F32 = jnp.bfloat16, jnp.float32
M, N, K, GROUPS = 4096, 4096, 2048, 8


def of(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def kept_gate(acc):
    return acc, gated(jax.nn.silu)(acc)


def scaled(acc, column):
    return acc * column


def biased(acc, bias, scale):
    return jax.nn.gelu(acc * scale + bias)


def back_through_gate(acc, z, scale):
    return gated_backward(acc, scale, z, activation=jax.nn.silu)


def row_sums(acc, column):
    y = acc * column
    return y, jnp.sum(y * y, axis=1)


# An epilogue, its operands, and its results' dtypes.
EPILOGUES = {
    "identity": (lambda acc: acc, (), (BF16,)),
    "float32": (lambda acc: acc, (), (F32,)),
    "kept_gate": (kept_gate, (), (BF16, BF16)),
    "scaled": (scaled, (of((M, 1), F32),), (BF16,)),
    "biased": (biased, (ByGroup(of((GROUPS, N))), ByGroup(of((GROUPS,), F32))), (BF16,)),
    "back_through_gate": (back_through_gate, (of((M, 2 * N)), of((M, 1), F32)), (BF16, BF16)),
    "row_sums": (row_sums, (of((M, 1), F32),), (BF16,)),
}


@functools.cache
def kernel(name, tile=None, cluster_m=None, *, ragged=Dimension.M, groups=GROUPS, transpose_b=False, yields=False):
    epilogue, operands, out_dtypes = EPILOGUES[name]
    traced, (*captured, offsets) = trace(epilogue, of((M, N), F32), operands, of((groups + 1,), jnp.int32))
    assert not captured
    by_k = ragged is Dimension.K
    options = {"ragged": ragged, "transpose_a": by_k, "transpose_b": transpose_b}
    spec = spec_of(EpilogueCase(epilogue, None, out_dtypes), traced, **options)
    a = of((K, M) if by_k else (M, K))
    b = of((K, N) if by_k else (groups, N, K) if transpose_b else (groups, K, N))
    arrays = [x.array if isinstance(x, ByGroup) else x for x in operands]
    config = GemmConfig(*(tile or (None, None)), cluster_m=cluster_m)
    return lowered((a, b, *arrays, offsets), spec, config, yields=yields)


def usage(*args, **kwargs):
    made = kernel(*args, **kwargs)
    log = ffi.compile(made.call.source, made.call.name, SM90.target).log
    assert "serialized" not in log  # wgmma, where the assembler does not see through a call
    found = resource_usage(log)
    assert found.registers <= 168  # of 65536 for the block's 384 threads
    return found


# Bytes a thread stores and loads once a tile, by the tile and the cluster's CTAs; of others none.
SPILLED = {
    ("back_through_gate", None, 1): 80,
    ("back_through_gate", None, 2): 80,
    ("back_through_gate", (128, 192), 1): 80,
    ("back_through_gate", (128, 192), 2): 80,
    ("back_through_gate", (64, 256), 2): 28,
    ("back_through_gate", (128, 256), 2): 28,
}
HALVES_ARE_NO_CHUNKS = {(128, 192), (64, 64), (64, 192)}  # of 64 columns
SOME = {("kept_gate", None, 2), ("back_through_gate", None, 2), ("scaled", (128, 256), 2), ("biased", (128, 128), 1)}
FORMS = [
    pytest.param(name, tile, cluster_m, marks=[pytest.mark.slow] * ((name, tile, cluster_m) not in SOME))
    for name in EPILOGUES
    for tile in (None, *SM90.tiles)
    for cluster_m in (1, 2)
    if not (name == "kept_gate" and tile in HALVES_ARE_NO_CHUNKS)
]


@pytest.mark.parametrize(("name", "tile", "cluster_m"), FORMS)
def test_registers_suffice(name, tile, cluster_m):
    assert usage(name, tile, cluster_m).spilled_bytes <= SPILLED.get((name, tile, cluster_m), 0)


@pytest.mark.parametrize("cluster_m", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tile", [None, *(pytest.param(tile, marks=pytest.mark.slow) for tile in SM90.tiles)], ids=str)
def test_registers_suffice_with_k_in_groups(tile, cluster_m):
    assert usage("identity", tile, cluster_m, ragged=Dimension.K).spilled_bytes == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "scaled")) for name in EPILOGUES]
)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_claiming_tiles_takes_few_more_registers(name, transpose_b):
    options = {"transpose_b": transpose_b, "yields": True}
    assert "claims = true" in kernel(name, **options).call.source
    assert usage(name, **options).spilled_bytes <= SPILLED.get((name, None, 2), 0) + 8


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [Dimension.M, Dimension.K])
@pytest.mark.parametrize("groups", [1, 2, 30, 128, 1024])
def test_any_number_of_groups(groups, ragged):
    """The kernel asserts that the host has counted its shared memory."""
    assert usage("identity", ragged=ragged, groups=groups).spilled_bytes == 0
