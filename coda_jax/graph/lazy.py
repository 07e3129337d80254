"""Values that look like arrays and are none: whatever asks for the array is told what to write instead."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


class NotAnArrayError(ValueError):
    """A value of a block was given to a function of arrays. (In the place of a TypeError jit shows its own message.)"""


class Lazy:
    """A value whose array is not known yet."""

    __array_ufunc__ = None  # numpy_array @ value comes to __rmatmul__

    @property
    def __jax_array__(self) -> NoReturn:
        """Refuses JAX's functions, which all ask for it; an array's operator gives way to the value's own."""
        if sys._getframe(1).f_code.co_name.startswith(("_operator_", "deferring_binary_op")):
            raise AttributeError
        self._refuse("a function of arrays is applied to it by .map(f), any other JAX function by coda.opaque")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("a function of arrays is applied to it by .map(f), any other JAX function by coda.opaque")

    def __bool__(self) -> NoReturn:
        self._refuse("nothing of it is computed yet: branch inside of .map, with jnp.where")

    def __iter__(self) -> NoReturn:
        self._refuse("take it apart in .map, which may return several arrays: .map(lambda x: jnp.split(x, 2, axis=1))")

    def __getitem__(self, index: Any) -> Any:
        """Itself for `...`, as variables of Flax are read."""
        return self if index is Ellipsis else self.__iter__()

    def _refuse(self, remedy: str) -> NoReturn:
        raise NotAnArrayError(f"{self!r} is no array; {remedy}")
