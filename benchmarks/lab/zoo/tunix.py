"""Tunix: its models under the loss of its trainer, with the targets as one-hot arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
    of_nnx,
    padded,
    tokens,
)
from benchmarks.lab.zoo.sources import imported, model

TUNIX = ("google-tunix==0.1.7", "jaxtyping==0.3.11", "wadler_lindig==0.1.8", "einops==0.8.2")

_TUNIX_EMPTIED = ("tunix", "tunix/models/llama3", "tunix/models/qwen2", "tunix/models/qwen3", "tunix/models/gemma4")

_TUNIX_ABSENT = ("tensorboardX", "wandb", "metrax", "kagglehub", "sentencepiece", "qwix", "tqdm", "sglang_jax", "vllm")

_TUNIX = {"requirements": TUNIX, "emptied": _TUNIX_EMPTIED, "absent": _TUNIX_ABSENT}


def _of_tunix(sizes: Sizes, name: str, module: str, vocabulary: str = "vocab_size", **options: Any) -> Case:
    library = imported(f"tunix.models.{module}.model")
    loss_of = imported("tunix.sft.peft_trainer")._default_loss_fn
    common = {"num_layers": sizes.layers, "embed_dim": sizes.width, "hidden_dim": sizes.hidden}
    common |= {"num_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    common |= {vocabulary: sizes.vocabulary}
    if "remat" in options:
        options["remat_config"] = library.RematConfig[options.pop("remat")]
    if "kinds" in options:
        options["attention_types"] = tuple(library.AttentionType[name] for name in options.pop("kinds"))
    config = library.ModelConfig(**common, **options)
    graph, parameters = of_nnx(lambda rngs: getattr(library, name)(config, rngs=rngs), sizes.dtype)
    length = sizes.length
    batch = {
        "input_tokens": tokens(sizes),
        "input_mask": padded(tokens(sizes)) > 0,
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (sizes.batch, length)),
        "attention_mask": np.broadcast_to(np.tril(np.ones((length, length), bool)), (sizes.batch, length, length)),
    }

    def loss(parameters: Any, **batch: Any) -> jax.Array:
        value: jax.Array = loss_of(nnx.merge(graph, parameters), **batch)
        return value

    return Case(loss, parameters, batch)


@model(**_TUNIX)
def tunix_llama3(sizes: Sizes) -> Case:
    """Each decoder layer under a checkpoint."""
    return _of_tunix(sizes, "Llama3", "llama3", rope_theta=500_000, norm_eps=1e-5, remat="DECODER")


@model(**_TUNIX)
def tunix_qwen3(sizes: Sizes) -> Case:
    options: dict[str, Any] = {"rope_theta": 1_000_000, "norm_eps": 1e-6, "use_tied_embedding": True}
    return _of_tunix(sizes, "Qwen3", "qwen3", dtype=sizes.dtype, param_dtype=sizes.dtype, **options)


@model(**_TUNIX)
def tunix_gemma2(sizes: Sizes) -> Case:
    """Soft caps, norms before and behind, attention of two kinds; each block under a checkpoint."""
    options: dict[str, Any] = {
        "final_logit_softcap": 30.0,
        "attn_logits_soft_cap": 50.0,
        "sliding_window_size": sizes.length // 2,
    }
    options |= {"use_post_attn_norm": True, "use_post_ffw_norm": True, "kinds": ("LOCAL_SLIDING", "GLOBAL")}
    return _of_tunix(sizes, "Gemma", "gemma", "num_embed", remat="BLOCK", **options)


@model(**_TUNIX)
def tunix_gemma3(sizes: Sizes) -> Case:
    return _of_tunix(
        sizes, "Gemma3", "gemma3", "num_embed", sliding_window_size=sizes.length // 2, param_dtype=sizes.dtype
    )
