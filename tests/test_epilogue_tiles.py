"""Epilogues of all kinds, tile by tile, by the kernel's own code on the host: operands, heads, reductions along rows
and columns, with the values that plain JAX has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_result_stores import F32, Case, pieces_of

from benchmarks.programs import PROGRAMS
from coda_jax.epilogue import finish
from coda_jax.lowering import kernel
from tests.lockstep import Library

M, N = 72, 80  # two tiles of rows and of columns, or more, the last ones with parts
WIDE = {  # tiles of more than 64 columns: for their heads
    **dict.fromkeys(("rotary_positions", "qk_norm_rotary", "rotary_whole_tables"), 128),
    **dict.fromkeys(("rotary_96", "qk_norm_rotary_192"), 192),
    "rotary_256": 256,
}
NAMES = [name for name, program in PROGRAMS.items() if program.epilogue is not None]
SOME = (
    *("every_vector", "extrema", "logsumexp_pick", "parts"),
    *("softmax_of_heads", "rotary_repeated", "rotary_whole_tables"),
)
OPTIONS = {"extrema": {"column_passes": 2, "box_n": 32}}


def case_of(name):
    program = PROGRAMS[name]
    tile = 64, WIDE.get(name, 64)
    return Case(
        program.epilogue, program.out_dtypes, tile, operands=program.operand_types, options=OPTIONS.get(name, {})
    )


class Kernels(Library):
    """Programs at one size each, by name."""

    def __init__(self, folder, names):
        self.cases = {name: case_of(name) for name in names}
        self.columns = {name: max(PROGRAMS[name].columns(N), 2 * PROGRAMS[name].multiple) for name in names}
        self.kernels = {name: case.kernel(M, self.columns[name]) for name, case in self.cases.items()}
        super().__init__(folder, {name: made for name, (_, made) in self.kernels.items()})


def random(rng, type_):
    """An operand of this type: normal numbers, integers from 0 to 9, or booleans."""
    if jnp.issubdtype(type_.dtype, jnp.floating):
        return rng.normal(size=type_.shape).astype(type_.dtype)
    return rng.integers(0, 2 if type_.dtype == bool else 10, type_.shape).astype(type_.dtype)


def check(library, name, **options):
    """Checks results to the rounding of their dtypes, reductions to that of float32."""
    n, case, (spec, made) = library.columns[name], library.cases[name], library.kernels[name]
    rng = np.random.default_rng(0)
    acc, *operands = (random(rng, type_) for type_ in (jax.ShapeDtypeStruct((M, n), F32), *case.operands(M, n)))
    # The rows of tiles of a cluster are even, so that the last tiles may begin behind the last row.
    pieces = pieces_of(case, spec, made.call, 3 * case.tile[0], n, 1)
    for piece in pieces:
        piece.row_end = M
    found = library.store(name, made, pieces, acc, operands, **options)
    program, stores = spec.program, len(spec.program.stores)
    partials = [
        kernel.finished(reduction, jnp.asarray(of_tiles.view(np.float32)))
        for reduction, of_tiles in zip(program.reductions, found[stores:], strict=False)
    ]
    outputs = finish(program, partials, [jnp.asarray(x) for x in operands], M)
    for store, bits, dtype in zip(program.stores, found, spec.store_dtypes, strict=False):
        outputs[store.output] = bits.view(np.dtype(dtype))
    wide = [x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    want = jax.tree.leaves(jax.jit(case.epilogue)(acc, *wide))
    assert len(outputs) == len(want)
    for number, expected in enumerate(want):
        got, expected = np.asarray(outputs[number], np.float64), np.asarray(expected, np.float64)
        rounding = 2**-8 if np.dtype(outputs[number].dtype).itemsize == 2 else 2**-16
        assert got.size == expected.size
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=rounding, atol=rounding)


def test_some_programs(tmp_path):
    library = Kernels(tmp_path / "some", SOME)
    for name in SOME:
        check(library, name)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Kernels(tmp_path_factory.mktemp("tiles"), NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_programs(library, name):
    """Also with other lanes and warps ahead, and results that are read at once."""
    check(library, name)
    check(library, name, lane_first=7, warp_first=2, stores_early=True)
