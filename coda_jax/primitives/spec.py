"""The one parameter of the primitive: all that defines a product except its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coda_jax.epilogue import Program
from coda_jax.epilogue.call_site import CallSite, call_site
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.matrices import ArrayAxes, Matrices
from coda_jax.primitives.mesh_types import MeshAxes
from coda_jax.tiles.config import GemmConfig

_T = TypeVar("_T")


class Sizes(NamedTuple):
    """Sizes of a product, without its batch."""

    m: Any
    n: Any
    k: Any


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """The options of a call that the primitive keeps.

    Attributes:
      transpose_a: whether a is (K, M) instead of (M, K).
      transpose_b: whether b is (N, K) instead of (K, N).
      implementation: "auto", "cuda" or "xla".
      config: the kernel's tile sizes where the user gives them.
      input_output_aliases: pairs (operand index, output index).
      k_axes: how many axes of the factors are summed over.
      halves: whether arrays with all columns of halves have the halves apart; see `ArrayAxes`.
      ragged: the dimension that groups divide, in a product of groups: with M, each group of rows of a has its own
        matrix in b; with K, each group is its own product. The last operand is then the offsets of the groups.
      out_sharding: of the product, (M, N), where a mesh has explicit axes and the factors' shardings leave it open.
      symmetric: whether the product and the epilogue's results are symmetric.
    """

    transpose_a: bool = False
    transpose_b: bool = False
    implementation: str = "auto"
    config: GemmConfig | None = None
    input_output_aliases: tuple[tuple[int, int], ...] = ()
    k_axes: int = 1
    halves: bool = False
    ragged: Dimension | None = None
    out_sharding: Any = None
    symmetric: bool = False

    @property
    def function(self) -> str:
        """The name of the function that computes such a product, for messages."""
        if self.ragged is None:
            return "symmetric_gemm" if self.symmetric else "gemm"
        return "ragged_contraction" if self.ragged is Dimension.K else "ragged_gemm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmSpec(CallOptions):
    """A product with its epilogue. Equal specs and equal argument types lower to the same program.

    The arguments of the primitive are a, b and the epilogue's operands in this order, each one array or its pieces;
    `matrices` has their axes and makes matrices of them, which `split` and `sizes` read.

    Attributes:
      program: the epilogue's.
      out_dtypes: one for each flat output.
      batched: for each argument, whether it has a leading batch axis.
      axes: of the arguments and results, beside a batch axis.
      name: of the epilogue, for messages.
      site: the user's line, for messages.
      row_mesh_axes: of each axis of M in the product, where `out_sharding` says it and M is several axes; else that of
        the factor's.
    """

    program: Program
    out_dtypes: tuple[np.dtype, ...]
    batched: tuple[bool, ...]
    axes: ArrayAxes
    name: str
    site: CallSite
    row_mesh_axes: tuple[MeshAxes, ...] | None = None

    @classmethod
    def of(
        cls,
        options: CallOptions,
        program: Program,
        out_dtypes: Sequence[Any],
        name: str,
        axes: ArrayAxes | None = None,
    ) -> GemmSpec:
        """A product of matrices, or of arrays with these axes, without a batch, called from the user's line."""
        call_options = {field.name: getattr(options, field.name) for field in dataclasses.fields(CallOptions)}
        return cls(
            **call_options,
            program=program,
            out_dtypes=tuple(np.dtype(dtype) for dtype in out_dtypes),
            batched=(False,) * (2 + len(program.operands)),
            axes=axes or ArrayAxes(),
            name=name,
            site=call_site(),
        )

    def __str__(self) -> str:  # in a printed jaxpr
        names = [field.name for field in dataclasses.fields(self) if field.name != "site"]
        return f"({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    def replace(self, **changes: Any) -> GemmSpec:
        return dataclasses.replace(self, **changes)

    @cached_property
    def matrices(self) -> Matrices:
        """The matrices that the arrays of the product make."""
        return Matrices.of(self)

    def split(self, arguments: Sequence[_T]) -> tuple[_T, _T, list[_T]]:
        """a, b and the operands, or other values of which there is one for each argument, as `batched`."""
        a, b, *operands = arguments
        return a, b, operands

    def sizes(self, a: Any, b: Any) -> Sizes:
        """Sizes of the product of these factors, arrays or types, with a batch axis or without."""
        k, m = a.shape[-2:] if self.transpose_a else a.shape[:-3:-1]
        return Sizes(m, b.shape[-2] if self.transpose_b else b.shape[-1], k)

    def batch(self, arguments: Sequence[Any]) -> Any:
        """The size of the batch axis; None if there is none."""
        return next((x.shape[0] for x, flag in zip(arguments, self.batched, strict=True) if flag), None)

    def num_groups(self, arguments: Sequence[Any]) -> int:
        """The number of groups, from their offsets, the last argument; 0 for a product without groups."""
        return 0 if self.ragged is None else arguments[-1].shape[0] - 1

    def general(self) -> GemmSpec:
        """The spec of this product without the knowledge that it is symmetric."""
        return self.replace(symmetric=False, program=dataclasses.replace(self.program, symmetric=False))

    def unbatched(self) -> GemmSpec:
        """The spec of this product for arguments without a batch axis."""
        return self.replace(batched=(False,) * len(self.batched))

    @property
    def store_dtypes(self) -> tuple[np.dtype, ...]:
        """Dtypes of the program's stores."""
        return tuple(self.out_dtypes[store.output] for store in self.program.stores)
