"""A Vision Transformer from the modules of flax_layers: patches by one product, attention in both directions.

    python examples/vit.py [--steps n]

The classifier of "An Image is Worth 16x16 Words" (arXiv 2010.11929), and `from_hf`, which takes the state dict of
transformers' ViTForImageClassification. A tiny one learns in which direction the stripes of an image run. It ends with
what each product of a training step is lowered to on a Hopper GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

if find_spec("optax") is None:
    raise SystemExit('vit.py needs optax: pip install optax, or in a clone pip install ".[train,hf]"')

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import coda_jax as coda
from flax_layers import MLP, Attention, LayerNorm, Linear, TransformerBlock


class ViTConfig(NamedTuple):
    """Sizes, by the names of transformers' ViTConfig, which may stand in the place of this one; no dropout."""

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    num_labels: int = 1000


def patches_of(images: jax.Array, size: int) -> jax.Array:
    """The patches of size x size pixels of images (B, H, W, C), row by row: (B, H W / size^2, size size C)."""
    count, height, width, channels = images.shape
    cut = images.reshape(count, height // size, size, width // size, size, channels)
    return cut.swapaxes(2, 3).reshape(count, -1, size * size * channels)


class ViT(nnx.Module):
    """Encoder and classifier; dtype is that of products and of what flows between them, parameters are float32."""

    def __init__(self, config: ViTConfig, *, dtype: Any = None, rngs: nnx.Rngs):
        width, init = config.hidden_size, nnx.initializers.truncated_normal(0.02)
        linear = {"kernel_init": init, "use_bias": True, "dtype": dtype, "rngs": rngs}
        # Query, key and value apart, as checkpoints have them.
        heads = {"num_heads": config.num_attention_heads, "is_causal": False, "rope_theta": None, "separate_qkv": True}
        hidden = {"hidden_features": config.intermediate_size, "activation": config.hidden_act}
        norm = partial(LayerNorm, width, epsilon=config.layer_norm_eps, rngs=rngs)

        self.patch = Linear(config.patch_size**2 * config.num_channels, width, **linear)
        self.class_token = nnx.Param(init(rngs.params(), (1, 1, width)))
        patches = (config.image_size // config.patch_size) ** 2
        self.positions = nnx.Param(init(rngs.params(), (1, 1 + patches, width)))
        self.layers = nnx.List(
            TransformerBlock(norm(), Attention(width, **heads, **linear), norm(), MLP(width, **hidden, **linear))
            for _ in range(config.num_hidden_layers)
        )
        self.norm, self.head = norm(), Linear(width, config.num_labels, **linear)
        self.patch_size = config.patch_size

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (B, num_labels) of images (B, image_size, image_size, num_channels)."""
        x = self.patch(patches_of(images, self.patch_size))
        first, positions = (p[...].astype(x.dtype) for p in (self.class_token, self.positions))
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], *first.shape[1:])), x], axis=1) + positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))  # of the class token alone

    @coda.fuse
    def loss(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross-entropy with labels (B,)."""
        logits = self(images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


HF_MODULES = {
    "patch": "vit.embeddings.patch_embeddings.projection",
    "class_token": "vit.embeddings.cls_token",
    "positions": "vit.embeddings.position_embeddings",
    "attention_norm": "layernorm_before",  # of a layer, as the next seven
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
    "attention.out": "attention.o_proj",
    "mlp_norm": "layernorm_after",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "norm": "vit.layernorm",
    "head": "classifier",
}
HF_OLDER = {
    "vit.encoder.layer.": "vit.layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def hf_name(path: tuple[Any, ...]) -> str:
    """The name in the state dict of the parameter at this path."""
    layer, path = (f"vit.layers.{path[1]}.", path[2:]) if path[0] == "layers" else ("", path)
    leaf = {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}.get(path[-1], "")
    return layer + HF_MODULES[".".join(path[:-1] if leaf else path)] + leaf


def from_hf(arrays: Mapping[str, Any], config: Any, *, dtype: Any = None) -> ViT:
    """A ViT of the state dict of ViTForImageClassification, tensors or arrays, by today's names or those of its files.

    Kernels are transposed, and that of the patches (D, C, P, P) is of pixels whose channels lie side by side here.
    """
    for older, newer in HF_OLDER.items():
        arrays = {name.replace(older, newer): array for name, array in arrays.items()}
    model = ViT(config, dtype=dtype, rngs=nnx.Rngs(0))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(arrays[hf_name(path)])
        if path[-1] == "kernel":
            array = array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0).reshape(-1, len(array))
        if array.shape != parameter.shape:
            raise ValueError(f"{hf_name(path)} has shape {array.shape}, the config says {parameter.shape}")
        parameter[...] = jnp.asarray(array, parameter.dtype)
    return model


def batch(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Images (32, 16, 16, 1) of stripes of any width and place, with noise; which of eight ways they run, (32,)."""
    labels, shape = rng.integers(8, size=32), (32, 1, 1)
    angle, wave, phase = labels.reshape(shape) * np.pi / 8, rng.uniform(0.8, 2.0, shape), rng.uniform(0, 6.3, shape)
    y, x = np.mgrid[:16, :16]
    images = np.sin(wave * (x * np.cos(angle) + y * np.sin(angle)) + phase) + 0.5 * rng.normal(size=(32, 16, 16))
    return jnp.asarray(images[..., None], jnp.bfloat16), jnp.asarray(labels, jnp.int32)


@nnx.jit(donate_argnames=("model", "optimizer"))
def step(model: ViT, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda model: model.loss(images, labels))(model)
    optimizer.update(model, gradient)
    return loss


def main(steps: int = 100) -> tuple[list[float], coda.Explanation]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=8, **sizes)
    model = ViT(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer, rng = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param), np.random.default_rng(0)
    losses = [float(step(model, optimizer, *batch(rng))) for _ in range(steps)]
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    explanation = coda.explain(nnx.grad(ViT.loss), model, *batch(rng), platform="cuda")
    print(explanation)
    return losses, explanation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
