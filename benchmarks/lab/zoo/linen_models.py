"""Models of linen with trainers of their own: nanodo, Big Vision."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
    key,
    of_linen,
    padded,
    tokens,
)
from benchmarks.lab.zoo.sources import TRAINING, folder_of, imported, model

NANODO = ("google-deepmind/nanodo", "10aefdeed40a63293daf112b91a5538cd24fa3a4")


@model(files=tuple((*NANODO, f"nanodo/{name}.py") for name in ("model", "fsdp", "loss", "data")), absent=TRAINING)
def nanodo(sizes: Sizes) -> Case:
    """Each block under a checkpoint; the embedding is the head, in float32."""
    sys.path.insert(0, str(folder_of(NANODO)))
    library, losses = imported("nanodo.model"), imported("nanodo.loss")
    losses.data.get_in_out = lambda x: (x, jnp.pad(x[:, 1:], ((0, 0), (0, 1))), (x > 0).astype(jnp.float32))
    of = {
        "D": sizes.width,
        "H": sizes.heads,
        "L": sizes.length,
        "N": sizes.layers,
        "V": sizes.vocabulary,
        "F": sizes.hidden,
    }
    module = library.TransformerDo(library.DoConfig(**of, dtype=sizes.dtype, fsdp_enabled=False, remat=True))
    batch = {"inputs": padded(tokens(sizes))}

    def loss(parameters: Any, inputs: Any) -> Any:
        value, aux = losses.get_default_loss_fn(inputs, module.apply, {})(parameters)
        return value, aux.ntokens

    return Case(loss, of_linen(module, batch["inputs"]), batch, has_aux=True)


BIG_VISION = ("google-research/big_vision", "0127fb6b337ee2a27bf4e54dea79cff176527356")


@model(
    files=tuple((*BIG_VISION, f"big_vision/{name}.py") for name in ("models/vit", "models/common", "utils")),
    absent=(*TRAINING, "einops", "absl.flags", "big_vision.pp", "google", "sklearn"),
)
def big_vision_vit(sizes: Sizes) -> Case:
    """A ViT: layers in a scan of which a checkpoint keeps nothing, a sigmoid loss of classes."""
    sys.path.insert(0, str(folder_of(BIG_VISION)))
    vit, utils = imported("big_vision.models.vit"), imported("big_vision.utils")
    side, rows = (224, 64) if sizes.width > 1000 else (32, 8)
    module = vit.Model(
        1000,
        width=sizes.width // 2,
        depth=sizes.layers,
        mlp_dim=sizes.width * 2,
        num_heads=sizes.heads,
        patch_size=(16, 16) if sizes.width > 1000 else (4, 4),
        pool_type="map",
        scan=True,
        dtype_mm=jnp.dtype(sizes.dtype).name,
    )
    rng = np.random.default_rng(1)
    batch = {
        "image": np.asarray(rng.normal(size=(rows, side, side, 3)), np.float32),
        "labels": np.asarray(np.arange(1000) == np.arange(rows)[:, None], np.float32),
        "rng": key(),
    }

    def loss(parameters: Any, image: Any, labels: Any, rng: Any) -> jax.Array:
        logits, _ = module.apply({"params": parameters}, image, train=True, rngs={"dropout": rng})
        value: jax.Array = utils.sigmoid_xent(logits=logits, labels=labels)
        return value

    return Case(loss, of_linen(module, batch["image"]), batch)
