"""Layers scanned over stacked parameters, and what policies make the backward pass compute again."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.jaxprs.walk import equations
from flax_layers.layer_stack import stack, unstack
from flax_layers.remat import policy_of

CONFIG = layers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
TOKENS = jax.random.randint(jax.random.key(0), (2, 17), 0, CONFIG.vocab_size)
# Products of a layer in a training step: 4 of the forward pass, 8 of the backward pass, and what is run again.
PRODUCTS = {None: 12, "full": 15, "save_qkv": 14, "save_attention": 13}


def llama(config=CONFIG, **options):
    return layers.Llama(config, rngs=nnx.Rngs(3), **options)


def value_and_gradient(model):
    """A function of the parameters, and the parameters."""
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params):
        logits = nnx.merge(graphdef, params)(TOKENS)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    return jax.value_and_grad(loss), params


def unstacked(params):
    """The parameters of a model whose layers are scanned, under the names of one whose layers are not."""
    tree = nnx.to_pure_dict(params)
    count = CONFIG.num_hidden_layers
    return tree | {"layers": {i: jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(count)}}


# These run once: optimising them takes longer than running them.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def expected():
    function, params = value_and_gradient(llama())
    value, gradient = compiled(function)(params)
    return value, nnx.to_pure_dict(gradient), nnx.to_pure_dict(params)


@pytest.mark.parametrize(
    "scan_layers, remat", [(True, None), (True, "save_attention"), (False, "full"), (False, ("query_proj", "mlpwi"))]
)
@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_plain_stack(scan_layers, remat):
    function, params = value_and_gradient(llama(scan_layers=scan_layers, remat=remat))
    value, gradient = compiled(function)(params)
    trees = [unstacked(x) if scan_layers else nnx.to_pure_dict(x) for x in (gradient, params)]
    want_value, *want = expected()
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    for got, reference, rtol in zip(trees, want, (2e-5, 0), strict=True):
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(reference), strict=True):
            scale = float(jnp.abs(y).max())
            np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))


def test_the_first_layers_alone():
    found = coda.explain(*value_and_gradient(llama(remat="full", remat_layers=1)))
    assert sum(found.products.values()) == PRODUCTS["full"] + PRODUCTS[None] + 3


@pytest.mark.parametrize("remat", PRODUCTS)
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scan"])
def test_products_of_a_training_step(scan_layers, remat):
    found = coda.explain(*value_and_gradient(llama(scan_layers=scan_layers, remat=remat)))
    assert sum(found.products.values()) == CONFIG.num_hidden_layers * PRODUCTS[remat] + 3


def test_names_and_policies():
    """Names of MaxText's, and its names for what is several arrays here; a policy of jax's is taken as it is."""

    def count(remat):
        return sum(coda.explain(*value_and_gradient(llama(scan_layers=True, remat=remat))).products.values())

    each = CONFIG.num_hidden_layers
    assert count(("qkv_proj",)) == each * PRODUCTS["save_qkv"] + 3
    assert count(["mlpwi_0", "mlpwi_1", "out_proj"]) == each * (PRODUCTS[None] + 1) + 3  # queries, keys, values
    assert count(jax.checkpoint_policies.everything_saveable) == each * PRODUCTS[None] + 3
    assert count(jax.checkpoint_policies.dots_saveable) == each * PRODUCTS[None] + 3  # what the docstring says


def test_attention_of_cudnn_is_kept(monkeypatch):
    """Traced where there is no cuDNN: its forward pass is in the step once, or twice where it is run again."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    attention = layers.Attention(32, 4, dtype=jnp.bfloat16, implementation="cudnn", rngs=nnx.Rngs(0))

    def forward_passes(remat):
        function = jax.checkpoint(lambda x: attention(x).sum(), policy=policy_of(remat))
        jaxpr = jax.make_jaxpr(jax.grad(function))(jnp.ones((2, 8, 32), jnp.bfloat16)).jaxpr
        return sum("product_attention_fwd" in one.primitive.name for one, _ in equations(jaxpr))

    assert forward_passes("full") == 2 * forward_passes("save_attention") > 0


@pytest.mark.parametrize("remat, again", [(None, 0), ("save_attention", 0), (("context",), 0), ("save_qkv", 1)])
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scan"])
def test_attention_is_kept(scan_layers, remat, again):
    """Its result and log-sum-exp: a layer has one forward pass in a step, or another if asked for; packed rows too."""
    segment_ids, count = jnp.arange(34).reshape(2, 17) // 5, 1 if scan_layers else CONFIG.num_hidden_layers
    graphdef, params = nnx.split(llama(scan_layers=scan_layers, remat=remat), nnx.Param)
    step = jax.grad(lambda params: nnx.merge(graphdef, params)(TOKENS, segment_ids=segment_ids).sum())
    names = collections.Counter(one.primitive.name for one, _ in equations(jax.make_jaxpr(step)(params).jaxpr))
    assert names["coda_attention"] == count * (1 + again)
    assert names["coda_attention_backward"] == count


def test_stack_and_unstack():
    blocks = [layers.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)]
    together = stack(blocks)
    assert together.kernel.shape == (3, 8, 8)
    for block, again in zip(blocks, unstack(together), strict=True):
        np.testing.assert_array_equal(block.kernel[...], again.kernel[...])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: llama(remat="full", remat_layers=3), "remat_layers=3 of 2 layers"),
        (lambda: llama(remat_layers=1), "remat_layers=1 wants remat"),
        (lambda: llama(remat="full", remat_layers=1, scan_layers=True), "layers that are not scanned"),
        (lambda: llama(remat="everything"), r"remat='everything' is not a policy: full, save_qkv, save_attention"),
        (lambda: llama(remat=True), "remat=True; it must be None, one of full, save_qkv, save_attention"),
        (lambda: llama(remat=("mlp",)), r"no array is named 'mlp'; names are context, decoder_layer_input"),
        (lambda: llama(dataclasses.replace(CONFIG, num_hidden_layers=0), scan_layers=True), "at least one layer"),
        (
            lambda: stack([layers.Linear(4, 4, rngs=nnx.Rngs(0)), layers.RMSNorm(4, rngs=nnx.Rngs(0))]),
            "scan_layers must be False for others: the class is Linear in layer 0, RMSNorm in layer 1",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()
