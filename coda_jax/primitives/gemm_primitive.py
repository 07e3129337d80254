"""The JAX primitive `coda_gemm`: its types, how it runs outside jit, and its XLA form, the reference for the kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import mlir

from coda_jax.epilogue import Program, types_of
from coda_jax.primitives.call_site import call_site
from coda_jax.tiles.config import GemmConfig

coda_gemm_p = jex_core.Primitive("coda_gemm")
coda_gemm_p.multiple_results = True


def bind(
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    *,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool = False,
    transpose_b: bool = False,
    implementation: str = "auto",
    config: GemmConfig | None = None,
    name: str,
    input_output_aliases: tuple[tuple[int, int], ...] = (),
    out_sharding: Any = None,
) -> list[jax.Array]:
    """Binds the primitive on unbatched arguments.

    Args:
      a: (M, K), or (K, M) with transpose_a.
      b: (K, N), or (N, K) with transpose_b.
      operands: as in `program.operands`.
      out_dtypes: one for each flat output.
      input_output_aliases: pairs (operand index, output index).
      out_sharding: of the product, where a mesh has explicit axes and the factors' shardings leave it open.

    Returns:
      The flat outputs of the program.
    """
    return coda_gemm_p.bind(
        a,
        b,
        *operands,
        program=program,
        out_dtypes=tuple(np.dtype(dtype) for dtype in out_dtypes),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        batched=(False,) * (2 + len(operands)),
        implementation=implementation,
        config=config,
        name=name,
        input_output_aliases=input_output_aliases,
        out_sharding=out_sharding,
        site=call_site(),
    )


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


def xla_form(
    a: jax.Array,
    b: jax.Array,
    *operands: jax.Array,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
    batched: Sequence[bool],
    out_sharding: Any,
    **_: Any,
) -> list[jax.Array]:
    """The program on the float32 product. Arguments flagged in `batched`, and then results, have a batch axis first."""

    def matrix(a: jax.Array, b: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        acc = accumulate(a, b, transpose_a=transpose_a, transpose_b=transpose_b, out_sharding=out_sharding)
        outputs = program.evaluate(acc, *operands)
        return [output.astype(dtype) for output, dtype in zip(outputs, out_dtypes, strict=True)]

    function = jax.vmap(matrix, in_axes=tuple(0 if flag else None for flag in batched)) if any(batched) else matrix
    return function(a, b, *operands)


@coda_gemm_p.def_abstract_eval
def _types(*avals: Any, **params: Any) -> list[Any]:
    # Through JAX's own typing, so that shardings and the mesh axes over which a result varies are kept.
    return types_of(functools.partial(xla_form, **params), *avals)


def _bind_flat(*arguments: jax.Array, **params: Any) -> list[jax.Array]:
    if not any(isinstance(x, jax.core.Tracer) for x in arguments):  # jit is disabled, or looks for a NaN
        return xla_form(*arguments, **params)
    return coda_gemm_p.bind(*arguments, **params)


# One jitted function for all calls outside jit: its cache is keyed by the parameters, programs by their mathematics.
_PARAMETERS = (
    "program",
    "out_dtypes",
    "transpose_a",
    "transpose_b",
    "batched",
    "implementation",
    "config",
    "name",
    "input_output_aliases",
    "out_sharding",
    "site",
)
coda_gemm_p.def_impl(jax.jit(_bind_flat, static_argnames=_PARAMETERS))


def _lower_xla(ctx: mlir.LoweringRuleContext, *arguments: Any, **params: Any) -> Any:
    if params["implementation"] == "cuda":
        raise NotImplementedError(
            f"gemm '{params['name']}': implementation='cuda' was asked for on platform {_platforms(ctx)}; the kernel "
            "runs on NVIDIA Hopper GPUs. Use 'auto' or 'xla' here."
        )
    return lower_xla(ctx, *arguments, **params)


def lower_xla(ctx: mlir.LoweringRuleContext, *arguments: Any, **params: Any) -> Any:
    """Lowers to the XLA form, on whatever platform."""
    return mlir.lower_fun(functools.partial(xla_form, **params), multiple_results=True)(ctx, *arguments)


def _platforms(ctx: mlir.LoweringRuleContext) -> str:
    return "/".join(ctx.platforms or ctx.module_context.platforms)


mlir.register_lowering(coda_gemm_p, _lower_xla)
