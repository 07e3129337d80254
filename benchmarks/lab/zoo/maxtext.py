"""MaxText: its whole decoder, its trainer's loss, its rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from benchmarks.lab.zoo.case import (
    DEVICES,
    Case,
    Sizes,
    padded,
    tokens,
    types_of,
)
from benchmarks.lab.zoo.sources import imported, model

MAXTEXT = (
    *("maxtext==0.2.5", "aqtp==0.9.0", "qwix==0.1.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
    *("pydantic==2.14.4", "pydantic_core==2.50.5", "annotated_types==0.8.0", "typing_inspection==0.4.5"),
    *("jaxtyping==0.3.11", "wadler_lindig==0.1.8"),
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
