"""Kernels with results of 8 bits, transposed results and maxima, compiled for Hopper; and which products have none."""

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from benchmarks.lab.machine_code import disassembly, machine_instructions, resource_usage
from coda_jax import ffi
from coda_jax.lowering import kernel
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig
from tests.nvrtc import needs_nvrtc
from tests.store_cases import BF16, CASES, E4M3, E5M2, F32, Case, array, forward, ordered, saturated

SPILLED = {"gate": 8}  # bytes that a thread stores and loads, once each: with rstd and two scales
MOST_INSTRUCTIONS = 8192  # that the instruction cache holds
ELEMENTS = 192  # of a thread, in a tile of 128 x 192


def quantised(acc, scale):
    y8 = saturated(acc * scale)
    return ordered(y8), ordered(y8.T), jnp.max(jnp.abs(acc))


def gate_with_copies(acc, rstd, w_scale, y_scale):
    z8 = saturated(acc * w_scale)
    return ordered(z8), ordered(z8.T), *forward(acc, rstd, w_scale, y_scale)[2:]


def both_copies_in_natural_order(acc):
    y8 = saturated(acc)
    return y8, y8.T, jnp.max(acc)


OF_GATE = {"operands": lambda m, n: (array(m, 1), array(n), array())}
KERNELS = {
    "quantised": Case(quantised, (E4M3, E4M3), tile=(128, 192), operands=lambda m, n: (array(),)),
    "gate": Case(forward, (BF16, E4M3, E4M3), tile=(128, 192), **OF_GATE),
    "gate with copies": Case(gate_with_copies, (E4M3, E4M3, E4M3), tile=(128, 192), **OF_GATE),
    "natural order": Case(both_copies_in_natural_order, (E4M3, E4M3), tile=(128, 192)),
    "16 bits": Case(lambda acc: (acc, acc.T, jnp.max(acc)), (BF16, BF16), tile=(128, 192)),
}


def compiled(name):
    _, made = KERNELS[name].kernel(16384, 16384)
    return ffi.compile(made.call.source, name, SM90.target)


@needs_nvrtc
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "gate")) for name in KERNELS])
def test_registers_suffice(name):
    done = compiled(name)
    usage = resource_usage(done.log)
    assert usage.registers <= 168 and usage.spilled_bytes <= SPILLED.get(name, 0)
    assert machine_instructions(done.cubin) < MOST_INSTRUCTIONS


@needs_nvrtc
def test_both_copies_are_of_one_conversion():
    """Half an instruction an element that converts, and a quarter that makes the transposed copy's words."""
    text = disassembly(compiled("quantised").cubin)
    count = {name: sum(name in line for line in text) for name in ("F2FP", "PRMT", "STSM", "SHFL")}
    assert count["F2FP"] == ELEMENTS // 2
    assert ELEMENTS // 4 <= count["PRMT"] < ELEMENTS // 4 + 8
    assert count["STSM"] == 2 * ELEMENTS // 16
    assert count["SHFL"] < 12


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_shared_memory_is_what_the_host_counted(name):
    """The kernel asserts it."""
    _, made = CASES[name].kernel(4096, 336 if name == "slices" else 4096)
    assert resource_usage(ffi.compile(made.call.source, name, SM90.target).log).registers <= 168


def reason(epilogue, out_dtype, m=256, n=256, **options):
    """Why such a product has no kernel."""
    types = array(m, 64, dtype=BF16), array(n, 64, dtype=BF16)
    products = []

    def noted(avals, spec):
        products.append(unsupported_reason(avals, spec))
        return products[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coda_jax.lowering.select.unsupported_reason", noted)
        f = jax.jit(lambda a, b: coda.gemm(a, b, epilogue=epilogue, transpose_b=True, out_dtype=out_dtype))
        f.trace(*types).lower(lowering_platforms=("cuda",))
    return products[0]


def heads_of_32(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 32), 2, axis=-1)
    return saturated(jnp.concatenate([second, first], axis=-1).reshape(acc.shape))


def turned_heads(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 64), 2, axis=-1)
    return jnp.concatenate([second, first], axis=-1).reshape(acc.shape).T


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("epilogue", "out_dtype", "sizes", "rule"),
    [
        (lambda acc: acc.T, F32, {}, "float32 and transposed"),
        (turned_heads, BF16, {}, "heads of 64 columns; the kernel transposes all columns"),
        (lambda acc: ordered(acc.astype(BF16)), BF16, {}, "in contraction order; the kernel stores results of 8 bits"),
        (heads_of_32, E4M3, {}, "half a head is less than a box"),
        (lambda acc: saturated(acc).T, E4M3, {"m": 264}, "TMA addresses multiples of 16"),
        (lambda acc: acc.T, BF16, {"m": 252}, "TMA addresses multiples of 16"),
        (lambda acc: saturated(acc), E4M3, {"n": 264}, "TMA addresses multiples of 16"),
    ],
)
def test_unsupported_results_have_a_reason(epilogue, out_dtype, sizes, rule):
    assert rule in reason(epilogue, out_dtype, **sizes)


@pytest.mark.filterwarnings("ignore")
def test_transposed_and_8_bit_results_have_a_kernel():
    assert reason(lambda acc: (ordered(saturated(acc).T), jnp.max(acc)), (E4M3, F32)) is None
    assert reason(lambda acc: (acc.astype(E5M2), acc.T), (E5M2, BF16)) is None


def test_narrow_boxes_are_refused():
    config = GemmConfig(box_n=16)
    with pytest.raises(ValueError, match="box_n = 16 makes rows of 16 bytes"):
        Case(saturated, (E4M3,), options={"box_n": config.box_n}).kernel(128, 128)


def test_a_maximum_of_a_claimed_tile_is_one_of_rows():
    """A launch of more blocks than multiprocessors has more warps than there are words."""
    for yields, shape in ((False, (1056,)), (True, (128, 16384))):
        case = Case(lambda acc: (acc, jnp.max(acc)), (BF16,), yields=yields)
        spec, made = case.kernel(16384, 16384)
        assert made.results[1].shape == shape
        assert kernel.finished(spec.program.reductions[0], jnp.ones(shape)).shape == ()
