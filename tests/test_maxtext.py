"""Llama's parameters from and to MaxText's names, shapes and conventions."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_layers import LlamaConfig, RopeScaling
from flax_layers.checkpoints import from_hf, from_maxtext, to_hf, to_maxtext
from flax_layers.checkpoints.hf_names import entries

D, F, V, H, KV, DH, L = 24, 40, 32, 4, 2, 16, 2
CONFIG = LlamaConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=H,
    num_key_value_heads=KV,
    head_dim=DH,
    rms_norm_eps=1e-5,
)
QWEN = dataclasses.replace(CONFIG, qk_norm=True, tie_word_embeddings=True)
SCALED = dataclasses.replace(CONFIG, rope_scaling=RopeScaling(original_max_position_embeddings=16), attention_bias=True)
TOKENS = np.random.default_rng(1).integers(0, V, (2, 9))


def maxtext_params(scan_layers=True, qwen=False):
    """Random arrays in the shapes of MaxText's decoder."""
    sizes = {
        "self_attention.query.kernel": (D, H, DH),
        "self_attention.key.kernel": (D, KV, DH),
        "self_attention.value.kernel": (D, KV, DH),
        "self_attention.out.kernel": (H, DH, D),
        "mlp.wi_0.kernel": (D, F),
        "mlp.wi_1.kernel": (D, F),
        "mlp.wo.kernel": (F, D),
        "pre_self_attention_layer_norm.scale": (D,),
        "post_self_attention_layer_norm.scale": (D,),
    }
    if qwen:
        sizes |= {"self_attention.query_norm.scale": (DH,), "self_attention.key_norm.scale": (DH,)}
    shapes = {"token_embedder.embedding": (V, D), "decoder.decoder_norm.scale": (D,)}
    if not qwen:
        shapes["decoder.logits_dense.kernel"] = (D, V)
    for name, (rows, *rest) in sizes.items():
        if scan_layers:
            shapes[f"decoder.layers.{name}"] = (rows, L, *rest)
        else:
            shapes |= {f"decoder.layers_{i}.{name}": (rows, *rest) for i in range(L)}
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    return unflatten_dict(arrays, sep=".")


def maxtext_logits(params, *, interleaved, qwen):
    """MaxText's decoder in float64: the attention's logits are unscaled, but for those of a Qwen3."""
    params = jax.tree.map(lambda x: x.astype(np.float64), params)
    decoder = params["decoder"]
    embedding = params["token_embedder"]["embedding"]
    length = TOKENS.shape[1]
    angle = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, DH, 2) / DH)
    turn = np.exp(1j * angle)[:, None]  # (T, 1, Dh / 2)

    def norm(x, scale):
        return scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)

    def rotate(x):
        if interleaved:
            z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
        z = (x[..., : DH // 2] + 1j * x[..., DH // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    x = embedding[TOKENS]
    for i in range(L):
        layer = (
            jax.tree.map(lambda x, i=i: x[:, i], decoder["layers"]) if "layers" in decoder else decoder[f"layers_{i}"]
        )
        attention, mlp = layer["self_attention"], layer["mlp"]
        y = norm(x, layer["pre_self_attention_layer_norm"]["scale"])
        q, k, v = (np.einsum("btd,dhk->bthk", y, attention[name]["kernel"]) for name in ("query", "key", "value"))
        if qwen:
            q, k = norm(q, attention["query_norm"]["scale"]), norm(k, attention["key_norm"]["scale"])
        q, k = rotate(q), rotate(k)
        if qwen:
            q = q * DH**-0.5
        k, v = k.repeat(H // KV, axis=2), v.repeat(H // KV, axis=2)
        scores = np.where(np.tri(length, dtype=bool), np.einsum("bthk,bshk->bhts", q, k), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum("bthk,hkd->btd", y, attention["out"]["kernel"])
        y = norm(x, layer["post_self_attention_layer_norm"]["scale"])
        gate, up = y @ mlp["wi_0"]["kernel"], y @ mlp["wi_1"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["wo"]["kernel"]
    x = norm(x, decoder["decoder_norm"]["scale"])
    return x @ (embedding.T if qwen else decoder["logits_dense"]["kernel"])


@pytest.mark.parametrize("rotary, scan_layers, qwen", [("interleaved", True, False), ("halves", False, True)])
def test_logits_of_a_checkpoint(rotary, scan_layers, qwen):
    params = maxtext_params(scan_layers, qwen)
    want = maxtext_logits(params, interleaved=rotary == "interleaved", qwen=qwen)
    model = from_maxtext(params, QWEN if qwen else CONFIG, rotary=rotary, scan_layers=scan_layers)
    got = nnx.jit(lambda model: model(TOKENS))(model)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
def test_there_and_back(rotary, scan_layers):
    params = maxtext_params(scan_layers)
    model = from_maxtext(params, CONFIG, rotary=rotary, scan_layers=not scan_layers)
    back = flatten_dict(to_maxtext(model, CONFIG, rotary=rotary, scan_layers=scan_layers))
    assert back.keys() == flatten_dict(params).keys()
    for name, array in flatten_dict(params).items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


QWEN2 = dataclasses.replace(CONFIG, attention_bias=True, attention_out_bias=False)


@pytest.mark.parametrize("config", [QWEN, SCALED, QWEN2], ids=["qwen3", "scaled_bias", "qwen2"])
def test_hugging_face_through_maxtext(config):
    """With QK-norms, and with biases and the defaults of Llama 3.1."""
    rng = np.random.default_rng(0)
    arrays = {p.name: rng.standard_normal(p.shape).astype(np.float32) for e in entries(config) for p in e.parts}
    params = to_maxtext(from_hf(arrays, config), config)
    for name, array in to_hf(from_maxtext(params, config), config).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


def test_defaults():
    """Queries are scaled unless they are normalised; Llama 3.1's rotary embedding, which stretches, is interleaved."""
    columns = np.arange(H * DH).reshape(H, DH)
    for config, factor, is_interleaved in ((CONFIG, 4, False), (QWEN, 1, False), (SCALED, 4, True)):
        arrays = {p.name: np.zeros(p.shape, np.float32) for e in entries(config) for p in e.parts}
        arrays["model.layers.1.self_attn.q_proj.weight"] = np.tile(columns.reshape(-1, 1), (1, D)).astype(np.float32)
        query = to_maxtext(from_hf(arrays, config), config)["decoder"]["layers"]["self_attention"]["query"]["kernel"]
        order = np.arange(DH).reshape(2, -1).T.ravel() if is_interleaved else np.arange(DH)
        np.testing.assert_array_equal(query[0, 1] * factor, columns[:, order])


def test_errors_name_the_array():
    params = maxtext_params()
    flat = flatten_dict(params, sep=".")

    def load(config=CONFIG, changes=None, **options):
        from_maxtext(unflatten_dict(flat | (changes or {}), sep="."), config, **options)

    with pytest.raises(
        ValueError, match=r"decoder\.layers\.self_attention\.query\.kernel .*axis 1 is not the config's 3 layers"
    ):
        load(dataclasses.replace(CONFIG, num_hidden_layers=3))
    with pytest.raises(
        ValueError, match=r"layers_0\.mlp\.wo\.kernel has shape \(40, 23\); the config makes it \(40, 24\)"
    ):
        load(changes={"decoder.layers.mlp.wo.kernel": np.ones((F, L, D - 1))})
    with pytest.raises(ValueError, match=r"no decoder\.logits_dense\.kernel; tie_word_embeddings"):
        load(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"lacks decoder\.decoder_norm\.scale"):
        from_maxtext({"params": params}, CONFIG)
    with pytest.raises(ValueError, match=r"query_scaled=True of a model with qk_norm"):
        load(QWEN, query_scaled=True)
    with pytest.raises(ValueError, match=r"rotary='even' must be"):
        load(rotary="even")
