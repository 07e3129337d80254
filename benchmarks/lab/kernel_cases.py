"""The cases that compare the kernels of two commits: functions of public names of `coda_jax` and `flax_layers` alone.

A case must mean the same on every commit, so nothing here may depend on what is inside the library. Names tell cases
apart; the products inside a case have none: they are paired by their place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from benchmarks.epilogues import EPILOGUES, EpilogueCase, array
from flax_layers import GPT2, GPT2Config, Llama, LlamaConfig, add_lora

DEVICES = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}
# Every tile, whole and with split-K, beside many rows; and those of few rows, which share nothing.
TILES = ((128, 128), (128, 192), (64, 256), (64, 128), (64, 64), (128, 256), (64, 192))
CONFIGS = (
    *({"tile_m": m, "tile_n": n, "cluster_m": 2, "split_k": False} for m, n in TILES),
    *({"tile_m": m, "tile_n": n, "cluster_m": 2, "split_k": True} for m, n in TILES if (m, n) != (128, 256)),
    *({"tile_m": m, "tile_n": n, "cluster_m": 1, "split_k": False} for m, n in TILES if m * n <= 8192),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, lowered for each device.

    Attributes:
      function, arguments: what is lowered, and the types of its arguments.
      every_tile: whether each product of it is also lowered alone in each of `CONFIGS`.
      is_small: whether it is one of the subset that CI compares.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    every_tile: bool = False
    is_small: bool = False


def cases() -> dict[str, Case]:
    """All cases by name."""
    found = dict(_products())
    for name, case in _models():
        found[name] = case
    return found


def _products() -> Iterator[tuple[str, Case]]:
    small = ("residual_sumsq 4096x4096x4096", "rotary_neighbours 8192x2048x16384", "bias_gelu 64x4096x4096")
    for name, epilogue in EPILOGUES.items():
        for m, n, k in ((4096, 4096, 4096), (4096, 2048, 1024), (8192, 2048, 16384), (64, 4096, 4096)):
            of_sizes = f"{name} {m}x{n}x{k}"
            case = _product(epilogue, m, epilogue.columns(n), k)
            yield of_sizes, dataclasses.replace(case, every_tile=(m, n) == (4096, 4096), is_small=of_sizes in small)
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            for dtype in (jnp.bfloat16, jnp.float16):
                layout = f"{'NT'[transpose_a]}{'NT'[transpose_b]} {jnp.dtype(dtype).name}"
                options = {"dtype": dtype, "transpose_a": transpose_a, "transpose_b": transpose_b}
                yield f"residual_sumsq {layout}", _product(EPILOGUES["residual_sumsq"], 264, 400, 136, **options)
    yield from _of_8_bits()
    if hasattr(coda, "symmetric_gemm"):  # which earlier commits have not
        yield from _symmetric()
    for name in ("bias_gelu", "every_vector", "rotary_qkv", "parts"):
        epilogue = EPILOGUES[name]
        yield f"{name} batched", _batched(epilogue, 3, 264, epilogue.columns(384), 136)
        yield f"{name} gradient", _gradient(epilogue, 512, epilogue.columns(1024), 256, "recompute")


def _of_8_bits() -> Iterator[tuple[str, Case]]:
    """Products of 8-bit factors of both dtypes, mixed too; the second product is promoted by default."""
    short, long = (4096, 4096, 4096), (8192, 2048, 16384)
    for name, (m, n, k), dtypes, is_small in (
        ("residual_sumsq", short, "e4m3fn e4m3fn", True),
        ("residual_sumsq", long, "e5m2 e4m3fn", True),
        ("bias_gelu", short, "e4m3fn e5m2", False),
        ("swiglu_backward", short, "e5m2 e5m2", False),
        ("accumulate", long, "e4m3fn e4m3fn", False),
    ):
        of_a, of_b = (jnp.dtype(f"float8_{dtype}") for dtype in dtypes.split())
        case = _product(EPILOGUES[name], m, EPILOGUES[name].columns(n), k, dtype=of_a, dtype_of_b=of_b)
        every = name == "bias_gelu"
        yield f"{name} {m}x{n}x{k} float8 {dtypes}", dataclasses.replace(case, every_tile=every, is_small=is_small)


def _symmetric() -> Iterator[tuple[str, Case]]:
    """x x^T, x^T x with two results, and a batch of polynomials of a symmetric matrix."""

    def transposed(x: jax.Array) -> Any:
        return coda.symmetric_gemm(x, x, transpose_a=True, epilogue=lambda acc: (acc, jnp.tanh(acc)))

    def polynomial(x: jax.Array, scale: jax.Array) -> jax.Array:
        return coda.symmetric_gemm(x, x, x, scale, epilogue=lambda acc, x, scale: scale * acc - x)

    gram = functools.partial(coda.symmetric_gemm, transpose_b=True)
    x = array((2048, 8192))
    yield "symmetric 2048x8192", Case(gram, (x, x), every_tile=True, is_small=True)
    yield "symmetric, transposed, float16", Case(transposed, (array((1024, 520), jnp.float16),), is_small=True)
    arguments = (array((16, 1032, 1032)), array((16,), jnp.float32))
    yield "symmetric, polynomial, batched", Case(jax.vmap(polynomial), arguments, is_small=True)


def _product(
    epilogue: EpilogueCase,
    m: int,
    n: int,
    k: int,
    *,
    dtype: Any = jnp.bfloat16,
    dtype_of_b: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = True,
) -> Case:
    product = functools.partial(
        coda.gemm,
        epilogue=epilogue.epilogue,
        out_dtype=epilogue.out_dtype(m, n),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    a = array((k, m) if transpose_a else (m, k), dtype)
    b = array((n, k) if transpose_b else (k, n), dtype if dtype_of_b is None else dtype_of_b)
    return Case(product, (a, b, *epilogue.operand_types(m, n)))


def _batched(epilogue: EpilogueCase, batch: int, m: int, n: int, k: int) -> Case:
    case = _product(epilogue, m, n, k)
    arguments = tuple(array((batch, *x.shape), x.dtype) for x in case.arguments)
    return Case(jax.vmap(case.function), arguments)


def _gradient(epilogue: EpilogueCase, m: int, n: int, k: int, residuals: str) -> Case:
    def total(a: jax.Array, b: jax.Array, *operands: jax.Array) -> jax.Array:
        outputs = coda.gemm(a, b, *operands, epilogue=epilogue.epilogue, residuals=residuals)
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(outputs))

    arguments = (array((m, k)), array((k, n)), *epilogue.operand_types(m, n))
    floats = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]
    return Case(jax.grad(total, argnums=floats), arguments)


def _models() -> Iterator[tuple[str, Case]]:
    llama = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
    )
    qwen3 = LlamaConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1000000.0,
        qk_norm=True,
        tie_word_embeddings=True,
    )
    gemma_gate = dataclasses.replace(llama, hidden_act="gelu_pytorch_tanh", attention_bias=True)
    tiny = dataclasses.replace(
        llama, vocab_size=256, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1
    )
    for name, model, every_tile in (
        ("Llama", functools.partial(Llama, llama), True),
        ("Llama, a scan with remat", functools.partial(Llama, llama, scan_layers=True, remat="save_attention"), False),
        ("Llama with GeGLU and biases", functools.partial(Llama, gemma_gate), True),
        ("Qwen3", functools.partial(Llama, qwen3), True),
        ("GPT-2", functools.partial(GPT2, GPT2Config(n_layer=2)), True),
        ("Llama in float16", functools.partial(Llama, llama), True),
        ("Llama with LoRA", functools.partial(_with_lora, llama), True),
        ("a tiny Llama", functools.partial(Llama, tiny), False),
    ):
        size = (2, 64) if "tiny" in name else (4, 1024)
        dtype = jnp.float16 if "float16" in name else jnp.bfloat16
        for forward in (True, False):
            for param_dtype in (dtype, jnp.float32) if name == "Llama" else (dtype,):
                case = _step(model, size, forward, dtype, param_dtype)
                every = every_tile and not forward and param_dtype == dtype
                yield (
                    f"{name}, {'forward' if forward else 'backward'}, {jnp.dtype(param_dtype).name} parameters",
                    dataclasses.replace(case, every_tile=every, is_small="tiny" in name and not forward),
                )


def _with_lora(config: LlamaConfig, **options: Any) -> Llama:
    model = Llama(config, **options)
    add_lora(model, 16, rngs=options["rngs"])
    return model


def _step(model: Callable[..., Any], size: tuple[int, int], forward: bool, dtype: Any, param_dtype: Any) -> Case:
    """A model's logits, or its loss and the gradients of what is trained: adapters where it has some."""
    make = functools.partial(model, dtype=dtype, param_dtype=param_dtype)
    shapes = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    is_adapted = bool(nnx.state(shapes, nnx.LoRAParam))
    graphdef, trained, rest = nnx.split(shapes, nnx.LoRAParam if is_adapted else nnx.Param, ...)

    def logits(trained: Any, rest: Any, tokens: jax.Array) -> Any:
        return nnx.merge(graphdef, trained, rest)(tokens)

    def loss(trained: Any, rest: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        return nnx.merge(graphdef, trained, rest).loss(tokens, labels)

    tokens = array(size, jnp.int32)
    arguments = (trained, rest, tokens)
    return Case(logits, arguments) if forward else Case(jax.value_and_grad(loss), (*arguments, tokens))
