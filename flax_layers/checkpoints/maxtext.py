"""Parameters of a Llama or a Qwen3 from and to the arrays of MaxText's checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_layers.checkpoints.incoming import readable_one
from flax_layers.checkpoints.placement import Index, Shardings, block_of
from flax_layers.checkpoints.table import Entry, Part, Path, arrays_of, check, check_layers, fill, interleaved
from flax_layers.models.llama import Llama, LlamaConfig
from flax_layers.models.llama_config import check_is_plain
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.origin import remember, settings_in

Rotary = Literal["halves", "interleaved"]
_ORIGIN = "maxtext"  # how a model's arrays were stored: the checkpoint has no settings that say it
_STACKED, _LAYER = "decoder.layers.", "decoder.layers_"


def from_maxtext(
    params: Mapping[str, Any],
    config: LlamaConfig,
    *,
    query_scaled: bool | None = None,
    rotary: Rotary | None = None,
    shardings: Shardings = None,
    **options: Any,
) -> Llama:
    """A model with the parameters of a MaxText decoder, of its blocks "llama2" (all Llamas) and "qwen3".

    Logits are the same, with two conditions in MaxText. A tied model (logits_via_embedding) wants
    normalize_embedding_logits=False there, as its Qwen3 configs have it. Its Llama 3.1 rotary embedding is
    RopeScaling(factor=8.0).

    `load_maxtext_folder` reads the arrays from an orbax folder.

    Args:
      params: nested dictionaries, {"decoder": ..., "token_embedder": ...}, as a checkpoint has them under
        params/params, of arrays: NumPy's, jax's, on a mesh too, or any with a shape whose slices NumPy takes. Layers
        are `layers`, stacked along axis 1 (param_scan_axis), or `layers_0`, `layers_1`, ...; query, key and value
        kernels (D, [layers,] heads, Dh), out (heads, [layers,] Dh, D).
      config: sizes; those of the arrays must agree.
      query_scaled: whether the query's kernel includes the attention's 1 / sqrt(Dh), as it does without QK-norms;
        default not config.qk_norm.
      rotary: which columns of a head its rotary embedding turns together: "halves", i and i + Dh / 2, as here and in
        Hugging Face's models, or "interleaved", 2 i and 2 i + 1, as with rope_type "llama3.1". Default: interleaved
        if the config has a rope_scaling.
      shardings: of the parameters, as in `from_hf`.
      **options: of `Llama`: dtype, param_dtype, scan_layers, remat and remat_layers.

    Raises:
      ValueError: arrays that are missing or unknown, a shape that does not agree with `config`, shardings that do not
        divide a parameter or are not those of all parameters, a MoEConfig, or query_scaled of a model with QK-norms,
        which undo any factor.

    Source: MaxText's attentions.py, embeddings.py and decoders.py.
    """
    arrays = _by_layer(params, config.num_hidden_layers)
    check_layers(config.num_hidden_layers, arrays)
    table = _entries(config, query_scaled, rotary)
    hint = (
        "tie_word_embeddings is MaxText's logits_via_embedding, qk_norm its use_qk_norm; experts, fused and quantised "
    )
    check(table, arrays, hint + "kernels are not supported")
    abstract = nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0)))
    model: Llama = fill(abstract, table, arrays, shardings)
    is_stacked = any(name.startswith(_STACKED) for name in flatten_dict(params, sep="."))
    remember(model, _ORIGIN, {"query_scaled": query_scaled, "rotary": rotary, "scan_layers": is_stacked})
    return model


def to_maxtext(
    model: Llama | nnx.State,
    config: LlamaConfig,
    *,
    query_scaled: bool | None = None,
    rotary: Rotary | None = None,
    scan_layers: bool | None = None,
) -> dict[str, Any]:
    """The inverse of `from_maxtext`: nested dictionaries of arrays in the parameters' own dtype.

    Args:
      model: a model, or the state of its parameters. Its layers may be stacked for a scan. Not gradients, unless
        query_scaled=False: those of query kernels are scaled the other way.
      config: its sizes.
      query_scaled, rotary: as in `from_maxtext`, by default as they were there for a model that it returned, or for
        the config of one. Kernels are scaled by 1 / sqrt(Dh) in float32: exactly if Dh is a power of 4.
      scan_layers: MaxText's setting: whether its layers are stacked, along axis 1; default as they were read, or True.

    Raises:
      ValueError: query_scaled of a model with QK-norms.
    """
    stored = settings_in(getattr(model, "origin", None) or config.origin, _ORIGIN) or {}
    query_scaled = stored.get("query_scaled") if query_scaled is None else query_scaled
    rotary = stored.get("rotary") if rotary is None else rotary
    scan_layers = stored.get("scan_layers", True) if scan_layers is None else scan_layers
    arrays: dict[str, np.ndarray] = {}
    for part, array in arrays_of(model, _entries(config, query_scaled, rotary)):
        if scan_layers and part.name.startswith(_LAYER):
            index, rest = part.name.removeprefix(_LAYER).split(".", 1)
            name = _STACKED + rest
            if name not in arrays:
                arrays[name] = np.empty((array.shape[0], config.num_hidden_layers, *array.shape[1:]), array.dtype)
            arrays[name][:, int(index)] = array
        else:
            arrays[part.name] = np.ascontiguousarray(array)
    nested: dict[str, Any] = unflatten_dict(arrays, sep=".")
    return nested


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer of an array with layers along axis 1; its slices are in the host's memory."""

    array: Any
    layer: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, _, *rest = self.array.shape
        return (rows, *rest)

    def __getitem__(self, index: Index) -> np.ndarray:
        return block_of(self.array, (index[0], slice(self.layer, self.layer + 1), *index[1:])).squeeze(1)


def _by_layer(params: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Name -> array, those of stacked layers a layer each."""
    arrays: dict[str, Any] = {}
    for name, array in flatten_dict(params, sep=".").items():
        array = readable_one(name, array)
        if not name.startswith(_STACKED):
            arrays[name] = array
            continue
        if tuple(array.shape[1:2]) != (layers,):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, whose axis 1 is not the config's {layers} layers")
        rest = name.removeprefix(_STACKED)
        arrays |= {f"{_LAYER}{i}.{rest}": _Layer(array, i) for i in range(layers)}
    return arrays


def _entries(config: LlamaConfig, query_scaled: bool | None, rotary: Rotary | None) -> list[Entry]:
    """All parameters, layers unrolled."""
    if isinstance(config, MoEConfig):
        raise ValueError("a config with experts: MaxText's checkpoints are read and written of models without experts")
    check_is_plain(config, "a checkpoint of MaxText's llama2 or qwen3")
    if query_scaled is None:
        query_scaled = not config.qk_norm
    if query_scaled and config.qk_norm:
        raise ValueError(f"{query_scaled=} of a model with qk_norm: the norm undoes any factor of the query's kernel")
    if rotary is None:
        rotary = "halves" if config.rope_scaling is None else "interleaved"
    if rotary not in ("halves", "interleaved"):
        raise ValueError(f"{rotary=} must be 'halves' or 'interleaved'")
    width, hidden, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    head_dim = config.resolved_head_dim
    queries, keys = (config.num_attention_heads, head_dim), (config.resolved_num_key_value_heads, head_dim)
    turned = partial(Part, order=interleaved(head_dim) if rotary == "interleaved" else ())
    query = partial(turned, factor=math.sqrt(head_dim) if query_scaled else 1.0)
    table = [
        Entry(("embed", "embedding"), (Part("token_embedder.embedding", (vocab, width)),)),
        Entry(("norm", "scale"), (Part("decoder.decoder_norm.scale", (width,)),)),
    ]
    if not config.tie_word_embeddings:
        table.append(Entry(("head", "kernel"), (Part("decoder.logits_dense.kernel", (width, vocab)),)))
    for i in range(config.num_hidden_layers):
        path: Path = ("layers", i)
        layer = f"{_LAYER}{i}"
        attention, mlp = f"{layer}.self_attention", f"{layer}.mlp"

        def qkv(kind: str, *rows: int, attention: str = attention) -> tuple[Part, ...]:
            return (
                query(f"{attention}.query.{kind}", (*rows, *queries)),
                turned(f"{attention}.key.{kind}", (*rows, *keys)),
                Part(f"{attention}.value.{kind}", (*rows, *keys)),
            )

        gate_up = tuple(Part(f"{mlp}.{name}.kernel", (width, hidden)) for name in ("wi_0", "wi_1"))
        norms = {"attention_norm": "pre_self_attention_layer_norm", "mlp_norm": "post_self_attention_layer_norm"}
        table += [
            *(
                Entry((*path, ours, "scale"), (Part(f"{layer}.{name}.scale", (width,)),))
                for ours, name in norms.items()
            ),
            Entry((*path, "attention", "qkv", "kernel"), qkv("kernel", width)),
            Entry((*path, "attention", "out", "kernel"), (Part(f"{attention}.out.kernel", (*queries, width)),)),
            Entry((*path, "mlp", "gate_up"), gate_up),
            Entry((*path, "mlp", "down", "kernel"), (Part(f"{mlp}.wo.kernel", (hidden, width)),)),
        ]
        if config.attention_bias:
            table.append(Entry((*path, "attention", "qkv", "bias"), qkv("bias")))
        if config.resolved_attention_out_bias:
            table.append(Entry((*path, "attention", "out", "bias"), (Part(f"{attention}.out.bias", (width,)),)))
        if config.qk_norm:
            for ours, name in {"q_norm": "query_norm", "k_norm": "key_norm"}.items():
                part = turned(f"{attention}.{name}.scale", (head_dim,))
                table.append(Entry((*path, "attention", ours, "scale"), (part,)))
    return table
