"""`fuse`: a function of arrays whose products get fused epilogues."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import trace_context  # has no public name
from jax.extend import core

from coda_jax.fusion.alike import own_params, structure
from coda_jax.fusion.checked import checked
from coda_jax.fusion.dots import PRODUCTS, Equation, operations
from coda_jax.fusion.histories import ARGUMENT, Histories, overwritten
from coda_jax.fusion.modules import changes_shared, is_change_outside, update_modules
from coda_jax.fusion.pieces import Options, Pieces, kernels_in, signature
from coda_jax.fusion.straight import as_inner
from coda_jax.graph.judged import names_of_arguments, names_of_results, parameters_of
from coda_jax.graph.rounded import Recipe
from coda_jax.graph.static import Static
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.evaluate import without_constants
from coda_jax.jaxprs.source_lines import at_call, is_of_package, line_of
from coda_jax.jaxprs.walk import equations
from coda_jax.operators.enclosing import ENCLOSING, PLAIN
from coda_jax.primitives.call_arguments import check_implementation
from coda_jax.primitives.fallbacks import is_strict, with_fallback_note

_MOST_LINES = 3  # of products that a note names
_SIGNATURES = 64  # of a function, whose traces are kept
_lock = threading.RLock()  # of the traces of all functions; comparing two signatures may run a user's code
AUX = "aux"
_ASKED_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


# A function of arrays, its jaxpr, and the structure of its results with the leaves that it changes.
_OfArrays = tuple[Callable[..., Any], core.ClosedJaxpr, Sequence[Any]]


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
        self._is_of_package = is_of_package(f)
        self._is_call = inspect.isfunction(f) and self.name == "__call__"  # of a class
        if self.name == "__call__":
            self.name = str(getattr(f, "__qualname__", "")).removesuffix(".__call__").rpartition(".")[-1]
        self.pieces, self.reason = Pieces(options), ""
        self._traces: collections.OrderedDict[Hashable, _Traced | str] = collections.OrderedDict()
        self._calls: collections.OrderedDict[Hashable, Callable[..., Sequence[Any]]] = collections.OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """f(*args, **kwargs)."""
        histories: Any = kwargs.pop(ARGUMENT, None) if self.options.fp8 is not None else None
        if ENCLOSING.value == PLAIN:
            return self._f(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = self._traced(leaves, tree, histories)
        if not isinstance(traced, str) and changes_shared((args, kwargs), traced.changed):
            traced = "it changes a variable that modules among its arguments share"
        self.reason = traced if isinstance(traced, str) else ""  # read by others alone: a thread may call it meanwhile
        if isinstance(traced, str) and histories is not None:
            raise ValueError(f"fuse({self.name}): {ARGUMENT} beside a function that runs as it is, for {traced}")
        if isinstance(traced, str):
            results = self._f(*args, **kwargs)
            return self._with_note(results, f"it runs as it is, for {traced}") if is_strict() else results
        own = [overwritten(histories[name]) for name in traced.histories]
        with at_call() if self._is_of_package else contextlib.nullcontext():
            results = traced.function(*traced.consts, *filter(_is_array, leaves), *own)
        outputs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]  # constants
        if is_strict() and (left := traced.left()):
            outputs = self._with_note(outputs, left)
        count = len(outputs) - len(traced.changed)
        if traced.changed:
            changed = dict(zip(traced.changed, outputs[count:], strict=True))
            after = [changed.get(i, x) for i, x in enumerate(leaves)]
            update_modules((args, kwargs), jax.tree.unflatten(tree, after))
        return jax.tree.unflatten(traced.tree, outputs[:count])

    def _with_note(self, results: Any, reason: str) -> Any:
        """The results, the first of which that is an array of floats has a note of this reason."""
        leaves, tree = jax.tree.flatten(results)
        number = next((i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and is_float(x.dtype)), None)
        if number is not None:
            remedy = "coda.fuse.report tells what became of each product"
            leaves[number] = with_fallback_note(leaves[number], f"fuse({self.name})", reason, remedy)
        return jax.tree.unflatten(tree, leaves)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __deepcopy__(self, memo: Any) -> Fused:
        return self  # as functions are

    def _traced(self, leaves: Sequence[Any], tree: Any, histories: Any) -> _Traced | str:
        """The function at these arguments; why it runs as it is, where it does."""
        config = trace_context(), jax.config.jax_default_prng_impl  # with the axes of an enclosing vmap
        each = (signature(x) if _is_array(x) else (type(x), Static(x)) for x in leaves)
        own, own_tree = jax.tree.flatten(histories)
        of_histories = own_tree, tuple(signature(x) if _is_array(x) else type(x) for x in own)
        key = tree, jax.sharding.get_abstract_mesh(), config, tuple(each), of_histories
        with _lock:
            if key in self._traces:
                self._traces.move_to_end(key)
                return self._traces[key]
        traced = self._trace(leaves, tree, histories)
        consts = () if isinstance(traced, str) else traced.consts
        if not any(isinstance(x, jax.Array) for x in consts):  # they may be others next time
            with _lock:
                self._traces[key] = traced
                if len(self._traces) > _SIGNATURES:
                    self._traces.popitem(last=False)
        return traced

    def _trace(self, leaves: Sequence[Any], tree: Any, histories: Any) -> _Traced | str:
        pieces = Pieces(self.options)  # earlier ones live as long as their traces
        enclosing = ENCLOSING.value
        is_inner = not self._is_checked and enclosing is not None and self._is_part(enclosing)
        is_inner = is_inner and histories is None  # else those of the function around are of its products too
        if not is_inner:
            self.pieces = pieces
        name = self._name_with(leaves, tree)
        traced = self._arrays_traced(leaves, tree, enclosing if is_inner else self.options)
        if isinstance(traced, str):
            return traced
        flat, closed, (out_tree, changed) = traced
        pieces.kernels += kernels_in(closed.jaxpr)
        if not is_inner and self.options.fp8 is not None and (histories is not None or self.is_delayed):
            return self._with_histories(traced, pieces, leaves, tree, histories)
        function = pieces.function(closed, name, kind="outer")
        if self._is_checked:
            with unfused():
                plain = jax.make_jaxpr(flat)(*filter(_is_array, leaves))  # without fused functions in it
            function = self._checked(function, closed, plain, leaves, tree, out_tree, changed)
        elif is_inner:
            is_loss = len(closed.out_avals) == 1 and bool(loss_form(closed.out_avals[0]))
            # By its graph a loss has no logits.
            function = as_inner(name, closed, function) if is_loss else self._call_of(name, closed)
        left = str if is_inner else functools.partial(_left, pieces, closed.jaxpr)
        return _Traced(function, closed.consts, out_tree, changed, left)

    def _is_part(self, enclosing: Options) -> bool:
        """Whether its options let it be a part of a fused function with these; without a recipe it takes theirs."""
        return self.options in (enclosing, dataclasses.replace(enclosing, fp8=None), Options())

    def _call_of(self, name: str, closed: core.ClosedJaxpr) -> Callable[..., Sequence[Any]]:
        """The call of a jaxpr in another fused function; the same for equal ones, as those that close over arrays."""
        jaxpr = closed.jaxpr
        found = structure(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, lambda x: x.aval, own_params)
        call = as_inner(name, closed, None)
        if found is None:
            return call
        key = name, found
        with _lock:
            known = self._calls.setdefault(key, call)
            self._calls.move_to_end(key)
            if len(self._calls) > _SIGNATURES:
                self._calls.popitem(last=False)
        return known

    def _name_with(self, leaves: Sequence[Any], tree: Any) -> str:
        """The name of the function with these arguments: that of the object's class, where it is a `__call__`."""
        args, _ = jax.tree.unflatten(tree, leaves) if self._is_call else ((), {})
        return type(args[0]).__name__ if args else self.name

    def _arrays_traced(self, leaves: Sequence[Any], tree: Any, options: Any) -> _OfArrays | str:
        """The function of the arrays among the leaves of its arguments, traced; why it runs as it is."""
        found: list[Any] = []

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

        flat.__name__ = self._name_with(leaves, tree)
        try:
            with ENCLOSING(options):
                closed = jax.make_jaxpr(flat)(*filter(_is_array, leaves))
        except _ASKED_VALUE:
            return "it asks for the value of an array"
        except _OtherStructure:
            return "it changes the structure of an argument"
        except Exception as error:
            if is_change_outside(error):
                return "it changes a module that it closes over"
            raise
        return flat, closed, found

    def _with_histories(
        self, traced: _OfArrays, pieces: Pieces, leaves: Sequence[Any], tree: Any, histories: Any
    ) -> _Traced:
        """The function of the arrays that it closes over, those among its arguments, and histories."""
        _, closed, (out_tree, changed) = traced
        known = self._histories(closed, leaves, tree)
        known.check(histories)
        whole, names = known.function(histories), [*known.shapes]
        weights = [*[True] * (len(whole.in_avals) - len(names)), *[False] * len(names)]
        function = pieces.function(whole, self.name, weights=weights, kind="outer")
        left = functools.partial(_left, pieces, closed.jaxpr)
        return _Traced(function, [*whole.consts, *closed.consts], out_tree, changed, left, names)

    def _histories(self, closed: core.ClosedJaxpr, leaves: Sequence[Any], tree: Any) -> Histories:
        assert self.options.fp8 is not None
        names = names_of_arguments(jax.tree.unflatten(tree, leaves), parameters_of(self._f))
        return Histories(
            closed, [name for name, x in zip(names, leaves, strict=True) if _is_array(x)], self.options.fp8
        )

    def history_shapes(self, *args: Any, **kwargs: Any) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the histories that a call with these arguments takes, by their names."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = self._arrays_traced(leaves, tree, self.options)
        if isinstance(traced, str):
            raise ValueError(f"fuse({self.name}): it has no histories, as it runs as it is, for {traced}")
        return self._histories(traced[1], leaves, tree).shapes

    @property
    def is_delayed(self) -> bool:
        """Whether it takes histories."""
        return self.options.fp8 is not None and self.options.fp8.scaling == "delayed"

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

    def with_current_scales(self) -> Fused:
        """The same with the scales of the tensors themselves; histories that are given receive their maxima."""
        assert self.options.fp8 is not None
        recipe = dataclasses.replace(self.options.fp8, scaling="current")
        return Fused(self._f, dataclasses.replace(self.options, fp8=recipe))

    def fresh(self) -> Fused:
        """The same with no traces, and unchecked."""
        return Fused(self._f, self.options)

    @property
    def plain(self) -> Callable[..., Any]:
        """The function itself."""
        return self._f


def _left(pieces: Pieces, jaxpr: core.Jaxpr) -> str:
    """The products that pieces leave to XLA, in words, but for those of less than a hundredth of all operations."""
    whole = sum(_operations(e) for e, _ in equations(jaxpr) if e.primitive.name in PRODUCTS)
    left = [(e, reason) for piece in pieces.made for e, reason in piece.left if _is_large(e, whole)]
    each = [*dict.fromkeys(f"{line_of(e) or 'a product'}: {reason}" for e, reason in left)]
    others = f"; {len(each) - _MOST_LINES} more" if len(each) > _MOST_LINES else ""
    return f"it leaves {len(left)} products to XLA, {'; '.join(each[:_MOST_LINES])}{others}" if left else ""


def _is_large(product: Equation, whole: Any) -> bool:
    """True for a hundredth of all operations, and for symbolic sizes."""
    try:
        return bool(100 * _operations(product) >= whole)
    except jax.errors.InconclusiveDimensionOperation:
        return True


def _operations(product: Equation) -> Any:
    return operations(product, *(x.aval.shape for x in product.invars[:2]))


def unfused() -> contextlib.AbstractContextManager[Any]:
    """A context in which fused functions are called as they are, for what plain JAX makes of a function."""
    context: contextlib.AbstractContextManager[Any] = ENCLOSING(PLAIN)
    return context


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function at a signature: of the arrays that it closes over and those of its arguments, as lists of arrays.

    Attributes:
      function: the function.
      consts: the arrays that it closes over.
      tree: the structure of its results.
      changed: the leaves of the arguments that it changes in place, as a module's statistics; they are results too.
      histories: the names of those that it takes behind these arrays, in order.
      left: says, once the function has been traced, which large products it leaves, and why; empty where it has none.
    """

    function: Callable[..., Sequence[Any]]
    consts: Sequence[Any]
    tree: Any
    changed: Sequence[int]
    left: Callable[[], str] = str
    histories: Sequence[str] = ()


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
    fp8: Recipe | None = None,
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

    `coda.fuse.report(f, *args)` tells what became of each product, and why others are left alone. Under `coda.strict()`
    a product that is left, if it has a hundredth of all operations, and a function that runs as it is are errors on a
    GPU.

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
      fp8: round the products with weights to 8 bits, and their cotangents, as this `coda.fp8.Recipe` says. A product
        x w is one if w is an argument, also a view of one or a loop's part of it, that has none of the rows of x, and
        all its sizes are multiples of 16. Logits of a loss over a vocabulary stay in their dtype, and so do products of
        activations, as attention's, and of weights. With delayed scaling the function takes one more argument by name,
        `fp8_histories`, as `coda.fp8.init` makes it; its gradient is the next step's histories.

    Returns:
      A function with the arguments and the results of f; numbers among the results are arrays. Its derivatives are
      those of reverse mode.

    Raises:
      TypeError: f is not callable; fp8 is no recipe. The function: `fp8_histories` is missing, or no dictionary.
      ValueError: another memory or implementation; fp8 beside exact or check. The function: other histories than those
        of its products; a function that holds its own gradient with delayed scaling.
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
            fp8=fp8,
        )
    check_implementation("fuse", implementation)
    if not callable(f):
        raise TypeError(f"fuse: f = {f!r}; it must be a function")
    if memory not in ("same", None):
        raise ValueError(f"fuse: memory = {memory!r}; it must be 'same' or None")
    if defer_norms not in (True, False, None):
        raise ValueError(f"fuse: defer_norms = {defer_norms!r}; it must be True, False or None")
    _check_recipe(fp8, exact=exact, check=check)
    options = Options(bool(exact), defer_norms, bool(chunk_losses), bool(attention), memory, implementation, fp8)
    return Fused(f, options, is_checked=bool(check))


def _check_recipe(fp8: Any, *, exact: bool, check: bool) -> None:
    if not isinstance(fp8, Recipe | None):
        raise TypeError(f"fuse: fp8 = {fp8!r}; it must be a coda.fp8.Recipe, as coda.fp8.Recipe(), or None")
    if fp8 is None:
        return
    for name, flag in (("exact", exact), ("check", check)):
        if flag:
            raise ValueError(f"fuse: {name} = True beside fp8 = {fp8}; a function in 8 bits rounds more than f does")


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
