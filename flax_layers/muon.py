"""The parameters that Muon updates, and their shapes as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax_layers.axis_names import Axes, axes_of_parameter
from flax_layers.sharding import map_named

# By the last names of a path: the number of axes without that of stacked layers, and the axes of a matrix's rows and
# columns, counted from the last.
_MATRICES = {"experts.gate_up": (4, 3, 1), "experts.down": (3, 2, 1), "kernel": (2, 2, 1), "gate_up": (3, 3, 1)}


def muon_dimension_numbers(params: Any) -> Any:
    """The layers' dimension numbers for `optax.contrib.muon`, which would misread parameters by their number of axes.

        optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=muon_dimension_numbers)

    Muon updates every `kernel` (K, N) and `gate_up` (D, 2, F), the latter as two matrices (D, F), as if they were
    separate projections. Experts' `gate_up` (E, D, 2, F) and `down` (E, F, D) are a matrix for each expert. Layers
    stacked for a scan are a matrix for each layer: their axis is the first, or the one that the names of linen's
    variables say. Query, key and value are one matrix, `qkv.kernel`: dimension numbers do not split columns. Adam has
    the rest: embeddings, norms, biases, the gate of a shared expert, and parameters under a name that ends in head.

    Args:
      params: an nnx.State, of variables or of arrays, or nested dictionaries, as linen's; or gradients as these.
        Another module's kernel with three axes is read as a stack, wrongly for nnx.MultiHeadAttention's.

    Returns:
      The same structure, with optax.contrib.MuonDimensionNumbers for parameters that Muon updates, else None.

    Raises:
      ImportError: an optax before 0.2.6, where Muon knows matrices only.
    """
    # Imported here, so that an older optax stops nothing else.
    from optax.contrib import MuonDimensionNumbers  # type: ignore[import-untyped]

    def dimension_numbers(path: Sequence[str | int], x: Any, metadata: Axes | None) -> Any:
        names = [key for key in path if isinstance(key, str)]
        names = names[:-1] if names[-1:] == ["value"] else names  # the key of a variable's array
        dimensions = next((_MATRICES[end] for end in (".".join(names[-2:]), *names[-1:]) if end in _MATRICES), None)
        if dimensions is None or "shared_gate" in names or any(name.endswith("head") for name in names):
            return None
        count, *from_last = dimensions
        rows, columns = (x.ndim - axis for axis in from_last)
        own = axes_of_parameter(path, count)
        named = metadata if metadata is not None and len(metadata) == x.ndim else ()
        if own is not None and {own.axes[-axis] for axis in from_last} <= {*named}:
            rows, columns = (named.index(own.axes[-axis]) for axis in from_last)
        return MuonDimensionNumbers(rows, columns)

    return map_named(dimension_numbers, params)
