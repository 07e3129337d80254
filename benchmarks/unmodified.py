"""Models in plain JAX, as people write them, with no line for coda_jax: what `coda.fuse` is timed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import coda_jax as coda
from benchmarks import plain_llama
from flax_layers import Llama, LlamaConfig
from flax_layers.layer_stack import run_layers

Params = Any
Apply = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and of what it is given.

    Attributes:
      layers: how many blocks.
      batch, length: rows, and tokens in each.
      width, hidden: of the stream and of the feed-forward layers.
      heads, kv_heads: of attention, and how many of them have keys and values of their own in a Llama.
      patch: pixels of a patch's side, of three colours.
      vocabulary: of models that have an embedding, and classes of those that have a head.
    """

    layers: int
    batch: int
    length: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    patch: int
    vocabulary: int


class Model(NamedTuple):
    """A model.

    Attributes:
      apply: its result, of parameters and a batch.
      init: parameters of a key.
      batch: what it is given, of a key: arrays.
      is_inner: whether the batch is activations, whose gradient a step wants too.
      peer: the same model in `flax_layers`, if it is there.
      has_loss: whether the result is the loss itself.
    """

    apply: Apply
    init: Callable[[jax.Array], Params]
    batch: Callable[[jax.Array], jax.Array]
    is_inner: bool = True
    peer: Peer | None = None
    has_loss: bool = False


class Peer(NamedTuple):
    """A model of the same values.

    Attributes:
      apply: as of a Model, of parameters in another form.
      parameters: these, of the model's.
      plain: a gradient in the form of the model's parameters.
    """

    apply: Apply
    parameters: Callable[[Params], Params]
    plain: Callable[[Params], Params]


class Draw:
    """Random arrays of a key, one after the other."""

    def __init__(self, key: jax.Array, dtype: Any):
        self._key, self._dtype = key, dtype

    def _normal(self, *shape: int) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return jax.random.normal(key, shape, jnp.float32)

    def matrix(self, rows: int, columns: int) -> jax.Array:
        return (self._normal(rows, columns) * rows**-0.5).astype(self._dtype)

    def vector(self, size: int, mean: float = 0.0) -> jax.Array:
        return (mean + 0.1 * self._normal(size)).astype(self._dtype)

    def array(self, *shape: int) -> jax.Array:
        return self._normal(*shape).astype(self._dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    length, half = x.shape[-3], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    return plain_llama.rotate(x, jnp.cos(angles), jnp.sin(angles))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = False) -> jax.Array:
    implementation = "cudnn" if jax.default_backend() == "gpu" and q.dtype != jnp.float32 else "xla"
    o = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=implementation)
    return o.reshape(*o.shape[:-2], -1)


def heads_of(x: jax.Array, count: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], count, -1)


def pre_norm_block(w: Mapping[str, jax.Array], x: jax.Array, heads: int, is_causal: bool) -> jax.Array:
    """A block of GPT-2 and of ViT."""
    h = layer_norm(x, w["norm_1"], w["norm_1_bias"])
    q, k, v = (heads_of(y, heads) for y in jnp.split(h @ w["qkv"] + w["qkv_bias"], 3, axis=-1))
    x = x + attention(q, k, v, is_causal=is_causal) @ w["out"] + w["out_bias"]
    h = layer_norm(x, w["norm_2"], w["norm_2_bias"])
    return x + jax.nn.gelu(h @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]


def bert_block(w: Mapping[str, jax.Array], x: jax.Array, heads: int) -> jax.Array:
    q, k, v = (heads_of(x @ w[name] + w[f"{name}_bias"], heads) for name in "qkv")
    x = layer_norm(x + attention(q, k, v) @ w["out"] + w["out_bias"], w["norm_1"], w["norm_1_bias"])
    h = jax.nn.gelu(x @ w["up"] + w["up_bias"], approximate=False)
    return layer_norm(x + h @ w["down"] + w["down_bias"], w["norm_2"], w["norm_2_bias"])


def gemma_block(w: Mapping[str, jax.Array], x: jax.Array, heads: int) -> jax.Array:
    h = rms_norm(x, 1 + w["norm_1"])
    q, k, v = (heads_of(h @ w[name], heads) for name in "qkv")
    o = attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + rms_norm(o @ w["out"], 1 + w["norm_2"])
    h = rms_norm(x, 1 + w["norm_3"])
    return x + rms_norm((jax.nn.gelu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], 1 + w["norm_4"])


def mixer_block(w: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    h = jnp.swapaxes(layer_norm(x, w["norm_1"], w["norm_1_bias"]), -1, -2)
    h = jax.nn.gelu(h @ w["tokens_up"] + w["tokens_up_bias"]) @ w["tokens_down"] + w["tokens_down_bias"]
    x = x + jnp.swapaxes(h, -1, -2)
    h = layer_norm(x, w["norm_2"], w["norm_2_bias"])
    return x + jax.nn.gelu(h @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]


def layer_of(draw: Draw, matrices: Mapping[str, tuple[int, int]], biased: bool, norms: Mapping[str, float]) -> Params:
    """A block's parameters.

    Args:
      draw: makes the arrays.
      matrices: their shapes by name.
      biased: whether each matrix and each norm has a bias.
      norms: the mean of each norm's scale.
    """
    width = next(iter(matrices.values()))[0]
    w = {name: draw.matrix(*shape) for name, shape in matrices.items()}
    w |= {name: draw.vector(width, mean) for name, mean in norms.items()}
    if biased:
        w |= {f"{name}_bias": draw.vector(shape[1]) for name, shape in matrices.items()}
        w |= {f"{name}_bias": draw.vector(width) for name in norms}
    return w


def stack_of(
    sizes: Sizes,
    dtype: Any,
    block: Apply,
    matrices: Mapping[str, tuple[int, int]],
    *,
    biased: bool = True,
    norms: Mapping[str, float] | None = None,
    scanned: bool = False,
) -> Model:
    """A stack of blocks on activations (B, T, D), unrolled or scanned.

    Args:
      sizes: sizes.
      dtype: of all arrays.
      block: of a layer's parameters and x.
      matrices, biased, norms: as in `layer_of`; two norms of mean 1 by default.
      scanned: whether the layers' parameters are stacked.
    """
    named = {"norm_1": 1.0, "norm_2": 1.0} if norms is None else norms

    def init(key: jax.Array) -> Params:
        draw = Draw(key, dtype)
        layers = [layer_of(draw, matrices, biased, named) for _ in range(sizes.layers)]
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers) if scanned else layers

    def apply(layers: Params, x: jax.Array) -> jax.Array:
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, layers)
            return x
        for w in layers:
            x = block(w, x)
        return x

    return Model(apply, init, lambda key: activations(sizes, dtype, key))


def activations(sizes: Sizes, dtype: Any, key: jax.Array) -> jax.Array:
    return Draw(key, dtype).array(sizes.batch, sizes.length, sizes.width)


def attention_matrices(sizes: Sizes) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(("q", "k", "v", "out"), (sizes.width, sizes.width))


def mlp_matrices(sizes: Sizes) -> dict[str, tuple[int, int]]:
    return {"up": (sizes.width, sizes.hidden), "down": (sizes.hidden, sizes.width)}


def llama(sizes: Sizes, dtype: Any, *, scanned: bool = False, packed: bool = False, joined: bool = False) -> Model:
    """`benchmarks.plain_llama`'s blocks; beside them those of `flax_layers`.

    Args:
      sizes, dtype: as everywhere.
      scanned: whether layers are.
      packed: whether rows hold documents: a new one begins where a token's first feature is beyond 3, after some 740.
      joined: whether q, k and v have one weight, and gate and up another, as in `flax_layers`.
    """
    width, narrow = sizes.width, sizes.width // sizes.heads * sizes.kv_heads
    config = LlamaConfig(sizes.vocabulary, width, sizes.hidden, sizes.layers, sizes.heads, sizes.kv_heads)
    if joined:
        matrices = {"out": (width, width), "qkv": (width, width + 2 * narrow), "gate_up": (width, 2 * sizes.hidden)}
        matrices |= {"down": (sizes.hidden, width)}
    else:
        matrices = attention_matrices(sizes) | {"k": (width, narrow), "v": (width, narrow)}
        matrices |= {"gate": (width, sizes.hidden)} | mlp_matrices(sizes)

    def block(w: Params, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        cos, sin = plain_llama.angles(jnp.arange(sizes.length), config)
        x = plain_llama.attention(x, w, cos, sin, config, mask)
        return plain_llama.mlp(x, w, config.rms_norm_eps)

    def packed_apply(layers: Params, x: jax.Array) -> jax.Array:
        ids = jnp.cumsum(x[..., 0] > 3, axis=1)
        for w in layers:
            x = block(w, x, (ids[:, :, None] == ids[:, None])[:, None])
        return x

    norms = {"attention_norm": 1.0, "mlp_norm": 1.0}
    model = stack_of(sizes, dtype, block, matrices, biased=False, norms=norms, scanned=scanned)
    if packed:
        return model._replace(apply=packed_apply)
    return model if scanned else model._replace(peer=fused_llama(sizes, config, dtype, joined))


def join_weights(w: Params, *, qkv: bool = True, gate_up: bool = True) -> Params:
    """A Llama layer's parameters with one weight of q, k and v, and one of gate and up."""
    of = dict(w)
    for name, parts, is_wanted in (("qkv", ("q", "k", "v"), qkv), ("gate_up", ("gate", "up"), gate_up)):
        if is_wanted:
            of[name] = jnp.concatenate([of.pop(part) for part in parts], axis=1)
    return of


def split_weights(w: Params, sizes: Sizes) -> Params:
    """Undoes `join_weights`."""
    of, narrow = dict(w), sizes.width // sizes.heads * sizes.kv_heads
    if "gate_up" in of:
        of["gate"], of["up"] = jnp.split(of.pop("gate_up"), 2, axis=1)
    if "qkv" in of:
        of["q"], of["k"], of["v"] = jnp.split(of.pop("qkv"), [sizes.width, sizes.width + narrow], axis=1)
    return of


def fused_llama(sizes: Sizes, config: LlamaConfig, dtype: Any, joined: bool) -> Peer:
    """The blocks of `flax_layers`."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)).layers)
    graphdef, abstract = nnx.split(model)
    tree = jax.tree.structure(abstract)

    @coda.fuse
    def apply(leaves: Params, x: jax.Array) -> jax.Array:
        return run_layers(nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), x)

    def parameters(layers: Params) -> Params:
        return jax.tree.leaves([_fused_layer(split_weights(w, sizes)) for w in layers])

    def plain(leaves: Params) -> Params:
        layers = nnx.to_pure_dict(jax.tree.unflatten(tree, leaves))
        of = [plain_llama.layer_from_fused(layers[i], config) for i in range(config.num_hidden_layers)]
        return [join_weights(w) for w in of] if joined else of

    return Peer(apply, parameters, plain)


def _fused_layer(w: Params) -> Params:
    """A layer's parameters under the names of `flax_layers`."""
    return {
        "attention": {
            "out": {"kernel": w["out"]},
            "qkv": {"kernel": jnp.concatenate([w[name] for name in "qkv"], axis=1)},
        },
        "attention_norm": {"scale": w["attention_norm"]},
        "mlp": {"down": {"kernel": w["down"]}, "gate_up": jnp.stack([w["gate"], w["up"]], axis=1)},
        "mlp_norm": {"scale": w["mlp_norm"]},
    }


def gpt2(sizes: Sizes, dtype: Any) -> Model:
    matrices = {"qkv": (sizes.width, 3 * sizes.width), "out": (sizes.width, sizes.width)} | mlp_matrices(sizes)
    return stack_of(sizes, dtype, lambda w, x: pre_norm_block(w, x, sizes.heads, is_causal=True), matrices)


def bert(sizes: Sizes, dtype: Any) -> Model:
    matrices = attention_matrices(sizes) | mlp_matrices(sizes)
    return stack_of(sizes, dtype, lambda w, x: bert_block(w, x, sizes.heads), matrices)


def gemma(sizes: Sizes, dtype: Any) -> Model:
    matrices = attention_matrices(sizes) | {"gate": (sizes.width, sizes.hidden)} | mlp_matrices(sizes)
    norms = {f"norm_{i}": 0.0 for i in (1, 2, 3, 4)}
    return stack_of(sizes, dtype, lambda w, x: gemma_block(w, x, sizes.heads), matrices, biased=False, norms=norms)


def mixer(sizes: Sizes, dtype: Any) -> Model:
    half = sizes.width // 2
    tokens = {"tokens_up": (sizes.length, half), "tokens_down": (half, sizes.length)}
    return stack_of(sizes, dtype, mixer_block, mlp_matrices(sizes) | tokens)


def vit(sizes: Sizes, dtype: Any, *, pooled: bool = False) -> Model:
    """Classes of images as patches (B, T, pixels), from a token of its own or from the mean of all."""
    pixels = sizes.patch**2 * 3
    count = sizes.length if pooled else sizes.length - 1
    blocks = gpt2(sizes, dtype)

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key)
        draw = Draw(keys[1], dtype)
        return {
            "patches": draw.matrix(pixels, sizes.width),
            "patches_bias": draw.vector(sizes.width),
            "positions": draw.array(sizes.length, sizes.width),
            "token": draw.vector(sizes.width),
            "norm": draw.vector(sizes.width, 1.0),
            "norm_bias": draw.vector(sizes.width),
            "head": draw.matrix(sizes.width, sizes.vocabulary),
            "head_bias": draw.vector(sizes.vocabulary),
            "layers": blocks.init(keys[0]),
        }

    def apply(w: Params, images: jax.Array) -> jax.Array:
        x = images @ w["patches"] + w["patches_bias"]
        if not pooled:
            token = jnp.broadcast_to(w["token"], (x.shape[0], 1, sizes.width))
            x = jnp.concatenate([token, x], axis=1)
        x = x + w["positions"]
        for layer in w["layers"]:
            x = pre_norm_block(layer, x, sizes.heads, is_causal=False)
        x = layer_norm(x, w["norm"], w["norm_bias"])
        x = jnp.mean(x, axis=1) if pooled else x[:, 0]
        return x @ w["head"] + w["head_bias"]

    def batch(key: jax.Array) -> jax.Array:
        return Draw(key, dtype).array(sizes.batch, count, pixels)

    return Model(apply, init, batch, is_inner=False)


def language_model(sizes: Sizes, dtype: Any) -> Model:
    """A Llama of tokens with its loss, over a vocabulary as large as a Llama 2 has it."""
    blocks, vocabulary = llama(sizes, dtype), 32 * sizes.vocabulary

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key)
        draw = Draw(keys[1], dtype)
        embedding, head = draw.array(vocabulary, sizes.width), draw.matrix(sizes.width, vocabulary)
        norm = draw.vector(sizes.width, 1.0)
        return {"embedding": embedding, "norm": norm, "head": head, "layers": blocks.init(keys[0])}

    def loss(w: Params, tokens: jax.Array) -> jax.Array:
        x = blocks.apply(w["layers"], w["embedding"][tokens[:, :-1]])
        logits = (rms_norm(x, w["norm"]) @ w["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def batch(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (sizes.batch, sizes.length + 1), 0, vocabulary)

    return Model(loss, init, batch, is_inner=False, has_loss=True)


def by_bernoulli(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Dropout, as the modules of Flax have it."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


def gpt2_dropout(sizes: Sizes, dtype: Any, dropout: Apply = by_bernoulli) -> Model:
    """GPT-2's blocks with dropout behind attention and behind the feed-forward layer.

    Half of the elements are dropped: XLA divides by a constant of 16 bits with its reciprocal, which 16 bits round
    unless it is a power of two.
    """
    blocks = gpt2(sizes, dtype)

    def block(w: Params, x: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key)
        h = layer_norm(x, w["norm_1"], w["norm_1_bias"])
        q, k, v = (heads_of(y, sizes.heads) for y in jnp.split(h @ w["qkv"] + w["qkv_bias"], 3, axis=-1))
        x = x + dropout(keys[0], attention(q, k, v, is_causal=True) @ w["out"] + w["out_bias"], 0.5)
        h = layer_norm(x, w["norm_2"], w["norm_2_bias"])
        h = jax.nn.gelu(h @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]
        return x + dropout(keys[1], h, 0.5)

    def apply(layers: Params, x: jax.Array) -> jax.Array:
        seed = jax.lax.stop_gradient(1000 * x[0, 0, 0]).astype(jnp.int32)  # of the batch: XLA cannot draw beforehand
        for w, key in zip(layers, jax.random.split(jax.random.key(seed), sizes.layers), strict=True):
            x = block(w, x, key)
        return x

    return Model(apply, blocks.init, blocks.batch)


def gpt2_coda_dropout(sizes: Sizes, dtype: Any) -> Model:
    """The same with `coda.dropout`."""
    return gpt2_dropout(sizes, dtype, coda.dropout)


def llama_joined(sizes: Sizes, dtype: Any) -> Model:
    return llama(sizes, dtype, joined=True)


def llama_scanned(sizes: Sizes, dtype: Any) -> Model:
    return llama(sizes, dtype, scanned=True)


def vit_pooled(sizes: Sizes, dtype: Any) -> Model:
    return vit(sizes, dtype, pooled=True)


def llama_packed(sizes: Sizes, dtype: Any) -> Model:
    return llama(sizes, dtype, packed=True)


MODELS: dict[str, Callable[[Sizes, Any], Model]] = {
    f.__name__: f
    for f in (
        llama,
        llama_joined,
        llama_scanned,
        llama_packed,
        language_model,
        gpt2,
        gpt2_dropout,
        gpt2_coda_dropout,
        bert,
        gemma,
        mixer,
        vit,
        vit_pooled,
    )
}
