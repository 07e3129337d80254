"""BERT and ViT of the examples against transformers: outputs, the loss and the gradient of every parameter, float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from test_examples import example

from flax_layers import segment_positions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "layer_norm_eps": 0.05,
    "initializer_range": 0.2,
}
BERT = SIZES | {"vocab_size": 71, "max_position_embeddings": 24, "type_vocab_size": 3}
VIT = SIZES | {"image_size": 12, "patch_size": 4, "num_channels": 3, "num_labels": 5}
ACTIVATIONS = ("gelu", "gelu_new")
LENGTHS = np.array([20, 13, 7])
RNG = np.random.default_rng(0)
IS_TOKEN = np.arange(20) < LENGTHS[:, None]
TOKENS = np.where(IS_TOKEN, RNG.integers(1, 71, (3, 20)), 0)  # padding, whose embedding torch does not train
TYPES = RNG.integers(0, 3, (3, 20))
LABELS = np.where(IS_TOKEN & (RNG.random((3, 20)) < 0.4), RNG.integers(0, 71, (3, 20)), -100)
IMAGES = RNG.normal(size=(3, 12, 12, 3)).astype(np.float32)
CLASSES = np.array([4, 0, 2])


def theirs(cls, config):
    """A random model of transformers without dropout, biases and scales random too."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def bert(act):
    """transformers' model and ours, what transformers makes of the padded batch, and its gradients."""
    reference = theirs(transformers.BertForMaskedLM, transformers.BertConfig(**BERT, hidden_act=act))
    arrays = map(torch.from_numpy, (TOKENS, IS_TOKEN.astype(int), TYPES, LABELS))
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    return differentiated(reference, dict(zip(names, arrays, strict=True)), "bert")


def vit(act):
    reference = theirs(transformers.ViTForImageClassification, transformers.ViTConfig(**VIT, hidden_act=act))
    images = torch.from_numpy(IMAGES.transpose(0, 3, 1, 2).copy())
    return differentiated(reference, {"pixel_values": images, "labels": torch.from_numpy(CLASSES)}, "vit")


def differentiated(reference, inputs, name):
    out = reference(**inputs)
    out.loss.backward()
    gradients = {name: x.grad.numpy() for name, x in reference.named_parameters()}
    ours = example(name)
    model = ours["from_hf"](reference.state_dict(), reference.config)
    return model, ours["hf_name"], (out.loss.item(), out.logits.detach().numpy()), gradients


def compared(found, loss_and_logits, where=...):
    """Asserts that a function of the model gives transformers' loss, logits at these tokens, and gradients."""
    model, hf_name, (loss, logits), gradients = found
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(state):
        return jax.value_and_grad(lambda state: loss_and_logits(nnx.merge(graphdef, state)), has_aux=True)(state)

    (got_loss, got), of_ours = run(state)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert got[where].shape == logits[where].shape
    np.testing.assert_allclose(got[where], logits[where], atol=1e-5 * np.abs(logits).max())
    got = {hf_name(path): as_theirs(path, x[...]) for path, x in nnx.to_flat_state(of_ours)}
    assert got.keys() == gradients.keys()
    for name, want in gradients.items():
        # Softmax does not see what is added to all keys: that is 0 but for rounding, beside a query's.
        scaled_by = name.replace("key.bias", "query.bias").replace("k_proj.bias", "q_proj.bias")
        scale = np.abs(gradients[scaled_by]).max()
        assert got[name].shape == want.shape and scale > 1e-5, name
        np.testing.assert_allclose(got[name], want, atol=2e-5 * scale, err_msg=name)


def as_theirs(path, x):
    if path[-2:] == ("patch", "kernel"):
        size, channels = VIT["patch_size"], VIT["num_channels"]
        return x.reshape(size, size, channels, -1).transpose(3, 2, 0, 1)
    return x.T if path[-1] == "kernel" else x


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("padding", ["mask", "segment_ids"])
def test_bert(padding, act):
    """Beside segments padding sees itself, which nobody reads."""
    masks = {"mask": IS_TOKEN[:, None, None, :]} if padding == "mask" else {"segment_ids": IS_TOKEN.astype(int)}

    def loss_and_logits(model):
        x = model.encoded(jnp.asarray(TOKENS), jnp.asarray(TYPES), **jax.tree.map(jnp.asarray, masks))
        return model.loss(x, jnp.asarray(LABELS)), model.logits(x)

    compared(bert(act), loss_and_logits, ... if padding == "mask" else IS_TOKEN)


def test_bert_packed():
    """The sequences of all rows in one row, with the head at the tokens that have labels."""
    segment_ids = jnp.asarray(np.repeat(np.arange(3), LENGTHS)[None])
    tokens, types, labels = (jnp.asarray(x[IS_TOKEN][None]) for x in (TOKENS, TYPES, LABELS))
    (chosen,) = np.nonzero(np.asarray(labels[0]) != -100)

    def loss_and_logits(model):
        x = model.encoded(tokens, types, positions=segment_positions(segment_ids), segment_ids=segment_ids)
        loss = model.loss(x[:, chosen], labels[:, chosen])
        return loss, jnp.zeros((*TOKENS.shape, 71)).at[IS_TOKEN].set(model.logits(x)[0])

    compared(bert("gelu"), loss_and_logits, IS_TOKEN)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_vit(act):
    compared(vit(act), lambda model: (model.loss(IMAGES, CLASSES), model(IMAGES)))


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_files_of_transformers_load_like_its_state_dict(name, tmp_path):
    """The names in its files may be other ones than those in a state dict."""
    cls, config = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**BERT)),
        "vit": (transformers.ViTForImageClassification, transformers.ViTConfig(**VIT)),
    }[name]
    reference, ours = theirs(cls, config), example(name)
    reference.save_pretrained(tmp_path)
    arrays = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    read, whole = (ours["from_hf"](x, config) for x in (arrays, reference.state_dict()))
    for got, want in zip(*map(jax.tree.leaves, map(nnx.state, (read, whole))), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match=r" has shape \(.*32,?\), the config says \(.*40,?\)"):
        ours["from_hf"](arrays, transformers.PretrainedConfig.from_dict(config.to_dict() | {"hidden_size": 40}))
