"""EasyDeL: its Llama under the loss of its trainer."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from benchmarks.lab.zoo.case import DEVICES, Case, Sizes, padded, tokens, types_of
from benchmarks.lab.zoo.sources import imported, model

EASYDEL = (
    *("easydel==0.3.0", "eformer==0.0.99.12", "ejkernel==0.0.78", "jaxtyping==0.3.11", "wadler_lindig==0.1.8"),
    *(
        "einops==0.8.2",
        "beartype==0.23.1",
        "chex==0.1.92",
        "toolz==1.2.0",
        "plum_dispatch==2.10.1",
        "contextlib2==21.6.0",
    ),
    *(
        "transformers==5.5.0",
        "tokenizers==0.22.1",
        "huggingface_hub==1.33.0",
        "safetensors==0.8.0",
        "regex==2026.11.19",
    ),
    *("packaging==26.4", "pyyaml==6.0.4", "filelock==4.3.1", "tqdm==4.70.1", "requests==2.34.2", "urllib3==2.8.0"),
    *("httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0", "anyio==4.16.0", "certifi==2026.10.19.post1", "idna==3.20"),
    *("pydantic==2.14.4", "pydantic_core==2.50.5", "annotated_types==0.8.0", "typing_inspection==0.4.5"),
    *("jinja2==3.1.6", "markupsafe==3.0.4"),
)
_ABSENT = (
    *("eformer.executor", "ejkernel.kernels._cuda", "ray", "datasets", "wandb", "grain", "tensorflow", "gcsfs"),
    *("fsspec", "google", "msgspec", "zmq", "fastapi", "uvicorn", "uvloop", "zstandard", "partial_json_parser"),
    *("grafanalib", "braceexpand"),
)


@model(requirements=EASYDEL, absent=_ABSENT, emptied=("easydel", "easydel/modules"))
def easydel_llama(sizes: Sizes) -> Case:
    """Constraints over a mesh, a loss of shifted labels under a mask, with an accuracy beside it."""
    library, losses = imported("easydel.modules.llama"), imported("easydel.infra.loss_utils")
    config = library.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.length,
        attn_mechanism="vanilla",
        attn_dtype=sizes.dtype,
        sharding_axis_dims=(1, DEVICES, 1, 1, 1),
    )

    def make() -> Any:
        return library.LlamaForCausalLM(config=config, dtype=sizes.dtype, param_dtype=sizes.dtype, rngs=nnx.Rngs(0))

    on = lambda: config.mesh  # noqa: E731
    with on():
        made = nnx.eval_shape(make)
        graph, parameters, _ = nnx.split(made, nnx.Param, ...)  # type: ignore[misc]
        others = jax.jit(lambda: nnx.split(make(), nnx.Param, ...)[2])()  # type: ignore[misc]  # keys of dropout
    specs = jax.tree.leaves(made._match_partition_rules(), is_leaf=lambda x: isinstance(x, jax.P))
    lies = [jax.NamedSharding(config.mesh, spec) for spec in specs]

    def loss(parameters: Any, input_ids: Any, attention_mask: Any) -> Any:
        module = nnx.merge(graph, parameters, others, copy=True)
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        _, found = module.compute_loss(labels=input_ids, loss_config=losses.LossConfig(), **given)
        return found.loss, found.accuracy

    ids = padded(tokens(sizes))
    batch = {"input_ids": ids, "attention_mask": ids > 0}
    over = jax.NamedSharding(config.mesh, jax.P("fsdp"))
    shardings = jax.tree.unflatten(jax.tree.structure(parameters), lies), dict.fromkeys(batch, over)
    return Case(loss, types_of(parameters), batch, True, on, shardings)
