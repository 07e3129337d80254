"""The measured cases: bare products, ours and others', and products with an epilogue, ours and XLA's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import peers, programs, timing
from benchmarks.lab.tile_losses import Shape, tiles
from coda_jax.tiles.config import GemmConfig
from coda_jax.tiles.constants import by_time, constants_for
from coda_jax.tiles.table import attached_device

Shapes = Sequence[tuple[str, int, int, int]]

_NN, _NT, _TN = "A[M,K] B[K,N]", "A[M,K] B[N,K]", "A[K,M] B[K,N]"  # layouts: how a and b are stored
# (layout, m, n, k)
PRODUCTS: Shapes = [
    (_NT, 16384, 2048, 2048),
    (_NT, 16384, 16384, 2048),
    (_NT, 16384, 2048, 8192),
    (_NT, 16384, 4096, 4096),
    (_NN, 16384, 4096, 4096),
    (_TN, 8192, 8192, 8192),
    (_TN, 2048, 2048, 16384),
    (_NT, 4096, 2048, 2048),
    (_NT, 4096, 4096, 4096),
]
# (program, m, n, k)
EPILOGUES: Shapes = [
    (program, *shape)
    for program, shapes in (
        (
            "residual_sumsq",
            [(16384, 2048, 2048), (16384, 4096, 4096), (16384, 2048, 8192), (16384, 4096, 14336)],
        ),
        ("swiglu", [(16384, 16384, 2048), (16384, 28672, 4096)]),
        ("gated_backward", [(16384, 8192, 2048), (16384, 14336, 4096)]),
        ("norm_backward", [(16384, 2048, 16384), (16384, 4096, 28672)]),
        ("residual", [(16384, 2048, 2048), (16384, 4096, 4096)]),
        ("bias_gelu", [(16384, 8192, 2048), (16384, 16384, 4096)]),
        ("gelu_backward", [(16384, 8192, 2048), (16384, 16384, 4096)]),
        ("geglu_backward", [(16384, 8192, 2048), (16384, 14336, 4096)]),
        ("gelu_erf", [(16384, 8192, 2048)]),
        ("mish", [(16384, 8192, 2048)]),
        ("column_sum", [(16384, 2048, 2048), (16384, 4096, 4096)]),
        ("rotary_qkv", [(16384, 3072, 2048), (16384, 6144, 4096)]),
        ("logsumexp_pick", [(4096, 128256, 2048), (4096, 128256, 4096)]),
    )
    for shape in shapes
]
# Value and gradient of a Llama-3-1B's loss on 16384 tokens: (how often, program, layout, m, n, k). The loss's sums of
# weight gradients in place, 8 times (2048, 128256, 2048), are left out: XLA would copy what the caller keeps.
STEP = [
    (16, "rotary_qkv", _NN, 16384, 3072, 2048),
    (16, "residual_sumsq", _NN, 16384, 2048, 2048),
    (16, "swiglu", _NN, 16384, 16384, 2048),
    (16, "residual_sumsq", _NN, 16384, 2048, 8192),
    (8, "logsumexp_pick", _NN, 2048, 128256, 2048),
    (8, "identity", _NT, 2048, 2048, 128256),
    (16, "gated_backward", _NT, 16384, 8192, 2048),
    (16, "identity", _TN, 8192, 2048, 16384),
    (16, "norm_backward", _NT, 16384, 2048, 16384),
    (16, "scale_backward", _TN, 2048, 16384, 16384),
    (16, "identity", _NT, 16384, 2048, 2048),
    (16, "identity", _TN, 2048, 2048, 16384),
    (16, "norm_backward", _NT, 16384, 2048, 3072),
    (16, "scale_backward", _TN, 2048, 3072, 16384),
]
TINY: tuple[Shapes, Shapes] = (
    [(_NT, 64, 64, 32), (_TN, 64, 32, 64)],
    [("residual_sumsq", 64, 32, 64), ("rotary_qkv", 32, 192, 64), ("logsumexp_pick", 32, 96, 64)],
)
TINY_STEP = [(2, "swiglu", _NN, 32, 64, 32), (1, "identity", _TN, 32, 64, 64)]


class Setting(NamedTuple):
    """The shapes that are run, and the implementation that runs them.

    Attributes:
      products, epilogues: as `PRODUCTS` and `EPILOGUES`.
      gemm: `coda.gemm` with the implementation to measure.
      cache_bytes: sets of arguments are together at least twice as large.
    """

    products: Shapes
    epilogues: Shapes
    gemm: Callable[..., Any]
    cache_bytes: float


def setting(is_tiny: bool) -> Setting:
    """For a Hopper GPU; or tiny, in sizes that a CPU runs in seconds, by XLA."""
    if is_tiny:
        return Setting(*TINY, coda.gemm, 2e4)
    return Setting(PRODUCTS, EPILOGUES, functools.partial(coda.gemm, implementation="cuda"), timing.L2_BYTES)


def product_calls(
    layout: str,
    m: int,
    n: int,
    k: int,
    configs: Mapping[str, GemmConfig | None],
    gemm: Callable[..., Any],
    cache_bytes: float,
    beside: Sequence[peers.Peer] = (),
) -> dict[str, Callable[[], Any]]:
    """Calls of a product's jitted functions, on sets of random arguments in turn, after a check of the results.

    Args:
      layout: as in `PRODUCTS`.
      configs: name -> how ours is cut. Beside them is "xla_product", and each peer by its name.
      gemm, cache_bytes: as in `Setting`.
      beside: other libraries.
    """
    transpose_a, transpose_b = _transposes(layout)

    def make(seed: int) -> tuple:
        return _factors(seed, layout, m, n, k)

    def ours(config: GemmConfig | None) -> Callable[..., Any]:
        return lambda a, b: gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b, config=config)

    xla = _jitted("xla_product", _xla_product(layout))
    sets = _sets(xla, make, cache_bytes)
    expected = xla(*sets[0])
    calls = {}
    for name, config in configs.items():
        function = _jitted(name, ours(config))
        programs.check(f"{name} {layout} {m} {n} {k}", function(*sets[0]), expected)
        calls[name] = _rotated(function, sets)
    calls["xla_product"] = _rotated(xla, sets)
    for peer in beside:
        prepared = [peer.prepare(a, b, transpose_a, transpose_b) for a, b in sets]
        result = prepared[0]()
        if peer.synchronize:
            peer.synchronize()
        programs.check(f"{peer.name} {layout} {m} {n} {k}", peer.to_jax(result), expected)
        call = timing.rotated(prepared)
        calls[peer.name] = timing.Outside(call, peer.synchronize) if peer.synchronize else call
    return calls


def tile_by_time(layout: str, m: int, n: int, k: int) -> GemmConfig:
    """The cost model's choice for a bare product at one clock, with ``CODA_JAX_TILES_BY=time``."""
    shape = Shape("identity", "".join("NT"[transposed] for transposed in _transposes(layout)), m, n, k)
    return GemmConfig(**tiles(shape, by_time(constants_for(attached_device())))[0]._asdict())


def epilogue_calls(
    name: str, m: int, n: int, k: int, gemm: Callable[..., Any], cache_bytes: float, layout: str = _NT
) -> dict[str, Callable[[], Any]]:
    """The same for a product with an epilogue, under these names.

    bare: the product alone. fused: with the program's epilogue. xla: the same by XLA. xla_product: its bare product.

    Args:
      name: of a program in programs.PROGRAMS.
      gemm, cache_bytes: as in `Setting`.
      layout: as in `PRODUCTS`.
    """
    program, (transpose_a, transpose_b) = programs.PROGRAMS[name], _transposes(layout)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}

    def make(seed: int) -> tuple:
        a, b = _factors(seed, layout, m, n, k)
        return a, b / jnp.bfloat16(math.sqrt(k)), program.operands(m, n, seed=seed + 7)

    def bare(a, b, operands):
        return gemm(a, b, **options)

    def fused(a, b, operands):
        return gemm(a, b, *operands, epilogue=program.epilogue, **options)

    def xla(a, b, operands):
        return coda.gemm(a, b, *operands, epilogue=program.epilogue, implementation="xla", **options)

    def xla_product(a, b, operands):
        return _xla_product(layout)(a, b)

    functions = {one.__name__: _jitted(one.__name__, one) for one in (bare, fused, xla, xla_product)}
    arguments = _sets(functions["bare"], make, cache_bytes)
    programs.check(f"{name} {m} {n} {k}", functions["fused"](*arguments[0]), functions["xla"](*arguments[0]))
    return {one: _rotated(function, arguments) for one, function in functions.items()}


def part_calls(
    parts: Mapping[str, programs.Program],
    m: int,
    n: int,
    k: int,
    config: GemmConfig,
    gemm: Callable[..., Any],
    cache_bytes: float,
) -> dict[str, Callable[[], Any]]:
    """A bare product in the tile that is chosen for it, "bare", and with each of the epilogues, by its `label`.

    Args:
      parts: name -> the epilogue, with operands of its own.
      config: of all of them.
      gemm, cache_bytes: as in `Setting`.
    """

    def make(seed: int) -> tuple:
        a, b = _factors(seed, _NT, m, n, k)
        return a, b / jnp.bfloat16(math.sqrt(k)), {name: of.operands(m, n, seed=seed + 7) for name, of in parts.items()}

    def multiply(name: str, implementation: Callable[..., Any], a, b, operands, **options):
        epilogue = parts[name].epilogue
        return implementation(a, b, *operands[name], epilogue=epilogue, transpose_b=True, **options)

    bare = _jitted("bare", lambda a, b, operands: gemm(a, b, transpose_b=True))
    arguments = _sets(bare, make, cache_bytes)
    calls = {"bare": _rotated(bare, arguments)}
    for name in parts:
        fused = _jitted(label(name), functools.partial(multiply, name, gemm, config=config))
        xla = jax.jit(functools.partial(multiply, name, functools.partial(coda.gemm, implementation="xla")))
        programs.check(f"{name} {m} {n} {k}", fused(*arguments[0]), xla(*arguments[0]))
        calls[label(name)] = _rotated(fused, arguments)
    return calls


def label(name: str) -> str:
    """The name of a part as that of a module."""
    return "part_" + "".join(letter if letter.isalnum() else "_" for letter in name)


def _transposes(layout: str) -> tuple[bool, bool]:
    return layout.startswith("A[K,M]"), layout.endswith("B[N,K]")


def _factors(seed: int, layout: str, m: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    transpose_a, transpose_b = _transposes(layout)
    a, b = (k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)
    return _normal(2 * seed, *a), _normal(2 * seed + 1, *b)


def _xla_product(layout: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    transpose_a, transpose_b = _transposes(layout)
    dimensions = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))

    def product(a, b):
        return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    return product


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def _jitted(name, function):
    """jax.jit with the module name that `timing.interleaved` looks for."""
    function.__name__ = name
    return jax.jit(function)


def _sets(function: Callable[..., Any], make: Callable[[int], tuple], cache_bytes: float) -> list[tuple]:
    """make(seed), which is (a, b, ...), for as many seeds as it takes to leave the cache before one comes again.

    function is the one that touches least: the bare product.
    """
    first = make(0)
    count = timing.sets_beyond(cache_bytes, first[:2], jax.eval_shape(function, *first))
    return [first, *map(make, range(1, count))]


def _rotated(function: Callable[..., Any], sets: Sequence[tuple]) -> Callable[[], Any]:
    return timing.rotated([functools.partial(function, *arguments) for arguments in sets])
