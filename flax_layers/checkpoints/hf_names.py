"""The places of a model's parameters in Hugging Face's checkpoints."""

from __future__ import annotations

from functools import partial

from flax_layers.checkpoints.hf_experts import expert_entries
from flax_layers.checkpoints.hf_kinds import is_phi3
from flax_layers.checkpoints.table import Entry, Part, Path, interleaved
from flax_layers.models.cohere import CohereConfig
from flax_layers.models.gemma import GemmaConfig
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.gpt_oss import GptOssConfig
from flax_layers.models.llama import LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.olmo2 import Olmo2Config
from flax_layers.rope_scaling import turned_columns


def entries(config: LlamaConfig | GPT2Config) -> list[Entry]:
    """All parameters of a model with this config."""
    return _llama(config) if isinstance(config, LlamaConfig) else _gpt2(config)


def _llama(config: LlamaConfig) -> list[Entry]:
    """LlamaForCausalLM and its kin, of all kinds in `hf_families` but GPT-2."""
    width, hidden, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    head_dim = config.resolved_head_dim
    queries, keys = config.num_attention_heads * head_dim, config.resolved_num_key_value_heads * head_dim
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms, order = _norms(config), _order(config)
    orders = {"q_proj": order, "k_proj": order, "v_proj": ()}
    is_packed = is_phi3(config)
    kernel = partial(Part, transposed=True)
    table = [
        Entry(("embed", "embedding"), (Part("model.embed_tokens.weight", (vocab, width)),)),
        Entry(("norm", "scale"), (Part("model.norm.weight", (width,)),)),
    ]
    if not config.tie_word_embeddings:
        table.append(Entry(("head", "kernel"), (kernel("lm_head.weight", (vocab, width)),)))
    for i in range(config.num_hidden_layers):
        path: Path = ("layers", i)
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        if is_packed:
            columns = queries + 2 * keys
            turned = _packed(order, (queries + keys) // head_dim, columns)
            qkv: tuple[Part, ...] = (kernel(f"{attention}.qkv_proj.weight", (columns, width), order=turned),)
            gate_up: tuple[Part, ...] = (kernel(f"{mlp}.gate_up_proj.weight", (2 * hidden, width)),)
        else:
            qkv = tuple(
                kernel(f"{attention}.{name}.weight", (n, width), order=orders[name]) for name, n in projections.items()
            )
            gate_up = tuple(kernel(f"{mlp}.{name}_proj.weight", (hidden, width)) for name in ("gate", "up"))
        table += [
            *(
                Entry((*path, ours, "scale"), (Part(f"{layer}.{name}.weight", (width,)),))
                for ours, name in norms.items()
            ),
            Entry((*path, "attention", "qkv", "kernel"), qkv),
            Entry((*path, "attention", "out", "kernel"), (kernel(f"{attention}.o_proj.weight", (width, queries)),)),
        ]
        if isinstance(config, MoEConfig) and config.has_experts(i):
            table += expert_entries(config, i)
        else:
            table += [
                Entry((*path, "mlp", "gate_up"), gate_up),
                Entry((*path, "mlp", "down", "kernel"), (kernel(f"{mlp}.down_proj.weight", (width, hidden)),)),
            ]
        if config.attention_bias:
            biases = tuple(
                Part(f"{attention}.{name}.bias", (n,), order=orders[name]) for name, n in projections.items()
            )
            table.append(Entry((*path, "attention", "qkv", "bias"), biases))
        if config.resolved_attention_out_bias:
            table.append(Entry((*path, "attention", "out", "bias"), (Part(f"{attention}.o_proj.bias", (width,)),)))
        if isinstance(config, GptOssConfig):
            sinks = Part(f"{attention}.sinks", (config.num_attention_heads,))
            table.append(Entry((*path, "attention", "sinks"), (sinks,)))
        if config.qk_norm:
            is_wide = isinstance(config, Olmo2Config)
            for x, size in (("q", queries), ("k", keys)):
                part = Part(f"{attention}.{x}_norm.weight", (size if is_wide else head_dim,))
                table.append(Entry((*path, "attention", f"{x}_norm", "scale"), (part,)))
    return table


def _norms(config: LlamaConfig) -> dict[str, str]:
    """Our names of a block's norms -> theirs."""
    if isinstance(config, CohereConfig):
        return {"norm": "input_layernorm"}
    if isinstance(config, Olmo2Config):
        return {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
    if isinstance(config, GemmaConfig) and config.sandwich_norms:
        return {
            "attention_norm": "input_layernorm",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
    return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def _order(config: LlamaConfig) -> tuple[int, ...]:
    """Their number of each of our columns, in a head of queries or keys; empty if the numbers are the same.

    Ours turn columns i and i + Dh / 2, Cohere's 2 i and 2 i + 1. Where only R columns of a head are turned, theirs turn
    i and i + R / 2 of the first R.
    """
    size = config.resolved_head_dim
    if isinstance(config, CohereConfig):
        return interleaved(size)
    if config.partial_rotary_factor == 1:
        return ()
    turned = turned_columns(size, config.partial_rotary_factor)
    half, rest = turned // 2, (size - turned) // 2
    first, second = (*range(half), *range(turned, turned + rest)), (*range(half, turned), *range(turned + rest, size))
    return (*first, *second)


def _packed(order: tuple[int, ...], heads: int, columns: int) -> tuple[int, ...]:
    """`Part.order` of all columns of queries, keys and values, of which these heads are turned."""
    if not order:
        return ()
    size = len(order)
    return (*(size * head + column for head in range(heads) for column in order), *range(size * heads, columns))


def _gpt2(config: GPT2Config) -> list[Entry]:
    """GPT2LMHeadModel, whose Conv1D layers store (in, out), with query, key and value in one kernel as ours."""
    width, hidden = config.n_embd, config.n_inner or 4 * config.n_embd
    table: list[Entry] = []

    def add(path: Path, name: str, shape: tuple[int, ...]) -> None:
        table.append(Entry(path, (Part(f"transformer.{name}", shape),)))

    def add_with_bias(path: Path, kind: str, name: str, shape: tuple[int, ...]) -> None:
        add((*path, kind), f"{name}.weight", shape)
        add((*path, "bias"), f"{name}.bias", shape[-1:])

    add(("embed", "embedding"), "wte.weight", (config.vocab_size, width))
    if not config.tie_word_embeddings:
        head = Part("lm_head.weight", (config.vocab_size, width), transposed=True)
        table.append(Entry(("head", "kernel"), (head,)))
    add(("position_embed", "embedding"), "wpe.weight", (config.n_positions, width))
    add_with_bias(("norm",), "scale", "ln_f", (width,))
    for i in range(config.n_layer):
        add_with_bias(("layers", i, "attention_norm"), "scale", f"h.{i}.ln_1", (width,))
        add_with_bias(("layers", i, "attention", "qkv"), "kernel", f"h.{i}.attn.c_attn", (width, 3 * width))
        add_with_bias(("layers", i, "attention", "out"), "kernel", f"h.{i}.attn.c_proj", (width, width))
        add_with_bias(("layers", i, "mlp_norm"), "scale", f"h.{i}.ln_2", (width,))
        add_with_bias(("layers", i, "mlp", "up"), "kernel", f"h.{i}.mlp.c_fc", (width, hidden))
        add_with_bias(("layers", i, "mlp", "down"), "kernel", f"h.{i}.mlp.c_proj", (hidden, width))
    return table
