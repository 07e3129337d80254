"""Epilogues of all kinds, tile by tile, by the kernel's own code on the host: operands, heads, reductions along rows
and columns, with the values that plain JAX has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import PROGRAMS, lowered
from coda_jax.epilogue import finish
from coda_jax.lowering import kernel
from coda_jax.tiles.config import GemmConfig
from tests.lockstep import Library
from tests.store_cases import F32, Case
from tests.test_result_stores import pieces_of

M, N = 72, 80  # two tiles of rows and of columns, or more, the last ones with parts
WIDE = {  # tiles of more than 64 columns: for their heads
    **dict.fromkeys(("rotary_positions", "qk_norm_rotary", "rotary_whole_tables"), 128),
    **dict.fromkeys(("rotary_96", "qk_norm_rotary_192"), 192),
    "rotary_256": 256,
}
NAMES = [name for name, program in PROGRAMS.items() if program.epilogue is not None]
SOME = (
    *("every_vector", "extrema", "logsumexp_pick", "parts_of_sum", "residual"),
    *("softmax_of_heads", "rotary_repeated", "rotary_whole_tables"),
)
OPTIONS = {"extrema": {"column_passes": 2, "box_n": 32}, "residual": {"load_slots": 1, "box_n": 32, "subtile_n": 32}}
BATCHED = ("every_vector", "logsumexp_pick", "rotary_whole_tables", "qk_norm_rotary", "two_outputs")  # operands too


class Kernels(Library):
    """Programs at one size each, by name."""

    def __init__(self, folder, names):
        self.cases, self.columns, self.kernels = {}, {}, {}
        for name in names:
            program, tile = PROGRAMS[name], (64, WIDE.get(name, 64))
            n = self.columns[name] = max(program.columns(N), 2 * program.multiple)
            self.cases[name] = Case(
                program.epilogue,
                program.out_dtypes,
                tile,
                operands=program.operand_types,
                batch=2 if name in BATCHED else None,
                options=OPTIONS.get(name, {}),
            )
            self.kernels[name] = kernel_of(self.cases[name], n)
        super().__init__(folder, {name: made for name, (_, made) in self.kernels.items()})


def kernel_of(case, n):
    """The spec and the kernel of a product and its operands, all but b with the case's batch."""
    spec, made = case.kernel(M, n)
    if case.batch is None:
        return spec, made
    shapes = [jax.ShapeDtypeStruct((M, 64), jnp.bfloat16), *case.operands(M, n)]
    a, *operands = (jax.ShapeDtypeStruct((case.batch, *x.shape), x.dtype) for x in shapes)
    spec = spec.replace(batched=(True, False, *(True for _ in operands)))
    config = GemmConfig(tile_m=case.tile[0], tile_n=case.tile[1], cluster_m=1, split_k=False, **case.options)
    return spec, lowered((a, jax.ShapeDtypeStruct((n, 64), jnp.bfloat16), *operands), spec, config)


def random(rng, type_, batch):
    """An array of this type: normal numbers, integers from 0 to 9, or booleans."""
    shape = type_.shape if batch is None else (batch, *type_.shape)
    if jnp.issubdtype(type_.dtype, jnp.floating):
        return rng.normal(size=shape).astype(type_.dtype)
    return rng.integers(0, 2 if type_.dtype == bool else 10, shape).astype(type_.dtype)


def check(library, name, **options):
    """Checks results to the rounding of their dtypes, reductions to that of float32."""
    n, case, (spec, made) = library.columns[name], library.cases[name], library.kernels[name]
    rng, program = np.random.default_rng(0), spec.program
    types = jax.ShapeDtypeStruct((M, n), F32), *case.operands(M, n)
    acc, *operands = (random(rng, type_, case.batch) for type_ in types)
    # The rows of tiles of a cluster are even, so that the last tiles may begin behind the last row.
    pieces = pieces_of(case, spec, made.call, 3 * case.tile[0], n, 1)
    for piece in pieces:
        piece.row_end = M
    found = library.store(name, made, pieces, acc, operands, **options)
    partials = [
        kernel.finished(reduction, jnp.asarray(of_tiles.view(np.float32)))
        for reduction, of_tiles in zip(program.reductions, found[len(program.stores) :], strict=False)
    ]
    stores = [bits.view(np.dtype(dtype)) for bits, dtype in zip(found, spec.store_dtypes, strict=False)]
    epilogue = jax.jit(case.epilogue)
    for i in range(case.batch or 1):
        own = [[x if case.batch is None else x[i] for x in of] for of in ((acc, *operands), partials, stores)]
        (acc_of, *operands_of), partials_of, stores_of = own
        outputs = finish(program, partials_of, [jnp.asarray(x) for x in operands_of], M)
        outputs.update({store.output: x for store, x in zip(program.stores, stores_of, strict=True)})
        wide = [x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands_of]
        want = jax.tree.leaves(epilogue(acc_of, *wide))
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
