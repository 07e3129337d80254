"""A plan in words: which map is made in which epilogue, which is left to XLA, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from coda_jax.epilogue.values import same_size
from coda_jax.graph.calls import Call, Result
from coda_jax.graph.plan import (
    MOST_INSTRUCTIONS,
    Plan,
    are_in_tiles,
    fits_beside,
    is_column,
    is_of_rows,
    program_beside,
    reason_beside,
)
from coda_jax.graph.pulled_back import Behind, pulls_back_attention
from coda_jax.graph.values import Map, Product, Value, reachable, reachable_until


def described(plan: Plan, name: str) -> str:
    """Lines of text: a line for each product, with the maps that its epilogue makes; attention's; then XLA's tiles."""
    lines = []
    for i, step in enumerate(plan.steps):
        maps = ", ".join(dict.fromkeys(name_of(x) for x in made_in(plan, i)))
        tiles = sum(x.is_tile for x in step.stores)
        stored = f"{_count(tiles, 'tile')}, {_count(len(step.stores) - tiles, 'vector')}"
        lines.append(f"{name}_{i}  {_factors(step.product)}: {maps or 'nothing'}; stores {stored}")
    beside = {y.call: values for y, values in plan.beside.items()}
    made = {x for values in (*beside.values(), *(x.tiles for x in plan.behind.values())) for x in values}
    calls = dict.fromkeys(_call_line(x.call, beside, plan.behind) for x in plan.by_xla if isinstance(x, Result))
    passes = [x for x in plan.by_xla if x.is_tile and not isinstance(x, Result) and x not in made]
    return "\n".join([*lines, *calls, *(f"XLA  {name_of(x)} {_shape(x)}: {why_by_xla(plan, x)}" for x in passes)])


def _call_line(call: Call, beside: Mapping[Call, Sequence[Value]], behind: Mapping[Call, Behind]) -> str:
    """A call, with the maps that attention's kernels make of its results."""
    if call in behind:
        return f"{call.name}: {', '.join(dict.fromkeys(map(name_of, behind[call].maps)))} in the place of its results"
    maps = ", ".join(dict.fromkeys(name_of(x) for x in beside.get(call, ())))
    return f"XLA  {call.name}" if not maps else f"{call.name}: {maps} beside its result"


def why_by_xla(plan: Plan, value: Value) -> str:
    """Why no epilogue makes a value that is stored in memory."""
    place = plan.place[value]
    if _sums_heads_behind_attention(value):
        return "it reads what is summed over all heads of a row, and attention's kernels have one head at a time"
    if place.step < 0:
        return "of what is known before all products"
    if reason := not_local(value):
        return reason
    read = reachable_until(value.inputs, plan.is_in_memory)
    if not plan.too_long.isdisjoint([value, *read]):
        return f"with it an epilogue would have more than {MOST_INSTRUCTIONS} instructions"
    if not plan.beyond_zero.isdisjoint([value, *read]):
        return "it is not zeros in rows in no group, which an epilogue of groups stores as zeros"
    if any(not x.is_tile and x in plan.place and plan.place[x].step >= 0 for x in read):
        return "it reads what is summed over whole rows or columns"
    return "no product behind what it reads has its tiles"


def _sums_heads_behind_attention(value: Value) -> bool:
    """True for a tile that reads a sum along rows of dq, dk or dv, as behind a norm over all heads."""
    near = _near(value.inputs)
    if not any(isinstance(x, Result) and pulls_back_attention(x.call) for x in near):
        return False
    of_rows = (x for x in near if is_of_rows(x) or is_column(x))
    sums = (x for x in of_rows if isinstance(x, Map) and any(y.is_tile for y in x.inputs))
    return any(isinstance(y, Result) and pulls_back_attention(y.call) for x in sums for y in _near([x]))


def _near(values: Sequence[Value]) -> list[Value]:
    """The values and what they are made of, as far as products and results of calls."""
    return reachable_until(values, lambda x: isinstance(x, Product | Result))


def not_local(value: Value) -> str:
    """Why no epilogue can compute a map from tiles of its inputs; empty where one can."""
    tiles = [x for x in value.inputs if x.is_tile and same_size(x.shape[0], value.shape[0] if value.shape else 1)]
    if not isinstance(value, Map) or not tiles:
        return ""
    shapes = list(dict.fromkeys([*(x.shape for x in tiles), value.shape]))
    programs = [program_beside(value, shape) for shape in shapes if len(shape) == 2]
    heads = [program.halves.head for program in programs if program is not None]
    if heads:
        is_in_tile = any(map(are_in_tiles, heads))
        return "" if is_in_tile else f"it works on heads of {heads[0]} columns, which no tile has whole"
    if len(value.shape) > 2:
        return "it has a matrix of each group"
    if not any(fits_beside(x, value) for x in tiles):
        return "it joins tiles of other widths, or takes them apart"
    return reason_beside(value, value.shape).partition(": ")[2]


def maps_that_are_not_local(plan: Plan) -> Iterator[tuple[str, str]]:
    """The author's maps of products' tiles that no epilogue can make: their names, and why."""
    for value in reachable(plan.by_xla, plan.given):
        is_authors = isinstance(value, Map) and value.origin.is_stated and value not in plan.given
        if is_authors and value.is_tile and plan.place[value].step >= 0 and (reason := not_local(value)):
            yield name_of(value), reason


def made_in(plan: Plan, step: int) -> list[Value]:
    """The maps that the epilogue makes, in their order."""
    maps: set[Value] = set()
    open_ = [x for x in plan.steps[step].stores if not isinstance(x, Product)]
    while open_:
        value = open_.pop()
        if value not in maps:
            maps.add(value)
            open_ += [x for x in value.inputs if plan.is_made_in(x, step)]
    return sorted(maps, key=lambda value: value.number)


def name_of(value: Value) -> str:
    """The name of a map."""
    return value.origin.name if isinstance(value, Map) else "transpose"


def _factors(product: Product) -> str:
    flags = product.transpose_a, product.transpose_b
    each = ((f"{x.shape}{'^T' * t}" for x, t in zip(pair, flags, strict=True)) for pair in product.pairs)
    return " + ".join(" @ ".join(pair) for pair in each)


def _shape(value: Value) -> str:
    return f"({', '.join(map(str, value.shape))})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
