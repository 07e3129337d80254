"""Lists of a generated struct as C++ text: entries without default values, on lines of at most 120 columns."""

from collections.abc import Mapping, Sequence

_LINE = 120
_DEFAULTS: Mapping[str, object] = {
    "half": 0,
    "halves": 1,
    "first": 0,
    "batched": False,
    "period": 0,
    "columns": 0,  # of a row of a store, if these are not the columns of its halves
    "value": 0,
    "contraction_order": False,
    "saturates": False,
}


def entry(fields: Mapping[str, object]) -> str:
    """An entry of a list: the fields without their default values, in the order of its type."""
    kept = {name: value for name, value in fields.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}
    return ", ".join(f".{name} = {'true' if value is True else value}" for name, value in kept.items())


def declared(declaration: str, lists: Sequence[Sequence[str]]) -> list[str]:
    """A list, or a list of lists, on one line if it fits."""
    is_nested = declaration.count("[") > 1
    rows = [", ".join(f"{{{entry}}}" for entry in entries) for entries in lists]
    rows = [f"{{{row}}}" for row in rows] if is_nested else rows
    line = f"  static constexpr {declaration} = {{{', '.join(rows)}}};"
    if len(line) <= _LINE:
        return [line]
    inner = []
    for row, entries in zip(rows, lists, strict=True):
        if is_nested and len(row) + 7 <= _LINE:
            inner.append(f"      {row},")
        elif is_nested:
            inner += ["      {", *(f"          {{{entry}}}," for entry in entries), "      },"]
        else:
            inner += [f"      {{{entry}}}," for entry in entries]
    return [f"  static constexpr {declaration} = {{", *inner, "  };"]
