"""What the axes of parameters and activations are called: the names that sharding rules speak of.

| name      | size                      | axes of                                                                    |
|-----------|---------------------------|----------------------------------------------------------------------------|
| batch     | B, rows of tokens         | activations                                                                |
| length    | T, tokens of a row        | the residual stream; attention and the products see whole rows             |
| embed     | D                         | the residual stream; every kernel; the embedding                           |
| heads     | H Dh, or H                | queries; what attention returns; `qkv`, `query` and `out`                  |
| kv_heads  | Hkv Dh, or Hkv            | keys and values; `key` and `value`                                         |
| mlp       | F                         | the hidden activation; `gate`, `up` and `down`                             |
| vocab     | V                         | the embedding; the head; logits                                            |
| norm      | D, or Dh                  | scales and biases of norms: vectors                                        |
| rank      | r                         | adapters                                                                   |
| positions | learned positions         | their embedding                                                            |
| layers    | layers stacked for a scan | an axis in front of a layer's parameters                                   |
| fan_in    | H Dh, or F                | `out` and `down`: a second name of the axis that their products sum over   |

An axis may have several names, ("mlp", "fan_in"): the mesh axes that rules give to each of them cut it, in the order of
the names. FSDP may cut `out` and `down` along either axis. By rows, the part of a device lies in one piece in what is
gathered; by columns every gather and every sum of a gradient costs transpositions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Name = str | tuple[str, ...] | None  # of an axis, or several; None for one that is never cut
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
    "qkv.bias": ("heads",),
    "query.bias": ("heads",),
    "key.bias": ("kv_heads",),
    "value.bias": ("kv_heads",),
    "up.bias": ("mlp",),
    "bias": ("norm",),
    "scale": ("norm",),
}
_WRAPPERS = ("base_module", "lora")  # of an adapter around a projection


def axes_of_parameter(path: Sequence[str | int], ndim: int, more: Mapping[str, Axes] | None = None) -> Axes | None:
    """The names of a parameter's axes; None where there are none for it.

    Args:
      path: its keys in a model, or in what has the model's structure: gradients, an optimizer's state.
      ndim: how many axes it has: one more than it has names where layers are stacked.
      more: names of further parameters, as in `PARAMETERS`, which come before these.
    """
    keys = [str(key) for key in path if key not in _WRAPPERS]
    if keys[-1:] == ["value"]:  # the key of a variable's array
        keys = keys[:-1]
    if not keys:
        return None
    if keys[-1] in ("lora_a", "lora_b"):
        of_kernel = axes_of_parameter((*keys[:-1], "kernel"), 2, more)
        if of_kernel is None:
            return None
        ends = [name[0] if isinstance(name, tuple) else name for name in of_kernel]
        axes: Axes | None = (ends[0], "rank") if keys[-1] == "lora_a" else ("rank", ends[-1])
    else:
        found = (table.get(key) for table in (more or {}, PARAMETERS) for key in (".".join(keys[-2:]), keys[-1]))
        axes = next((axes for axes in found if axes is not None), None)
    if axes is not None and ndim == len(axes) + 1:
        axes = ("layers", *axes)
    return axes if axes is not None and len(axes) == ndim else None
