"""Epilogues with results of 8 bits, transposed and symmetric results and maxima of all elements, and their kernels."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks.epilogues import EpilogueCase
from benchmarks.programs import lowered, spec_of
from coda_jax.epilogue import trace
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.tiles.config import GemmConfig

BF16, F16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
ordered = coda.contraction_order


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """An epilogue whose operations are exact or rounded once, its stores' dtypes, and the tile.

    `units`: M and N are multiples of these. `symmetric`: M is N, and tiles on and below the diagonal alone are made.
    """

    epilogue: object
    out_dtypes: tuple
    tile: tuple = (128, 128)
    units: tuple = (16, 16)
    operands: object = lambda m, n: ()
    batch: int | None = None
    yields: bool = False
    symmetric: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    @functools.cache  # noqa: B019
    def kernel(self, m, n):
        operands = self.operands(m, n)
        traced, captured = trace(self.epilogue, array(m, n), operands)
        assert not captured
        if self.symmetric:
            traced = traced.symmetric()
        case = EpilogueCase(self.epilogue, None, self.out_dtypes)
        spec = spec_of(case, traced, transpose_b=True, symmetric=self.symmetric)
        batch = () if self.batch is None else (self.batch,)
        types = (array(*batch, m, 64, dtype=BF16), array(n, 64, dtype=BF16), *operands)
        spec = spec.replace(batched=(bool(batch),) + (False,) * (len(types) - 1))
        assert unsupported_reason(types, spec) is None
        options = {"cluster_m": 1, "split_k": False, **self.options}
        config = GemmConfig(tile_m=self.tile[0], tile_n=self.tile[1], **options)
        return spec, lowered(types, spec, config, yields=self.yields)

    @property
    def square(self):
        """The side of the squares, on the diagonal of a symmetric result, that are not stored transposed."""
        return math.lcm(self.tile[0] * self.options.get("cluster_m", 1), self.tile[1])

    def __hash__(self):
        return id(self)


def gate(z):
    of_gate, up = jnp.split(z, 2, axis=1)
    return jnp.maximum(of_gate, 0) * up


def saturated(y):
    return coda.saturate(y, E4M3)


def forward(acc, rstd, w_scale, y_scale):
    z = acc * rstd * w_scale
    y = gate(z)
    y8 = saturated(y * y_scale)
    return z, ordered(y8), ordered(y8.T), jnp.max(jnp.abs(y))


def backward(acc, z, scale):
    of_gate, up = jnp.split(z.astype(F32), 2, axis=1)
    t = jnp.concatenate([acc * up, acc * jnp.maximum(of_gate, 0)], axis=1)
    t8, y8 = saturated(t * scale), saturated(of_gate * up)
    return ordered(t8), ordered(t8.T), ordered(y8.T), jnp.max(jnp.abs(t))


def halves_of_heads(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 64), 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1).reshape(acc.shape)


def both(quantise, order, transposed_order):
    def epilogue(acc):
        y8 = quantise(acc)
        return order(y8), transposed_order(y8.T)

    return epilogue


def plain(y):
    return y


def symmetric(epilogue, *out_dtypes, units=(8, 8), **options):
    return Case(epilogue, out_dtypes, units=units, symmetric=True, **options)


CASES = {
    "natural order": Case(saturated, (E4M3,)),
    "contraction order": Case(lambda acc: ordered(saturated(acc)), (E4M3,), tile=(128, 192)),
    "as XLA converts": Case(
        lambda acc: (acc.astype(E4M3), ordered(acc.astype(E4M3)), acc.astype(E5M2), ordered(coda.saturate(acc, E5M2))),
        (E4M3, E4M3, E5M2, E5M2),
    ),
    "both copies": Case(
        lambda acc, s: (*both(saturated, ordered, ordered)(acc * s), jnp.max(jnp.abs(acc))),
        (E4M3, E4M3),
        tile=(128, 192),
        operands=lambda m, n: (array(),),
    ),
    "copies in natural order": Case(both(lambda y: y.astype(E5M2), plain, plain), (E5M2, E5M2)),
    "copies of two orders": Case(both(saturated, ordered, plain), (E4M3, E4M3), tile=(64, 256)),
    "copies of the other two": Case(both(saturated, plain, ordered), (E4M3, E4M3), tile=(128, 256)),
    "transposed alone": Case(lambda acc: (ordered(saturated(acc).T), acc), (E4M3, BF16), tile=(128, 256)),
    "transposed in natural order": Case(lambda acc: saturated(acc).T, (E4M3,), options={"subtile_n": 16}),
    "16 bits": Case(
        lambda acc: (acc, acc.T), (BF16, BF16), tile=(128, 192), units=(8, 8), options={"box_n": 32, "subtile_n": 16}
    ),
    "16 bits transposed alone": Case(lambda acc: acc.T, (F16,), tile=(128, 256), units=(8, 8)),
    "beside float32": Case(lambda acc: (saturated(acc), acc, saturated(acc).T), (E4M3, F32, E4M3), units=(16, 16)),
    "gate": Case(
        forward,
        (BF16, E4M3, E4M3),
        tile=(128, 192),
        units=(16, 32),
        operands=lambda m, n: (array(m, 1), array(n), array()),
    ),
    "back through a gate": Case(
        backward,
        (E4M3, E4M3, E4M3),
        tile=(128, 192),
        operands=lambda m, n: (array(m, 2 * n, dtype=BF16), array()),
    ),
    "operands of 8 bits": Case(
        lambda acc, x, y: saturated(acc + x.astype(F32) + y.astype(F32)),
        (E4M3,),
        operands=lambda m, n: (array(m, n, dtype=E4M3), array(m, n, dtype=E5M2)),
    ),
    "operands of a shared tile": Case(
        lambda acc, x: (acc + x.astype(F32)).T,
        (BF16,),
        tile=(128, 256),
        operands=lambda m, n: (array(m, n, dtype=E4M3),),
    ),
    "heads": Case(lambda acc: ordered(saturated(halves_of_heads(acc))), (E4M3,), units=(1, 64)),
    "slices": Case(
        lambda acc: (ordered(acc[:, :96].astype(E4M3)), acc[:, 96:], jnp.max(acc)), (E4M3, BF16), units=(1, 16)
    ),
    "a batch": Case(both(saturated, ordered, ordered), (E4M3, E4M3), batch=2),
    "maxima of a batch": Case(lambda acc: (saturated(acc), jnp.max(acc)), (E4M3,), units=(1, 16), batch=2),
    "maximum alone": Case(jnp.max, (), units=(1, 8)),
    "maximum of any columns": Case(lambda acc: (jnp.max(jnp.abs(acc)), acc), (F32,), units=(1, 4)),
    "maximum of claimed tiles": Case(lambda acc: (acc, jnp.max(acc)), (BF16,), units=(1, 8), yields=True),
    "three slots": Case(both(saturated, ordered, ordered), (E4M3, E4M3), options={"store_slots": 3, "box_n": 32}),
    "one slot": Case(both(saturated, ordered, ordered), (E4M3, E4M3), options={"store_slots": 1, "box_n": 32}),
    "columns in passes": Case(both(saturated, ordered, ordered), (E4M3, E4M3), options={"column_passes": 2}),
    "symmetric": symmetric(lambda acc: acc, BF16),
    "symmetric, float16, wide tiles": symmetric(lambda acc: acc, F16, tile=(128, 256)),
    "symmetric, of few rows": symmetric(lambda acc: acc, BF16, tile=(64, 256), options={"cluster_m": 2}),
    "symmetric, in clusters": symmetric(lambda acc: acc, BF16, options={"cluster_m": 2, "store_slots": 1}),
    "symmetric, 8 bits": symmetric(saturated, E4M3, units=(16, 16), options={"store_slots": 1}),
    "symmetric, in contraction order": symmetric(lambda acc: ordered(saturated(acc)), E4M3, units=(16, 16)),
    "symmetric, two outputs": symmetric(lambda acc: (acc, jnp.maximum(acc, 0)), BF16, F16, tile=(64, 256)),
    "symmetric, with operands": symmetric(
        lambda acc, tile, scale: acc * scale + tile.astype(F32),
        BF16,
        operands=lambda m, n: (array(m, n, dtype=BF16), array()),
    ),
    "symmetric, with operands, wide tiles": symmetric(
        lambda acc, tile, scale: (acc * scale, acc + tile.astype(F32)),
        BF16,
        E5M2,
        tile=(128, 256),
        units=(16, 16),
        operands=lambda m, n: (array(m, n, dtype=BF16), array()),
    ),
    "symmetric, three slots": symmetric(
        lambda acc: (acc, saturated(acc)), BF16, E4M3, units=(16, 16), options={"store_slots": 3, "box_n": 32}
    ),
    "symmetric, two slots": symmetric(lambda acc: acc, BF16, tile=(64, 256), options={"store_slots": 2, "box_n": 32}),
    "symmetric, one slot": symmetric(lambda acc: acc, BF16, tile=(128, 256), options={"store_slots": 1, "box_n": 32}),
    "symmetric, a batch": symmetric(lambda acc: acc, BF16, batch=2),
    "symmetric, claimed tiles": symmetric(lambda acc: acc, BF16, yields=True),
}
LEAST_ROWS = 128  # of a tile, lest a kernel for fewer is another
LEAST_COLUMNS = {"heads": 128}  # two heads: the halves of one are those of all columns
SLICED = "slices"  # whose N is part of the kernel


def sizes(name, m, n):
    """M and N of a case that are near these numbers of 16 rows and columns."""
    (unit_m, unit_n), has_slices = CASES[name].units, name == SLICED
    m = max(LEAST_ROWS, 16 * m + (5 if unit_m == 1 else 8 if unit_m == 8 else 0))
    n = -(-(16 * n + (4 if unit_n == 4 else 8 if unit_n == 8 else 0)) // unit_n) * unit_n
    if CASES[name].symmetric:
        return (max(LEAST_ROWS, n),) * 2
    return m, 336 if has_slices else max(n, LEAST_COLUMNS.get(name, 0))
