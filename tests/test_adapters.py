"""Modules put in the place of a layer's Linears, as adapters are: they are called, and differentiated."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from tests.tiny_models import GPT2, LLAMA

MODELS = {
    "llama": (lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0)), ("attention.qkv", "attention.out", "mlp.down")),
    "gpt2": (
        lambda: layers.GPT2(GPT2, rngs=nnx.Rngs(0)),
        ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
    ),
}
CASES = [(model, place) for model, (_, places) in MODELS.items() for place in places]


class Adapted(layers.Linear):
    """A subclass with a low-rank addition."""

    def __init__(self, base, adapter):
        super().__init__(base.in_features, base.out_features, use_bias=base.bias is not None, rngs=nnx.Rngs(0))
        nnx.update(self, nnx.state(base))
        self.adapter = adapter

    def __call__(self, x):
        return super().__call__(x) + self.adapter(x)


def parent_of(model, place):
    block = model.layers[1]
    parent, name = place.split(".")
    return getattr(block, parent), name


def adapter_for(linear):
    lora = nnx.LoRA(linear.in_features, 2, linear.out_features, rngs=nnx.Rngs(1))
    lora.lora_b[...] = jax.random.normal(jax.random.key(2), lora.lora_b.shape)
    return lora


class Beside(nnx.Module):
    """A module of one's own that knows arrays only."""

    def __init__(self, base, adapter):
        self.base, self.adapter = base, adapter

    def __call__(self, x):
        assert isinstance(x, jax.Array)
        return self.base(x) + self.adapter(x)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [Adapted, Beside])
@pytest.mark.parametrize("model, place", CASES)
def test_an_adapter_is_what_its_merged_kernel_is(model, place, adapted):
    merged, model = MODELS[model][0](), MODELS[model][0]()
    parent, name = parent_of(model, place)
    adapter = adapter_for(getattr(parent, name))
    setattr(parent, name, adapted(getattr(parent, name), adapter))
    target = getattr(*parent_of(merged, place))
    plain = merged(tokens := jax.random.randint(jax.random.key(3), (2, 9), 0, 64))
    target.kernel[...] += adapter.lora_a[...] @ adapter.lora_b[...]

    np.testing.assert_allclose(nnx.jit(model)(tokens), nnx.jit(merged)(tokens), rtol=1e-4, atol=1e-4)
    assert not np.allclose(plain, merged(tokens), atol=1e-2)

    def loss(model):
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    of_adapter = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    of_kernel = getattr(*parent_of(nnx.grad(loss)(merged), place)).kernel[...]
    by_name = {path[-1]: leaf for path, leaf in nnx.to_flat_state(of_adapter)}
    np.testing.assert_allclose(by_name["lora_a"][...], of_kernel @ adapter.lora_b[...].T, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(by_name["lora_b"][...], adapter.lora_a[...].T @ of_kernel, rtol=1e-3, atol=1e-5)


def test_a_bias_is_added():
    model = MODELS["llama"][0]()
    tokens = jnp.arange(8)[None]
    before = model(tokens)
    down = model.layers[1].mlp.down
    biased = layers.Linear(24, 16, use_bias=True, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    biased.kernel = down.kernel
    model.layers[1].mlp.down = biased
    assert not np.allclose(model(tokens), before, atol=1e-2)


class Renamed(layers.Linear):
    """A subclass that is called as a Linear is."""


def test_a_subclass_without_a_call_of_its_own_stays_in_the_chain():
    """So does a module of one's own, which adds its products: XLA's passes are the same."""
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def products_and_passes(model):
        explained = coda.explain(lambda model, tokens: model(tokens), model, tokens, platform="cuda")
        factors = collections.Counter()
        for product, count in explained.products.items():
            factors[product.a, product.b] += count
        return factors, explained.totals.passes_bytes

    model = MODELS["llama"][0]()
    before, passes = products_and_passes(model)
    model.layers[1].mlp.down = Renamed(24, 16, rngs=nnx.Rngs(0))
    assert products_and_passes(model) == (before, passes)
    model.layers[1].mlp.down = Beside(model.layers[1].mlp.down, adapter_for(model.layers[1].mlp.down))
    after, beside = products_and_passes(model)
    assert after - before == {("float32[16,24]", "float32[24,2]"): 1, ("float32[16,2]", "float32[2,16]"): 1}
    assert beside == passes


@pytest.mark.parametrize("is_linear", [False, True])
def test_an_adapter_without_a_dtype_computes_in_that_of_its_base(is_linear):
    """Flax would promote to the dtype of the adapter's parameters; an adapter with a dtype keeps it."""
    x = jax.random.normal(jax.random.key(0), (4, 16), jnp.bfloat16)

    def factors(dtype):
        mlp = layers.MLP(16, 24, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        if is_linear:
            options = {"use_bias": False, "dtype": jnp.bfloat16, "lora_dtype": dtype}
            mlp.up = nnx.LoRALinear(16, 24, lora_rank=2, rngs=nnx.Rngs(1), **options)
        else:
            mlp.up = nnx.LoRA(16, 2, 24, base_module=mlp.up, dtype=dtype, rngs=nnx.Rngs(1))
        assert mlp(x).dtype == jnp.bfloat16
        explained = coda.explain(lambda mlp, x: mlp(x), mlp, x, platform="cuda")
        found = (explained.products | explained.other_products).items()
        return sorted(product.b.partition("[")[0] for product, count in found for _ in range(count))

    assert factors(None) == ["bfloat16"] * 4
    assert factors(jnp.float32) == ["bfloat16"] * 2 + ["float32"] * 2


@pytest.mark.slow
def test_a_module_in_the_place_of_gate_up():
    """nnx.LoRALinear, whose kernel is gate_up seen as (D, 2F); its gradients are those of the merged kernel."""
    merged, model = MODELS["llama"][0](), MODELS["llama"][0]()
    mlp, target = model.layers[1].mlp, merged.layers[1].mlp
    adapted = nnx.LoRALinear(16, 48, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1))
    adapted.kernel[...] = mlp.gate_up[...].reshape(16, 48)
    adapted.lora.lora_b[...] = jax.random.normal(jax.random.key(2), (2, 48))
    target.gate_up[...] += (adapted.lora.lora_a[...] @ adapted.lora.lora_b[...]).reshape(16, 2, 24)
    mlp.gate_up = adapted
    tokens = jax.random.randint(jax.random.key(3), (2, 9), 0, 64)
    np.testing.assert_allclose(nnx.jit(model)(tokens), nnx.jit(merged)(tokens), rtol=1e-4, atol=1e-4)

    def loss(model):
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    of_adapter = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    of_gate_up = nnx.grad(loss)(merged).layers[1].mlp.gate_up[...].reshape(16, 48)
    by_name = {path[-1]: leaf for path, leaf in nnx.to_flat_state(of_adapter)}
    expected = of_gate_up @ adapted.lora.lora_b[...].T
    np.testing.assert_allclose(by_name["lora_a"][...], expected, rtol=1e-3, atol=1e-5)
    with pytest.raises(TypeError, match="gate_up is a LoRALinear, which has no kernels"):
        mlp.split_kernel()
