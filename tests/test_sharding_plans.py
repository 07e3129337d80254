"""The textbook plans: what devices exchange for a layer, that XLA's partitioner is not misled, and the values.

Collectives a layer are those of two layers less those of one, of weights and activations: vectors, as the sums of a
norm's scale and those of rows, are not counted. Weights are gathered once for both passes where XLA keeps the cast one
(`out` and `down`), and folded ones anew in the backward pass; layers scanned with remat gather all of them anew. What
sequence parallelism gathers for the forward product, XLA keeps for the weight's gradient.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import flax_layers as layers
from flax_layers import sharding
from tests.gemm_cases import assert_close
from tests.partitioned import COLLECTIVES, partitioned_on_cpus

WIDTH = 64
LLAMA = layers.LlamaConfig(
    vocab_size=256, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
GPT2 = layers.GPT2Config(vocab_size=256, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4)
TOKENS = jax.random.randint(jax.random.key(0), (8, 33), 0, 256)

# Rules, mesh axes, and the collectives of a Llama's layer: weights are query, key, value, out, gate_up and down.
PLANS = {
    "data": (sharding.DATA, {"data": 4}, {"all-reduce": 6}),
    "fsdp": (sharding.FSDP, {"fsdp": 4}, {"all-gather": 6, "reduce-scatter": 6}),
    "tensor": (sharding.TENSOR, {"tensor": 4}, {"all-reduce": 4}),
    "fsdp and tensor": (
        sharding.FSDP_TENSOR,
        {"fsdp": 2, "tensor": 2},
        {"all-gather": 6, "reduce-scatter": 6, "all-reduce": 4},
    ),
    "sequence": (
        sharding.SEQUENCE,
        {"data": 2, "tensor": 2},
        {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 6},
    ),
    "fsdp and sequence": (
        sharding.FSDP_SEQUENCE,
        {"fsdp": 2, "tensor": 2},
        {"all-gather": 6 + 4, "reduce-scatter": 6 + 4},
    ),
}
MODELS = ("llama", "qwen3", "tied", "scanned", "gpt2")


def model_of(name, count, dtype=jnp.float32, **options):
    if name == "gpt2":
        config = dataclasses.replace(GPT2, n_layer=count)
        return layers.GPT2(config, separate_qkv=True, dtype=dtype, rngs=nnx.Rngs(0), **options)
    fields = {"qwen3": {"qk_norm": True}, "tied": {"tie_word_embeddings": True}}.get(name, {})
    config = dataclasses.replace(LLAMA, num_hidden_layers=count, **fields)
    if name == "scanned":
        options |= {"scan_layers": True, "remat": "save_attention"}
    return layers.Llama(config, separate_qkv=True, dtype=dtype, rngs=nnx.Rngs(0), **options)


def mesh_of(sizes, kind=AxisType.Auto):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices("cpu")[:4]
    )


def step_of(model, tokens):
    """Value and gradients of the loss, compiled; and its arguments."""
    graphdef, state = nnx.split(model)

    def loss(state, tokens):
        return nnx.merge(graphdef, state).loss(tokens[:, :-1], tokens[:, 1:])

    return jax.jit(jax.value_and_grad(loss)).lower(state, tokens).compile(), (state, tokens)


def matrices(compiled):
    """Counts of the arrays that collectives make, by kind; of parts of weights and of activations."""
    found = dict.fromkeys(COLLECTIVES, 0)
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if match:
            shapes = ([int(size) for size in x.split(",")] for x in re.findall(r"\w+\[([\d,]+)\]", match[1]))
            found[match[2]] += sum(math.prod(shape) >= WIDTH * WIDTH // 4 for shape in shapes)
    return {kind: count for kind, count in found.items() if count}


def exchanges(compiled):
    """How many all-to-alls of numbers there are; one of tokens is small."""
    lines = compiled.as_text().splitlines()
    return sum(bool(re.search(r"= \(?f32\[.* all-to-all(?:-start)?\(", line)) for line in lines)


def planned(name, plan, count, **options):
    """A step on a mesh: compiled, its arguments, why products are no kernels."""
    rules, sizes, _ = PLANS[plan]
    mesh = mesh_of(sizes)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        model = sharding.create(lambda: model_of(name, count, **{"rules": rules} | options), rules)
        tokens = jax.device_put(TOKENS, sharding.array_sharding(mesh, rules, "batch", None))
        compiled, arguments = step_of(model, tokens)
    return compiled, arguments, {selection.reason for _, _, selection in records}


def cases(*fast):
    return [
        pytest.param(name, plan, marks=() if (name, plan) in fast else pytest.mark.slow, id=f"{name}-{plan}")
        for name in MODELS
        for plan in PLANS
    ]


@pytest.mark.parametrize(("name", "plan"), cases(("llama", "fsdp and sequence")))
@pytest.mark.slow
def test_values_and_nothing_odd(name, plan, capfd):
    """Loss and every gradient are those of one device, and gradients lie as their parameters do."""
    want = jax.device_get(step_of(model_of(name, 2), TOKENS)[0](*(nnx.state(model_of(name, 2)), TOKENS)))
    compiled, arguments, _ = planned(name, plan, 2)
    value, gradient = compiled(*arguments)
    assert_close(jax.device_get((value, gradient)), want, rtol=2e-5)
    lie = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), gradient, arguments[0])
    assert all(jax.tree.leaves(lie))
    # Rows of the embedding, which a device of FSDP looks up its columns of, and their cotangents on the way back.
    assert exchanges(compiled) == (2 if "fsdp" in PLANS[plan][1] else 0)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "plan", [pytest.param(x, marks=() if x == "fsdp and tensor" else pytest.mark.slow) for x in PLANS]
)
def test_collectives_of_a_layer(plan):
    two, one = (matrices(planned("llama", plan, count)[0]) for count in (2, 1))
    found = {kind: count - one.get(kind, 0) for kind, count in two.items() if count != one.get(kind, 0)}
    assert found == PLANS[plan][2]


def test_weights_in_16_bits_are_gathered_once():
    """The forward and backward products of a layer read the same gathered weights, one for each of them."""
    found = matrices(planned("llama", "fsdp and tensor", 1, dtype=jnp.bfloat16)[0])
    assert found["all-gather"] == PLANS["fsdp and tensor"][2]["all-gather"] + 1


@pytest.mark.slow
def test_without_rules_xla_is_misled(capfd):
    """XLA is misled by the same parameters without constraints on activations, which is what the rules are for."""
    compiled, *_ = planned("llama", "fsdp and tensor", 2, rules=None)
    assert "all-to-all" in matrices(compiled)
    if jax.__version_info__ >= (0, 12):  # XLA of 0.10.2 says nothing
        assert "nvoluntary full rematerialization" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_product_is_the_kernel_s(name, plan):
    assert planned(name, plan, 2, dtype=jnp.bfloat16)[2] == {None}
