"""Examples of Flax: a language model and a tagger of linen, Gemma of nnx."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
    key,
    of_linen,
    of_nnx,
    padded,
    tokens,
)
from benchmarks.lab.zoo.sources import TRAINING, folder_of, imported, model

FLAX = ("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0")


def _sizes_of_flax(sizes: Sizes) -> dict[str, Any]:
    """The fields of a `TransformerConfig` in Flax's examples."""
    of = {"vocab_size": sizes.vocabulary, "dtype": sizes.dtype, "emb_dim": sizes.width, "num_heads": sizes.heads}
    return of | {"num_layers": sizes.layers, "qkv_dim": sizes.width, "mlp_dim": sizes.hidden, "max_len": sizes.length}


@model(
    files=tuple((*FLAX, f"examples/lm1b/{name}.py") for name in ("models", "train", "utils")),
    absent=(*TRAINING, "input_pipeline", "temperature_sampler", "tokenizer"),
)
def flax_lm1b(sizes: Sizes) -> Case:
    """Packed rows, dropout, label smoothing; the logits are read by the metrics too."""
    sys.path.insert(0, str(folder_of(FLAX) / "examples/lm1b"))
    models, train = imported("models"), imported("train")
    config = models.TransformerConfig(output_vocab_size=sizes.vocabulary, **_sizes_of_flax(sizes))
    module = models.TransformerLM(config)
    half = np.arange(sizes.length, dtype=np.int32) // (sizes.length // 2)
    batch = {
        "inputs": padded(tokens(sizes)),
        "inputs_position": np.broadcast_to(
            np.arange(sizes.length, dtype=np.int32) % (sizes.length // 2), (sizes.batch, sizes.length)
        ),
        "inputs_segmentation": np.broadcast_to(half + 1, (sizes.batch, sizes.length)),
        "dropout_rng": key(),
    }

    def loss(parameters: Any, inputs: Any, inputs_position: Any, inputs_segmentation: Any, dropout_rng: Any) -> Any:
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        logits = module.apply(
            {"params": parameters},
            inputs,
            inputs_positions=inputs_position,
            inputs_segmentation=inputs_segmentation,
            rngs={"dropout": dropout_rng},
        )
        value, weight_sum = train.compute_weighted_cross_entropy(logits, inputs, weights, 0.1)
        return value / weight_sum, train.compute_metrics(logits, inputs, weights)

    return Case(loss, of_linen(module, batch["inputs"]), batch, has_aux=True)


_GEMMA_FILES = (
    *("transformer", "transformer_cfg", "layers", "modules", "params", "helpers", "sow_lib", "train"),
    "positional_embeddings",
)


@model(
    files=tuple((*FLAX, f"examples/gemma/{name}.py") for name in _GEMMA_FILES),
    requirements=("jaxtyping==0.3.11", "wadler_lindig==0.1.8"),
    absent=(*TRAINING, "input_pipeline", "sampler", "tokenizer", "train_cfg"),
)
def flax_gemma(sizes: Sizes) -> Case:
    """The logits are a result beside the loss: the example's trainer gives them to its metrics. Float32 parameters."""
    sys.path.insert(0, str(folder_of(FLAX) / "examples/gemma"))
    train, library = imported("train"), imported("transformer")
    configs = imported("transformer_cfg")
    config = configs.TransformerConfig(
        num_layers=sizes.layers,
        num_embed=sizes.vocabulary,
        embed_dim=sizes.width,
        hidden_dim=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(configs.AttentionType.LOCAL_SLIDING, configs.AttentionType.GLOBAL),
        sliding_window_size=sizes.length // 2,
        dtype=sizes.dtype,
    )
    graph, parameters = of_nnx(lambda rngs: library.Transformer(config, rngs=rngs))
    positions = np.broadcast_to(np.arange(sizes.length, dtype=np.int32), (sizes.batch, sizes.length))
    batch = {"inputs": padded(tokens(sizes)), "targets": padded(tokens(sizes, 2)), "positions": positions}

    def loss(parameters: Any, inputs: Any, targets: Any, positions: Any) -> Any:
        module = nnx.merge(graph, parameters)
        mask = library.make_causal_attn_mask(inputs > 0)
        logits, _ = module(inputs, positions=positions, attention_mask=mask, cache=None)
        weights = (inputs > 0).astype(jnp.float32)
        each = train.compute_weighted_cross_entropy(logits, targets, weights, 0.1)
        return each.mean(), (each, logits)

    return Case(loss, parameters, batch, has_aux=True)


@model(
    files=tuple((*FLAX, f"examples/nlp_seq/{name}.py") for name in ("models", "train")),
    absent=(*TRAINING, "input_pipeline", "tensorboard"),
)
def flax_nlp_seq(sizes: Sizes) -> Case:
    """A tagger with dropout: the classes are few."""
    sys.path.insert(0, str(folder_of(FLAX) / "examples/nlp_seq"))
    models, train = imported("models"), imported("train")
    config = models.TransformerConfig(output_vocab_size=50, **_sizes_of_flax(sizes))
    module = models.Transformer(config)
    batch = {"inputs": padded(tokens(sizes)), "targets": padded(tokens(sizes, 2)) % 50, "dropout_rng": key()}

    def loss(parameters: Any, inputs: Any, targets: Any, dropout_rng: Any) -> Any:
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
        rngs = {"dropout": dropout_rng}
        logits = module.apply({"params": parameters}, inputs=inputs, train=True, rngs=rngs)
        value, weight_sum = train.compute_weighted_cross_entropy(logits, targets, weights)
        return value / weight_sum, logits

    return Case(loss, of_linen(module, inputs=batch["inputs"], train=True), batch, has_aux=True)
