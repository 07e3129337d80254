"""A plan, run: each product with the maps of its epilogue, and XLA's passes between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import ByGroup
from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.epilogue.rounding import rounded
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.graph.attended import Beside, called_beside
from coda_jax.graph.calls import Call, Result, results_of_call
from coda_jax.graph.constraint import Constraint
from coda_jax.graph.evaluate import applied
from coda_jax.graph.on_mesh import is_on_mesh, reshaped_as
from coda_jax.graph.passes import in_pass
from coda_jax.graph.pieces import Part, Pieces, as_type, whole
from coda_jax.graph.plan import Plan, Step, has_halves, has_rows, is_of_rows
from coda_jax.graph.pulled_back import Behind, called_behind
from coda_jax.graph.saved import named
from coda_jax.graph.unflattened import Unflattened
from coda_jax.graph.values import (
    ForEachRow,
    Leaf,
    Map,
    Product,
    Transposed,
    Value,
    is_float,
    reachable,
    reachable_until,
    source_of,
)
from coda_jax.jaxprs.source_lines import at_line_of
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.derivative import Options, Parts, product
from coda_jax.primitives.layout import spec_of_sum
from coda_jax.primitives.mesh_types import (
    constrained,
    explicit_sharding,
    sharding_over_explicit,
    with_same_sharding,
)
from coda_jax.primitives.product_arrays import as_parts

_Arguments = tuple[  # of `product`
    Parts,
    Parts,
    list[Parts | ByGroup],
    Callable[..., Any] | None,
    Callable[[Any], list[np.dtype[Any]]],
    Options,
    jax.Array | None,
]


def run(
    plan: Plan,
    arrays: Mapping[Value, Any],
    *,
    dtype: Any,
    out_dtypes: Sequence[Any],
    name: str,
    rows: Sequence[Any] = (),
    implementation: str = "auto",
    names: Mapping[Value, str] | None = None,
    add_plan_text: Callable[[jax.Array], jax.Array] = lambda x: x,
    has_derivative: bool = True,
) -> list[Any]:
    """The arrays of what the plan makes; a factor that is kept may be a tuple of these, pieces of one.

    Args:
      arrays: of leaves and of values that are given.
      dtype: of the products' factors, and of tiles that lie in memory between them.
      out_dtypes: of what is wanted.
      name: of the graph, in messages and in the kernels' names.
      rows: the axes that arrays have in the place of a block's rows; none where these are one axis.
      implementation: as in `gemm`.
      names: for the policies of `jax.checkpoint`, of what lies in memory.
      add_plan_text: an identity on the first product's first factor, or on an output where there is no product, which
        puts the plan's text into the program, as long as the product is in it.
      has_derivative: as in `product`.
    """
    stored: dict[Value, np.dtype[Any]] = {}  # the widest that is asked for
    for value, of in zip(plan.wanted, out_dtypes, strict=True):
        stored[value] = max(np.dtype(of), stored.get(value, np.dtype(of)), key=lambda one: one.itemsize)
    parts = {x: list(of) for x, of in arrays.items() if isinstance(of, tuple)}
    arrays = {x: of for x, of in arrays.items() if x not in parts}
    running = _Run(
        plan, arrays, parts, np.dtype(dtype), stored, tuple(rows), implementation, names or {}, add_plan_text
    )
    running.arrays |= {
        x: running.named(x, running.constrained(x, of)) for x, of in arrays.items() if isinstance(x, Leaf)
    }
    for i, step in enumerate(plan.steps):
        arguments = running.arguments(i, f"{name}_{i}")
        with at_line_of(source_of(step.product)):
            outputs, _ = product(*arguments, has_derivative=has_derivative)
            running.store(i, outputs)
    results = [running.result(value, of) for value, of in zip(plan.wanted, out_dtypes, strict=True)]
    return results if plan.steps else _with_first(results, add_plan_text)


def _with_first(arrays: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """The array changed, or the arrays with the first of them changed."""
    if not isinstance(arrays, Sequence):
        return change(arrays)
    return [change(arrays[0]), *arrays[1:]] if arrays else arrays


@dataclasses.dataclass
class _Run:
    """The state of a plan while it runs: the arrays that are known, with all axes of the rows."""

    plan: Plan
    arrays: dict[Value, jax.Array]
    parts: dict[Value, list[jax.Array]]  # of factors
    dtype: np.dtype[Any]
    dtypes: dict[Value, np.dtype[Any]]
    rows: tuple[Any, ...]
    implementation: str
    names: Mapping[Value, str]
    add_plan_text: Callable[[jax.Array], jax.Array]

    def __post_init__(self) -> None:
        self.passing: dict[Value, Part | Pieces] = {}
        self._by_xla = frozenset(self.plan.by_xla)
        self._results: dict[Call, list[Result]] = {}  # of calls, that the plan asks for
        for value in self.plan.by_xla:
            if isinstance(value, Result) and value not in self.plan.unread:
                self._results.setdefault(value.call, []).append(value)
        self._beside = {x: y for y, values in self.plan.beside.items() for x in values}
        self._apart: set[Result] = set()  # results of attention whose maps XLA makes
        self._behind = {x: behind for behind in self.plan.behind.values() for x in behind.made}

    def dtype_of(self, value: Value) -> np.dtype[Any]:
        """As which the value lies in memory."""
        if value in self.plan.factors_alone and is_float(value.dtype) and not is_of_8_bits(value.dtype):
            return self.dtype
        own = value.stored_as(self.dtype)
        return self.dtypes.get(value, own) if value.is_tile and is_float(value.dtype) else own

    def known(self, value: Value) -> jax.Array:
        """The value, which XLA makes if it is not known."""
        self._make_beside(value)
        if value not in self.arrays and isinstance(value, Result):
            self._call(value)
        if value in self.parts and value not in self.arrays:
            pieces = jnp.concatenate(with_same_sharding(self.parts[value], -1), axis=-1)
            self.arrays[value] = reshaped_as(pieces, self._shape_of(value))
        if value not in self.arrays:
            made = self._in_pass(value)
            with at_line_of(source_of(value)):
                x = whole(made)
                array = (x.array if isinstance(x, Unflattened) else x).reshape(self._shape_of(value))
                array = self._stored(value, array) if value in self._by_xla else array
                self.arrays[value] = self.named(value, self.constrained(value, array))
        return self.arrays[value]

    def _stored(self, value: Value, x: jax.Array) -> jax.Array:
        """x, made by a pass, in the dtype that it has in memory; other passes may see more of it, or may not."""
        dtype = self.dtype_of(value)
        return (rounded(x, dtype) if value in self.plan.as_stored else x).astype(dtype)

    def result(self, value: Value, dtype: Any) -> Any:
        """The array of a wanted value; for a factor that is kept maybe several, the pieces of one."""
        parts = self.in_parts(value) if value.is_factor else []
        return tuple(parts) if len(parts) > 1 else self.known(value).astype(dtype)

    def in_parts(self, value: Value) -> list[jax.Array]:
        """A factor as the arrays that a pass makes of its columns; another as the one that it is."""
        self._make_beside(value)
        if value not in self.parts:
            made = self._in_pass(value) if value not in self.arrays and isinstance(value, Map | Transposed) else None
            if not isinstance(made, Pieces):
                return [self.known(value)]
            row_sizes = self.rows if self.rows and has_rows(value) else made.parts[0].shape[:1]
            arrays = [x.array if isinstance(x, Unflattened) else x.reshape(*row_sizes, -1) for x in made.parts]
            self.parts[value] = [self._stored(value, x) for x in arrays]
        return self.parts[value]

    def _in_pass(self, value: Value) -> Part | Pieces:
        """A map or a transpose, as a pass of XLA's makes it; what it reads is made in the same pass or known."""
        made = self.passing

        def is_read(x: Value) -> bool:
            return x is not value and (x in self.arrays or x in self._by_xla)

        for of in reachable_until([value], is_read) if self._behind else ():
            if of in self._behind:
                self._make_beside(of)
        for of in [x for x in reachable_until([value], is_read) if not is_read(x)]:
            if isinstance(of, Map | Transposed) and of not in made:
                inputs = [made[x] if x in made else self._input(x) for x in of.inputs]
                with at_line_of(source_of(of)):
                    made[of] = in_pass(of, inputs)
                    made[of] = as_type(made[of], self.dtype) if of.is_rounded else made[of]
        return made[value]

    def _input(self, value: Value) -> Part | Pieces:
        """A value in memory, as a matrix whose axes may be several of its array; one of each group as it is."""
        halves, arrays = has_halves(value), self.in_parts(value)
        if halves and isinstance(value, Product) and len(value.shape) > 2:
            return reshaped_as(arrays[0], value.shape)
        rows = self.rows if self.rows and has_rows(value) else arrays[0].shape[:1] if halves else ()
        parts = [Unflattened(x, tuple(rows), halves) if rows else x for x in arrays]
        return Pieces(parts) if len(parts) > 1 else parts[0]

    def _call(self, value: Result) -> None:
        """Makes the results of a value's call, and what its derivative keeps where the plan asks for that."""
        for y in value.call.results:
            if y in self.plan.beside:
                self._attend(y)
        behind = self.plan.behind.get(value.call)
        if behind is not None and behind.made[0] in self._behind:
            self._pull_back(behind)
        if value not in self.arrays:
            of = dict.fromkeys([value, *self._results.get(value.call, ())])
            self._take(results_of_call(list(of), [self.known(x) for x in value.inputs]))

    def _make_beside(self, value: Value) -> None:
        """Makes a value that attention's kernels make with the other results of attention, or of its derivative."""
        if value in self._beside and value not in self.arrays:
            self._attend(self._beside[value])
        if value in self._behind and value not in self.arrays:
            self._pull_back(self._behind[value])

    def _pull_back(self, behind: Behind) -> None:
        """Makes what is made of dq, dk and dv, and the other results of the call; nothing where XLA makes it."""
        for x in behind.made:
            self._behind.pop(x, None)  # who asks for what these read, or for them again, has what is known then
        inputs, operands = ([self.known(x) for x in of] for of in (behind.call.inputs, behind.read))
        if is_on_mesh(*inputs, *operands) or behind.gradients[0].dtype != self.dtype:
            return
        others = [x for x in self._results.get(behind.call, ()) if x not in behind.gradients]
        matrices = [x.reshape(of.shape) for x, of in zip(operands, behind.read, strict=True)]
        made = called_behind(behind, others, inputs, matrices, [self.dtype_of(x) for x in behind.tiles])
        if made is None:
            return
        self._take(made[0])
        for value, made_array in made[1].items():
            array = made_array.reshape(value.shape if isinstance(value, Transposed) else self._shape_of(value))
            self.arrays[value] = self.named(value, self.constrained(value, array))

    def _attend(self, y: Result) -> None:
        """Makes the results of attention with the maps beside y; nothing where XLA makes these."""
        inputs = [self.known(x) for x in y.inputs]
        operands = {x: self.known(x) for x in self.plan.read_beside(y)}
        if y in self._apart or is_on_mesh(*inputs, *operands.values()):
            self._apart.add(y)
            return
        values = self.plan.beside[y]
        dtypes = {x: self.dtype_of(x) for x in self.plan.as_stored}
        epilogue = _epilogue("attention", y, list(operands), values, dtypes, self.plan.traces)
        arrays = list(operands.values())
        beside = Beside(y, epilogue, arrays, [self.dtype_of(x) for x in values])
        made = called_beside(self._results.get(y.call, []), inputs, beside)
        if made is None:
            self._apart.add(y)
            return
        self._take(made[0])
        for value, x in zip(values, made[1], strict=True):
            array = x.reshape(value.shape if isinstance(value, Transposed) else self._shape_of(value))
            self.arrays[value] = self.named(value, self.constrained(value, array))

    def _take(self, made: Mapping[Result, jax.Array]) -> None:
        self.arrays |= {x: reshaped_as(array, self._shape_of(x)) for x, array in made.items()}

    def arguments(self, step: int, name: str) -> _Arguments:
        """The arguments of `product` for a step; its epilogue has this name."""
        of, stores = self.plan.steps[step].product, self.plan.steps[step].stores
        spec = self._spec_of_rows(stores)
        a, b = self._factors(of, spec)
        operands = {x: self._alongside(of, x, self._as_operand(x, spec, b)) for x in self.plan.operands(step)}
        if step not in self.plan.epilogues:
            dtypes = {x: self.dtype_of(x) for x in self.plan.as_stored}
            self.plan.epilogues[step] = _epilogue(name, of, list(operands), stores, dtypes, self.plan.traces)
        return (
            a if step else _with_first(a, self.add_plan_text),
            b,
            list(operands.values()),
            None if stores == [of] else self.plan.epilogues[step],
            lambda _: [self.dtype_of(value) for value in stores],
            self._options(self.plan.steps[step], a, b, operands),
            None if of.groups is None else self.known(of.groups),
        )

    def store(self, step: int, outputs: Sequence[jax.Array]) -> None:
        """Takes what the epilogue of a step's product gave: it is known then."""
        stores = self.plan.steps[step].stores
        spec = self._spec_of_rows(stores)
        for value, x in zip(stores, outputs, strict=True):
            if self.rows and has_rows(value) != has_rows(self.plan.steps[step].product):
                x = reshaped_as(x, self._shape_of(value))
            if not value.is_tile and spec is not None and has_rows(value):
                x = _with_rows(x, spec)
            x = x.reshape(value.shape) if isinstance(value, Transposed) else self.constrained(value, x)
            self.arrays[value] = self.named(value, x)

    def named(self, value: Value, x: jax.Array) -> jax.Array:
        """x, under the value's name for policies, if it has one."""
        return named(x, self.names[value]) if value in self.names else x

    def constrained(self, value: Value, x: jax.Array) -> jax.Array:
        """x, constrained to the author's sharding; its rows alone where the author's array has several column axes."""
        if value.spec is None or isinstance(value.spec, Constraint):
            return x if value.spec is None else value.spec(x)
        rows = max(len(self.rows), 1)
        return constrained(x, value.spec if len(value.spec) <= x.ndim else jax.P(*value.spec[:rows]))

    def _spec_of_rows(self, stores: Sequence[Value]) -> Sequence[Any] | Constraint | None:
        """The sharding of the rows that the author states for the stored tiles, if it shards their columns too."""
        for x in stores:
            if x.is_tile and has_rows(x) and (spec := self._own_spec_of_rows(x)) is not None:
                return spec
        return None

    def _own_spec_of_rows(self, value: Value) -> Sequence[Any] | Constraint | None:
        """How the author says that the rows of one value lie, where its columns are cut too."""
        if isinstance(value.spec, Constraint):
            return value.spec.of_rows(self.rows or value.shape[:1])
        rows = max(len(self.rows), 1)
        return tuple(value.spec[:rows]) if value.spec is not None and any(value.spec[rows:]) else None

    def _as_operand(self, value: Value, spec: Sequence[Any] | Constraint | None, b: Parts) -> Parts | ByGroup:
        """Beside b in pieces of the columns, pieces too where these are how a pass makes it."""
        if self.plan.is_by_group(value):
            return ByGroup(self.known(value.inputs[0]))
        parts = self.in_parts(value) if isinstance(b, list) and value.is_tile else []
        if isinstance(b, list) and [x.shape[-1] for x in parts] == [x.shape[-1] for x in b]:
            return parts
        x = self.known(value)
        x = x[..., None] if is_of_rows(value) else x
        is_column = not value.is_tile and has_rows(value)
        return _with_rows(x, spec, None) if spec is not None and is_column else x

    def _alongside(self, of: Product, value: Value, x: Parts | ByGroup) -> Parts | ByGroup:
        """An operand with as many axes of rows as the product beside it: a product of other factors may have M rows."""
        same_rows = len(value.shape) == 2 and same_size(value.shape[0], of.shape[-2])
        if not self.rows or not same_rows or not isinstance(x, jax.Array) or has_rows(value) == has_rows(of):
            return x
        return reshaped_as(x, (*self.rows, value.shape[1]) if has_rows(of) else value.shape)

    def _options(self, step: Step, a: Parts, b: Parts, operands: Mapping[Value, Parts | ByGroup]) -> Options:
        of = step.product
        ragged = None if of.groups is None else Dimension.K if of.transpose_a else Dimension.M
        k_axes = len(self.rows) if self.rows and self._sums_rows(of) else 1
        if of.transpose_b and has_halves(of.b):
            k_axes = 2
        like = self._alike(of.like)
        spec = of.out_spec if isinstance(of.spec, Constraint) else of.spec
        is_plain = ragged is None and not of.transpose_a
        has_pairs = len(of.pairs) > 1
        if spec is None and is_plain and (has_pairs or not (isinstance(a, list) or isinstance(b, list))):
            arrays = [x for x in operands.values() if isinstance(x, jax.Array)]
            (first_a, *_), (first_b, *_) = as_parts(a), as_parts(b)
            spec = spec_of_sum(first_a, first_b, *arrays, transpose_b=of.transpose_b)
        return Options(
            of.transpose_a,
            of.transpose_b,
            implementation=self.implementation,
            ragged=ragged,
            k_axes=k_axes,
            halves=not of.transpose_a and any(map(has_halves, (of, *step.stores, *operands))),
            out_sharding=sharding_over_explicit(spec) if like is None else explicit_sharding(like),
            apart=has_pairs,
        )

    def _alike(self, value: Value | None) -> jax.Array | None:
        """A known array that lies as the value: its own, or that of what it is made of."""
        while value is not None and value not in self.arrays:
            value = next((x for x in value.inputs if same_shape(x.shape[:-1], value.shape[:-1]) and x.is_tile), None)
        return None if value is None else self.arrays[value]

    def _factors(self, of: Product, spec: Sequence[Any] | Constraint | None) -> list[Parts]:
        """Both factors, in the products' dtype: arrays, or several that are pieces of one."""
        each = [self._pair(of, a, b) for a, b in of.pairs]
        a, b = ([x for pieces in factors for x in pieces] for factors in zip(*each, strict=True))
        a = _as_asked(of, a, spec)
        factors = ([x if is_of_8_bits(x.dtype) else x.astype(self.dtype) for x in one] for one in (a, b))
        return [one[0] if len(one) == 1 else one for one in factors]

    def _pair(self, of: Product, value_a: Value, value_b: Value) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays of one pair of factors."""
        a, b = self.in_parts(value_a), self.in_parts(value_b)
        sums_pieces = of.transpose_b and [x.shape[-1] for x in a] == [x.shape[-1] for x in b]
        if len(a) > 1 and not sums_pieces:
            a = [self.known(value_a)]
        if len(b) > 1 and not sums_pieces and (of.transpose_b or len(of.pairs) > 1 or self._is_whole(of.like)):
            b = [self.known(value_b)]
        if not self._sums_rows(of):
            b = [self._as_matrix(value_b, x) for x in b]
            if of.transpose_a:
                a = [self._as_matrix(value_a, x) for x in a]
        return self._as_halves(of, a), b

    def _as_halves(self, of: Product, a: list[jax.Array]) -> list[jax.Array]:
        """The first factor with two axes of columns where the second has them alone: a cotangent that JAX gave."""
        if not (of.transpose_b and has_halves(of.b)) or has_halves(of.a):
            return a
        return [reshaped_as(x, (*x.shape[:-1], 2, x.shape[-1] // 2)) for x in a]

    def _is_whole(self, like: Value | None) -> bool:
        """True if what a product's result is a cotangent of is one array."""
        return like is not None and len(self.in_parts(like)) == 1

    def _sums_rows(self, of: Product) -> bool:
        """True if it sums over the rows, with all their axes."""
        return of.transpose_a and not of.transpose_b and has_rows(of.a) and has_rows(of.b)

    def _as_matrix(self, value: Value, x: jax.Array) -> jax.Array:
        if not (self.rows and has_rows(value)) or isinstance(value, Transposed):
            return x
        return x.reshape(-1, *x.shape[len(self.rows) :])

    def _shape_of(self, value: Value) -> tuple[Any, ...]:
        """The shape of a value's array, with all axes of the rows, and with two axes of columns that are halves."""
        rows = self.rows if self.rows and has_rows(value) else value.shape[:1]
        columns = value.shape[1:]
        return (*rows, *columns[:-1], 2, columns[-1] // 2) if has_halves(value) else (*rows, *columns)


def _as_asked(of: Product, a: list[jax.Array], spec: Sequence[Any] | Constraint | None) -> list[jax.Array]:
    """The first factor, whose rows are sharded as the product's result is asked to be."""
    if spec is not None and not of.transpose_a and has_rows(of.a):
        return [_with_rows(x, spec, None) for x in a]
    return [of.spec_of_a(x) for x in a] if of.spec_of_a is not None and len(a) == 1 else a


def _with_rows(x: jax.Array, spec: Sequence[Any] | Constraint, *columns: None) -> jax.Array:
    """x, whose rows are sharded so, and whose columns are not."""
    return spec(x) if isinstance(spec, Constraint) else constrained(x, jax.P(*spec, *columns))


def _epilogue(
    name: str,
    product: Product | Result,
    operands: Sequence[Value],
    stores: Sequence[Value],
    dtypes: Mapping[Value, np.dtype[Any]],
    traces: dict[Hashable, dict[Any, Any]],
) -> Callable[..., Any]:
    """A function of the product, or of attention's result, and of these operands that gives what is stored.

    It shares the traces of its likes.

    Args:
      dtypes: of tiles that each reader sees as they are stored.
    """

    def epilogue(acc: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        values: dict[Value, jax.Array] = {product: _seen(product, acc, dtypes)}
        for value, x in zip(operands, arrays, strict=True):
            values[value] = x.reshape(value.shape) if is_of_rows(value) else x
        return [_made(value, values, dtypes) for value in stores]

    epilogue.__name__ = name
    key = _structure(product, operands, stores, dtypes)
    epilogue.traced = traces.setdefault(key, {})  # type: ignore[attr-defined]  # it closes over no array
    return epilogue


def _structure(
    product: Product | Result, operands: Sequence[Value], stores: Sequence[Value], dtypes: Mapping[Value, np.dtype[Any]]
) -> Hashable:
    """A key that is equal for epilogues that compute the same."""
    known = [product, *operands]
    numbers = {value: i for i, value in enumerate(known)}
    kinds = tuple((is_of_rows(x), isinstance(x, ForEachRow)) for x in operands)
    made: list[Hashable] = [kinds, dtypes.get(product)]
    for value in reachable(stores, known):
        if value not in numbers:
            numbers[value] = len(numbers)
            function = value.body if isinstance(value, Map) else type(value)
            made.append((function, tuple(numbers[x] for x in value.inputs), dtypes.get(value)))
    return tuple(made), tuple(numbers[x] for x in stores)


def _made(value: Value, values: dict[Value, jax.Array], dtypes: Mapping[Value, np.dtype[Any]]) -> jax.Array:
    """The value from those that are known, in an epilogue."""
    for of in reachable([value], values):
        if of not in values:
            values[of] = _seen(of, applied(of, [values[x] for x in of.inputs]), dtypes)
    return values[value]


def _seen(value: Value, x: jax.Array, dtypes: Mapping[Value, np.dtype[Any]]) -> jax.Array:
    """A tile as the maps in the epilogue that makes it see it."""
    return x.astype(dtypes[value]).astype(x.dtype) if value in dtypes else x
