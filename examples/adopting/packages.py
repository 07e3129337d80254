"""How each package's model is made at a tiny size, and what it is given: see run.py."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

LAYERS, ROWS, LENGTH, VOCABULARY, WIDTH, HIDDEN = 4, 32, 128, 512, 128, 256  # a device has 4 tokens for each feature
DEVICES = 8
WIDEST_SUMS = 4 * ROWS // DEVICES * LENGTH * 2 * HIDDEN  # bytes a device of a layer's widest product, gate and up


REMAT_NAMES = ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds mocks in the place of packages, or modules in them, that are imported and, on a CPU, not called."""

    def __init__(self, names: Collection[str]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = any(f"{name}.".startswith(f"{one}.") for one in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        pass


@contextlib.contextmanager
def standing_in(names: Collection[str]) -> Iterator[None]:
    """Mocks for these packages, while others are imported."""
    finder = _Absent(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of each token but the first, given those before."""
    logp = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH))


class Package:
    """The methods that packages have in common.

    Attributes:
      requirements: of pip, the package itself first.
      folder: the package's, in site-packages.
      emptied: folders in it whose `__init__.py` imports more than the model needs.
      not_called: packages that are imported and not called.
      stored: the parameters' dtype; None for the dtype that the model computes in.
    """

    requirements: tuple[str, ...]
    folder: str
    emptied: tuple[str, ...] = ()
    not_called: tuple[str, ...] = ()
    stored: Any = None

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[jax.sharding.Mesh]:
        mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        with jax.set_mesh(mesh):
            yield mesh

    def shardings(self, state: Any, mesh: jax.sharding.Mesh) -> Any:
        """By what the model's parameters say."""
        specs = nnx.get_partition_spec(state)
        return jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)

    def batch(self, dtype: Any) -> dict[str, Any]:
        return {"tokens": tokens()}


class Tunix(Package):
    """Tunix's Llama 3 with a head of its own."""

    requirements = ("google-tunix==0.1.7", "jaxtyping==0.3.11")
    folder = "tunix"
    emptied = ("tunix", "tunix/models/llama3")

    def __init__(self) -> None:
        self.llama = importlib.import_module("tunix.models.llama3.model")

    def make(self, dtype: Any) -> nnx.Module:
        sizes = {"num_layers": LAYERS, "vocab_size": VOCABULARY, "embed_dim": WIDTH, "hidden_dim": HIDDEN}
        heads = {"num_heads": 8, "head_dim": 32, "num_kv_heads": 4, "rope_theta": 500_000, "norm_eps": 1e-5}
        model: nnx.Module = self.llama.Llama3(self.llama.ModelConfig(**sizes, **heads), rngs=nnx.Rngs(0))
        return model

    def loss(self, model: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (ROWS, LENGTH, LENGTH))
        return cross_entropy(model(tokens, positions, None, mask)[0], tokens)


class MaxText(Package):
    """MaxText's decoder layers of a Llama 2 under its rules, each under remat with the names that MaxText keeps."""

    requirements = (
        *("maxtext==0.2.5", "aqtp==0.9.0", "qwix==0.1.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
        *("pydantic==2.14.4", "pydantic_core==2.50.5", "annotated_types==0.8.0", "typing_inspection==0.4.5"),
        *("jinja2==3.1.6", "markupsafe==3.0.4", "psutil==7.2.2", "absl-py==2.5.1", "etils==1.15.0"),
    )
    folder = "maxtext"
    not_called = ("pathwaysutils", "tokamax")
    stored = jnp.float32

    def __init__(self) -> None:
        self.llama = importlib.import_module("maxtext.models.llama2")
        self.pyconfig = importlib.import_module("maxtext.configs.pyconfig")
        self.config = self.configured(jnp.float32)

    def configured(self, dtype: Any) -> Any:
        sizes = {"base_emb_dim": WIDTH, "base_mlp_dim": HIDDEN, "base_num_query_heads": 8, "base_num_kv_heads": 4}
        sizes |= {"head_dim": 32, "max_target_length": LENGTH, "per_device_batch_size": ROWS // jax.device_count()}
        how = {"run_name": "adopting", "enable_checkpointing": False, "hardware": "cpu", "attention": "dot_product"}
        how |= {"skip_jax_distributed_system": True, "dataset_type": "synthetic", "decoder_block": "llama2"}
        how |= {"scan_layers": False, "dtype": jnp.dtype(dtype).name, "mlp_activations": "['silu','linear']"}
        options = [
            f"{name}={value}".replace("True", "true").replace("False", "false") for name, value in (sizes | how).items()
        ]
        base = Path(self.pyconfig.__file__).parent / "base.yml"
        return self.pyconfig.initialize(["", str(base), *options])

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[jax.sharding.Mesh]:
        axes = tuple(self.config.mesh_axes)
        sizes = tuple(jax.device_count() if axis == "fsdp" else 1 for axis in axes)
        mesh = jax.make_mesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
        with jax.set_mesh(mesh), nn.logical_axis_rules(self.config.logical_axis_rules):
            yield mesh

    def shardings(self, state: Any, mesh: jax.sharding.Mesh) -> Any:
        return nn.logical_to_mesh_sharding(nnx.get_partition_spec(state), mesh, self.config.logical_axis_rules)

    def make(self, dtype: Any) -> nnx.Module:
        mesh = jax.sharding.get_mesh()
        config, rngs = self.configured(dtype), nnx.Rngs(0)
        return nnx.List([self.llama.LlamaDecoderLayer(config, "train", mesh, rngs) for _ in range(LAYERS)])

    def batch(self, dtype: Any) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        x, dy = (np.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.bfloat16).astype(dtype) for _ in range(2))
        positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
        return {"x": x, "dy": dy, "positions": positions, "segment_ids": np.ones((ROWS, LENGTH), np.int32)}

    def loss(self, model: Any, x: jax.Array, dy: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names(*REMAT_NAMES)
        for layer in model:
            graph, state = nnx.split(layer)

            def run(state: Any, x: jax.Array, graph: Any = graph) -> jax.Array:
                y: jax.Array = nnx.merge(graph, state)(x, segment_ids, positions, True, "train")[0]
                return y

            x = jax.checkpoint(run, policy=policy)(state, x)
        return jnp.vdot(x.astype(jnp.float32), dy.astype(jnp.float32))


PACKAGES = {package.__name__.lower(): package for package in (MaxText, Tunix)}
