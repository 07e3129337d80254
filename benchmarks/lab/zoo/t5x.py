"""T5X: both of its T5s under its loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
    key,
    of_linen,
    padded,
    tokens,
)
from benchmarks.lab.zoo.sources import folder_of, imported, model

T5X = ("google-research/t5x", "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16")


def _t5x_files(name: str) -> tuple[tuple[str, str, str], ...]:
    return *((*T5X, f"t5x/examples/{name}/{part}.py") for part in ("network", "layers")), (*T5X, "t5x/losses.py")


def _of_t5x(sizes: Sizes, name: str, has_accuracy: bool, of_loss: Mapping[str, float], **options: Any) -> Case:
    sys.path.insert(0, str(folder_of(T5X)))
    network, losses = imported(f"t5x.examples.{name}.network"), imported("t5x.losses")
    config = network.T5Config(
        vocab_size=sizes.vocabulary,
        dtype=sizes.dtype,
        emb_dim=sizes.width,
        num_heads=sizes.heads,
        num_encoder_layers=sizes.layers,
        num_decoder_layers=sizes.layers,
        head_dim=sizes.head_dim,
        mlp_dim=sizes.hidden,
        mlp_activations=("gelu", "linear"),
        **options,
    )
    module = network.Transformer(config)
    batch = {"inputs": padded(tokens(sizes)), "targets": padded(tokens(sizes, 2)), "dropout_rng": key()}

    def loss(parameters: Any, inputs: Any, targets: Any, dropout_rng: Any) -> Any:
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        logits = module.apply({"params": parameters}, inputs, shifted, targets, rngs={"dropout": dropout_rng})
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
        value, z_loss, weight_sum = losses.compute_weighted_cross_entropy(
            logits, targets, weights, z_loss=1e-4, **of_loss
        )
        if "loss_normalizing_factor" not in of_loss:
            value = value / weight_sum
        return value, (z_loss, weight_sum, jnp.argmax(logits, -1) == targets) if has_accuracy else z_loss

    parameters = of_linen(module, batch["inputs"], batch["targets"], batch["targets"])
    return Case(loss, parameters, batch, has_aux=True)


@model(files=_t5x_files("t5"))
def t5x_t5(sizes: Sizes) -> Case:
    """An encoder and a decoder, relative positions, gated GELU, dropout; a loss with z-loss by its custom_vjp."""
    return _of_t5x(sizes, "t5", True, {"label_smoothing": 0.0, "loss_normalizing_factor": 1000.0})


@model(files=_t5x_files("scalable_t5"))
def t5x_scalable_t5(sizes: Sizes) -> Case:
    """Layers in a scan under a checkpoint that keeps products, dropout, a loss with z-loss and smoothed labels."""
    options = {"logits_via_embedding": True, "remat_policy": "minimal", "scan_layers": True}
    return _of_t5x(sizes, "scalable_t5", False, {"label_smoothing": 0.1}, **options)
