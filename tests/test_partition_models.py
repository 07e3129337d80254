"""Models that are split over the devices of a mesh: loss and gradients, what each device computes, what is moved."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_layers as layers
from tests.gemm_cases import assert_close
from tests.partitioned import collectives, mesh_of, partitioned_on_cpus

P = PartitionSpec

LLAMA = layers.LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
GPT2 = layers.GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4)
TOKENS = jax.random.randint(jax.random.key(0), (8, 65), 0, 512)


def fsdp(name, ndim):
    return P("data") if ndim > 1 else P()


def tensor_parallel(name, ndim):
    if ndim < 2:
        return P()
    if any(part in name for part in ("down", "'out'", ".out", "embed")):
        return P("model")
    return P(*[None] * (ndim - 1), "model")


def fsdp_and_tensor_parallel(name, ndim):
    spec = (*tensor_parallel(name, ndim), *[None] * ndim)[:ndim]
    return P(*("data" if axis is None and i in (0, ndim - 1) else axis for i, axis in enumerate(spec)))


SCHEMES = {
    "data parallel": (lambda name, ndim: P(), 4, 1),
    "fsdp": (fsdp, 4, 1),
    "tensor parallel": (tensor_parallel, 1, 4),
    "fsdp and tensor parallel": (fsdp_and_tensor_parallel, 2, 2),
}
# of a layer, forward and backward; of the loss
PRODUCTS = {"llama": 2 * 12 + 3, "packed": 2 * 12 + 3, "qwen3": 2 * 12 + 3, "gpt2": 2 * 12 + 3, "scan": 13 + 3}
OPTIONS = {"packed": {"separate_qkv": False}, "scan": {"scan_layers": True, "remat": "save_attention"}}


def model_of(name, dtype):
    if name == "gpt2":
        return layers.GPT2(GPT2, dtype=dtype, rngs=nnx.Rngs(0))
    config = dataclasses.replace(LLAMA, qk_norm=True) if name == "qwen3" else LLAMA
    options = {"separate_qkv": True} | OPTIONS.get(name, {})
    return layers.Llama(config, dtype=dtype, rngs=nnx.Rngs(0), **options)


def step_of(name, dtype):
    graphdef, params = nnx.split(model_of(name, dtype), nnx.Param)

    def loss(params, tokens):
        return nnx.merge(graphdef, params).loss(tokens[:, :-1], tokens[:, 1:])

    return jax.jit(jax.value_and_grad(loss)), params


def placed_on(mesh, rule, params, name):
    def place(path, x):
        stacked = name == "scan" and "layers" in jax.tree_util.keystr(path)
        axes = (*[None] * stacked, *rule(jax.tree_util.keystr(path), x.ndim - stacked), *[None] * x.ndim)[: x.ndim]
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data", None)))
    return jax.tree_util.tree_map_with_path(place, params), tokens


def check_model(name, scheme, kind):
    """Compares a training step with that of one device; returns its collectives, and why products are no kernels."""
    rule, data, model = SCHEMES[scheme]
    step, params = step_of(name, jnp.float32)
    want = jax.device_get(step(params, TOKENS))
    mesh = mesh_of(kind, data, model)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        arguments = placed_on(mesh, rule, params, name)
        compiled = step.lower(*arguments).compile()
        value, gradient = compiled(*arguments)
        if kind is AxisType.Explicit:
            assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, gradient, arguments[0]))
        records.clear()
        step_of(name, jnp.bfloat16)[0].lower(*arguments).compile()
    assert_close(jax.device_get((value, gradient)), want, rtol=2e-5)
    return collectives(compiled), collections.Counter(selection.reason for _, _, selection in records)


def cases(*fast):
    """All models under all schemes; slow, but for Llama under these."""
    return [
        pytest.param(
            *(name, scheme),
            marks=() if name == "llama" and scheme in fast else pytest.mark.slow,
            id=f"{name}-{scheme}",
        )
        for name in PRODUCTS
        for scheme in SCHEMES
    ]


@pytest.mark.parametrize(("name", "scheme"), cases("tensor parallel"))
def test_models(name, scheme):
    """Under plain jit: loss and every gradient in float32; in bfloat16 each device runs the kernel in every product.

    What tensor parallelism moves is Megatron's: a sum for each block's two halves, forward and backward.
    """
    found, reasons = check_model(name, scheme, AxisType.Auto)
    if scheme == "tensor parallel" and name in ("llama", "qwen3", "scan"):
        assert set(found) == {"all-reduce"}
    assert reasons == {None: PRODUCTS[name]}


@pytest.mark.parametrize(("name", "scheme"), cases("fsdp and tensor parallel"))
def test_models_over_explicit_axes(name, scheme):
    """Types say how parameters lie: they are gathered in the compute dtype, their gradients scattered.

    Layers of one kind are lowered once. The products of tensor parallelism lie as the stream that they are added to.
    """
    found, reasons = check_model(name, scheme, AxisType.Explicit)
    if "fsdp" in scheme:
        assert found["reduce-scatter"] >= (6 if name == "scan" else 8)
    if name not in ("packed", "gpt2"):  # whose packed q, k and v move at the split
        assert not {"all-to-all", "collective-permute"} & set(found)
    assert set(reasons) == {None}
