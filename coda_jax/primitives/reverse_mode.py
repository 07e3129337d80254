"""Functions with a derivative rule for reverse mode, and what they say in forward mode.

JAX refuses forward mode of a custom_vjp function without its name, where the tangent of its result is computed. Such a
function has one more argument here, a zero whose tangent depends on those of the others, and so is computed before it.
In reverse mode that tangent is only transposed, to nothing.

The zero also tells the gradient of a vmap from the vmap of a gradient: it has the batch where vmap came first. There
the cotangent of an argument that the batch shares is a sum over it, which JAX takes from a cotangent for each element;
a `Backward` that can sums in its own products. One that a rule gives without the batch is to JAX the whole already.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax._src.interpreters.batching import BatchTracer  # has no public name
from jax._src.shard_map import ShardMapTracer  # of a shard_map that is not in a jit
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue import types_of
from coda_jax.primitives.mesh_types import explicit_sharding, with_sharding

_zero_p = jex_core.Primitive("coda_reverse_mode")
_tangent_p = jex_core.Primitive("coda_forward_mode")
_batch_p = jex_core.Primitive("coda_batch")  # has a batching rule alone
_batch_p.multiple_results = True
# If JAX differentiates one equation twice, in other arguments, its backward rule gets the arrays of one time in the
# structure of the other: jax 0.10 also in a loop that is traced before, jax 0.11 and 0.12 in a function that is called
# twice. There, a rule keeps the same whatever is asked for.
_MIXES_STRUCTURES = jax.__version_info__ < (0, 11)
_is_shared = contextvars.ContextVar("coda_is_shared", default=False)


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """A context for tracing a function that is called several times: JAX differentiates its equations in each call."""
    token = _is_shared.set(True)
    try:
        yield
    finally:
        _is_shared.reset(token)


class Backward:
    """backward(kept, cotangents), as `jax.custom_vjp.defvjp` takes it, that sees more of how it is called.

    Cotangents that are zeros to JAX are None.
    """

    def check(self, arguments: Sequence[Any], is_differentiated: Sequence[bool]) -> None:
        """Raises or warns where these of the arguments' arrays cannot be all that is differentiated."""

    def forward_of(self, forward: Callable[..., Any], is_differentiated: Sequence[bool]) -> Callable[..., Any]:
        """The function that runs forward where these of the arguments' arrays are differentiated."""
        return forward

    def __call__(self, kept: Any, cotangents: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def of_batch(self, size: Any, kept: Any, cotangents: Any, batched: tuple[Any, Any]) -> OfBatch | None:
        """The rule for a batch, whose axis is the first of what `batched` flags; None: as JAX batches a function."""
        raise NotImplementedError


class OfBatch(NamedTuple):
    """The derivative of a batch.

    Attributes:
      backward: of all.
      kept, cotangents: what it takes.
      batched: trees of flags, whether each cotangent that it gives has a batch axis in front; what has none is the sum
        over the batch.
    """

    backward: Callable[[Any, Any], tuple[Any, ...]]
    kept: Any
    cotangents: Any
    batched: Sequence[Any]


def differentiable(
    name: str, run: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """run(*arguments) with the rule of `jax.custom_vjp`; a forward mode raises NotImplementedError that names it.

    Args:
      name: of the operator.
      run, forward, backward: as `jax.custom_vjp` and its `defvjp` take them; backward may be a `Backward`.
    """

    def beside_zero(_: jax.Array, *arguments: Any) -> Any:
        return run(*arguments)

    rule = Rule(name, beside_zero, forward, backward)

    def function(*arguments: Any) -> Any:
        return rule.function(arguments)(rule.zero(arguments), *arguments)

    return function


def refuse_forward_mode(name: str, arguments: Any) -> jax.Array:
    """A zero whose tangent, where these arguments have tangents, raises the error that names the operator."""
    zero: jax.Array = _zero_p.bind(*jax.tree.leaves(arguments), name=name)
    return zero


class Rule(NamedTuple):
    """A function of arrays with its derivative: rule.function(arguments)(rule.zero(arguments), *arguments).

    Attributes:
      name: of the operator.
      run: a function of `zero`, which it does not read, and the arguments.
      forward, backward: as `differentiable` takes them.
    """

    name: str
    run: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def zero(self, arguments: Any) -> jax.Array:
        """The zero that refuses a forward mode of these arguments, by the operator's name."""
        return refuse_forward_mode(self.name, arguments)

    def function(self, arguments: Any) -> Any:
        """The function of the zero and such arguments."""
        run, forward, backward = self.run, self.forward, self.backward
        # JAX has no symbols of zeros in a shard_map outside of jit; cotangents there are arrays.
        has_symbols = not any(isinstance(x, ShardMapTracer) for x in jax.tree.leaves(arguments))
        is_alike = _MIXES_STRUCTURES or _is_shared.get()

        def guarded_forward(*arguments: Any) -> Any:
            zero, *values = custom_vjp_primal_tree_values(arguments) if has_symbols else arguments
            run_forward = forward
            if isinstance(backward, Backward):
                leaves = jax.tree.leaves(arguments[1:], is_leaf=_is_primal)
                is_differentiated = [not _is_primal(x) or x.perturbed for x in leaves]
                backward.check(jax.tree.leaves(values), is_differentiated)
                if not is_alike:
                    run_forward = backward.forward_of(forward, is_differentiated)
            outputs, kept = run_forward(*values)
            may_be_batched = isinstance(backward, Backward) and isinstance(zero, jax.core.Tracer)
            return outputs, (kept, zero if may_be_batched else None, _Shardings.of(tuple(values)))

        def guarded_backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
            kept, zero, shardings = kept
            return None, *shardings.given(_pulled_back(backward, zero, kept, cotangents))

        guarded = jax.custom_vjp(run)
        guarded.defvjp(guarded_forward, guarded_backward, symbolic_zeros=has_symbols)
        return guarded


def _pulled_back(backward: Callable[..., Any], zero: Any, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    """backward(kept, cotangents), of a whole batch where vmap came first and `backward` can."""
    if not isinstance(backward, Backward):
        outputs: tuple[Any, ...] = backward(kept, jax.tree.map(instantiated, cotangents))
        return outputs
    cotangents = jax.tree.map(lambda x: None if isinstance(x, SymbolicZero) else x, cotangents)
    if isinstance(zero, BatchTracer):
        leaves, tree = jax.tree.flatten((kept, cotangents))
        made: list[Any] = []
        outputs = _batch_p.bind(zero, *leaves, backward=backward, tree=tree, made=made)
        if made:
            found: tuple[Any, ...] = jax.tree.unflatten(made[0], outputs)
            return found
    return backward(kept, cotangents)


def instantiated(x: Any) -> Any:
    """A cotangent; zeros where it is JAX's symbol of these."""
    return ad.instantiate_zeros(ad.Zero(x.aval)) if isinstance(x, SymbolicZero) else x


def _batch(
    axis: Any,
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    backward: Backward,
    tree: Any,
    made: list[Any],
) -> tuple[list[jax.Array], list[int | None]]:
    """Applies backward.of_batch; no results where that is None."""
    zero, *leaves = (x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True))
    if axis.explicit_mesh_axis is not None:  # JAX takes its name from the mesh here
        return [], []
    batched = jax.tree.unflatten(tree, [dim is not None for dim in dims[1:]])
    kept, cotangents = jax.tree.unflatten(tree, leaves)
    whole = backward.of_batch(axis.size, kept, cotangents, batched)
    if whole is None:
        return [], []
    found = _pulled_back(whole.backward, zero, whole.kept, whole.cotangents)
    flags = jax.tree.leaves(list(whole.batched), is_leaf=_is_none)
    each = zip(jax.tree.leaves(list(found), is_leaf=_is_none), flags, strict=True)
    outputs, structure = jax.tree.flatten(found)
    made.append(structure)
    return outputs, [0 if has_batch else None for x, has_batch in each if x is not None]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Shardings:
    """The shardings of arguments over explicit mesh axes: their cotangents have to have them too."""

    tree: Any
    shardings: tuple[Any, ...]

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> _Shardings:
        leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_none)
        return cls(tree, tuple(None if x is None else explicit_sharding(x) for x in leaves))

    def given(self, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """The cotangents, resharded where they are sharded otherwise. None stands for zeros of a whole argument."""
        if not any(self.shardings):
            return cotangents
        moved = iter(self.shardings)

        def place(argument_shardings: Any, x: Any) -> Any:
            shardings = [next(moved) for _ in jax.tree.leaves(argument_shardings, is_leaf=_is_none)]
            leaves, tree = jax.tree.flatten(x, is_leaf=_is_none)
            moved_leaves = map(with_sharding, leaves, shardings)
            return x if len(leaves) != len(shardings) else jax.tree.unflatten(tree, moved_leaves)

        return tuple(map(place, jax.tree.unflatten(self.tree, self.shardings), cotangents))


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _is_none(x: Any) -> bool:
    return x is None


def _zero(*_: Any, **__: Any) -> jax.Array:
    return jnp.zeros(0, jnp.float32)  # of no size: it may be kept for the backward pass


def _batched_zero(
    axis: Any, arrays: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int | None]:
    zero = _zero_p.bind(*arrays, **params)
    if all(dim is None for dim in dims):
        return zero, None
    over = axis.explicit_mesh_axis
    sharding = None if over is None else jax.P(over, *[None] * zero.ndim)
    return jax.lax.broadcast(zero, (axis.size,), out_sharding=sharding), 0


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
    primitive.def_abstract_eval(lambda *_, **__: types_of(_zero, key="zero")[0])
mlir.register_lowering(_zero_p, mlir.lower_fun(_zero, multiple_results=False))
mlir.register_lowering(_tangent_p, _refuse)
batching.fancy_primitive_batchers[_zero_p] = _batched_zero
batching.fancy_primitive_batchers[_batch_p] = _batch
batching.primitive_batchers[_tangent_p] = _refuse
ad.primitive_jvps[_zero_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
