"""Equinox, and libraries of named axes that are written in it: Penzai, Levanter."""

from __future__ import annotations

import argparse
import json
import sys
from types import ModuleType
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

EQUINOX = ("equinox==0.13.8", "jaxtyping==0.3.11", "wadler_lindig==0.1.8", "einops==0.8.2")

EQUINOX_FILES = ("patrick-kidger/equinox", "9336d820b2ef66b360fc6cb3611b3da5cefbb14d")


def _of_notebook(name: str, begins: tuple[str, ...]) -> dict[str, Any]:
    """The names that cells of a notebook of Equinox define, of those that begin so.

    None of them needs torch, which others ask for arrays of its own where it is imported.
    """
    notebook = json.loads((folder_of(EQUINOX_FILES) / f"docs/examples/{name}.ipynb").read_text())
    library = sys.modules[f"zoo_{name}"] = ModuleType(f"zoo_{name}")
    for cell in notebook["cells"]:
        text = "".join(line for line in cell["source"] if line.split()[:2] != ["import", "torch"])
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
