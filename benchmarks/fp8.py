"""`python -m benchmarks.fp8`: products of fp8 factors, what quantised results add to them, a model that trains in fp8.

Three parts:
products    nine bare products with bfloat16 results: ours in fp8 and in bfloat16, XLA's of both, and
            `torch._scaled_mm` with fast and with slow accumulation
results     a product whose results are quantised, over the bare one: the fp8 result in contraction order, beside it the
            transposed copy, beside both the maximum
mlp         value and gradients of a Flax MLP: bfloat16, `coda.fp8.DotGeneral`, and Flax's own fp8 by XLA

Each is checked before it is timed. Times are the profiler's, the variants interleaved in random order; with --alone
SECONDS also back to back, with their energy. Of products "coda" promotes sums over more than 4096 of k, and
"coda_unpromoted" does not. Writes benchmarks/results/<device>_fp8.csv.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import fp8_ops

import coda_jax as coda
from benchmarks import alone, compare, peers, results, timing
from benchmarks.grouped import normal
from benchmarks.train_step import use_whole_gpu
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig

E4M3 = jnp.float8_e4m3fn
PARTS = ("products", "results", "mlp")
# name -> (m, n, k): of Llama 3 with 1B and 8B on 16384 tokens, and a weight gradient.
PRODUCTS = {
    "1B gate/up": (16384, 16384, 2048),
    "1B down": (16384, 2048, 8192),
    "1B qkv": (16384, 3072, 2048),
    "1B out": (16384, 2048, 2048),
    "8B gate/up": (16384, 28672, 4096),
    "8B down": (16384, 4096, 14336),
    "8B qkv": (16384, 6144, 4096),
    "8B out": (16384, 4096, 4096),
    "weight gradient": (8192, 2048, 16384),
}
RESULTS = ((16384, 8192, 2048), (16384, 16384, 2048), (16384, 14336, 4096), (16384, 4096, 4096))
MLPS = ((16384, 2048, 8192), (16384, 4096, 14336))  # tokens, width, features
TINY = {
    "products": {"tiny": (48, 64, 32), "tiny, long": (32, 32, 4224)},
    "results": ((32, 64, 32),),
    "mlp": ((32, 64, 96),),
}
COLUMNS = ("part", "name", "m", "n", "k", "variant", "ms", "tflops", "alone_ms", "alone_tflops", "joules")


class Variants:
    """Jitted functions on sets of arguments that leave the cache in turn.

    Attributes:
      calls: by the variant's name.
      first: the results on the first set.
    """

    def __init__(self, make: Callable[[int], tuple[Any, ...]], cache_bytes: float, reference: Callable[..., Any]):
        arguments = make(0)
        count = timing.sets_beyond(cache_bytes, arguments, jax.eval_shape(reference, *arguments))
        self.sets = [arguments, *map(make, range(1, count))]
        self.calls: dict[str, Callable[[], Any]] = {}
        self.first: dict[str, Any] = {}

    def add(
        self, name: str, function: Callable[..., Any], chosen: Callable[[tuple[Any, ...]], Any] = lambda x: x
    ) -> None:
        """A variant, on those arguments of a set that `chosen` gives."""
        of_name = lambda *arguments: function(*arguments)  # noqa: E731  its name is the key that timing looks for
        of_name.__name__ = name
        jitted = jax.jit(of_name)
        sets = [chosen(one) for one in self.sets]
        self.first[name] = jitted(*sets[0])
        self.calls[name] = timing.rotated([functools.partial(jitted, *one) for one in sets])

    def add_peer(self, peer: peers.Peer, chosen: Callable[[tuple[Any, ...]], Any]) -> None:
        prepared = [peer.prepare(*chosen(one), False, True) for one in self.sets]
        result = prepared[0]()
        if peer.synchronize:
            peer.synchronize()
        self.first[peer.name] = peer.to_jax(result)
        call = timing.rotated(prepared)
        self.calls[peer.name] = timing.Outside(call, peer.synchronize) if peer.synchronize else call


def check(name: str, results: Any, reference: Any) -> None:
    """Raises where sums of the tensor cores, cut 13 bits below their largest addend, do not account for a distance."""
    if not (error := compare.distance(results, reference)) < 0.02:
        raise AssertionError(f"{name}: {error:.4f} of its size away from the reference")


def products(m: int, n: int, k: int, gemm: Callable[..., Any], cache_bytes: float, beside: Sequence[Any]) -> Variants:
    """The bare products of one shape: factors in bfloat16, and the same rounded to e4m3."""

    def make(seed: int) -> tuple[jax.Array, ...]:
        a, b = (normal(2 * seed + i, shape) for i, shape in enumerate(((m, k), (n, k))))
        return a, b, a.astype(E4M3), b.astype(E4M3)

    def xla(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    ours = functools.partial(gemm, transpose_b=True, out_dtype=jnp.bfloat16)
    made = Variants(make, cache_bytes, lambda a, b, *_: xla(a, b))
    wide, narrow = (lambda x: x[:2]), (lambda x: x[2:])
    made.add("coda_bf16", ours, wide)
    made.add("coda", ours, narrow)
    if k > SM90.unpromoted_k:
        made.add("coda_unpromoted", functools.partial(ours, config=GemmConfig(promote=False)), narrow)
    made.add("xla_bf16", xla, wide)
    made.add("xla", xla, narrow)
    for peer in beside:
        made.add_peer(peer, narrow)
    exact = xla(*(x.astype(jnp.bfloat16) for x in made.sets[0][2:]))
    for name, result in made.first.items():
        if not name.endswith("bf16"):
            check(f"{name} {m} {n} {k}", result, exact)
    return made


def quantised_results(m: int, n: int, k: int, gemm: Callable[..., Any], cache_bytes: float) -> Variants:
    """A product of e4m3 factors, bare and with results in e4m3."""

    def make(seed: int) -> tuple[jax.Array, ...]:
        a, b = (normal(2 * seed + i, shape).astype(E4M3) for i, shape in enumerate(((m, k), (n, k))))
        return a, b, jnp.float32(1 / math.sqrt(k))

    def quantised(acc: jax.Array, scale: jax.Array) -> jax.Array:
        return coda.contraction_order(coda.saturate(acc * scale, E4M3))

    def both(acc: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        y8 = coda.saturate(acc * scale, E4M3)
        return coda.contraction_order(y8), coda.contraction_order(y8.T)

    def maximum(acc: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        return *both(acc, scale), jnp.max(jnp.abs(acc))

    epilogues = {
        "bare": (lambda acc, scale: acc * scale, jnp.bfloat16),
        "quantised": (quantised, E4M3),
        "transposed": (both, (E4M3, E4M3)),
        "maximum": (maximum, (E4M3, E4M3, jnp.float32)),
    }
    multiply = functools.partial(gemm, transpose_b=True)
    made = Variants(make, cache_bytes, lambda a, b, s: multiply(a, b, s, epilogue=epilogues["bare"][0]))
    a, b, scale = made.sets[0]
    exact = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), scale  # XLA compiles some of the fp8 programs for minutes
    for name, (epilogue, out_dtype) in epilogues.items():
        made.add(name, functools.partial(multiply, epilogue=epilogue, out_dtype=out_dtype))
        by_xla = functools.partial(multiply, epilogue=epilogue, out_dtype=out_dtype, implementation="xla")
        check(f"{name} {m} {n} {k}", made.first[name], jax.jit(by_xla)(*exact))
    return made


class MLP(linen.Module):
    """Two layers with a GELU between them.

    Attributes:
      features: of the layer between.
      dot_general_cls: what makes the layers' products; None for JAX's.
    """

    features: int
    dot_general_cls: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(
            linen.Dense,
            use_bias=False,
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            dot_general_cls=self.dot_general_cls,
        )
        return dense(x.shape[-1])(jax.nn.gelu(dense(self.features)(x)))


def mlp(tokens: int, width: int, features: int, cache_bytes: float) -> Variants:
    """Loss and gradients, by each kind of products.

    The loss is no mean: Flax's scales are 1 in the first step, with which the gradients of a mean would round to 0.
    """
    kinds = {"bf16": None, "coda": coda.fp8.DotGeneral, "flax": fp8_ops.Fp8DirectDotGeneralOp}

    def make(seed: int) -> tuple[Any, ...]:
        x = normal(seed, (tokens, width))
        variables = {name: MLP(features, kind).init(jax.random.key(1), x[:16]) for name, kind in kinds.items()}
        return x, variables

    def step(name: str, x: jax.Array, variables: Any) -> Any:
        of_kind = variables[name]

        def loss(params: Any, x: jax.Array) -> jax.Array:
            y = MLP(features, kinds[name]).apply(of_kind | {"params": params}, x)
            return jnp.sum(jnp.square(y.astype(jnp.float32) - x.astype(jnp.float32))) / 2

        return jax.value_and_grad(loss, argnums=(0, 1))(of_kind["params"], x)

    made = Variants(make, cache_bytes, functools.partial(step, "bf16"))
    for name in kinds:
        made.add(name, functools.partial(step, name))
    for name in ("coda", "flax"):
        if not (error := compare.distance(made.first[name], made.first["bf16"])) < 0.2:
            raise AssertionError(f"mlp, {name}: a gradient is {error:.3f} of its size away from bfloat16's")
    return made


class Part(NamedTuple):
    """Variants that are timed together: their flops, and what makes them."""

    part: str
    name: str
    sizes: tuple[int, int, int]
    flops: float
    make: Callable[[], Variants]


def parts(options: Any, beside: Sequence[Any]) -> Iterator[Part]:
    """The parts that the options name, with the shapes of each."""
    tiny = options.tiny
    gemm = coda.gemm if tiny else functools.partial(coda.gemm, implementation="cuda")
    cache_bytes = 1e4 if tiny else timing.L2_BYTES
    shapes = TINY if tiny else {"products": PRODUCTS, "results": RESULTS, "mlp": MLPS}
    if "products" in options.parts:
        for name, sizes in shapes["products"].items():
            make = functools.partial(products, *sizes, gemm, cache_bytes, beside)
            yield Part("products", name, sizes, 2 * math.prod(sizes), make)
    if "results" in options.parts:
        for sizes in shapes["results"]:
            make = functools.partial(quantised_results, *sizes, gemm, cache_bytes)
            yield Part("results", "", sizes, 2 * math.prod(sizes), make)
    if "mlp" in options.parts:
        for tokens, width, features in shapes["mlp"]:
            make = functools.partial(mlp, tokens, width, features, cache_bytes)
            yield Part("mlp", "", (tokens, width, features), 12 * tokens * width * features, make)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.fp8", __doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measurement of the variants of a shape")
    parser.add_argument("--alone", type=float, default=0.0, help="seconds of each variant alone, in two halves")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]} is none of {', '.join(PARTS)}")
    beside = [] if options.tiny else peers.available(peers.FP8_MODULES)
    counter = alone.device_counter() if options.alone else None
    about = {"commit": options.commit, "peers": peers.versions(beside)}
    rows: list[dict[str, Any]] = []
    for part, name, (m, n, k), flops, make in parts(options, beside):
        print(f"{part} {name} {m} {n} {k}   [{timing.clock()}]", flush=True)
        variants = make()
        times = timing.interleaved(variants.calls, seconds=options.seconds)
        by_itself = alone.in_turn(variants.calls, counter, options.alone) if counter else {}
        for variant in variants.calls:
            us = times[variant].total
            row = {"part": part, "name": name, "m": m, "n": n, "k": k, "variant": variant}
            row |= {"ms": us / 1e3, "tflops": 1e-6 * flops / us}
            if variant in by_itself:
                joules, seconds = by_itself[variant]
                row |= {"alone_ms": 1e3 * seconds, "alone_tflops": 1e-12 * flops / seconds, "joules": joules}
            figures = "".join(f"{row[key]:12.4g}" for key in COLUMNS[6:11] if key in row)
            print(f"  {variant:18}{figures}", flush=True)
            rows.append(row)
        results.write("_fp8", COLUMNS, rows, folder=options.out, **about)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")  # PyTorch has memory of its own
    use_whole_gpu()
    sys.exit(main())
