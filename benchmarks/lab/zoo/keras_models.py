"""Keras: its own trainer's function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
    padded,
    tokens,
)
from benchmarks.lab.zoo.sources import imported, model

KERAS = ("keras==3.15.1", "keras-hub==0.32.0", "namex==0.1.0", "optree==0.20.0", "h5py==3.16.0")

_KERAS_ABSENT = ("kagglehub", "tensorflow_text", "tokenizers", "sentencepiece", "safetensors")

_KERAS = {"requirements": KERAS, "absent": _KERAS_ABSENT}


def _of_keras(sizes: Sizes, task: str, backbone: str, heads: str, **options: Any) -> Case:
    keras, hub = imported("keras"), imported("keras_hub")
    policy = "float32" if sizes.dtype == jnp.float32 else "mixed_bfloat16"
    options = {
        "vocabulary_size": sizes.vocabulary,
        "num_layers": sizes.layers,
        heads: sizes.heads,
        "hidden_dim": sizes.width,
        "intermediate_dim": sizes.hidden,
        "dtype": policy,
        **options,
    }
    model = getattr(hub.models, task)(backbone=getattr(hub.models, backbone)(**options), preprocessor=None)
    model.compile(
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    ids = padded(tokens(sizes))
    x = {"token_ids": ids, "padding_mask": ids > 0}
    model.build(jax.tree.map(np.shape, x)) if not model.built else None
    y, weight = padded(tokens(sizes, 2)), np.asarray(ids > 0, np.float32)
    model._symbolic_build(data_batch=(x, y, weight))
    parameters = [jax.ShapeDtypeStruct(v.shape, v.value.dtype) for v in model.trainable_variables]
    others = [np.asarray(v.value) for v in model.non_trainable_variables]
    metrics = [np.asarray(v.value) for v in model.metrics_variables]
    state = [np.asarray(v.value) for v in model.optimizer.variables]
    batch = {"ids": ids, "mask": x["padding_mask"], "y": y, "weight": weight}

    def loss(parameters: Any, ids: Any, mask: Any, y: Any, weight: Any) -> Any:
        given = {"token_ids": ids, "padding_mask": mask}
        variables = parameters, others, metrics
        return model.compute_loss_and_updates(*variables, given, y, weight, training=True, optimizer_variables=state)

    return Case(loss, parameters, batch, has_aux=True)


@model(**_KERAS)
def keras_gpt2(sizes: Sizes) -> Case:
    """Keras' mixed precision, dropout, a tied head, weights of tokens and an accuracy beside the loss."""
    return _of_keras(sizes, "GPT2CausalLM", "GPT2Backbone", "num_heads", max_sequence_length=sizes.length)


@model(**_KERAS)
def keras_llama3(sizes: Sizes) -> Case:
    return _of_keras(sizes, "Llama3CausalLM", "Llama3Backbone", "num_query_heads", num_key_value_heads=sizes.kv_heads)
