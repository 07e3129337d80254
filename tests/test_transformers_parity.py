"""Llama, Mistral, Qwen2, Qwen3 and GPT-2 against transformers: logits, loss and the gradient of every parameter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

from flax_layers.checkpoints import config_from_hf, from_hf, load_hf_folder, save_hf_folder, to_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": 71, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
CASES = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3),
    "llama_bias_tied": lambda: transformers.LlamaConfig(
        **LLAMA, attention_bias=True, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, rope_parameters=LLAMA3),
    "qwen2_head_dim_window": lambda: transformers.Qwen2Config(**LLAMA, head_dim=16, **WINDOW),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=5),
    "mistral_no_window": lambda: transformers.MistralConfig(**LLAMA, head_dim=16, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=16),
    "qwen3_window": lambda: transformers.Qwen3Config(**LLAMA, head_dim=16, attention_bias=True, **WINDOW),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2_untied": lambda: transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
    "gpt2_gelu": lambda: transformers.GPT2Config(**GPT2, n_inner=40, activation_function="gelu"),
}
TOKENS = np.random.default_rng(0).integers(0, 71, (2, 24))


def theirs(case):
    """A random model of transformers, biases and scales random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[case](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def ours(model):
    arrays = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    return from_hf(arrays, config_from_hf(model.config.to_dict()))


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients(case):
    reference = theirs(case)
    tokens = torch.from_numpy(TOKENS)
    out = reference(tokens, labels=tokens)
    out.loss.backward()
    gradients = {name: x.grad.numpy() for name, x in reference.named_parameters()}

    model = ours(reference)
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def loss_and_gradient(state, tokens):
        def loss(state):
            logits = nnx.merge(graphdef, state)(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, logits), gradient = loss_and_gradient(state, jnp.asarray(TOKENS))
    np.testing.assert_allclose(loss, out.loss.item(), rtol=1e-5)
    want = out.logits.detach().numpy()
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    got = to_hf(gradient, model.config)
    assert got.keys() == gradients.keys()
    for name, want in gradients.items():
        np.testing.assert_allclose(got[name], want, atol=2e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("llama_bias_tied", "gpt2_gelu")])
def test_folders(case, tmp_path):
    """We load what transformers saves, in one file or several, and transformers loads what we save."""
    reference = theirs(case)
    tokens = torch.from_numpy(TOKENS)
    want = reference(tokens).logits.detach().numpy()
    for name, size in (("one", "5GB"), ("several", "10KB")):
        reference.save_pretrained(tmp_path / name, max_shard_size=size)
        model = load_hf_folder(tmp_path / name)
        for parameter, array in to_hf(model, model.config).items():
            np.testing.assert_array_equal(array, reference.state_dict()[parameter].numpy())
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    save_hf_folder(model, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    np.testing.assert_array_equal(back(tokens).logits.detach().numpy(), want)


@pytest.mark.parametrize("case", ["llama_bias_tied", "gpt2"])
def test_a_head_of_its_own_under_a_tied_config(case, tmp_path):
    """transformers gives the model the head that the file has, and so do we; also with the file beside an old index."""
    reference = theirs(case)
    reference.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    arrays = {name: np.array(x.detach().numpy()) for name, x in reference.state_dict().items()}
    arrays["lm_head.weight"] += 1.0
    safetensors.numpy.save_file(arrays, tmp_path / "model" / "model.safetensors")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    want = other(torch.from_numpy(TOKENS)).logits.detach().numpy()
    with pytest.warns(UserWarning, match="the config ties the head"):
        model = load_hf_folder(tmp_path / "model")
    np.testing.assert_allclose(model(jnp.asarray(TOKENS)), want, atol=1e-5 * np.abs(want).max())
    save_hf_folder(model, tmp_path / "model")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    np.testing.assert_array_equal(back(torch.from_numpy(TOKENS)).logits.detach().numpy(), want)
    assert not list((tmp_path / "model").glob("*-of-*"))


def test_settings_that_ours_do_not_model(tmp_path):
    """transformers finds them again, after a change of ours too, and in the dtype that the arrays have."""
    reference = theirs("llama")
    reference.config.eos_token_id, reference.config.pad_token_id, reference.config.a_key = 5, 3, {"b": 1}
    reference.generation_config.eos_token_id = [5, 7]
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=r"a_key={'b': 1} is not supported: .* ignore=\('a_key',\) reads"):
        load_hf_folder(tmp_path / "a")
    model = load_hf_folder(tmp_path / "a", ignore=("a_key",))
    assert model.end_tokens == (5, 7)
    model.config = dataclasses.replace(model.config, rope_theta=5000.0)
    save_hf_folder(model, tmp_path / "a")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    want = reference.config.to_dict() | {"dtype": "float32"}
    want["rope_parameters"]["rope_theta"] = 5000.0
    assert {k: v for k, v in back.config.to_dict().items() if k != "_name_or_path"} == {
        k: v for k, v in want.items() if k != "_name_or_path"
    }
    assert back.generation_config.eos_token_id == [5, 7] and back.dtype == torch.float32
