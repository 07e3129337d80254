"""Haiku, and AlphaFold, which is written in it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lab.zoo.case import (
    Case,
    Sizes,
    key,
    padded,
    tokens,
    types_of,
)
from benchmarks.lab.zoo.sources import folder_of, imported, model

HAIKU = ("dm-haiku==0.0.17", "jmp==0.0.4", "tabulate==0.10.0")

HAIKU_FILES = ("dm-haiku", "f4d858a5cbb29140855d68f81f5fd625e078a5ae")


@model(
    requirements=HAIKU,
    files=tuple(
        ("google-deepmind/dm-haiku", HAIKU_FILES[1], f"examples/{name}.py")
        for name in ("__init__", "transformer/__init__", "transformer/model", "transformer/train")
    ),
    absent=("examples.transformer.dataset",),
)
def haiku_transformer(sizes: Sizes) -> Case:
    """Dropout, a head with a bias, targets as one-hot arrays, a mask."""
    sys.path.insert(0, str(folder_of(("google-deepmind/dm-haiku", HAIKU_FILES[1]))))
    train = imported("examples.transformer.train")
    train.dataset.VOCAB_SIZE, train.dataset.PAD_TOKEN = sizes.vocabulary, 0
    train.NUM_LAYERS, train.NUM_HEADS, train.MODEL_SIZE = sizes.layers, sizes.heads, sizes.width
    train.KEY_SIZE = sizes.width // sizes.heads
    batch = {"inputs": padded(tokens(sizes)), "targets": padded(tokens(sizes, 2)), "rng": key()}

    def loss(parameters: Any, inputs: Any, targets: Any, rng: Any) -> jax.Array:
        data = argparse.Namespace(inputs=inputs, targets=targets)
        value: jax.Array = train.loss_fn.apply(parameters, rng, data)
        return value

    data = argparse.Namespace(**{name: batch[name] for name in ("inputs", "targets")})
    parameters = jax.eval_shape(lambda: train.loss_fn.init(jax.random.key(0), data))
    return Case(loss, types_of(parameters, sizes.dtype), batch)


class _OlderUtil:
    """The functions of jax.util, which is no more, that AlphaFold calls."""

    @staticmethod
    def wraps(function: Callable[..., Any], docstr: str = "") -> Callable[..., Any]:
        del docstr
        return functools.wraps(function)


ALPHAFOLD = ("alphafold-colabfold==2.3.6", "ml_collections==1.1.0", *HAIKU)


@model(requirements=ALPHAFOLD, absent=("tensorflow", "Bio", "tree", "scipy"))
def alphafold_evoformer(sizes: Sizes) -> Case:
    """Two blocks of the Evoformer in its stack under checkpoints, with the heads of masked residues and distances."""
    for name, of_older_jax in {"tree_map": jax.tree.map, "util": _OlderUtil}.items():
        if not hasattr(jax, name):
            setattr(jax, name, of_older_jax)
    hk = imported("haiku")
    modules = imported("alphafold.model.modules")
    layer_stack = imported("alphafold.model.layer_stack")
    prng = imported("alphafold.model.prng")
    config = imported("alphafold.model.config").model_config("model_1").model
    config.global_config.use_remat = True
    evoformer, heads = config.embeddings_and_evoformer.evoformer, config.heads
    rows, residues = (128, 256) if sizes.width > 1000 else (32, 64)
    channels = {"msa": 256, "pair": 128} if sizes.width > 1000 else {"msa": 32, "pair": 16}
    rng = np.random.default_rng(1)
    batch = {
        "msa": np.asarray(rng.normal(size=(rows, residues, channels["msa"])), sizes.dtype),
        "pair": np.asarray(rng.normal(size=(residues, residues, channels["pair"])), sizes.dtype),
        "true_msa": rng.integers(0, 23, (rows, residues), dtype=np.int32),
        "bert_mask": np.asarray(rng.random((rows, residues)) < 0.15, np.float32),
        "pseudo_beta": np.asarray(rng.normal(size=(residues, 3)) * 10, np.float32),
        "pseudo_beta_mask": np.ones(residues, np.float32),
        "rng": key(),
    }

    def stack(**batch: Any) -> jax.Array:
        masks = {"msa": jnp.ones((rows, residues), sizes.dtype), "pair": jnp.ones((residues, residues), sizes.dtype)}
        block = modules.EvoformerIteration(evoformer, config.global_config, is_extra_msa=False)

        def evoformer_fn(x: Any) -> Any:
            act, safe_key = x
            safe_key, safe_subkey = safe_key.split()
            return block(activations=act, masks=masks, is_training=True, safe_key=safe_subkey), safe_key

        evoformer_fn = hk.remat(evoformer_fn)
        act = {"msa": batch["msa"], "pair": batch["pair"]}
        found, _ = layer_stack.layer_stack(sizes.layers)(evoformer_fn)((act, prng.SafeKey(hk.next_rng_key())))
        total = jnp.zeros(())
        for name, head in (("masked_msa", modules.MaskedMsaHead), ("distogram", modules.DistogramHead)):
            one = head(heads[name], config.global_config)
            total += heads[name].weight * one.loss(one(found, batch, True), batch)["loss"]
        return total

    transformed = hk.transform(stack)
    inputs = {name: x for name, x in batch.items() if name != "rng"}

    def loss(parameters: Any, rng: Any, **batch: Any) -> jax.Array:
        value: jax.Array = transformed.apply(parameters, rng, **batch)
        return value

    parameters = jax.eval_shape(lambda: transformed.init(jax.random.PRNGKey(0), **inputs))
    return Case(loss, types_of(parameters, sizes.dtype), batch)
