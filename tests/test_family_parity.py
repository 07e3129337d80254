"""Gemma, Phi-3, OLMo 2, Command R, Granite, SmolLM3 and rotary scalings against transformers, both ways."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_layers.checkpoints import config_from_hf, config_to_hf, from_hf, load_hf_folder, save_hf_folder, to_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.family_cases import FAMILIES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
TOKENS = np.random.default_rng(0).integers(3, 71, (2, 24))
each_family = pytest.mark.parametrize("case", FAMILIES)


def theirs(case):
    """A random model of transformers, biases and scales random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[case](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def ours(model, **options):
    arrays = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    return from_hf(arrays, config_from_hf(model.config.to_dict()), **options)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def loss_and_gradient(graphdef, state, tokens):
    def loss(state):
        model = nnx.merge(graphdef, state)
        logits = model(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits

    (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(state)
    labels = jnp.concatenate([tokens[:, 1:], jnp.full_like(tokens[:, :1], -100)], axis=1)
    fused, of_head = jax.value_and_grad(lambda state: nnx.merge(graphdef, state).loss(tokens, labels))(state)
    return value, logits, gradient, fused, of_head


@each_family
def test_logits_loss_and_gradients(case):
    reference = theirs(case)
    tokens = torch.from_numpy(TOKENS)
    out = reference(tokens, labels=tokens)
    out.loss.backward()
    gradients = {name: x.grad.numpy() for name, x in reference.named_parameters()}
    largest = max(np.abs(x).max() for x in gradients.values())

    model = ours(reference)
    graphdef, state = nnx.split(model)
    loss, logits, gradient, fused, of_head = loss_and_gradient(graphdef, state, jnp.asarray(TOKENS))
    np.testing.assert_allclose([loss, fused], [out.loss.item()] * 2, rtol=1e-5)
    want = out.logits.detach().numpy()
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    for found in (gradient, of_head):
        got = to_hf(found, model.config)
        assert got.keys() == gradients.keys()
        for name, want in gradients.items():
            # A key's bias moves no weight where heads are not turned: its gradient is what is left of rounding.
            atol = max(2e-5 * np.abs(want).max(), 1e-7 * largest)
            np.testing.assert_allclose(got[name], want, atol=atol, err_msg=name)


@each_family
def test_folders(case, tmp_path):
    """We load what transformers saves, and transformers loads what we save, as the same kind of model."""
    reference = theirs(case)
    tokens = torch.from_numpy(TOKENS)
    want = reference(tokens).logits.detach().numpy()
    reference.save_pretrained(tmp_path / "theirs")
    model = load_hf_folder(tmp_path / "theirs")
    for parameter, array in to_hf(model, model.config).items():
        np.testing.assert_array_equal(array, reference.state_dict()[parameter].numpy())
    save_hf_folder(model, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(back) is type(reference)
    np.testing.assert_array_equal(back(tokens).logits.detach().numpy(), want)


@each_family
def test_a_configuration_without_its_origin(case):
    """Written anew it is read as the same one, by transformers too: nothing hangs on what a file said."""
    settings = FAMILIES[case]().to_dict()
    config = config_from_hf(settings)
    written = config_to_hf(dataclasses.replace(config, origin=None), model_type=settings["model_type"])
    assert written["model_type"] == settings["model_type"]
    resolved = {"head_dim": config.resolved_head_dim, "attention_multiplier": written.get("attention_multiplier")}
    wanted = dataclasses.replace(config, **resolved)
    assert config_from_hf(written) == wanted
    again = transformers.CONFIG_MAPPING[written["model_type"]].from_dict(written)
    assert config_from_hf(again.to_dict()) == wanted


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "olmo2", "cohere2", "granite", "smollm3_window", "phi3_short"])
def test_decoding_is_the_forward_pass(case):
    """Token by token over a cache, with windows, caps and factors."""
    model = ours(theirs(case))
    tokens = jnp.asarray(TOKENS[:, :9])
    want = np.asarray(model(tokens))
    logits, cache = model.decode(tokens[:, :6], model.init_cache(2, 9))
    np.testing.assert_allclose(logits, want[:, 5], atol=2e-5 * np.abs(want).max())
    for i in (6, 7, 8):
        logits, cache = model.decode(tokens[:, i : i + 1], cache)
        np.testing.assert_allclose(logits, want[:, i], atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("case", ["gemma2", "olmo2", "cohere", "granite"])
def test_under_remat_and_in_bfloat16(case):
    """The same gradients to bfloat16's error, with and without remat."""
    reference = theirs(case)
    wanted = loss_and_gradient(*nnx.split(ours(reference)), jnp.asarray(TOKENS))
    for remat in (None, "save_attention"):
        model = ours(reference, dtype=jnp.bfloat16, remat=remat)
        found = loss_and_gradient(*nnx.split(model), jnp.asarray(TOKENS))
        for got, want in ((found[0], wanted[0]), (found[3], wanted[3])):
            assert abs(got - want) < 0.03 * want
        pairs = zip(jax.tree.leaves(found[4]), jax.tree.leaves(wanted[4]), strict=True)
        errors = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]
        assert max(errors) < 0.12, errors
