"""The JAX primitive `coda_gemm`: its types, how it runs outside jit, and its XLA form, the reference for the kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import mlir

from coda_jax.epilogue import evaluate, types_of
from coda_jax.primitives.spec import GemmSpec

coda_gemm_p = jex_core.Primitive("coda_gemm")  # bound as coda_gemm_p.bind(a, b, *operands, spec=GemmSpec(...))
coda_gemm_p.multiple_results = True


def compute_dtype(a: Any, b: Any) -> np.dtype:
    """The dtype that both factors are converted to before they are multiplied."""
    return np.dtype(jnp.promote_types(a.dtype, b.dtype))


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which the accumulator of a product in `dtype` is kept: float16 would overflow at 65504.

    bfloat16 has float32's range. In float16's place it would lose three bits, and a product computed again takes
    longer than the two bytes more.
    """
    return np.dtype(np.float32) if dtype == np.float16 else np.dtype(dtype)


def accumulate(a: jax.Array, b: jax.Array, *, transpose_a: bool, transpose_b: bool, out_sharding: Any) -> jax.Array:
    """a @ b, (M, N) float32, from two matrices converted to their common dtype."""
    dtype = compute_dtype(a, b)
    contraction = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (contraction, ((), ())),
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


def xla_form(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """The program on the float32 product. Arguments flagged in `spec.batched`, and then results, have a batch axis."""

    def matrix(*arguments: jax.Array) -> list[jax.Array]:
        a, b, operands = spec.split(arguments)
        acc = accumulate(
            a, b, transpose_a=spec.transpose_a, transpose_b=spec.transpose_b, out_sharding=spec.out_sharding
        )
        outputs = evaluate(spec.program, acc, *operands)
        return [output.astype(dtype) for output, dtype in zip(outputs, spec.out_dtypes, strict=True)]

    axes = tuple(0 if flag else None for flag in spec.batched)
    function = jax.vmap(matrix, in_axes=axes) if any(spec.batched) else matrix
    return function(*arguments)


@coda_gemm_p.def_abstract_eval
def _types(*avals: Any, spec: GemmSpec) -> list[Any]:
    # Through JAX's own typing, so that shardings and the mesh axes over which a result varies are kept.
    return types_of(functools.partial(xla_form, spec=spec), *avals)


def _bind_flat(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    if not any(isinstance(x, jax.core.Tracer) for x in arguments):  # jit is disabled, or looks for a NaN
        return xla_form(*arguments, spec=spec)
    return coda_gemm_p.bind(*arguments, spec=spec)


# One jitted function for all calls outside jit: its cache is keyed by the specs, programs by their mathematics.
coda_gemm_p.def_impl(jax.jit(_bind_flat, static_argnames=("spec",)))


def _lower_xla(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec) -> Any:
    if spec.implementation == "cuda":
        raise NotImplementedError(
            f"gemm '{spec.name}': implementation='cuda' was asked for on platform {_platforms(ctx)}; the kernel "
            "runs on NVIDIA Hopper GPUs. Use 'auto' or 'xla' here."
        )
    return lower_xla(ctx, *arguments, spec=spec)


def lower_xla(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec) -> Any:
    """Lowers to the XLA form, on whatever platform."""
    return mlir.lower_fun(functools.partial(xla_form, spec=spec), multiple_results=True)(ctx, *arguments)


def _platforms(ctx: mlir.LoweringRuleContext) -> str:
    return "/".join(ctx.platforms or ctx.module_context.platforms)


mlir.register_lowering(coda_gemm_p, _lower_xla)
