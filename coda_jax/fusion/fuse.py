"""`fuse`: a function of arrays whose products get fused epilogues."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import trace_context  # has no public name
from jax.extend import core

from coda_jax.fusion.checked import checked
from coda_jax.fusion.modules import changes_shared, is_change_outside, update_modules
from coda_jax.fusion.pieces import Options, Pieces, kernels_in, signature
from coda_jax.fusion.straight import as_inner
from coda_jax.graph.judged import names_of_arguments, names_of_results
from coda_jax.graph.static import Static
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.evaluate import without_constants
from coda_jax.primitives.call_arguments import check_implementation

_SIGNATURES = 64  # of a function, whose traces are kept
_lock = threading.RLock()  # of the traces of all functions; comparing two signatures may run a user's code
_ENCLOSING = jax.make_user_context(None)  # the options of the function that this thread traces; of JAX's traces' keys
_PLAIN = "plain"  # in the place of options: nothing is fused
AUX = "aux"
_ASKED_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class _OtherStructure(Exception):
    """A function changes the structure of an argument: a module's variables or static attributes, a dict's keys."""


class Fused:
    """A function that `fuse` was applied to; it is called as the function is.

    Attributes:
      name: of the function.
      pieces: the straight functions that its last trace was made of, whichever thread made it.
      reason: why its last call ran as it is, whichever thread called it; empty if it did not.
    """

    def __init__(self, f: Callable[..., Any], options: Options, *, is_checked: bool = False):
        functools.update_wrapper(self, f)
        self._f, self.options, self._is_checked = f, options, is_checked
        self.name = str(getattr(f, "__name__", type(f).__name__)).strip("<>")
        self.pieces, self.reason = Pieces(options), ""
        self._traces: collections.OrderedDict[Hashable, _Traced | str] = collections.OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """f(*args, **kwargs)."""
        if _ENCLOSING.value == _PLAIN:
            return self._f(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = self._traced(leaves, tree)
        if not isinstance(traced, str) and changes_shared((args, kwargs), traced.changed):
            traced = "it changes a variable that modules among its arguments share"
        self.reason = traced if isinstance(traced, str) else ""  # read by others alone: a thread may call it meanwhile
        if isinstance(traced, str):
            return self._f(*args, **kwargs)
        results = traced.function(*traced.consts, *filter(_is_array, leaves))
        outputs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]  # constants
        count = len(outputs) - len(traced.changed)
        if traced.changed:
            changed = dict(zip(traced.changed, outputs[count:], strict=True))
            after = [changed.get(i, x) for i, x in enumerate(leaves)]
            update_modules((args, kwargs), jax.tree.unflatten(tree, after))
        return jax.tree.unflatten(traced.tree, outputs[:count])

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __deepcopy__(self, memo: Any) -> Fused:
        return self  # as functions are

    def _traced(self, leaves: Sequence[Any], tree: Any) -> _Traced | str:
        """The function at these arguments; why it runs as it is, where it does."""
        config = trace_context(), jax.config.jax_default_prng_impl  # with the axes of an enclosing vmap
        each = (signature(x) if _is_array(x) else (type(x), Static(x)) for x in leaves)
        key = tree, jax.sharding.get_abstract_mesh(), config, tuple(each)
        with _lock:
            if key in self._traces:
                self._traces.move_to_end(key)
                return self._traces[key]
        traced = self._trace(leaves, tree)
        consts = () if isinstance(traced, str) else traced.consts
        if not any(isinstance(x, jax.Array) for x in consts):  # they may be others next time
            with _lock:
                self._traces[key] = traced
                if len(self._traces) > _SIGNATURES:
                    self._traces.popitem(last=False)
        return traced

    def _trace(self, leaves: Sequence[Any], tree: Any) -> _Traced | str:
        found: list[Any] = []
        pieces = Pieces(self.options)  # earlier ones live as long as their traces
        enclosing = _ENCLOSING.value
        is_inner = not self._is_checked and enclosing is not None and self.options in (enclosing, Options())
        if not is_inner:
            self.pieces = pieces

        def flat(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            before = [next(given) if _is_array(x) else x for x in leaves]
            args, kwargs = jax.tree.unflatten(tree, before)
            outputs, out_tree = jax.tree.flatten(self._f(*args, **kwargs))
            after, after_tree = jax.tree.flatten((args, kwargs))
            if after_tree != tree:
                raise _OtherStructure
            changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x is not y]
            found[:] = out_tree, changed
            return [*outputs, *(after[i] for i in changed)]

        flat.__name__ = self.name
        try:
            with _ENCLOSING(enclosing if is_inner else self.options):
                closed = jax.make_jaxpr(flat)(*filter(_is_array, leaves))
        except _ASKED_VALUE:
            return "it asks for the value of an array"
        except _OtherStructure:
            return "it changes the structure of an argument"
        except Exception as error:
            if is_change_outside(error):
                return "it changes a module that it closes over"
            raise
        pieces.kernels += kernels_in(closed.jaxpr)
        function = pieces.function(closed, self.name, kind="outer")
        if self._is_checked:
            with unfused():
                plain = jax.make_jaxpr(flat)(*filter(_is_array, leaves))  # without fused functions in it
            function = self._checked(function, closed, plain, leaves, tree, *found)
        elif is_inner:
            is_loss = len(closed.out_avals) == 1 and bool(loss_form(closed.out_avals[0]))
            function = as_inner(self.name, closed, function if is_loss else None)  # by its graph it has no logits
        out_tree, changed = found
        return _Traced(function, closed.consts, out_tree, changed)

    def _checked(
        self,
        function: Callable[..., Sequence[Any]],
        closed: core.ClosedJaxpr,
        plain: core.ClosedJaxpr,
        leaves: Sequence[Any],
        tree: Any,
        out_tree: Any,
        changed: Sequence[int],
    ) -> Callable[..., Sequence[Any]]:
        """The function of a jaxpr, compared in each call with a plain one's; the rest is as `_trace` has it."""
        if list(map(id, plain.consts)) != list(map(id, closed.consts)):
            plain = closed
        names, outputs = names_of_arguments(jax.tree.unflatten(tree, leaves)), closed.out_avals[: out_tree.num_leaves]
        arguments = [f"a closed-over {x.aval.str_short()}" for x in closed.jaxpr.constvars]
        arguments += [name for name, x in zip(names, leaves, strict=True) if _is_array(x)]
        results = names_of_results(jax.tree.unflatten(out_tree, outputs))
        results += [f"{names[i]} after the call" for i in changed]
        return checked(self.name, function, without_constants(plain), arguments, results)

    def fresh(self) -> Fused:
        """The same with no traces, and unchecked."""
        return Fused(self._f, self.options)

    @property
    def plain(self) -> Callable[..., Any]:
        """The function itself."""
        return self._f


def unfused() -> contextlib.AbstractContextManager[Any]:
    """A context in which fused functions are called as they are, for what plain JAX makes of a function."""
    context: contextlib.AbstractContextManager[Any] = _ENCLOSING(_PLAIN)
    return context


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function at a signature: of the arrays that it closes over and those of its arguments, as lists of arrays.

    Attributes:
      function: the function.
      consts: the arrays that it closes over.
      tree: the structure of its results.
      changed: the leaves of the arguments that it changes in place, as a module's statistics; they are results too.
    """

    function: Callable[..., Sequence[Any]]
    consts: Sequence[Any]
    tree: Any
    changed: Sequence[int]


_P = ParamSpec("_P")


class _WithReport(Protocol[_P]):
    """A function with the attribute `report`."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Any: ...

    @staticmethod
    def report(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


def _with_report(f: Callable[_P, Any]) -> _WithReport[_P]:
    """f, with `_report` as its attribute."""
    function: Any = f
    function.report = _report
    return cast("_WithReport[_P]", function)


def _report(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A table of what `fuse` makes of f(*args, **kwargs); a `coda_jax.tools.fusion_report.Report`.

    Args:
      f: a function, or what `fuse` made of one, whose options are then used.
      args, kwargs: its arguments: arrays, or jax.ShapeDtypeStructs.
    """
    return importlib.import_module("coda_jax.tools.fusion_report").report(f, *args, **kwargs)


@_with_report
def fuse(
    f: Callable[..., Any] | None = None,
    /,
    *,
    exact: bool = False,
    defer_norms: bool | None = None,
    chunk_losses: bool = True,
    attention: bool = True,
    memory: str | None = "same",
    check: bool = False,
    implementation: str = "auto",
) -> Any:
    """A function whose products get fused epilogues, forward and backward, with no line of it changed.

        loss = coda.fuse(loss)                   # then jax.grad(loss), under jit, vmap, scan, remat, shard_map
        step = coda.fuse(jax.value_and_grad(f))  # also; the first fuses more

    f is traced, as by jax.jit, before it is differentiated. Its products of matrices become kernels. What stands behind
    them runs in their epilogues where it is local to tiles: biases, activations, gates, rotations of heads, residuals,
    the sums of norms. So does the derivative of all that, which is derived of the same graph. An RMSNorm that products
    alone read may be applied behind them. Bodies of scan, while and cond, functions under jax.checkpoint and shard_map
    are fused each by itself; so is a jitted function that donates its arguments or says how arrays are sharded, or that
    is f itself, which then stays one program. The rule of a custom_vjp stays the derivative of its function: both are
    fused, a rule of rows where it stands. Attention that is written out becomes `coda.attention`. All the rest runs
    as it is, as gathers.

    As under jax.jit, f's Python code runs once for each signature: the types of the arrays, and the values of all other
    arguments; and in each call where it closes over arrays of JAX, or reads them of an argument that is no pytree.
    Modules of flax.nnx among the arguments change in place as they did; dicts and NumPy arrays that f changes do not.

    `coda.fuse.report(f, *args)` tells what became of each product, and why others are left alone.

    Args:
      f: a function of pytrees of arrays; other arguments are static. One that asks for the values of arrays, that
        changes the structure of an argument, or a module that it closes over, is called as it is.
      exact: round where f rounds, to 16 bits after each operation, defer no norm, chunk no loss and leave attention. By
        default values stay float32 within an epilogue, as in a fusion of XLA's.
      defer_norms: apply an RMSNorm that products alone read behind them. None: where that moves fewer bytes, which
        takes about as many rows as the products have columns together, counted over all devices.
      chunk_losses: compute a loss over a vocabulary in chunks, by `coda.linear_cross_entropy` or `coda.token_logprobs`.
      attention: compute softmax(q k^T) v by `coda.attention`, however it is written, where nothing else reads its
        probabilities.
      memory: "same": a piece whose backward pass would keep more bytes than JAX's own is left alone. None: it is fused.
      check: compute f and its gradient as JAX does too, and in float32 if f computes in 16 bits, in each call. Raise
        where an array is farther from the float32 run than f's own roundings explain: than three times f's own distance
        and one rounding, of 1e-3 in float32, of its norm.
      implementation: as in `coda.gemm`.

    Returns:
      A function with the arguments and the results of f; numbers among the results are arrays. Its derivatives are
      those of reverse mode.

    Raises:
      TypeError: f is not callable.
      ValueError: another memory or implementation.
      NotImplementedError: jax.jvp, jax.jacfwd or jax.linearize of what is returned.
    """
    if f is None:
        return functools.partial(
            fuse,
            exact=exact,
            defer_norms=defer_norms,
            chunk_losses=chunk_losses,
            attention=attention,
            memory=memory,
            check=check,
            implementation=implementation,
        )
    check_implementation("fuse", implementation)
    if not callable(f):
        raise TypeError(f"fuse: f = {f!r}; it must be a function")
    if memory not in ("same", None):
        raise ValueError(f"fuse: memory = {memory!r}; it must be 'same' or None")
    if defer_norms not in (True, False, None):
        raise ValueError(f"fuse: defer_norms = {defer_norms!r}; it must be True, False or None")
    options = Options(bool(exact), defer_norms, bool(chunk_losses), bool(attention), memory, implementation)
    return Fused(f, options, is_checked=bool(check))


def loss_form(results: Any) -> str:
    """The form of a loss that these are the results of: "loss", or "aux" for a loss beside others; else empty.

    They are arrays or their types. A loss is a number, and so is the first of two results that `jax.grad` takes with
    `has_aux=True`.
    """
    is_pair = isinstance(results, tuple) and len(results) == 2
    loss = results[0] if is_pair else results
    if not hasattr(loss, "dtype") or loss.shape or not is_float(loss.dtype):
        return ""
    return AUX if is_pair else "loss"


def _is_array(x: Any) -> bool:
    """True for what JAX takes as an array; NumPy's strings, objects and dates are static."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "OSUMm")
