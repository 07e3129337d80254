"""The log-sum-exp of an epilogue: a JAX primitive of its own, and the form in which JAX writes it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue.flatten import Atom, Equation, Flat, drop_unused
from coda_jax.epilogue.values import same_shape, same_size

reduce_logsumexp_p = jex_core.Primitive("reduce_logsumexp")
_MOVES = ("broadcast_in_dim", "reshape", "squeeze")


def logsumexp(x: jax.Array, axis: int = 1, *, keepdims: bool = False) -> jax.Array:
    """log(sum(exp(x), axis)), which an epilogue may take along rows.

    An ordinary JAX function, also outside of epilogues. `jax.nn.logsumexp` without `b`, `where` and `return_sign` is
    recognised in an epilogue too.

    Args:
      x: (..., N) floating.
      axis: the axis to reduce.
      keepdims: whether the axis stays, with size 1.

    Returns:
      In the dtype of x, computed in float32 or wider; -inf where all of x is -inf. The derivative is softmax(x), and 0
      there.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"logsumexp: x has dtype {x.dtype}; it must be floating")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"logsumexp: axis = {axis}; x has shape {x.shape}")
    out = reduce_logsumexp_p.bind(x, axes=(axis % x.ndim,))
    return jnp.expand_dims(out, axis % x.ndim) if keepdims else out


def _with_xla(x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.logsumexp(wide, axis=axes).astype(x.dtype)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    out = reduce_logsumexp_p.bind(x, axes=axes)
    shift = jnp.expand_dims(jnp.where(jnp.isfinite(out), out, 0), axes)  # exp(-inf - -inf) is not a number
    return out, jnp.sum(dx * jnp.exp(x - shift), axis=axes)


def _batch(arguments: Sequence[Any], dimensions: Sequence[int], *, axes: tuple[int, ...]) -> tuple[jax.Array, int]:
    x = jnp.moveaxis(arguments[0], dimensions[0], 0)
    return reduce_logsumexp_p.bind(x, axes=tuple(axis + 1 for axis in axes)), 0


@reduce_logsumexp_p.def_abstract_eval
def _type(x: Any, *, axes: tuple[int, ...]) -> Any:
    return jax.make_jaxpr(lambda x: _with_xla(x, axes=axes))(x).out_avals[0]


reduce_logsumexp_p.def_impl(_with_xla)
mlir.register_lowering(reduce_logsumexp_p, mlir.lower_fun(_with_xla, multiple_results=False))
ad.primitive_jvps[reduce_logsumexp_p] = _jvp
batching.primitive_batchers[reduce_logsumexp_p] = _batch


def recognise(flat: Flat) -> None:
    """Replaces g + log(sum(exp(x - g))) by the primitive; `jax.nn.logsumexp` writes it so, with the maximum as g.

    It is the log-sum-exp of x for any g that is constant along the reduced axes.
    """
    made_by = {variable: equation for equation in flat.equations for variable in equation.outputs}
    equations: list[Equation] = []
    for equation in flat.equations:
        x, total = _summed(flat, made_by, equation) or (None, None)
        if x is None or total is None:
            equations.append(equation)
            continue
        axes = tuple(map(int, total.params["axes"]))
        reduced, (output,) = flat.avals[total.outputs[0]], equation.outputs
        keepdims = not same_shape(reduced.shape, flat.avals[output].shape)
        result = flat.new(reduced) if keepdims else output
        equations.append(Equation(reduce_logsumexp_p, {"axes": axes}, (x,), (result,), equation.source_info))
        if keepdims:
            (expand,) = jax.make_jaxpr(partial(jnp.expand_dims, axis=axes))(reduced).eqns
            expanded = Equation(expand.primitive, expand.params, (result,), (output,), equation.source_info)
            equations.append(expanded)
    flat.equations = equations
    drop_unused(flat)


def _summed(flat: Flat, made_by: dict[int, Equation], equation: Equation) -> tuple[Atom, Equation] | None:
    """x and the sum's equation, if `equation` adds g to log(sum(exp(x - g))); else None."""

    def maker_of(atom: Atom, name: str, *skipped: str) -> Equation | None:
        """The equation of this name that made the atom, directly or through equations named in `skipped`."""
        maker = made_by.get(atom) if isinstance(atom, int) else None
        if maker is None or maker.name == name:
            return maker
        return maker_of(maker.inputs[0], name, *skipped) if maker.name in skipped else None

    def root(atom: Atom) -> Atom:
        maker = made_by.get(atom) if isinstance(atom, int) else None
        return root(maker.inputs[0]) if maker is not None and maker.name in _MOVES else atom

    if equation.name != "add":
        return None
    for logarithm, shift in (equation.inputs, equation.inputs[::-1]):
        log = maker_of(logarithm, "log", *_MOVES)
        total = log and maker_of(log.inputs[0], "reduce_sum", "abs", *_MOVES)
        exp = total and maker_of(total.inputs[0], "exp")
        difference = exp and maker_of(exp.inputs[0], "sub")
        if total is None or difference is None:
            continue
        x, subtracted = difference.inputs
        sizes = flat.aval(subtracted).shape
        axes, (output,) = total.params["axes"], equation.outputs
        constant = len(sizes) > 0 and all(same_size(sizes[axis], 1) for axis in axes)
        kept = [1 if axis in axes else size for axis, size in enumerate(flat.aval(x).shape)]
        has_reduced_shape = any(
            same_shape(flat.avals[output].shape, s) for s in (kept, flat.avals[total.outputs[0]].shape)
        )
        if constant and has_reduced_shape and root(subtracted) == root(shift) and flat.aval(x).dtype == jnp.float32:
            return x, total
    return None
