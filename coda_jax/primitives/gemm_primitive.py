"""The JAX primitive `coda_gemm`: its types, how it runs outside jit, and its XLA form, the reference for the kernel."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.extend import core as jex_core
from jax.interpreters import mlir, partial_eval

from coda_jax.epilogue import evaluate_tiles, finish, types_of
from coda_jax.epilogue.groups import RowGroups
from coda_jax.epilogue.rounding import stored
from coda_jax.primitives.accumulate import accumulate, accumulate_groups
from coda_jax.primitives.axes import Dimension, FactorSizes
from coda_jax.primitives.mesh_types import may_be_automatic
from coda_jax.primitives.ragged import RowsInGroups
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.arch import current

coda_gemm_p = jex_core.Primitive("coda_gemm")  # bound as coda_gemm_p.bind(a, b, *operands, spec=GemmSpec(...))
# The same where XLA may partition the product over automatic mesh axes: JAX has to tell its lowering the devices, and
# so refuses to lower it for an AbstractMesh.
coda_gemm_auto_p = jex_core.Primitive("coda_gemm")
PRIMITIVES = (coda_gemm_p, coda_gemm_auto_p)
dispatch.prim_requires_devices_during_lowering.add(coda_gemm_auto_p)


def bind_beside(_: jax.Array, *arguments: Any, spec: GemmSpec) -> list[jax.Array]:
    """`bind`, of the arguments of a `Rule`'s function."""
    outputs: list[jax.Array] = _primitive_of(arguments, spec).bind(*arguments, spec=spec)
    return outputs


def bind(*arguments: Any, spec: GemmSpec) -> list[jax.Array]:
    """The product of these arrays, by the primitive that their types ask for."""
    outputs: list[jax.Array] = _primitive_of(arguments, spec).bind(*arguments, spec=spec)
    return outputs


def _primitive_of(arguments: Sequence[Any], spec: GemmSpec) -> jex_core.Primitive:
    is_auto = spec.implementation != "xla" and may_be_automatic(*arguments)
    return coda_gemm_auto_p if is_auto else coda_gemm_p


def xla_form(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """f's flat outputs by XLA. Arguments flagged in `spec.batched`, and then results, have a batch axis."""
    stores, reductions = xla_tiles(*arguments, spec=spec)
    return outputs_of([*stores, *reductions], arguments, spec)


def xla_tiles(
    *arguments: jax.Array, spec: GemmSpec, in_8_bits: bool = False
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The kernel's results, computed by XLA: the program's stores and reductions, or their pieces.

    Args:
      in_8_bits: as `accumulate` has it.
    """
    matrices, flat_spec = spec.matrices, spec.matrices.spec_of_matrices
    a, b, operands = flat_spec.split(matrices.flatten(arguments))
    flags_a, flags_b, _ = flat_spec.split(flat_spec.batched)
    multiply = functools.partial(
        accumulate,
        transpose_a=spec.transpose_a,
        transpose_b=spec.transpose_b,
        out_sharding=spec.out_sharding,
        in_8_bits=in_8_bits,
    )
    if spec.ragged is not None:
        multiply = functools.partial(
            accumulate_groups, ragged=spec.ragged, transpose_b=spec.transpose_b, out_sharding=spec.out_sharding
        )
        return _tiles(multiply(a, b, operands[-1]), operands, matrices.factor_sizes(arguments), spec)
    if spec.axes.apart:
        acc = _sum_of_products(multiply, arguments, spec)
        return _tiles(acc, operands, matrices.factor_sizes(arguments), spec)
    has_batch = flags_a or flags_b
    acc = jax.vmap(multiply, in_axes=(_axis(flags_a), _axis(flags_b)))(a, b) if has_batch else multiply(a, b)
    return _tiles(acc, operands, matrices.factor_sizes(arguments), spec)


def _sum_of_products(multiply: Callable[..., jax.Array], arguments: Sequence[jax.Array], spec: GemmSpec) -> jax.Array:
    """The products of the pieces of K, added in their order."""
    pairs, flags = spec.matrices.flatten_pairs(arguments), spec.batched
    accs = []
    for (a, b), *has_batch in zip(pairs, flags, flags[len(pairs) :], strict=False):
        own = jax.vmap(multiply, in_axes=tuple(map(_axis, has_batch))) if any(has_batch) else multiply
        accs.append(own(a, b))
    return functools.reduce(operator.add, accs)


def tiles_of(
    accs: Sequence[jax.Array], operands: Sequence[jax.Array], spec: GemmSpec
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`xla_tiles` of an accumulator, or of its pieces.

    Args:
      accs, operands: with all their axes.
    """
    matrices = spec.matrices
    has_batch = any(spec.batched[: matrices.num_factors])
    acc, sizes = matrices.flatten_acc(accs, has_batch=has_batch), matrices.acc_sizes(accs, has_batch=has_batch)
    return _tiles(acc, matrices.flatten_operands(operands), sizes, spec)


def _tiles(
    acc: jax.Array, operands: Sequence[jax.Array], sizes: FactorSizes, spec: GemmSpec
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`xla_tiles` of an accumulator and operands that are matrices and vectors; results have these axes."""
    flat_spec = spec.matrices.spec_of_matrices
    flags_a, flags_b, flags = flat_spec.split(flat_spec.batched)

    def matrix(acc: jax.Array, *operands: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        stores, reductions = evaluate_tiles(spec.program, acc.astype(jnp.float32), *operands)
        if spec.ragged is Dimension.M:
            groups, each = RowGroups.of(operands[-1], acc.shape[0]), zip(stores, spec.program.stores, strict=True)
            stores = [groups.masked(x, axis=int(store.transposed)) for x, store in each]
        return [stored(x, dtype) for x, dtype in zip(stores, spec.store_dtypes, strict=True)], reductions

    batched = (flags_a or flags_b, *flags)
    if spec.ragged is Dimension.K:  # each group has a matrix of acc
        batched = (True, *flags)
    function = jax.vmap(matrix, in_axes=tuple(map(_axis, batched))) if any(batched) else matrix
    stores, reductions = function(acc, *operands)
    return spec.matrices.split_results(spec.matrices.unflatten_results([*stores, *reductions], sizes))


def outputs_of(results: Sequence[jax.Array], arguments: Sequence[jax.Array], spec: GemmSpec) -> list[jax.Array]:
    """f's flat outputs from the stores and reductions, or their pieces: XLA finishes the reductions here."""
    program, matrices = spec.program, spec.matrices
    results = matrices.concatenated_results(results)
    outputs = {store.output: x for store, x in zip(program.stores, results, strict=False)}
    if program.finishing.outputs:
        _, _, flags = spec.split(matrices.spec_of_matrices.batched)
        function = functools.partial(finish, program, rows=math.prod(matrices.factor_sizes(arguments).m))
        if any(spec.batched):
            (batch,) = {x.shape[0] for x in results} or {spec.batch(arguments)}
            function = jax.vmap(function, in_axes=(0, [*map(_axis, flags)]), axis_size=batch)
        operands = matrices.flatten_operands(arguments[matrices.num_factors :])
        finished = function(matrices.flat_reductions(results[len(program.stores) :]), operands)
        if spec.ragged is Dimension.M:
            rows = RowsInGroups(operands[-1], math.prod(matrices.factor_sizes(arguments).m))
            finished = {i: rows.masked(x, program.row_axes[i]) for i, x in finished.items()}
        outputs |= finished
    ordered = [outputs[i].astype(dtype) for i, dtype in enumerate(spec.out_dtypes)]
    return matrices.unflatten_outputs(ordered, arguments)


def _axis(flag: bool) -> int | None:
    return 0 if flag else None


_traced_form = jax.jit(xla_form, static_argnames=("spec",))  # equal products are traced once


def _types(*avals: Any, spec: GemmSpec) -> list[Any]:
    # Through JAX's own typing, so that shardings and the mesh axes over which a result varies are kept.
    spec = spec.replace(name="")
    return types_of(functools.partial(_traced_form, spec=spec), *avals, key=spec)


for _primitive in PRIMITIVES:
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_types)


def _bind_flat(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    if not any(isinstance(x, jax.core.Tracer) for x in arguments):  # jit is disabled, or looks for a NaN
        return xla_form(*arguments, spec=spec)
    return bind(*arguments, spec=spec)


# One jitted function for all calls outside jit: its cache is keyed by the specs, programs by their mathematics.
_run = jax.jit(_bind_flat, static_argnames=("spec",))
_names: dict[GemmSpec, str] = {}  # of the first product, by those that differ in a number at the end of their names
_MOST_NAMES = 4096


def _run_alone(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """A product outside jit. Products of a block that differ in the number of their step alone are one program."""
    if len(_names) >= _MOST_NAMES:
        _names.clear()
    name = _names.setdefault(spec.replace(name=spec.name.rstrip("0123456789")), spec.name)
    results: list[jax.Array] = _run(*arguments, spec=spec.replace(name=name))
    return results


for _primitive in PRIMITIVES:
    _primitive.def_impl(_run_alone)


def _without_unused(used: list[bool], *others: Any) -> tuple[list[bool], Any]:
    """Drops a product whose results nobody reads; and acc, where it was kept for a gradient that does not need it."""
    equation = others[-1]  # jax 0.12 puts in front of it which inputs are live
    if not any(used):
        return [False] * len(equation.invars), None
    spec: GemmSpec = equation.params["spec"]
    program = spec.program if used[-1] else spec.program.without_acc()
    if program is not spec.program:
        shorter = spec.replace(program=program, out_dtypes=spec.out_dtypes[:-1])
        equation = equation.replace(outvars=equation.outvars[:-1], params={"spec": shorter})
    return [True] * len(equation.invars), equation


for _primitive in PRIMITIVES:
    partial_eval.dce_rules[_primitive] = _without_unused


def _lower_xla(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec) -> Any:
    if spec.implementation == "cuda":
        raise NotImplementedError(
            f"{spec.function} '{spec.name}': implementation='cuda' was asked for on platform {_platforms(ctx)}; the "
            f"kernel runs on NVIDIA {current().name} GPUs. Use 'auto' or 'xla' here."
        )
    return lower_xla(ctx, *arguments, spec=spec)


def lower_xla(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec) -> Any:
    """Lowers to the XLA form, on whatever platform."""
    lowered: Any = mlir.lower_fun(functools.partial(xla_form, spec=spec), multiple_results=True)(ctx, *arguments)
    return lowered


def _platforms(ctx: mlir.LoweringRuleContext) -> str:
    return "/".join(ctx.platforms or ctx.module_context.platforms)


for _primitive in PRIMITIVES:
    mlir.register_lowering(_primitive, _lower_xla)
