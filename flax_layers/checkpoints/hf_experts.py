"""Experts in Hugging Face's checkpoints: an array for each, as in files, or one for all, as in models in memory.

    file       block_sparse_moe.experts.3.w1.weight, .w3, .w2           Mixtral: gate, up, down
               mlp.experts.3.gate_proj.weight, .up_proj, .down_proj      Qwen2-MoE and Qwen3-MoE
    memory     mlp.experts.gate_up_proj (E, 2F, D), mlp.experts.down_proj (E, D, F)        transformers 5
    gpt-oss    mlp.experts.gate_up_proj (E, D, 2F), columns of gate and up in turn, mlp.experts.down_proj (E, F, D), and
               their biases, in both; mlp.router.weight and .bias

A balance bias is `mlp.gate.e_score_correction_bias`, as DeepSeek-V3 has it; where a file has none it begins at 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flax_layers.checkpoints.placement import Index, block_of
from flax_layers.checkpoints.table import Entry, Part, Path, interleaved
from flax_layers.models.gpt_oss import GptOssConfig
from flax_layers.models.moe_config import MoEConfig

_BIAS = "gate.e_score_correction_bias"
MXFP4_REMEDY = (
    "Blocks of 4 bits are not read, they must be dequantised first: transformers' AutoModelForCausalLM.from_pretrained("
    'path, quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16").save_pretrained(folder) does, and '
    "load_hf_folder(folder) reads that"
)


def is_mixtral(config: MoEConfig) -> bool:
    """Whether a Mixtral computes what the configuration says."""
    has_all = config.mlp_only_layers == () and config.decoder_sparse_step == 1
    extras = (
        config.qk_norm,
        config.attention_bias,
        config.resolved_attention_out_bias,
        config.shared_expert_intermediate_size is not None,
        config.use_balance_bias,
    )
    same_size = config.resolved_moe_intermediate_size == config.intermediate_size
    return has_all and same_size and config.norm_topk_prob and not any(extras)


def expert_entries(config: MoEConfig, layer: int) -> Iterator[Entry]:
    """The parameters of the MoE of a layer, with the names that files have."""
    path: Path = ("layers", layer, "mlp")
    if isinstance(config, GptOssConfig):
        yield from _gpt_oss_entries(config, layer, path)
        return
    width, hidden = config.hidden_size, config.resolved_moe_intermediate_size
    mlp, gate, up, down = _names(config, layer)

    def kernel(name: str, columns: int, rows: int) -> Part:
        return Part(f"{mlp}.{name}.weight", (columns, rows), transposed=True)

    yield Entry((*path, "router", "kernel"), (kernel("gate", config.num_experts, width),))
    if config.use_balance_bias:
        yield Entry((*path, "router", "bias"), (Part(f"{mlp}.{_BIAS}", (config.num_experts,)),))
    for i in range(config.num_experts):
        pair = tuple(kernel(f"experts.{i}.{name}", hidden, width) for name in (gate, up))
        yield Entry((*path, "experts", i, "gate_up"), pair)
        yield Entry((*path, "experts", i, "down"), (kernel(f"experts.{i}.{down}", width, hidden),))
    if (shared := config.shared_expert_intermediate_size) is not None:
        pair = tuple(kernel(f"shared_expert.{name}_proj", shared, width) for name in ("gate", "up"))
        yield Entry((*path, "shared", "gate_up"), pair)
        yield Entry((*path, "shared", "down", "kernel"), (kernel("shared_expert.down_proj", width, shared),))
    if config.shared_expert_gate:
        yield Entry((*path, "shared_gate", "kernel"), (kernel("shared_expert_gate", 1, width),))


def _gpt_oss_entries(config: GptOssConfig, layer: int, path: Path) -> Iterator[Entry]:
    mlp, experts = f"model.layers.{layer}.mlp", config.num_experts
    width, hidden = config.hidden_size, config.resolved_moe_intermediate_size
    parts = {
        "gate_up": Part(f"{mlp}.experts.gate_up_proj", (experts, width, 2 * hidden), order=interleaved(2 * hidden)),
        "gate_up_bias": Part(f"{mlp}.experts.gate_up_proj_bias", (experts, 2 * hidden), order=interleaved(2 * hidden)),
        "down": Part(f"{mlp}.experts.down_proj", (experts, hidden, width)),
        "down_bias": Part(f"{mlp}.experts.down_proj_bias", (experts, width)),
    }
    yield Entry((*path, "router", "kernel"), (Part(f"{mlp}.router.weight", (experts, width), transposed=True),))
    yield Entry((*path, "router", "logit_bias"), (Part(f"{mlp}.router.bias", (experts,)),))
    for name, part in parts.items():
        yield Entry((*path, "experts", name), (part,))


def check_dequantised(arrays: Mapping[str, Any]) -> None:
    """Checks that experts are no MXFP4 blocks, as those of the released gpt-oss.

    Raises:
      ValueError: they are, with the remedy.
    """
    if blocks := next((name for name in arrays if name.endswith(("_proj_blocks", "_proj_scales"))), None):
        raise ValueError(f"{blocks} is of experts in MXFP4. {MXFP4_REMEDY}")


def as_in_files(arrays: Mapping[str, Any], config: MoEConfig) -> dict[str, Any]:
    """The arrays with the names and shapes that files have; an array of all experts becomes a view for each.

    Balance biases are zeros if no layer has one.

    Raises:
      ValueError: an array of all experts of another shape than the config makes it.
    """
    result = dict(arrays)
    if isinstance(config, GptOssConfig):
        return result
    begins_at_zero = config.use_balance_bias and not any(name.endswith(_BIAS) for name in arrays)
    hidden, width = config.resolved_moe_intermediate_size, config.hidden_size
    for layer in filter(config.has_experts, range(config.num_hidden_layers)):
        memory = f"model.layers.{layer}.mlp"
        mlp, gate, up, down = _names(config, layer)
        if begins_at_zero:
            result[f"{mlp}.{_BIAS}"] = np.zeros(config.num_experts, np.float32)
        if (router := f"{memory}.gate.weight") in result:
            result[f"{mlp}.gate.weight"] = result.pop(router)
        for name, shape, rows in (
            ("gate_up_proj", (2 * hidden, width), {gate: slice(0, hidden), up: slice(hidden, 2 * hidden)}),
            ("down_proj", (width, hidden), {down: slice(0, width)}),
        ):
            if (array := result.pop(f"{memory}.experts.{name}", None)) is None:
                continue
            if tuple(array.shape) != (config.num_experts, *shape):
                raise ValueError(
                    f"{memory}.experts.{name} has shape {tuple(array.shape)}; the config makes it "
                    f"{(config.num_experts, *shape)}"
                )
            for i in range(config.num_experts):
                for kind, kind_rows in rows.items():
                    result[f"{mlp}.experts.{i}.{kind}.weight"] = _ExpertRows(array, i, kind_rows)
    return result


def _names(config: MoEConfig, layer: int) -> tuple[str, str, str, str]:
    """The names of a layer's mixture, and of the kernels of an expert."""
    if is_mixtral(config):
        return f"model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2"
    return f"model.layers.{layer}.mlp", "gate_proj", "up_proj", "down_proj"


@dataclasses.dataclass(frozen=True, eq=False)
class _ExpertRows:
    """Some rows of one expert in an array (E, rows, columns) of all experts; slices are in the host's memory."""

    array: Any
    expert: int
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.stop - self.rows.start, self.array.shape[2]

    def __getitem__(self, index: Index) -> np.ndarray:
        rows, columns = index
        first = self.rows.start
        full_index = (slice(self.expert, self.expert + 1), slice(first + rows.start, first + rows.stop), columns)
        return block_of(self.array, full_index)[0]
