"""The textbook plans for sharding a model: which mesh axes shard the axes of each name."""

from __future__ import annotations

MeshAxes = str | tuple[str, ...] | None
Plan = dict[str, MeshAxes]

# Over mesh axes "data", "fsdp" and "tensor", any of which a mesh may lack.
DATA: Plan = {"batch": "data"}
FSDP: Plan = {"batch": ("data", "fsdp"), "fan_in": "fsdp", "embed": "fsdp"}
TENSOR: Plan = {"batch": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
FSDP_TENSOR: Plan = {**TENSOR, **FSDP}
SEQUENCE: Plan = {**TENSOR, "length": "tensor"}
FSDP_SEQUENCE: Plan = {**FSDP_TENSOR, "length": "tensor"}
# Experts over "expert", which shards the batch as well: outside of the experts it is an axis of data parallelism.
EXPERT: Plan = {**FSDP_TENSOR, "batch": ("data", "fsdp", "expert"), "expert": "expert"}
