"""The layers among flax's and JAX's tools: nnx.tabulate, pytrees of Streams, and what is said of a Stream misplaced."""

import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers as layers
from coda_jax.extend import array
from flax_layers.models import gpt2_block
from tests.tiny_models import GPT2, LLAMA

TOKENS = jnp.zeros((2, 8), int)
X = jax.random.normal(jax.random.key(0), (2, 8, 16))
STREAM = layers.Stream.of(X)


def rngs():
    return nnx.Rngs(0)


def normalized():
    return layers.RMSNorm(16, rngs=rngs())(STREAM)


def layer_normalized():
    return layers.LayerNorm(16, rngs=rngs())(STREAM)


def ordered(block, norms):
    """A block of another order, with so many norms, by the names of its arguments."""
    parts = {"attention": layers.Attention(16, 2, rngs=rngs()), "mlp": layers.GatedMLP(16, 24, rngs=rngs())}
    parts |= {name: layers.RMSNorm(16, rngs=rngs()) for name in norms}
    return block(**parts), [STREAM], {}


SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
# name -> module, positional arguments, keywords
CALLS = {
    "Attention": lambda: (layers.Attention(16, 2, rngs=rngs()), [normalized()], {"residual": True}),
    "Cohere": lambda: (layers.Cohere(layers.CohereConfig(**SIZES), rngs=rngs()), [TOKENS], {}),
    "CrossAttention": lambda: (layers.CrossAttention(16, 2, rngs=rngs()), [normalized(), X], {"residual": True}),
    "Embed": lambda: (layers.Embed(64, 16, rngs=rngs()), [TOKENS], {}),
    "GPT2": lambda: (layers.GPT2(GPT2, rngs=rngs()), [TOKENS], {}),
    "Gemma": lambda: (layers.Gemma(layers.GemmaConfig(**SIZES, head_dim=8), rngs=rngs()), [TOKENS], {}),
    "GptOss": lambda: (
        layers.GptOss(layers.GptOssConfig(**SIZES, num_key_value_heads=1, num_experts=4), rngs=rngs()),
        [TOKENS],
        {},
    ),
    "Olmo2": lambda: (layers.Olmo2(layers.Olmo2Config(**SIZES), rngs=rngs()), [TOKENS], {}),
    "GatedMLP": lambda: (layers.GatedMLP(16, 24, rngs=rngs()), [normalized()], {"residual": True}),
    "LMHead": lambda: (
        layers.LMHead(16, 64, tied=True, rngs=rngs()),
        [normalized()],
        {"embedding": jnp.ones((64, 16))},
    ),
    "LayerNorm": lambda: (layers.LayerNorm(16, rngs=rngs()), [STREAM], {}),
    "Linear": lambda: (layers.Linear(16, 16, rngs=rngs()), [layer_normalized()], {"residual": STREAM}),
    "Llama": lambda: (layers.Llama(LLAMA, rngs=rngs()), [TOKENS], {}),
    "MLP": lambda: (layers.MLP(16, 24, use_bias=True, rngs=rngs()), [layer_normalized()], {"residual": X}),
    "MoE": lambda: (layers.MoE(16, 24, 4, 2, shared_features=8, rngs=rngs()), [normalized()], {"residual": X}),
    "NormBeforeSumBlock": lambda: ordered(layers.NormBeforeSumBlock, ["attention_norm", "mlp_norm"]),
    "ParallelBlock": lambda: ordered(layers.ParallelBlock, ["norm"]),
    "PostNormBlock": lambda: ordered(layers.PostNormBlock, ["attention_norm", "mlp_norm"]),
    "RMSNorm": lambda: (layers.RMSNorm(16, rngs=rngs()), [STREAM], {}),
    "SandwichNormBlock": lambda: ordered(
        layers.SandwichNormBlock, ["attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"]
    ),
    "TransformerBlock": lambda: (gpt2_block(GPT2, rngs=rngs()), [jnp.ones((2, 8, 32))], {}),
    "LlamaBlock": lambda: (
        layers.LlamaBlock(16, 24, 2, rngs=rngs()),
        [STREAM.with_statistic()],
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


def test_tabulate_shows_the_arrays_of_a_stream():
    module, args, kwargs = CALLS["Linear"]()
    table = nnx.tabulate(module, *args, **kwargs, console_kwargs={"force_terminal": False, "width": 200})
    assert "residual:" in table and "mean: float32[2,8]" in table and "sumsq: float32[2,8]" in table


@pytest.mark.parametrize("value", [STREAM, STREAM.with_statistic(), normalized(), layer_normalized()])
def test_pytrees(value):
    """As jax.tree_util.register_dataclass would register them."""
    leaves, structure = jax.tree.flatten(value)
    doubled = jax.tree.map(lambda x: 2 * x, value)
    assert type(doubled) is type(value) and jax.tree.structure(doubled) == structure
    np.testing.assert_array_equal(doubled.x, 2 * X)
    assert getattr(doubled, "epsilon", None) == getattr(value, "epsilon", None)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    assert paths == [f".{n}" for n in ("x", "sumsq", "scale", "mean", "bias") if getattr(value, n, None) is not None]
    assert len(leaves) == len(paths)
    assert jax.tree.structure(pickle.loads(pickle.dumps(value))) == structure
    assert jax.jit(lambda x: x)(value).array().shape == X.shape
    other = layers.RMSNorm(16, epsilon=1.0, rngs=rngs())(STREAM)
    assert jax.tree.structure(other) != structure


@pytest.mark.parametrize("value", [STREAM, normalized(), layer_normalized()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "function",
    [
        nnx.Linear(16, 4, rngs=rngs()),
        nnx.Linear(16, 4, dtype=jnp.bfloat16, rngs=rngs()),
        nnx.LayerNorm(16, rngs=rngs()),
        nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs()),
        nnx.Dropout(0.5, rngs=rngs()),
        jnp.asarray,
        np.asarray,
    ],
    ids=lambda f: type(f).__name__ if isinstance(f, nnx.Module) else f.__name__,
)
def test_streams_as_arrays_are_refused_with_a_hint(function, value):
    with pytest.raises(TypeError, match=rf"{type(value).__name__}.*\.array\(\)"):
        function(value)
    function(value.array())


def test_a_stream_s_array_and_text():
    assert STREAM.array() is STREAM.x
    assert repr(STREAM) == "Stream(x=float32[2,8,16], sumsq=None; its array is .array())"
    assert "epsilon=1e-06" in repr(normalized())


@pytest.mark.parametrize("loop", [jax.lax.scan, jax.lax.fori_loop])
def test_a_carry_without_statistic(loop):
    """JAX's message names the way out."""
    linear = layers.Linear(16, 16, rngs=rngs())
    with pytest.raises(TypeError, match=r"sumsq \(absent: Stream\.with_statistic\(\) computes it\) is a .*NoneType"):
        if loop is jax.lax.scan:
            loop(lambda s, _: (linear(s, residual=s), None), STREAM, length=2)
        else:
            loop(0, 2, lambda _, s: linear(s, residual=s), STREAM)


@pytest.mark.parametrize("residual", [jnp.ones((2, 8, 16)), layers.Stream.of(jnp.ones((2, 4))), jnp.ones(4), 1.0])
@pytest.mark.parametrize("cls", [layers.Linear, nnx.Linear])
def test_a_residual_of_another_shape(cls, residual):
    mlp = layers.MLP(16, 4, rngs=rngs())
    mlp.down = cls(4, 4, rngs=rngs())
    message = f"a residual of shape {jnp.shape(array(residual))} is added to an output of shape (2, 8, 4)"
    with pytest.raises(ValueError, match=re.escape(message)):
        mlp(X, residual=residual)
