"""For libraries of layers: what `flax_layers` uses beside the operators."""

import typing as _typing
import warnings as _warnings

from coda_jax.attend.choose import prefers_cudnn as prefers_cudnn
from coda_jax.attend.primitive import CONTEXT_NAME as CONTEXT_NAME
from coda_jax.epilogue.call_site import hide as hide_frames
from coda_jax.graph.lines import concatenate as concatenate
from coda_jax.graph.lines import product as product
from coda_jax.graph.lines import store_as as store_as
from coda_jax.jaxprs.bind import bind as bind_equation
from coda_jax.jaxprs.hoist import hoist as hoist
from coda_jax.operators.deferred_norm import scaled_weight as scaled_weight
from coda_jax.operators.feed_forward import add_residual as add_residual
from coda_jax.operators.feed_forward import add_residual_sumsq as add_residual_sumsq
from coda_jax.operators.head.arguments import int32_labels as int32_labels
from coda_jax.operators.pytree import register as register_pytree
from coda_jax.operators.qkv_projection import Head as Head
from coda_jax.operators.qkv_projection import in_whole_heads as in_whole_heads
from coda_jax.operators.qkv_projection import rotate_heads as rotate_heads
from coda_jax.operators.qkv_projection import split_heads as split_heads
from coda_jax.operators.run import norm_value as norm_value
from coda_jax.operators.stream import array as array
from coda_jax.primitives.columns import in_heads as in_heads
from coda_jax.primitives.columns import join_halves as join_halves
from coda_jax.primitives.columns import split_halves as split_halves
from coda_jax.primitives.fallbacks import with_fallback_note as with_fallback_note
from coda_jax.primitives.layout import spec_of_sum as spec_of_sum
from coda_jax.primitives.mesh_types import constrained as constrained
from coda_jax.primitives.mesh_types import explicit_axes as explicit_axes
from coda_jax.primitives.mesh_types import explicit_cuts as explicit_cuts
from coda_jax.primitives.mesh_types import explicit_sharding as explicit_sharding
from coda_jax.primitives.mesh_types import vary as vary
from coda_jax.primitives.mesh_types import varying_axes as varying_axes
from coda_jax.primitives.mesh_types import with_same_sharding as with_same_sharding
from coda_jax.primitives.mesh_types import with_sharding as with_sharding
from coda_jax.primitives.mesh_types import without_axes as without_axes

__all__ = [
    "CONTEXT_NAME",
    "Head",
    "add_residual",
    "add_residual_sumsq",
    "array",
    "bind_equation",
    "concatenate",
    "constrained",
    "explicit_axes",
    "explicit_cuts",
    "explicit_sharding",
    "hide_frames",
    "hoist",
    "in_heads",
    "in_whole_heads",
    "int32_labels",
    "join_halves",
    "norm_value",
    "prefers_cudnn",
    "product",
    "register_pytree",
    "rotate_heads",
    "scaled_weight",
    "spec_of_sum",
    "split_halves",
    "split_heads",
    "store_as",
    "vary",
    "varying_axes",
    "with_fallback_note",
    "with_same_sharding",
    "with_sharding",
    "without_axes",
]

_RENAMED = {
    "halves_apart": "split_halves",
    "halves_joined": "join_halves",
    "heads_apart": "split_heads",
    "heads_turned": "rotate_heads",
    "joined": "concatenate",
    "noted": "with_fallback_note",
    "placed": "with_sharding",
    "placed_alike": "with_same_sharding",
    "stored": "store_as",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _RENAMED:
        raise AttributeError(f"module 'coda_jax.extend' has no attribute {name!r}")
    _warnings.warn(f"coda_jax.extend.{name} is {_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
