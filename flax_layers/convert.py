"""Parameters of a Llama from and to the names and shapes of Hugging Face's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.llama import Llama, LlamaConfig


def from_hf(
    state_dict: Mapping[str, Any],
    config: LlamaConfig,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
) -> Llama:
    """A Llama with the parameters of a Hugging Face LlamaForCausalLM.

    Example:
      arrays = safetensors.flax.load_file("model.safetensors")
      model = from_hf(arrays, config, dtype=jnp.bfloat16)

    Args:
      state_dict: name -> array, (out, in) as torch.nn.Linear stores them; of any floating dtype.
      config: sizes; those of the arrays must agree.
      dtype, param_dtype: as in `Llama`.

    Raises:
      ValueError: names that are missing or unknown, or a shape that does not agree with `config`.
    """
    shapes = _shapes(config)
    # Checkpoints of tied models may hold the head too; older ones hold the rotary frequencies.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    given = {name for name in state_dict if name not in ignored and not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(shapes.keys() - given):
        raise ValueError(f"the checkpoint lacks {_some(missing)}")
    if unknown := sorted(given - shapes.keys()):
        raise ValueError(f"a Llama has no {_some(unknown)}; biases, QK-norms and adapters are not supported")
    for name, shape in shapes.items():
        if tuple(state_dict[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state_dict[name].shape)}; the config makes it {shape}")

    def kernel(*names: str) -> jax.Array:  # (in, out), several outputs side by side
        return jnp.concatenate([jnp.asarray(state_dict[name]).T for name in names], axis=1)

    def vector(name: str) -> jax.Array:
        return jnp.asarray(state_dict[name])

    def layer(prefix: str) -> dict[str, Any]:
        q, k, v, out = (f"{prefix}.self_attn.{name}_proj.weight" for name in "qkvo")
        gate, up, down = (f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        return {
            "attention_norm": {"scale": vector(f"{prefix}.input_layernorm.weight")},
            "attention": {"qkv": {"kernel": kernel(q, k, v)}, "out": {"kernel": kernel(out)}},
            "mlp_norm": {"scale": vector(f"{prefix}.post_attention_layernorm.weight")},
            "mlp": {
                "gate_up": kernel(gate, up).reshape(config.hidden_size, 2, -1),
                "down": {"kernel": kernel(down)},
            },
        }

    params: dict[str, Any] = {
        "embed": {"embedding": vector("model.embed_tokens.weight")},
        "layers": {i: layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)},
        "norm": {"scale": vector("model.norm.weight")},
    }
    if not config.tie_word_embeddings:
        params["head"] = {"kernel": kernel("lm_head.weight")}
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: x.astype(param_dtype), params))
    return nnx.merge(graphdef, state)


def to_hf(model: Llama | nnx.State, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: name -> array in the parameters' own dtype.

    Args:
      model: a Llama, or a state with its structure, as a gradient is.
      config: its sizes.
    """
    state = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    # Files are written from memory as it lies: a transposed view would be written untransposed.
    return {name: np.ascontiguousarray(array) for name, array in _views(state, config).items()}


def _views(state: nnx.State, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The parameters under the checkpoint's names and in its shapes, not copied."""
    params: dict[str, Any] = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    heads = config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    queries, keys = heads * head_dim, (config.num_key_value_heads or heads) * head_dim
    arrays = {
        "model.embed_tokens.weight": params["embed"]["embedding"],
        "model.norm.weight": params["norm"]["scale"],
    }
    if not config.tie_word_embeddings:
        arrays["lm_head.weight"] = params["head"]["kernel"].T
    for i, layer in params["layers"].items():
        prefix, attention, mlp = f"model.layers.{i}", layer["attention"], layer["mlp"]
        arrays[f"{prefix}.input_layernorm.weight"] = layer["attention_norm"]["scale"]
        arrays[f"{prefix}.post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        qkv = np.split(attention["qkv"]["kernel"], [queries, queries + keys], axis=1)
        for name, kernel in zip("qkvo", [*qkv, attention["out"]["kernel"]], strict=True):
            arrays[f"{prefix}.self_attn.{name}_proj.weight"] = kernel.T
        gate, up = mlp["gate_up"][:, 0], mlp["gate_up"][:, 1]
        for name, kernel in (("gate", gate), ("up", up), ("down", mlp["down"]["kernel"])):
            arrays[f"{prefix}.mlp.{name}_proj.weight"] = kernel.T
    return arrays


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the checkpoint."""
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    empty = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), nnx.state(abstract, nnx.Param))
    return {name: array.shape for name, array in _views(empty, config).items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
