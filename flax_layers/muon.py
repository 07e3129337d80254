"""Which parameters Muon takes, and as which matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax_layers.axis_names import Axes, axes_of_parameter
from flax_layers.sharding import map_named

# Axes of a matrix's rows and columns, from the last; those of layers stacked for a scan come before.
_MATRICES = {"kernel": (2, 1), "gate_up": (3, 1)}


def muon_dimension_numbers(params: Any) -> Any:
    """What `optax.contrib.muon` is told of the layers' parameters, which it would misread by their number of axes.

        optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=muon_dimension_numbers)

    Muon takes every `kernel` (K, N) and `gate_up` (D, 2, F), the latter as two matrices (D, F), as it takes separate
    projections; of layers stacked for a scan, where a first axis counts them, or the one that the names of linen's
    variables say, each layer's by itself. Query, key and value are one matrix, `qkv.kernel`: dimension numbers do not
    cut columns. Adam has the rest: embeddings, norms, biases, and what is named `head`, or with a name that ends so.

    Args:
      params: an nnx.State, of variables or of arrays, or nested dictionaries, as linen's; or gradients as these.
        A kernel of another module with three axes is taken for a stack, which that of nnx.MultiHeadAttention is not.

    Returns:
      The same structure, with optax.contrib.MuonDimensionNumbers where Muon takes a parameter, else None.

    Raises:
      ImportError: an optax before 0.2.6, where Muon knows matrices only.
    """
    # Here, for an older optax to stop nothing else.
    from optax.contrib import MuonDimensionNumbers  # type: ignore[import-untyped]

    def dimension_numbers(path: Sequence[str | int], x: Any, metadata: Axes | None) -> Any:
        names = [key for key in path if isinstance(key, str)]
        names = names[:-1] if names[-1:] == ["value"] else names  # the key of a variable's array
        if not names or names[-1] not in _MATRICES or any(name.endswith("head") for name in names):
            return None
        rows, columns = (x.ndim - axis for axis in _MATRICES[names[-1]])
        own = axes_of_parameter(path, _MATRICES[names[-1]][0])
        named = metadata if metadata is not None and len(metadata) == x.ndim else ()
        if own is not None and {own.axes[0], own.axes[-1]} <= {*named}:
            rows, columns = named.index(own.axes[0]), named.index(own.axes[-1])
        return MuonDimensionNumbers(rows, columns)

    return map_named(dimension_numbers, params)
