"""A product that JAX can differentiate: the epilogue's derivative is JAX's own, the products are the primitive's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from coda_jax.epilogue import Epilogue, NotTileLocalError, Program, trace, types_of
from coda_jax.primitives.gemm_primitive import accumulate, bind, compute_dtype, kept_dtype
from coda_jax.primitives.mesh_types import explicit_sharding, vary, varying_axes
from coda_jax.primitives.pullback import Pullback
from coda_jax.primitives.reverse_mode import differentiable
from coda_jax.primitives.spec import CallOptions, GemmSpec

PREACTIVATION_NAME = "coda_preactivation"


@dataclasses.dataclass(frozen=True)
class Options(CallOptions):
    """What a call says beside its arrays and its epilogue; `residuals` as in `coda.gemm`."""

    residuals: str = "preactivation"


def product(
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    epilogue: Callable[..., Any] | None,
    out_dtypes: Callable[[Epilogue], Sequence[np.dtype]],
    options: Options,
) -> tuple[list[jax.Array], Epilogue]:
    """epilogue(a @ b, *operands) of matrices, flat, and the traced epilogue.

    Args:
      a: (M, K), or (K, M) with transpose_a.
      b: (K, N), or (N, K) with transpose_b.
      operands: as the epilogue language has them.
      out_dtypes: gives the dtype of each flat output of a traced epilogue.
    """
    axes = varying_axes(a, b, *operands)
    multiply = functools.partial(
        accumulate,
        transpose_a=options.transpose_a,
        transpose_b=options.transpose_b,
        out_sharding=options.out_sharding,
    )
    while True:
        a, b, *operands = vary(axes, a, b, *operands)
        (acc,) = types_of(multiply, a, b)
        traced, captured = trace(epilogue, acc, operands)
        if varying_axes(*captured) <= axes:
            break
        axes |= varying_axes(*captured)
    captured = tuple(map(jnp.asarray, captured))  # a Python number that JAX differentiates is captured as it is
    dtypes = tuple(out_dtypes(traced))
    name = "gemm" if epilogue is None else traced.name
    arguments = (*operands, *captured)
    types = tuple(map(jax.typeof, arguments))
    return _differentiable(traced, acc, types, dtypes, name, options)(a, b, *arguments), traced


def _differentiable(
    epilogue: Epilogue, acc: Any, types: Sequence[Any], out_dtypes: Sequence[np.dtype], name: str, options: Options
) -> Callable[..., Any]:
    """The differentiable function of (a, b, *operands, *captured); it closes over no array.

    Args:
      acc, types: types of the product and of what follows b.
    """

    @functools.cache
    def pullback() -> Pullback:
        return Pullback.of(epilogue, acc, types)

    def evaluate(a: jax.Array, b: jax.Array, *arguments: jax.Array) -> list[jax.Array]:
        spec = GemmSpec.of(options, epilogue.program, out_dtypes, name, len(arguments))
        return bind(a, b, *arguments, spec=spec)

    def forward(a: jax.Array, b: jax.Array, *arguments: jax.Array) -> tuple[list[jax.Array], Any]:
        kept = None
        if pullback().needs_acc and options.residuals == "preactivation":
            dtype = kept_dtype(compute_dtype(a, b))
            index = _acc_output(epilogue.program, out_dtypes, dtype)
            if index is None:
                extended = _differentiable(epilogue.with_acc(), acc, types, (*out_dtypes, dtype), name, options)
                *outputs, kept = extended(a, b, *arguments)
            else:
                outputs = run(a, b, *arguments)
                kept = outputs[index]
            kept = checkpoint_name(kept, PREACTIVATION_NAME)
        else:
            outputs = run(a, b, *arguments)
        return outputs, (a, b, kept, [x for x, needed in zip(arguments, pullback().needs, strict=True) if needed])

    def backward(residuals: Any, cotangents: list[jax.Array]) -> tuple[jax.Array | None, ...]:
        a, b, kept, arguments = residuals
        if pullback().needs_acc and kept is None:
            dacc, darguments = _recomputed(pullback(), a, b, arguments, cotangents, options)
        else:
            dacc, darguments = pullback()(kept, arguments, cotangents)
        da, db = _factors(a, b, dacc.astype(compute_dtype(a, b)), options)
        return (da, db, *darguments)

    run = differentiable(f"gemm '{name}'", evaluate, forward, backward)
    return run


def _acc_output(program: Program, out_dtypes: Sequence[np.dtype], dtype: np.dtype) -> int | None:
    """The output that is acc itself in `dtype`, if there is one."""
    for store in program.stores:
        leaves = [program.nodes[value] for value in store.values]
        ways = [leaf["way"] for leaf in leaves if leaf.op == "acc"]
        is_acc = ways == [*range(program.acc_ways)] and store.width is program.acc_width and store.slice is None
        if is_acc and out_dtypes[store.output] == dtype:
            return store.output
    return None


def _factors(a: jax.Array, b: jax.Array, dacc: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    """Cotangents of a and b, each one product in its argument's layout, written in its dtype straight from float32."""
    if options.transpose_a:  # (K, M) = b @ dacc.T
        da = _plain(b, dacc, a.dtype, options, like=a, transpose_a=options.transpose_b, transpose_b=True)
    else:  # (M, K) = dacc @ b.T
        da = _plain(dacc, b, a.dtype, options, like=a, transpose_b=not options.transpose_b)
    if options.transpose_b:  # (N, K) = dacc.T @ a
        db = _plain(dacc, a, b.dtype, options, like=b, transpose_a=True, transpose_b=options.transpose_a)
    else:  # (K, N) = a.T @ dacc
        db = _plain(a, dacc, b.dtype, options, like=b, transpose_a=not options.transpose_a)
    return da, db


def _plain(
    a: jax.Array,
    b: jax.Array,
    dtype: np.dtype,
    options: Options,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    like: jax.Array | None = None,
) -> jax.Array:
    """A bare product; it is sharded as `like` where mesh axes are explicit."""
    plain = Options(
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=options.implementation,
        out_sharding=options.out_sharding if like is None else explicit_sharding(like),
    )
    (out,), _ = product(a, b, (), None, lambda _: (dtype,), plain)
    return out


def _recomputed(
    pullback: Pullback,
    a: jax.Array,
    b: jax.Array,
    arguments: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    options: Options,
) -> tuple[jax.Array, list[jax.Array | None]]:
    """The pullback at the product computed again: in its epilogue if tile-local, else from the rounded product."""
    again = dataclasses.replace(options, config=None, input_output_aliases=())
    dtype = compute_dtype(a, b)

    def at_rounded_product() -> tuple[jax.Array, list[jax.Array | None]]:
        acc = _plain(a, b, kept_dtype(dtype), options, transpose_a=options.transpose_a, transpose_b=options.transpose_b)
        return pullback(acc, arguments, cotangents)

    if not pullback.is_uniform:
        return at_rounded_product()
    try:
        outputs, _ = product(
            a,
            b,
            [*arguments, *pullback.as_operands(cotangents)],
            pullback.as_epilogue(),
            lambda epilogue: pullback.out_dtypes(epilogue, dtype),
            again,
        )
    except NotTileLocalError:  # the derivative of a maximum or a log-sum-exp needs the finished one
        return at_rounded_product()
    return outputs[0], pullback.restored(outputs[1:])
