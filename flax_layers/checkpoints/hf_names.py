"""Where a model's parameters lie in Hugging Face's checkpoints."""

from __future__ import annotations

from functools import partial

from flax_layers.checkpoints.hf_experts import expert_entries
from flax_layers.checkpoints.table import Entry, Part, Path
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.llama import LlamaConfig
from flax_layers.models.moe_config import MoEConfig


def entries(config: LlamaConfig | GPT2Config) -> list[Entry]:
    """All parameters of a model with this config."""
    return _llama(config) if isinstance(config, LlamaConfig) else _gpt2(config)


def _llama(config: LlamaConfig) -> list[Entry]:
    """LlamaForCausalLM and its kin: Mistral, Qwen2, Qwen3, and Mixtral, Qwen2-MoE, Qwen3-MoE."""
    width, hidden, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    head_dim = config.resolved_head_dim
    queries, keys = config.num_attention_heads * head_dim, config.resolved_num_key_value_heads * head_dim
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    kernel = partial(Part, transposed=True)
    found = [
        Entry(("embed", "embedding"), (Part("model.embed_tokens.weight", (vocab, width)),)),
        Entry(("norm", "scale"), (Part("model.norm.weight", (width,)),)),
    ]
    if not config.tie_word_embeddings:
        found.append(Entry(("head", "kernel"), (kernel("lm_head.weight", (vocab, width)),)))
    for i in range(config.num_hidden_layers):
        path: Path = ("layers", i)
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = tuple(kernel(f"{attention}.{name}.weight", (n, width)) for name, n in projections.items())
        gate_up = tuple(kernel(f"{mlp}.{name}_proj.weight", (hidden, width)) for name in ("gate", "up"))
        found += [
            Entry((*path, "attention_norm", "scale"), (Part(f"{layer}.input_layernorm.weight", (width,)),)),
            Entry((*path, "attention", "qkv", "kernel"), qkv),
            Entry((*path, "attention", "out", "kernel"), (kernel(f"{attention}.o_proj.weight", (width, queries)),)),
            Entry((*path, "mlp_norm", "scale"), (Part(f"{layer}.post_attention_layernorm.weight", (width,)),)),
        ]
        if isinstance(config, MoEConfig) and config.has_experts(i):
            found += expert_entries(config, i)
        else:
            found += [
                Entry((*path, "mlp", "gate_up"), gate_up),
                Entry((*path, "mlp", "down", "kernel"), (kernel(f"{mlp}.down_proj.weight", (width, hidden)),)),
            ]
        if config.attention_bias:
            biases = tuple(Part(f"{attention}.{name}.bias", (n,)) for name, n in projections.items())
            found.append(Entry((*path, "attention", "qkv", "bias"), biases))
        if config.resolved_attention_out_bias:
            found.append(Entry((*path, "attention", "out", "bias"), (Part(f"{attention}.o_proj.bias", (width,)),)))
        if config.qk_norm:
            found += [
                Entry((*path, "attention", f"{x}_norm", "scale"), (Part(f"{attention}.{x}_norm.weight", (head_dim,)),))
                for x in "qk"
            ]
    return found


def _gpt2(config: GPT2Config) -> list[Entry]:
    """GPT2LMHeadModel, whose Conv1D layers store (in, out), query, key and value packed as ours."""
    width, hidden = config.n_embd, config.n_inner or 4 * config.n_embd
    found: list[Entry] = []

    def add(path: Path, name: str, shape: tuple[int, ...]) -> None:
        found.append(Entry(path, (Part(f"transformer.{name}", shape),)))

    def add_with_bias(path: Path, kind: str, name: str, shape: tuple[int, ...]) -> None:
        add((*path, kind), f"{name}.weight", shape)
        add((*path, "bias"), f"{name}.bias", shape[-1:])

    add(("embed", "embedding"), "wte.weight", (config.vocab_size, width))
    if not config.tie_word_embeddings:
        head = Part("lm_head.weight", (config.vocab_size, width), transposed=True)
        found.append(Entry(("head", "kernel"), (head,)))
    add(("position_embed", "embedding"), "wpe.weight", (config.n_positions, width))
    add_with_bias(("norm",), "scale", "ln_f", (width,))
    for i in range(config.n_layer):
        add_with_bias(("layers", i, "attention_norm"), "scale", f"h.{i}.ln_1", (width,))
        add_with_bias(("layers", i, "attention", "qkv"), "kernel", f"h.{i}.attn.c_attn", (width, 3 * width))
        add_with_bias(("layers", i, "attention", "out"), "kernel", f"h.{i}.attn.c_proj", (width, width))
        add_with_bias(("layers", i, "mlp_norm"), "scale", f"h.{i}.ln_2", (width,))
        add_with_bias(("layers", i, "mlp", "up"), "kernel", f"h.{i}.mlp.c_fc", (width, hidden))
        add_with_bias(("layers", i, "mlp", "down"), "kernel", f"h.{i}.mlp.c_proj", (hidden, width))
    return found
