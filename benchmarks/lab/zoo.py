"""`coda.fuse` on models that others wrote: `python -m benchmarks.lab.zoo [--only NAME ...] [--folder FOLDER]`

Each model is brought as its authors have it: packages by pip, a pinned version each and without what it depends on;
examples that are in no package from GitHub, at a pinned commit. They lie in FOLDER, a temporary one without the option,
and nothing else is installed. Packages that a model's file imports and that its training does not call are replaced by
mocks. Each has the loss that its own trainer takes, with dropout, masks, auxiliary losses, checkpoints and constraints.

Three functions are compared: value and gradient in plain JAX, of the fused loss ("grad(fuse)"), and the fused value and
gradient ("fuse(grad)").

* At sizes of real models, some 8 x 1024 tokens in 2 layers, by shapes alone: bytes of the passes between products and
  bytes that are kept for the backward pass, by `coda.explain` for an H100, and products, fused and all.
* At small sizes in float32, compiled for the CPU: XLA's temporaries, the loss, and the distance of the gradients from
  those of plain JAX, relative, of the parameter that is furthest.

A line ends with what is worse than plain JAX: passes, kept bytes, temporaries by more than 1 %, gradients by more than
1e-4 or an exception. Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import coda_jax as coda
from benchmarks import compare

_ADOPTING = Path(__file__).parents[2] / "examples" / "adopting"
DEVICES = 8
MORE, GRADIENT = 1.01, 1e-4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that models have in common, and the dtype that they compute in."""

    layers: int = 2
    batch: int = 8
    length: int = 1024
    vocabulary: int = 32000
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    dtype: Any = jnp.bfloat16


LARGE = Sizes()
SMALL = Sizes(
    batch=8,
    length=128,
    vocabulary=2048,
    width=128,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=32,
    dtype=jnp.float32,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at some sizes.

    Attributes:
      loss: of parameters and the arrays of a batch, by name.
      parameters: types.
      batch: arrays.
      has_aux: whether the loss returns something beside it.
      on: the mesh and the rules that it is traced under.
      shardings: of the parameters, and of the batch's arrays; None for one device.
    """

    loss: Callable[..., Any]
    parameters: Any
    batch: Mapping[str, np.ndarray]
    has_aux: bool = False
    on: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    shardings: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """The origin of a model, and the function that makes it."""

    make: Callable[[Sizes], Case]
    requirements: tuple[str, ...] = ()
    files: tuple[tuple[str, str, str], ...] = ()
    absent: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()


MODELS: dict[str, Model] = {}


def model(**source: Any) -> Callable[[Callable[[Sizes], Case]], Callable[[Sizes], Case]]:
    """Registers what makes a model, by its name.

    Args:
      requirements: of pip.
      files: repository, commit and path of each file that is fetched. They lie in one folder by their paths.
      absent: packages that are imported and not called.
      emptied: packages whose `__init__.py` imports more than the model needs.
    """

    def register(make: Callable[[Sizes], Case]) -> Callable[[Sizes], Case]:
        MODELS[make.__name__] = Model(make, **source)
        return make

    return register


def imported(name: str) -> Any:
    """A module of the folder's."""
    return importlib.import_module(name)


# The models' arguments


def tokens(sizes: Sizes, seed: int = 1) -> np.ndarray:
    """Tokens of which none is padding."""
    return np.random.default_rng(seed).integers(2, sizes.vocabulary, (sizes.batch, sizes.length), dtype=np.int32)


def padded(x: np.ndarray) -> np.ndarray:
    """The tokens with padding, 0, at the end of every other row."""
    ends = x.shape[1] - (np.arange(x.shape[0]) % 2) * (x.shape[1] // 4)
    return np.where(np.arange(x.shape[1]) < ends[:, None], x, 0)


def key() -> np.ndarray:
    """A key of random numbers."""
    return np.asarray([0, 7], np.uint32)


def types_of(tree: Any, dtype: Any = None) -> Any:
    """Types of arrays, those of floats with another dtype."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, dtype if is_float and dtype is not None else x.dtype)

    return jax.tree.map(leaf, tree)


def values(types: Any) -> Any:
    """Arrays: vectors near 1, and others that keep the variance."""
    rng = np.random.default_rng(0)

    def leaf(x: Any) -> np.ndarray:
        drawn = rng.normal(size=x.shape)
        inputs = np.prod(x.shape[:-1]) ** 0.5 if len(x.shape) == 2 else np.prod(x.shape) ** (1 / 3)
        drawn = 1 + drawn / 10 if len(x.shape) < 2 else drawn / max(float(inputs), 4)
        return np.asarray(drawn, x.dtype)

    return jax.tree.map(leaf, types)


def of_nnx(make: Callable[[nnx.Rngs], Any], dtype: Any = None) -> tuple[Any, Any]:
    """A module's graph and the types of its parameters."""
    graph, state, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)  # type: ignore[misc]
    return graph, types_of(state, dtype)


def of_linen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The types of a module's parameters."""
    made = jax.eval_shape(
        lambda: module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *args, **kwargs)
    )
    return types_of(nn.meta.unbox(made["params"]))


# Tunix: its models under the loss of its trainer, with the targets as one-hot arrays


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


# Examples of Flax and T5X, nanodo: linen


FLAX = ("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0")
T5X = ("google-research/t5x", "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16")
NANODO = ("google-deepmind/nanodo", "10aefdeed40a63293daf112b91a5538cd24fa3a4")
_TRAINING = ("clu", "tensorflow", "tensorflow_datasets", "tensorflow_text", "ml_collections", "grain", "sentencepiece")


def _sizes_of_flax(sizes: Sizes) -> dict[str, Any]:
    """The fields of a `TransformerConfig` in Flax's examples."""
    of = {"vocab_size": sizes.vocabulary, "dtype": sizes.dtype, "emb_dim": sizes.width, "num_heads": sizes.heads}
    return of | {"num_layers": sizes.layers, "qkv_dim": sizes.width, "mlp_dim": sizes.hidden, "max_len": sizes.length}


@model(
    files=tuple((*FLAX, f"examples/lm1b/{name}.py") for name in ("models", "train", "utils")),
    absent=(*_TRAINING, "input_pipeline", "temperature_sampler", "tokenizer"),
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


def folder_of(repository: tuple[str, str]) -> Path:
    """The folder of a repository's files."""
    return Path(os.environ["CODA_JAX_ZOO"]) / "github" / repository[0] / repository[1]


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


@model(files=tuple((*NANODO, f"nanodo/{name}.py") for name in ("model", "fsdp", "loss", "data")), absent=_TRAINING)
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


_GEMMA_FILES = (
    *("transformer", "transformer_cfg", "layers", "modules", "params", "helpers", "sow_lib", "train"),
    "positional_embeddings",
)


@model(
    files=tuple((*FLAX, f"examples/gemma/{name}.py") for name in _GEMMA_FILES),
    requirements=("jaxtyping==0.3.11", "wadler_lindig==0.1.8"),
    absent=(*_TRAINING, "input_pipeline", "sampler", "tokenizer", "train_cfg"),
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
    absent=(*_TRAINING, "input_pipeline", "tensorboard"),
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


@model(files=_t5x_files("scalable_t5"))
def t5x_scalable_t5(sizes: Sizes) -> Case:
    """Layers in a scan under a checkpoint that keeps products, dropout, a loss with z-loss and smoothed labels."""
    options = {"logits_via_embedding": True, "remat_policy": "minimal", "scan_layers": True}
    return _of_t5x(sizes, "scalable_t5", False, {"label_smoothing": 0.1}, **options)


BIG_VISION = ("google-research/big_vision", "0127fb6b337ee2a27bf4e54dea79cff176527356")


@model(
    files=tuple((*BIG_VISION, f"big_vision/{name}.py") for name in ("models/vit", "models/common", "utils")),
    absent=(*_TRAINING, "einops", "absl.flags", "big_vision.pp", "google", "sklearn"),
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


# Keras: its own trainer's function


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


# MaxText: its whole decoder, its trainer's loss, its rules


MAXTEXT = (
    *("maxtext==0.2.5", "aqtp==0.9.0", "qwix==0.1.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
    *("pydantic==2.14.4", "pydantic_core==2.50.5", "annotated_types==0.8.0", "typing_inspection==0.4.5"),
    *("jinja2==3.1.6", "markupsafe==3.0.4", "psutil==7.2.2", "absl-py==2.5.1", "etils==1.15.0"),
)
_MAXTEXT_ABSENT = (
    *("pathwaysutils", "tokamax", "tensorflow", "ml_goodput_measurement", "cloud_tpu_diagnostics", "tensorboardX"),
    *("grain", "google", "tensorflow_datasets", "tensorflow_text", "sentencepiece", "datasets", "gcsfs", "drjax"),
    *("cloud_accelerator_diagnostics", "mlperf_logging", "ml_collections", "tiktoken", "librosa", "array_record"),
    *("tpu_info", "jetstream", "google_cloud_mldiagnostics", "tunix", "maxtext.kernels.mhc"),
    *("maxtext.checkpoint_conversion", "maxtext.layers.engram", "transformers", "huggingface_hub"),
)
_MAXTEXT = {"requirements": MAXTEXT, "absent": _MAXTEXT_ABSENT}


def _of_maxtext(sizes: Sizes, **options: Any) -> Case:
    from jax.experimental import xla_metadata

    for name in ("must_fuse_call",):  # of a newer jax, for kernels of TPUs
        if not hasattr(xla_metadata, name):
            setattr(xla_metadata, name, None)
    train = imported("maxtext.trainers.pre_train.train")
    pyconfig = imported("maxtext.configs.pyconfig")
    creation = imported("maxtext.utils.model_creation_utils")
    of: dict[str, Any] = {
        "base_emb_dim": sizes.width,
        "base_mlp_dim": sizes.hidden,
        "base_num_query_heads": sizes.heads,
    }
    of |= {"base_num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "base_num_decoder_layers": sizes.layers}
    of |= {"max_target_length": sizes.length, "vocab_size": sizes.vocabulary, "dtype": jnp.dtype(sizes.dtype).name}
    of |= {"per_device_batch_size": sizes.batch // DEVICES, "run_name": "zoo", "enable_checkpointing": False}
    of |= {
        "hardware": "cpu",
        "attention": "dot_product",
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
    }
    written = [
        f"{name}={value}".replace("True", "true").replace("False", "false") for name, value in (of | options).items()
    ]
    config = pyconfig.initialize(["", str(Path(str(pyconfig.__file__)).parent / "base.yml"), *written])
    axes = tuple(config.mesh_axes)
    shape = tuple(DEVICES if axis == "fsdp" else 1 for axis in axes)
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))

    @contextlib.contextmanager
    def on() -> Iterator[None]:
        with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
            yield

    with on():
        made = nnx.eval_shape(lambda: creation.from_config(config, mesh=mesh, rngs=nnx.Rngs(0)))
        graph, state, others = nnx.split(made, nnx.Param, ...)  # type: ignore[misc]
        lies = nn.logical_to_mesh_sharding(nnx.get_partition_spec(state), mesh, config.logical_axis_rules)
    others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)
    positions = np.broadcast_to(np.arange(sizes.length, dtype=np.int32), (sizes.batch, sizes.length))
    segments = np.asarray(padded(tokens(sizes)) > 0, np.int32)
    batch = {"inputs": padded(tokens(sizes)), "targets": padded(tokens(sizes, 2))}
    batch |= {f"{name}_position": positions for name in ("inputs", "targets")}
    batch |= {f"{name}_segmentation": segments for name in ("inputs", "targets")}

    def loss(parameters: Any, **batch: Any) -> Any:
        model = nnx.merge(graph, parameters, others, copy=True)
        value, aux = train.loss_fn(model, config, batch, None, None)
        return value, {name: aux[name] for name in ("xent_sum", "z_loss", "total_weights") if name in aux}

    over = jax.NamedSharding(mesh, jax.P("fsdp"))
    return Case(loss, types_of(state), batch, True, on, (lies, dict.fromkeys(batch, over)))


@model(**_MAXTEXT)
def maxtext_defaults(sizes: Sizes) -> Case:
    """Layers in a scan, of which a checkpoint keeps nothing."""
    return _of_maxtext(sizes)


@model(**_MAXTEXT)
def maxtext_llama2(sizes: Sizes) -> Case:
    """Layers by themselves, a checkpoint that keeps products, a z-loss."""
    return _of_maxtext(sizes, scan_layers=False, remat_policy="minimal", z_loss_multiplier=1e-4)


@model(**_MAXTEXT)
def maxtext_gemma2(sizes: Sizes) -> Case:
    options = {"decoder_block": "gemma2", "remat_policy": "save_qkv_proj", "final_logits_soft_cap": 30.0}
    return _of_maxtext(
        sizes, scan_layers=False, attn_logits_soft_cap=50.0, mlp_activations="['gelu','linear']", **options
    )


# Haiku, Equinox, AlphaFold


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


EQUINOX = ("equinox==0.13.8", "jaxtyping==0.3.11", "wadler_lindig==0.1.8", "einops==0.8.2")
EQUINOX_FILES = ("patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d")


def _of_notebook(name: str, begins: tuple[str, ...]) -> dict[str, Any]:
    """The names that cells of a notebook of Equinox define, of those that begin so."""
    notebook = json.loads((folder_of(EQUINOX_FILES) / f"docs/examples/{name}.ipynb").read_text())
    library = sys.modules[f"zoo_{name}"] = ModuleType(f"zoo_{name}")
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and text.startswith(begins):
            exec(text.partition("@eqx.filter_jit")[0], vars(library))
    return vars(library)


@model(
    requirements=EQUINOX,
    files=((*EQUINOX_FILES, "docs/examples/bert.ipynb"),),
    absent=("datasets", "tqdm", "transformers"),
)
def equinox_bert(sizes: Sizes) -> Case:
    """The BERT of Equinox's pages: modules of one row under vmap, of one token under a second, with dropout."""
    eqx = imported("equinox")
    module = _of_notebook("bert", ("import ", "class ", "@eqx.filter_value_and_grad"))
    config = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.hidden,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": sizes.length,
        "type_vocab_size": 2,
    }
    made = eqx.filter_eval_shape(
        lambda: module["BertClassifier"](config=config, num_classes=2, key=jax.random.PRNGKey(0))
    )
    is_type = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    parameters, static = eqx.partition(made, is_type)
    batch = {
        "token_ids": padded(tokens(sizes)),
        "segment_ids": np.zeros((sizes.batch, sizes.length), np.int32),
        "label": np.arange(sizes.batch, dtype=np.int32) % 2,
        "key": key(),
    }
    compute_loss = module["compute_loss"]._fun

    def loss(parameters: Any, key: Any, **inputs: Any) -> jax.Array:
        value: jax.Array = compute_loss(eqx.combine(parameters, static), inputs, key)
        return value

    return Case(loss, types_of(parameters, sizes.dtype), batch)


@model(
    requirements=EQUINOX,
    files=((*EQUINOX_FILES, "docs/examples/vision_transformer.ipynb"),),
    absent=("torchvision",),
)
def equinox_vit(sizes: Sizes) -> Case:
    """The vision transformer of Equinox's pages: one token more than a power of 2, and a loss of 10 classes."""
    eqx = imported("equinox")
    module = _of_notebook("vision_transformer", ("import ", "# Hyper", "class ", "@eqx.filter_value_and_grad"))
    made = eqx.filter_eval_shape(
        lambda: module["VisionTransformer"](
            embedding_dim=sizes.width,
            hidden_dim=sizes.hidden,
            num_heads=sizes.heads,
            num_layers=sizes.layers,
            dropout_rate=0.1,
            patch_size=4,
            num_patches=sizes.length,
            num_classes=10,
            key=jax.random.PRNGKey(0),
        )
    )
    parameters, static = eqx.partition(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    side = 4 * int(sizes.length**0.5)
    batch = {
        "images": np.asarray(np.random.default_rng(1).normal(size=(sizes.batch, 3, side, side)), sizes.dtype),
        "labels": np.arange(sizes.batch, dtype=np.int32) % 10,
        "key": np.asarray([[0, i] for i in range(sizes.batch)], np.uint32),
    }
    compute = module["compute_grads"]._fun

    def loss(parameters: Any, images: Any, labels: Any, key: Any) -> jax.Array:
        value: jax.Array = compute(eqx.combine(parameters, static), images, labels, key)
        return value

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


PENZAI = ("penzai==0.2.5", "treescope==0.1.10", "ordered-set==4.1.0", *EQUINOX)


@model(requirements=PENZAI)
def penzai_llama(sizes: Sizes) -> Case:
    """Named axes; the loss is a mean of log-probabilities."""
    pz = imported("penzai.pz")
    library = imported("penzai.models.transformer.variants.llamalike_common")
    config = library.LlamalikeTransformerConfig(
        num_kv_heads=sizes.kv_heads,
        query_head_multiplier=sizes.heads // sizes.kv_heads,
        embedding_dim=sizes.width,
        projection_dim=sizes.head_dim,
        mlp_hidden_dim=sizes.hidden,
        num_decoder_blocks=sizes.layers,
        vocab_size=sizes.vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        parameter_dtype=sizes.dtype,
        activation_dtype=sizes.dtype,
    )
    make = lambda: library.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))  # noqa: E731
    variables = jax.eval_shape(lambda: pz.unbind_params(make(), freeze=True)[1])
    unbound = jax.jit(lambda: pz.unbind_params(make(), freeze=True)[0])()  # with the numbers of norms

    def loss(parameters: Any, tokens: Any) -> Any:
        model = pz.bind_variables(unbound, parameters)
        named = pz.nx.wrap(tokens, "batch", "seq")
        logits = model(named)
        log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
        targets = named[{"seq": pz.slice[1:]}]
        found = log_probs[{"seq": pz.slice[:-1]}].untag("vocabulary")
        picked = pz.nx.nmap(lambda row, label: row[label])(found, targets)
        return -jnp.mean(picked.unwrap("batch", "seq")), None

    return Case(loss, types_of(variables, sizes.dtype), {"tokens": tokens(sizes)}, has_aux=True)


LEVANTER = (
    *("levanter==1.1", "haliax==1.3", "draccus==0.11.6", "mergedeep==1.3.4", "toml==0.10.2", "jmp==0.0.4"),
    *("typing_inspect==0.9.0", "mypy_extensions==1.2.0", "pyyaml_include==1.4.1", *EQUINOX),
)
_LEVANTER_ABSENT = (
    *("pytimeparse", "furl", "sentencepiece", "hf_transfer", "lz4", "zstd", "lm_eval"),
    *("levanter.distributed", "levanter.checkpoint", "levanter.trainer", "levanter.logging", "requests"),
    *("wandb", "tensorstore", "ray", "tensorboardX", "datasets", "fsspec", "gcsfs"),
    *("pyarrow", "zstandard", "tblib", "dataclasses_json", "humanfriendly", "braceexpand", "tqdm_loggable"),
    *("deepdiff", "soundfile", "librosa", "async_lru", "transformers", "huggingface_hub"),
)


@model(requirements=LEVANTER, absent=_LEVANTER_ABSENT, emptied=("levanter",))
def levanter_llama(sizes: Sizes) -> Case:
    """Named axes, layers in a scan under checkpoints, targets as one-hot arrays; parameters are cast for each step."""
    from jax._src import tree_util
    from jax._src.numpy import einsum, lax_numpy

    if not hasattr(tree_util, "BuiltInKeyEntry"):  # of an older jax, in annotations
        tree_util.BuiltInKeyEntry = object  # type: ignore[attr-defined]
    if not hasattr(lax_numpy, "_einsum"):  # where an older jax had it
        lax_numpy._einsum = einsum._einsum  # type: ignore[attr-defined]
    eqx, hax = imported("equinox"), imported("haliax")
    llama, lm_model = (imported(f"levanter.models.{name}") for name in ("llama", "lm_model"))
    split = lambda key, count: jax.random.split(key, count) if count > 1 else jax.random.split(key)[0]  # noqa: E731
    llama.jrandom = argparse.Namespace(split=split)  # one key, as an older jax took an array of one
    config = llama.LlamaConfig(
        seq_len=sizes.length,
        hidden_dim=sizes.width,
        intermediate_dim=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
    )
    vocabulary, rows = hax.Axis("vocab", sizes.vocabulary), hax.Axis("batch", sizes.batch)
    made = eqx.filter_eval_shape(lambda: llama.LlamaLMHeadModel.init(vocabulary, config, key=jax.random.PRNGKey(0)))
    leaves, tree = jax.tree.flatten(made)
    is_type = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    parameters = [x for x, flag in zip(leaves, is_type, strict=True) if flag]

    def loss(parameters: Any, tokens: Any, mask: Any) -> jax.Array:
        given = iter(x.astype(sizes.dtype) for x in parameters)
        model = jax.tree.unflatten(tree, [next(given) if flag else x for x, flag in zip(leaves, is_type, strict=True)])
        named = (hax.named(x, (rows, config.Pos)) for x in (tokens, mask))
        value: jax.Array = model.compute_loss(lm_model.LmExample(*named)).scalar()
        return value

    mask = padded(tokens(sizes)) > 0
    return Case(loss, parameters, {"tokens": padded(tokens(sizes)), "mask": mask})


# How they are brought, and what is found


def fetch(model: Model, folder: Path) -> None:
    """Installs packages and downloads files that are not there."""
    target = folder / "packages"
    missing = [one for one in model.requirements if not _is_there(one, target)]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, "--target", str(target), *missing], check=True)
    for name in model.emptied:  # these import what the model does not need
        (target / name / "__init__.py").write_text("")
    for repository, commit, path in model.files:
        file = folder / "github" / repository / commit / path
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"https://raw.githubusercontent.com/{repository}/{commit}/{path}") as found:
                file.write_bytes(found.read())


def _is_there(requirement: str, target: Path) -> bool:
    name, _, version = requirement.partition("==")
    return (target / f"{name.replace('-', '_')}-{version}.dist-info").exists()


def standing_in(names: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
    """Mocks for packages, as examples/adopting has them."""
    spec = importlib.util.spec_from_file_location("adopting_packages", _ADOPTING / "packages.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    manager: contextlib.AbstractContextManager[None] = module.standing_in(names)
    return manager


def doors(case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Value and gradient of plain JAX, and of both ways to fuse."""

    def loss(parameters: Any, batch: Mapping[str, Any]) -> Any:
        return case.loss(parameters, **batch)

    yield "plain", jax.value_and_grad(loss, has_aux=case.has_aux)
    yield "grad(fuse)", jax.value_and_grad(coda.fuse(loss), has_aux=case.has_aux)
    yield "fuse(grad)", coda.fuse(jax.value_and_grad(loss, has_aux=case.has_aux))


def explained(case: Case) -> Iterator[dict[str, Any]]:
    """Counts of each door."""
    batch: Any = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.batch.items()}
    parameters = case.parameters
    if case.shardings is not None:
        with_sharding = lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies)  # noqa: E731
        parameters = jax.tree.map(with_sharding, parameters, case.shardings[0])
        batch = jax.tree.map(with_sharding, batch, dict(case.shardings[1]))
    for name, function in doors(case):
        with case.on():
            found = coda.explain(function, parameters, batch, platform="cuda", device="H100")
        totals = found.totals
        yield {
            "door": name,
            "passes": totals.passes_bytes / 1e6,
            "kept": totals.kept_bytes / 1e6,
            "products": sum(found.products.values()) + found.others,
            "fused": found.kernels,
        }


def compiled(case: Case) -> Iterator[dict[str, Any]]:
    """Temporaries and results of each door, beside those of the first."""
    parameters, batch = values(case.parameters), dict(case.batch)
    if case.shardings is not None:
        parameters, batch = (
            jax.tree.map(jax.device_put, x, lies) for x, lies in zip((parameters, batch), case.shardings, strict=True)
        )
    expected: Any = None
    for name, function in doors(case):
        with case.on():
            program: Any = jax.jit(function).lower(parameters, batch).compile()
            value, gradients = jax.device_get(program(parameters, batch))
        value = value[0] if case.has_aux else value
        found = {"door": name, "temporaries": program.memory_analysis().temp_size_in_bytes / 1e6, "loss": float(value)}
        expected = (value, gradients) if expected is None else expected
        apart = abs(float(value) - float(expected[0])) / abs(float(expected[0]))
        yield found | {"distance": compare.distance(gradients, expected[1], floor=1e-2), "loss_distance": apart}


def lines_of(name: str) -> Iterator[dict[str, Any]]:
    """The findings of a model, a dict for each door."""
    entry = MODELS[name]
    folder = Path(os.environ["CODA_JAX_ZOO"])
    fetch(entry, folder)
    sys.path.insert(0, str(folder / "packages"))
    found: dict[str, dict[str, Any]] = {}
    with standing_in(entry.absent):
        for part, sizes in ((explained, LARGE), (compiled, SMALL)):
            try:
                for one in part(entry.make(sizes)):
                    found.setdefault(one["door"], {"model": name}).update(one)
            except Exception as error:
                traceback.print_exc()
                failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                found.setdefault(f"{part.__name__} failed", {"model": name, "failure": failure})
    yield from found.values()


def worse(one: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Names what of a door is worse than plain JAX."""
    if "failure" in one:
        return str(one["failure"])
    names = [
        name for name in ("passes", "kept", "temporaries") if one.get(name, 0) > MORE * plain.get(name, 1e30) + 0.1
    ]
    names += [name for name in ("distance", "loss_distance") if one.get(name, 0) > GRADIENT]
    names += ["not finite"] if not np.isfinite(one.get("loss", 0)) else []
    return ", ".join(names)


HEADINGS = (
    f"{'model':20}{'door':12}{'passes MB':>10}{'kept MB':>9}{'products':>10}{'temporaries MB':>16}{'gradients':>11}"
)


def show(found: list[dict[str, Any]]) -> None:
    """Prints the lines of a model."""
    plain = found[0]
    for one in found:
        products = f"{one.get('fused', 0)}/{one.get('products', 0)}"
        numbers = f"{one.get('passes', np.nan):10.0f}{one.get('kept', np.nan):9.0f}{products:>10}"
        numbers += f"{one.get('temporaries', np.nan):16.2f}{one.get('distance', np.nan):11.1e}"
        print(f"{one['model']:20}{one.get('door', ''):12}{numbers}  {worse(one, plain)}", flush=True)


def main() -> int:
    """The command; 1 where something is worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*MODELS], metavar="NAME", default=[*MODELS])
    parser.add_argument("--folder", type=Path, help="where packages and files lie, and stay")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)  # of one model, in this process
    options = parser.parse_args()
    if options.json:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
        print(json.dumps([*lines_of(options.only[0])]))
        return 0
    failed = False
    print(HEADINGS)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in options.only:
            command = [sys.executable, "-m", "benchmarks.lab.zoo", "--json", "--only", name]
            environment = os.environ | {"CODA_JAX_ZOO": str(folder.absolute()), "KERAS_BACKEND": "jax"}
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
            if run.returncode:
                print(f"{name:20}failed", flush=True)
                failed = True
                continue
            found = json.loads(run.stdout.splitlines()[-1])
            show(found)
            failed |= any(worse(one, found[0]) for one in found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
