"""The user's names of an epilogue and its operands, for a reader of the generated source. Programs ignore them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# A local variable of a generated function cannot have these names: C++'s keywords that Python lacks, the function's
# parameters, and its other variables.
_RESERVED = re.compile(
    r"v\d+|in|out|value|variant|pass|coda|"
    r"alignas|alignof|asm|auto|bool|case|catch|char|class|compl|concept|consteval|constexpr|constinit|const|"
    r"const_cast|co_await|co_return|co_yield|decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|"
    r"export|extern|false|float|for|friend|goto|if|inline|int|long|mutable|namespace|new|noexcept|nullptr|"
    r"operator|private|protected|public|register|reinterpret_cast|requires|return|short|signed|sizeof|static|"
    r"static_assert|static_cast|struct|switch|template|this|thread_local|throw|true|try|typedef|typeid|"
    r"typename|union|unsigned|using|virtual|void|volatile|wchar_t|while|and_eq|bitand|bitor|not_eq|or_eq|xor|"
    r"xor_eq"
)


@dataclass(frozen=True)
class UserNames:
    """Names of a function and of its operands.

    Attributes:
      function: its name.
      place: the file, without its folder, and the line; empty where Python does not know them.
      operands: of the parameters after acc; further operands were captured.
    """

    function: str
    place: str
    operands: tuple[str, ...]

    @classmethod
    def of(cls, f: Callable[..., Any], function: str, operands: Sequence[str]) -> UserNames:
        """The names of f, whose name in messages is `function`."""
        while isinstance(f, partial):
            f = f.func
        code = getattr(inspect.unwrap(f), "__code__", None)
        place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""
        return cls(function, place, tuple(operands))

    @property
    def origin(self) -> str:
        return ", ".join(filter(None, [self.function, self.place]))

    def operand(self, index: int) -> str:
        """The name of an operand."""
        count = len(self.operands)
        return self.operands[index] if index < count else f"captured_{index - count}"


def is_usable(name: str) -> bool:
    """Whether a local variable of a generated function may have this name."""
    return name.isascii() and name.isidentifier() and not _RESERVED.fullmatch(name)
