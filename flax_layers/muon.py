"""Which parameters Muon takes, and as which matrices."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import DictKey

# Axes of a matrix's rows and columns, from the last; those of layers stacked for a scan come before.
_MATRICES = {"kernel": (2, 1), "gate_up": (3, 1)}


def muon_dimension_numbers(params: Any) -> Any:
    """What `optax.contrib.muon` is told of the layers' parameters, which it would misread by their number of axes.

        optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=muon_dimension_numbers)

    Muon takes every `kernel` (K, N) and `gate_up` (D, 2, F), the latter as two matrices (D, F), as it takes separate
    projections; of layers stacked for a scan, where a first axis counts them, each layer's by itself. Query, key and
    value are one matrix, `qkv.kernel`: dimension numbers do not cut columns. Adam has the rest: embeddings, norms,
    biases, and what is named `head`, or with a name that ends so.

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

    def dimension_numbers(path: Any, x: Any) -> Any:
        names = [str(key.key) for key in path if isinstance(key, DictKey)]
        if not names or names[-1] not in _MATRICES or any(name.endswith("head") for name in names):
            return None
        rows, columns = (x.ndim - axis for axis in _MATRICES[names[-1]])
        return MuonDimensionNumbers(rows, columns)

    return jax.tree_util.tree_map_with_path(dimension_numbers, params)
