"""Registration of the dataclasses that flow between layers as pytrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from jax.tree_util import GetAttrKey

T = TypeVar("T")


class _Itself:
    def __get__(self, instance: Any, owner: Any) -> Any:
        return instance


# The default of a dataclass's InitVar: `dataclasses.replace` gives an InitVar what the instance has under its name,
# here the instance itself, so `__post_init__` can look at what was not replaced. Wherever else one is made it is None.
REPLACED = _Itself()


def register(
    *, meta_fields: tuple[str, ...] = (), key: Callable[[Any, str], Any] | None = None
) -> Callable[[type[T]], type[T]]:
    """Registers a dataclass as `jax.tree_util.register_dataclass` does, in a way that `flax.nnx.tabulate` can show.

    nnx.tabulate replaces arrays by descriptions, and wants nothing but lists and dictionaries around them. So where
    leaves are replaced by strings, fields come back as a dictionary.

    Args:
      meta_fields: fields that are no children but part of the structure.
      key: key(instance, name of a field) in paths and messages; default GetAttrKey(name).
    """

    def decorate(cls: type[T]) -> type[T]:
        all_fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        data_fields = [field.name for field in all_fields if field.name not in meta_fields]

        def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return tuple(getattr(x, name) for name in data_fields), tuple(getattr(x, name) for name in meta_fields)

        def flatten_with_keys(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            children, meta = flatten(x)
            keys = (GetAttrKey(name) if key is None else key(x, name) for name in data_fields)
            return tuple(zip(keys, children, strict=True)), meta

        def unflatten(meta: tuple[Any, ...], children: Iterable[Any]) -> Any:
            fields = dict(zip(data_fields, children, strict=True))
            if any(isinstance(child, str) for child in fields.values()):  # as nnx.summary describes arrays
                return fields
            return cls(**fields, **dict(zip(meta_fields, meta, strict=True)))

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate
