"""The layers among flax's tools, nnx.tabulate, and modules of another width in them."""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_layers as layers
from flax_layers.models import gpt2_block
from tests.tiny_models import GPT2, LLAMA

TOKENS = jnp.zeros((2, 8), int)
X = jax.random.normal(jax.random.key(0), (2, 8, 16))


def rngs():
    return nnx.Rngs(0)


def ordered(block, norms):
    """A block of another order, with so many norms, by the names of its arguments."""
    parts = {"attention": layers.Attention(16, 2, rngs=rngs()), "mlp": layers.GatedMLP(16, 24, rngs=rngs())}
    parts |= {name: layers.RMSNorm(16, rngs=rngs()) for name in norms}
    return block(**parts), [X], {}


SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
# name -> module, positional arguments, keywords
CALLS = {
    "Attention": lambda: (layers.Attention(16, 2, rngs=rngs()), [X], {}),
    "Cohere": lambda: (layers.Cohere(layers.CohereConfig(**SIZES), rngs=rngs()), [TOKENS], {}),
    "CrossAttention": lambda: (layers.CrossAttention(16, 2, rngs=rngs()), [X, X], {}),
    "Embed": lambda: (layers.Embed(64, 16, rngs=rngs()), [TOKENS], {}),
    "GPT2": lambda: (layers.GPT2(GPT2, rngs=rngs()), [TOKENS], {}),
    "Gemma": lambda: (layers.Gemma(layers.GemmaConfig(**SIZES, head_dim=8), rngs=rngs()), [TOKENS], {}),
    "GptOss": lambda: (
        layers.GptOss(layers.GptOssConfig(**SIZES, num_key_value_heads=1, num_experts=4), rngs=rngs()),
        [TOKENS],
        {},
    ),
    "Olmo2": lambda: (layers.Olmo2(layers.Olmo2Config(**SIZES), rngs=rngs()), [TOKENS], {}),
    "GatedMLP": lambda: (layers.GatedMLP(16, 24, rngs=rngs()), [X], {}),
    "LMHead": lambda: (
        layers.LMHead(16, 64, tied=True, rngs=rngs()),
        [X],
        {"embedding": jnp.ones((64, 16))},
    ),
    "LayerNorm": lambda: (layers.LayerNorm(16, rngs=rngs()), [X], {}),
    "Linear": lambda: (layers.Linear(16, 16, rngs=rngs()), [X], {}),
    "Llama": lambda: (layers.Llama(LLAMA, rngs=rngs()), [TOKENS], {}),
    "MLP": lambda: (layers.MLP(16, 24, use_bias=True, rngs=rngs()), [X], {}),
    "MoE": lambda: (layers.MoE(16, 24, 4, 2, shared_features=8, rngs=rngs()), [X], {}),
    "NormBeforeSumBlock": lambda: ordered(layers.NormBeforeSumBlock, ["attention_norm", "mlp_norm"]),
    "ParallelBlock": lambda: ordered(layers.ParallelBlock, ["norm"]),
    "PostNormBlock": lambda: ordered(layers.PostNormBlock, ["attention_norm", "mlp_norm"]),
    "RMSNorm": lambda: (layers.RMSNorm(16, rngs=rngs()), [X], {}),
    "SandwichNormBlock": lambda: ordered(
        layers.SandwichNormBlock, ["attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"]
    ),
    "TransformerBlock": lambda: (gpt2_block(GPT2, rngs=rngs()), [jnp.ones((2, 8, 32))], {}),
    "LlamaBlock": lambda: (
        layers.LlamaBlock(16, 24, 2, rngs=rngs()),
        [X],
        {"positions": jnp.arange(8)},
    ),
    "scanned Llama": lambda: (layers.Llama(LLAMA, scan_layers=True, remat="full", rngs=rngs()), [TOKENS], {}),
    "decode": lambda: (
        model := layers.Llama(LLAMA, rngs=rngs()),
        [TOKENS, model.init_cache(2, 12)],
        {"lengths": jnp.array([3, 8]), "method": "decode"},
    ),
}
MODULES = [n for n in layers.__all__ if inspect.isclass(c := getattr(layers, n)) and issubclass(c, nnx.Module)]


@pytest.fixture(autouse=True)
def unpatched():
    """nnx.tabulate puts its own methods into classes, and takes them out again only if nothing fails."""
    before = {c: dict(vars(c)) for c in [nnx.Embed, *(getattr(layers, name) for name in MODULES)]}
    yield
    for cls, methods in before.items():
        for name in {"__call__", "loss", "decode", "beside"} & methods.keys():
            setattr(cls, name, methods[name])


@pytest.mark.parametrize("name", sorted({*CALLS, *MODULES}))
def test_tabulate(name):
    module, args, kwargs = CALLS[name]()
    call = type(module).__call__
    table = nnx.tabulate(module, *args, **kwargs, console_kwargs={"force_terminal": False, "width": 200})
    sizes = [x.size for x in jax.tree.leaves(nnx.state(module))]
    assert f"Total Parameters: {sum(sizes):,} " in table
    assert type(module).__call__ is call
    assert f" {type(module).__name__} " in table
    if name in ("Llama", "GPT2"):
        assert "layers/1/mlp " in table


@pytest.mark.parametrize("features", [4, 1])
@pytest.mark.parametrize("cls", [layers.Linear, nnx.Linear])
@pytest.mark.parametrize("name", ["attention.out", "mlp.down"])
def test_an_output_of_another_shape_is_not_added(name, cls, features):
    """Nor is one of width 1 broadcast."""
    block = layers.LlamaBlock(16, 24, 2, rngs=rngs())
    layer, name = name.split(".")
    setattr(getattr(block, layer), name, cls(getattr(getattr(block, layer), name).in_features, features, rngs=rngs()))
    message = f"an output of shape (2, 8, {features}) is added to a stream of shape (2, 8, 16)"
    with pytest.raises(ValueError, match=re.escape(message)):
        block(X)
