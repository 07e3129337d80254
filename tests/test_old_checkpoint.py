"""A checkpoint that orbax wrote at commit 309242d: parameters keep their names and shapes, and their meaning."""

import pathlib
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flax_layers as layers

LLAMA = layers.LlamaConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    qk_norm=True,
    attention_bias=True,
)
GPT2 = layers.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)
MODELS = {
    "llama": lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0)),
    "scanned": lambda: layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0)),
    "gpt2": lambda: layers.GPT2(GPT2, rngs=nnx.Rngs(0)),
}


@pytest.fixture(scope="module")
def split():
    return {name: nnx.split(nnx.eval_shape(make)) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def restored(split, tmp_path_factory):
    """The checkpoint, read as what the models want today."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with zipfile.ZipFile(pathlib.Path(__file__).with_name("checkpoint_309242d.zip")) as file:
        file.extractall(folder)
    logits = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    wanted = {name: {"params": nnx.to_pure_dict(state), "logits": logits} for name, (_, state) in split.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.resolve(), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_it_loads_and_means_the_same(name, split, restored):
    graphdef, state = split[name]
    nnx.replace_by_pure_dict(state, restored[name]["params"])
    logits = jax.jit(nnx.merge(graphdef, state))(jnp.arange(16).reshape(2, 8))
    np.testing.assert_allclose(logits, restored[name]["logits"], rtol=1e-4, atol=1e-5)
