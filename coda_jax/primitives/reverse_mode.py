"""Functions with a derivative rule for reverse mode, and what they say in forward mode.

JAX refuses forward mode of a custom_vjp function without its name, where the tangent of its result is computed. Such a
function has one more argument here, a zero whose tangent depends on those of the others, and so is computed before it.
In reverse mode that tangent is only transposed, to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue import types_of
from coda_jax.primitives.mesh_types import explicit_sharding, placed

_zero_p = jex_core.Primitive("coda_reverse_mode")
_tangent_p = jex_core.Primitive("coda_forward_mode")


def differentiable(
    name: str, run: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """run(*arguments) with the rule of `jax.custom_vjp`; a forward mode raises NotImplementedError that names it.

    Args:
      name: of the operator.
      run, forward, backward: as `jax.custom_vjp` and its `defvjp` take them.
    """

    @jax.custom_vjp
    def guarded(zero: jax.Array, *arguments: Any) -> Any:
        return run(*arguments)

    def guarded_forward(zero: jax.Array, *arguments: Any) -> Any:
        outputs, kept = forward(*arguments)
        return outputs, (kept, _Shardings.of(arguments))

    def guarded_backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        kept, shardings = kept
        return None, *shardings.given(backward(kept, cotangents))

    guarded.defvjp(guarded_forward, guarded_backward)
    return lambda *arguments: guarded(_zero_p.bind(*jax.tree.leaves(arguments), name=name), *arguments)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Shardings:
    """How arguments lie over explicit mesh axes: their cotangents have to lie so too."""

    tree: Any
    shardings: tuple[Any, ...]

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> _Shardings:
        leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_none)
        return cls(tree, tuple(None if x is None else explicit_sharding(x) for x in leaves))

    def given(self, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """The cotangents, moved where they lie otherwise. None stands for zeros of a whole argument."""
        if not any(self.shardings):
            return cotangents
        moved = iter(self.shardings)

        def place(of_one: Any, x: Any) -> Any:
            shardings = [next(moved) for _ in jax.tree.leaves(of_one, is_leaf=_is_none)]
            leaves, tree = jax.tree.flatten(x, is_leaf=_is_none)
            moved_leaves = map(placed, leaves, shardings)
            return x if len(leaves) != len(shardings) else jax.tree.unflatten(tree, moved_leaves)

        return tuple(map(place, jax.tree.unflatten(self.tree, self.shardings), cotangents))


def _is_none(x: Any) -> bool:
    return x is None


def _zero(*_: Any, **__: Any) -> jax.Array:
    return jnp.zeros((), jnp.float32)


def _refuse(*_: Any, name: str, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"coda_jax: {name} has no forward mode (jax.jvp, jax.jacfwd, jax.linearize, jax.hessian), in any "
        "implementation. Use jax.grad, jax.vjp or jax.jacrev; a Hessian is jax.jacrev(jax.jacrev(f)), its product with "
        "v the jax.grad of lambda x: jnp.vdot(jax.grad(f)(x), v). What needs a tangent evaluates the plain formula."
    )


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, name: str) -> tuple[jax.Array, jax.Array]:
    return _zero(), _tangent_p.bind(*(t for t in tangents if type(t) is not ad.Zero), name=name)


def _transpose(_: Any, *tangents: Any, name: str) -> list[Any]:
    return [ad.Zero(t.aval) for t in tangents]


for primitive, evaluate in ((_zero_p, _zero), (_tangent_p, _refuse)):
    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *_, **__: types_of(_zero)[0])
mlir.register_lowering(_zero_p, mlir.lower_fun(_zero, multiple_results=False))
mlir.register_lowering(_tangent_p, _refuse)
batching.primitive_batchers[_zero_p] = lambda arguments, _, **params: (_zero_p.bind(*arguments, **params), None)
batching.primitive_batchers[_tangent_p] = _refuse
ad.primitive_jvps[_zero_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
