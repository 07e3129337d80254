"""A product behind its epilogue's prelude: the operands that are made first, and the epilogue that is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from coda_jax.epilogue import Epilogue
from coda_jax.epilogue.prelude import hoisted
from coda_jax.primitives.spec import CallOptions


@dataclasses.dataclass(frozen=True)
class BehindPrelude:
    """The arguments of `product` in the place of the epilogue and operands that it was given.

    Attributes:
      given: the traced epilogue, as it was given.
    """

    given: Epilogue
    epilogue: Callable[..., Any]
    operands: list[Any]

    @classmethod
    def of(
        cls,
        traced: Epilogue,
        arrays: Sequence[Sequence[jax.Array]],
        captured: Sequence[Any],
        operands: Sequence[Any],
        options: CallOptions,
    ) -> BehindPrelude | None:
        """None where nothing is made first, as of rows in groups, and where results take the place of operands.

        Args:
          arrays: of each operand, as it is laid out.
          operands: as they were given.
        """
        if options.ragged is not None or options.input_output_aliases:
            return None
        found = hoisted(traced, [x[0] if len(x) == 1 else None for x in arrays], captured)
        return found and cls(traced, found.epilogue, [*(operands[i] for i in found.kept), *found.made])

    def dtypes(self, of_given: Callable[[Epilogue], Sequence[np.dtype]]) -> Callable[[Epilogue], Sequence[np.dtype]]:
        """The function for the dtypes of the results, from one of an epilogue that returns what the given one did."""
        return lambda traced: of_given(self.as_given(traced))

    def as_given(self, traced: Epilogue) -> Epilogue:
        """The epilogue that was traced behind the prelude, as one that returns what the given one did."""
        return dataclasses.replace(traced, out_tree=self.given.out_tree)
