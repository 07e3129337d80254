"""The names of the axes of parameters and activations, which sharding rules use.

| name      | size                      | axes of                                                                    |
|-----------|---------------------------|----------------------------------------------------------------------------|
| batch     | B, rows of tokens         | activations                                                                |
| length    | T, tokens of a row        | the residual stream; attention and the products see entire rows            |
| embed     | D                         | the residual stream; every kernel; the embedding                           |
| heads     | H Dh, or H                | queries; what attention returns; `qkv`, `query`, `out` and `sinks`         |
| kv_heads  | Hkv Dh, or Hkv            | keys and values; `key` and `value`                                         |
| mlp       | F                         | the hidden activation; `gate`, `up` and `down`                             |
| vocab     | V                         | the embedding; the head; logits                                            |
| norm      | D, or Dh                  | scales and biases of norms: vectors                                        |
| rank      | r                         | adapters                                                                   |
| positions | learned positions         | their embedding                                                            |
| layers    | layers stacked for a scan | an axis in front of a layer's parameters                                   |
| expert    | E                         | experts' `gate_up` and `down`, and their biases                            |
| fan_in    | H Dh, or F                | `out` and `down`: a second name of the axis that their products sum over   |

An axis may have several names, ("mlp", "fan_in"): it is sharded over the mesh axes that rules give to each of them, in
the order of the names. FSDP may shard `out` and `down` along either axis. By rows, the shard of a device is one piece
of what is gathered; by columns every gather and every sum of a gradient costs transpositions.

MaxText's parameters have the same names: embed, heads, kv_heads, mlp, vocab, norm, layers. Its activations have others,
`MAXTEXT`: its rules may shard embed over a mesh axis that shards the batch of activations, without saying which comes
first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Name = str | tuple[str, ...] | None  # of an axis, or several; None for one that is never sharded
Axes = tuple[Name, ...]

# By the last names of a parameter's path, as "qkv.kernel" of layers.0.attention.qkv.kernel, or by the last one alone.
PARAMETERS: dict[str, Axes] = {
    "embedding": ("vocab", "embed"),
    "position_embed.embedding": ("positions", "embed"),
    "head.kernel": ("embed", "vocab"),
    "qkv.kernel": ("embed", "heads"),
    "query.kernel": ("embed", "heads"),
    "key.kernel": ("embed", "kv_heads"),
    "value.kernel": ("embed", "kv_heads"),
    "out.kernel": (("heads", "fan_in"), "embed"),
    "gate_up": ("embed", None, "mlp"),
    "gate_up.kernel": ("embed", "mlp"),
    "gate.kernel": ("embed", "mlp"),
    "up.kernel": ("embed", "mlp"),
    "down.kernel": (("mlp", "fan_in"), "embed"),
    "experts.gate_up": ("expert", "embed", None, "mlp"),
    "experts.down": ("expert", ("mlp", "fan_in"), "embed"),
    "experts.gate_up_bias": ("expert", None, "mlp"),
    "experts.down_bias": ("expert", "embed"),
    "router.kernel": ("embed", None),
    "router.bias": (None,),
    "router.logit_bias": (None,),
    "shared_gate.kernel": ("embed", None),
    "qkv.bias": ("heads",),
    "query.bias": ("heads",),
    "key.bias": ("kv_heads",),
    "value.bias": ("kv_heads",),
    "up.bias": ("mlp",),
    "sinks": ("heads",),
    "bias": ("norm",),
    "scale": ("norm",),
    "fp8_history": (None, None),  # each device has all maxima
    "gate_up_history": (None, None),
}
# MaxText's rules have other names for the axes of activations; a name that is not here is the same there.
MAXTEXT = {"batch": "activation_batch", "length": "activation_norm_length"}
METADATA = "axis_names"  # the key of a parameter's names in its metadata, see `flax_layers.axis_metadata`
_WRAPPERS = ("base_module", "lora")  # of an adapter around a projection


class ParameterAxes(NamedTuple):
    """The names of a parameter's axes.

    Attributes:
      axes: the names.
      is_guess: whether the first one, "layers", is there only because the array has one axis more than there are names.
    """

    axes: Axes
    is_guess: bool


def axes_of_parameter(
    path: Sequence[str | int], ndim: int, more: Mapping[str, Axes] | None = None, metadata: Axes | None = None
) -> ParameterAxes | None:
    """The names of a parameter's axes; None where there are none for it.

    Args:
      path: its keys in a model, or in a tree of the model's structure: gradients, an optimizer's state.
      ndim: the number of its axes: one more than it has names where layers are stacked.
      more: names of further parameters, as in `PARAMETERS`, which take precedence over all others.
      metadata: the names in the parameter's metadata, which take precedence over `PARAMETERS`.
    """
    keys = _own_keys(path)
    if (axes := _axes_by_path(keys, more or {})) is not None:
        return _fitted(axes, ndim)
    return _fitted(metadata, ndim) or _fitted(_axes_by_path(keys, PARAMETERS), ndim)


def module_of_parameter(path: Sequence[str | int]) -> tuple[str, ...]:
    """The path of the module that has the parameter; of the module around a Linear for the Linear's parameters."""
    keys = _own_keys(path)
    return keys[:-1] if keys[-1:] and keys[-1] in PARAMETERS else keys[:-2]


def first_name(name: Name) -> str | None:
    """An axis's name, the first of several: flax's rules know one name for each axis."""
    return name[0] if isinstance(name, tuple) else name


def _own_keys(path: Sequence[str | int]) -> tuple[str, ...]:
    keys = tuple(str(key) for key in path if key not in _WRAPPERS)
    return keys[:-1] if keys[-1:] == ("value",) else keys  # the key of a variable's array


def _axes_by_path(keys: tuple[str, ...], table: Mapping[str, Axes]) -> Axes | None:
    if keys[-1:] in (("lora_a",), ("lora_b",)):
        kernel_axes = _axes_by_path((*keys[:-1], "kernel"), table)
        if kernel_axes is None or len(kernel_axes) != 2:
            return None
        rows, columns = map(first_name, kernel_axes)
        return (rows, "rank") if keys[-1] == "lora_a" else ("rank", columns)
    return next((table[key] for key in (".".join(keys[-2:]), *keys[-1:]) if key in table), None)


def _fitted(axes: Axes | None, ndim: int) -> ParameterAxes | None:
    if axes is None:
        return None
    if len(axes) == ndim:
        return ParameterAxes(axes, False)
    return ParameterAxes(("layers", *axes), True) if len(axes) + 1 == ndim else None
