"""A product without its epilogue's prelude: the operands that are computed first, and the rest of the epilogue."""

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
    """The arguments of `product` that replace the epilogue and the operands of the call.

    Attributes:
      given: the traced epilogue of the call.
      epilogue: the rest of it, without its prelude.
      operands: those that the rest reads.
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
        """Splits the epilogue; None if it has no prelude, for rows in groups, and if results overwrite operands.

        Args:
          arrays: the pieces of each operand, as they are sharded.
          operands: those of the call.
        """
        if options.ragged is not None or options.input_output_aliases:
            return None
        prelude = hoisted(traced, [x[0] if len(x) == 1 else None for x in arrays], captured)
        return prelude and cls(traced, prelude.epilogue, [*(operands[i] for i in prelude.kept), *prelude.new_operands])

    def dtypes(self, dtypes_of: Callable[[Epilogue], Sequence[np.dtype]]) -> Callable[[Epilogue], Sequence[np.dtype]]:
        """The function for the results' dtypes, from one of an epilogue that returns what the given one does."""
        return lambda traced: dtypes_of(self.as_given(traced))

    def as_given(self, traced: Epilogue) -> Epilogue:
        """The traced rest of the epilogue as one that returns what the given one does."""
        return dataclasses.replace(traced, out_tree=self.given.out_tree)
