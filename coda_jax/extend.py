"""For libraries of layers: what `flax_layers` uses beside the operators."""

import typing as _typing
import warnings as _warnings

from coda_jax.attend.choose import prefers_cudnn as prefers_cudnn
from coda_jax.attend.primitive import CONTEXT_NAME as CONTEXT_NAME
from coda_jax.epilogue.call_site import hide as hide_frames
from coda_jax.jaxprs.hoist import hoist as hoist
from coda_jax.operators.deferred_norm import in_row as in_row
from coda_jax.operators.enclosing import is_fused as is_fused
from coda_jax.operators.head.arguments import int32_labels as int32_labels
from coda_jax.operators.pytree import register as register_pytree
from coda_jax.primitives.columns import both_halves as both_halves
from coda_jax.primitives.columns import in_heads as in_heads
from coda_jax.primitives.columns import join_halves as join_halves
from coda_jax.primitives.columns import split_halves as split_halves
from coda_jax.primitives.layout import spec_of_sum as spec_of_sum
from coda_jax.primitives.mesh_types import constrained as constrained
from coda_jax.primitives.mesh_types import explicit_axes as explicit_axes
from coda_jax.primitives.mesh_types import explicit_cuts as explicit_cuts
from coda_jax.primitives.mesh_types import explicit_sharding as explicit_sharding
from coda_jax.primitives.mesh_types import vary as vary
from coda_jax.primitives.mesh_types import varying_axes as varying_axes
from coda_jax.primitives.mesh_types import with_sharding as with_sharding
from coda_jax.primitives.mesh_types import without_axes as without_axes

__all__ = [
    "CONTEXT_NAME",
    "both_halves",
    "constrained",
    "explicit_axes",
    "explicit_cuts",
    "explicit_sharding",
    "hide_frames",
    "hoist",
    "in_heads",
    "in_row",
    "int32_labels",
    "is_fused",
    "join_halves",
    "prefers_cudnn",
    "register_pytree",
    "spec_of_sum",
    "split_halves",
    "vary",
    "varying_axes",
    "with_sharding",
    "without_axes",
]

_RENAMED = {
    "halves_apart": "split_halves",
    "halves_joined": "join_halves",
    "placed": "with_sharding",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _RENAMED:
        raise AttributeError(f"module 'coda_jax.extend' has no attribute {name!r}")
    _warnings.warn(f"coda_jax.extend.{name} is {_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
