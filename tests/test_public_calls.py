"""Keywords that no other test gives literally: each is given once, and does what it is for.

tests/test_public_names.py finds what is missing here.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import coda_jax as coda
import flax_layers as layers
from coda_jax import extend
from flax_layers import sharding
from flax_layers.checkpoints import from_hf, from_maxtext, from_peft, to_hf, to_maxtext, to_peft
from flax_layers.layer_stack import run_layers
from flax_layers.models import gpt2_block
from flax_layers.plan import PlanCosts, plan_costs
from flax_layers.remat import named
from tests import loss_cases
from tests.chain_cases import normal
from tests.tiny_models import GPT2, LLAMA

ONE_LAYER = dataclasses.replace(LLAMA, num_hidden_layers=1)

X, SCALE = normal(0, 2, 6, 16), 1 + 0.1 * normal(1, 16)
NORM = coda.rms_norm(X, SCALE)
UP, DOWN = normal(2, 16, 24) / 4, normal(3, 24, 16) / 5
TOKENS = np.arange(12).reshape(2, 6)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1]] * 2)
WHOLE = jnp.ones((1, 1, 6, 6), bool)  # a mask that hides nothing
ONES, ZEROS = nnx.initializers.ones, nnx.initializers.zeros
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@functools.cache
def llama():
    return nnx.jit(lambda: layers.Llama(ONE_LAYER, rngs=nnx.Rngs(0)))()


def attention(q, k, v, *, mask, is_causal, local_window_size):
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, local_window_size=local_window_size, implementation="xla"
    )


def test_results_are_made_by_keyword():
    nothing = coda.Explanation(
        products={}, others=2, notes={}, device=None, passes={}, attention={}, kept={}, advice=(), num_devices=1
    )
    assert nothing.kernels == 0 and nothing.as_dict()["others"] == 2
    assert nothing == coda.Explanation(products={}, others=2, attention_calls={})
    plan = plan_costs(LLAMA, tokens=16, mesh={"tensor": 2}, bus_gbytes=100.0, tflops=700.0, length=8)
    assert plan == PlanCosts(
        sizes=plan.sizes,
        tokens=16,
        mesh={"data": 1, "fsdp": 1, "tensor": 2},
        sequence_parallel=False,
        device=plan.device,
        bus_gbytes=100.0,
        tflops=700.0,
        steps=plan.steps,
        length=8,
    )
    assert plan.ms("backward", part="head", over="tensor") == plan.ms("backward", part="head") > 0
    assert "no product" in str(coda.Tuning(path=pathlib.Path("tiles.json"), device="H200", products=()))
    assert layers.Generated(tokens=TOKENS, lengths=[6, 6]).lengths == [6, 6]


def test_a_config_of_every_part():
    config = coda.GemmConfig(
        tile_m=128,
        tile_n=128,
        stages=3,
        cluster_m=2,
        box_n=32,
        subtile_n=32,
        load_slots=2,
        store_slots=2,
        split_k=False,
    )
    close(coda.gemm(X[0], UP, config=config), X[0] @ UP)


def test_a_norm_of_other_arrays():
    assert NORM.cotangent(x=X, scale=SCALE, bias=None).sumsq is None


def test_operators_of_xla():
    got = coda.gated_mlp(
        NORM,
        jnp.concatenate([UP, -UP], axis=1),
        DOWN,
        activation=jax.nn.relu,
        residual=False,
        dtype=jnp.float32,
        hidden_sharding=jax.P(None, None, None),
        keep_weights=True,
        implementation="xla",
    )
    z = NORM.array() @ UP
    close(got.x, jax.nn.relu(z) * -z @ DOWN)
    got = coda.mlp(
        NORM,
        UP,
        DOWN,
        activation=jax.nn.relu,
        residual=False,
        dtype=jnp.float32,
        hidden_sharding=jax.P(None, None, None),
        keep_weights=True,
        implementation="xla",
    )
    close(got.x, jax.nn.relu(z) @ DOWN)
    spec = jax.P(None, None, None)
    close(coda.norm_projection(NORM, UP, out_sharding=spec, keep_weights=True, implementation="xla"), z)
    close(coda.project(X, UP, implementation="xla").x, X @ UP)


def test_experts():
    """Two with the same weights are one feed-forward layer."""
    rows = X.reshape(-1, X.shape[-1])
    gate_up, down = (jnp.stack([w, w]) for w in (jnp.concatenate([UP, -UP], axis=1), DOWN))
    got = coda.expert_mlp(
        rows,
        w_gate_up=gate_up,
        w_down=down,
        group_sizes=jnp.array([5, len(rows) - 5], jnp.int32),
        row_scale=jnp.full(len(rows), 0.5),
        activation=jax.nn.relu,
        dtype=jnp.float32,
        keep_weights=True,
        implementation="xla",
    )
    z = rows @ UP
    close(got, 0.5 * (jax.nn.relu(z) * -z) @ DOWN)


def test_heads_with_norms_of_their_own():
    scaling = layers.RopeScaling(low_freq_factor=0.5, high_freq_factor=2)

    @jax.jit
    def run(norm):
        cos, sin = layers.rotary_angles(jnp.arange(6), 8, 1e4, scaling=scaling)
        got = coda.qkv_projection(
            norm,
            UP,
            cos,
            sin,
            num_heads=1,
            num_kv_heads=1,
            q_scale=SCALE[:8],
            k_scale=SCALE[8:],
            qk_epsilon=1e-3,
            dtype=jnp.float32,
            out_sharding=[jax.P(None, None, None, None)] * 3,
            keep_weights=True,
            implementation="xla",
        )
        heads = jnp.split((norm.array() @ UP)[..., None, :], 3, axis=-1)
        of_q, of_k = (
            coda.rms_norm(x, scale, epsilon=1e-3) for x, scale in zip(heads[:2], (SCALE[:8], SCALE[8:]), strict=True)
        )
        return got, (coda.rotary(of_q.array(), cos, sin), coda.rotary(of_k.array(), cos, sin), heads[2])

    jax.tree.map(close, *run(NORM))


@pytest.mark.smoke
def test_losses_with_every_option():
    x, scale, kernel, labels, weights = loss_cases.arguments(jnp.float32, lead=(30,))
    a, b = normal(5, 40, 2), normal(6, 2, 136)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 5.0, "ignore_index": 3}

    @jax.jit
    def run(kernel):
        norm, whole = coda.rms_norm(x, scale, epsilon=loss_cases.EPS), kernel + a @ b
        loss, _ = coda.linear_cross_entropy(
            norm,
            kernel,
            labels % 136,
            weights=weights,
            low_rank=(a, b),
            ignore_index=3,
            label_smoothing=0.1,
            z_loss=1e-2,
            soft_cap=5.0,
            implementation="xla",
        )
        expected = loss_cases.plain(x, scale, whole, labels % 136, weights, **options)[0]
        each = coda.token_logprobs(norm, kernel, labels, low_rank=(a, b), soft_cap=5.0, implementation="xla")
        one = loss_cases.plain(x, scale, whole, labels, jnp.ones(30), soft_cap=5.0, reduction="none")[0]
        return (loss, each), (expected, -one)

    jax.tree.map(close, *run(kernel))


def test_the_sharding_of_a_product_whose_sum_is_over_devices():
    """The rows' axes and the columns' remain; None where no explicit axis shards both factors' sums."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X[0], jax.P("data", "tensor"))
        w = jax.device_put(UP.T, jax.P("data", "tensor"))
        assert extend.spec_of_sum(a=x, b=w, transpose_b=True) == jax.P("data", None)
        assert extend.spec_of_sum(a=X[0], b=w, transpose_b=True) is None


def test_extend_offers_pytrees_to_layers():
    @extend.register_pytree(meta_fields=("b",), key=lambda of, name: jax.tree_util.GetAttrKey(f"of_{name}"))
    @dataclasses.dataclass
    class Pair:
        a: jax.Array
        b: int

    ((path, _),), _ = jax.tree_util.tree_flatten_with_path(Pair(SCALE, 1))
    assert jax.tree_util.keystr(path) == ".of_a"


@pytest.mark.smoke
def test_blocks_with_every_option():
    rope = layers.RopeScaling(original_max_position_embeddings=4)

    @nnx.jit
    def run(x):
        block = layers.LlamaBlock(
            16,
            24,
            2,
            rope_theta=100.0,
            rope_scaling=rope,
            qk_norm=True,
            use_bias=True,
            use_out_bias=False,
            separate_qkv=True,
            separate_gate_up=True,
            activation="relu",
            sliding_window=2,
            attention_implementation=attention,
            rngs=nnx.Rngs(0),
        )
        alone = layers.Attention(
            16,
            2,
            rope_theta=100.0,
            rope_scaling=rope,
            qk_norm=True,
            epsilon=1e-6,
            use_bias=True,
            use_out_bias=False,
            separate_qkv=True,
            is_causal=True,
            sliding_window=2,
            param_dtype=jnp.float32,
            kernel_init=ZEROS,
            rngs=nnx.Rngs(1),
        )
        nnx.update(alone, nnx.state(block.attention))
        again = layers.TransformerBlock(
            attention_norm=block.attention_norm, attention=alone, mlp_norm=block.mlp_norm, mlp=block.mlp
        )
        y = x + alone(block.attention_norm(x))
        return block(x), again(x), y + block.mlp(block.mlp_norm(y))

    got, again, expected = run(X)
    close(got, expected)
    close(got, again)


def test_parameters_are_made_as_asked():
    """The products are sums of rows where parameters are made of ones."""
    linear = layers.Linear(16, 24, param_dtype=jnp.bfloat16, kernel_init=ONES, rngs=nnx.Rngs(0))
    assert linear.kernel.dtype == jnp.bfloat16
    rows = jnp.sum(X, axis=-1, keepdims=True)
    close(linear(X), jnp.broadcast_to(rows, (2, 6, 24)))
    close(linear(X)[..., :1], jnp.sum(X, axis=-1, keepdims=True))
    head = layers.LMHead(16, 24, param_dtype=jnp.bfloat16, kernel_init=ONES, rngs=nnx.Rngs(0))
    close(head(X)[..., :1], rows)
    mlp = layers.MLP(16, 24, activation="relu", param_dtype=jnp.bfloat16, kernel_init=ONES, rngs=nnx.Rngs(0))
    close(mlp(X)[..., :1], 24 * jax.nn.relu(rows))
    mlp = layers.GatedMLP(16, 24, activation="relu", kernel_init=ONES, rngs=nnx.Rngs(0))
    close(mlp(X)[..., :1], 24 * jax.nn.relu(rows) * rows, rtol=1e-4)
    norm = layers.LayerNorm(
        16,
        use_bias=True,
        dtype=jnp.float16,
        param_dtype=jnp.bfloat16,
        scale_init=ZEROS,
        bias_init=ONES,
        rngs=nnx.Rngs(0),
    )
    assert norm(X).dtype == jnp.float16 and jnp.all(norm(X) == 1)
    assert layers.RMSNorm(16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)).scale.dtype == jnp.bfloat16


def test_tied_head():
    head = layers.LMHead(16, 24, tied=True, rngs=nnx.Rngs(0))
    labels, weights = TOKENS % 5, jnp.ones((2, 6))
    logits = jax.nn.log_softmax(X @ UP)
    each = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    close(head.loss(X, labels, weights=weights, embedding=UP.T)[0], -jnp.mean(each))
    close(head.token_logprobs(X, labels, embedding=UP.T), each)


def test_caches():
    made = layers.Attention(16, 2, rngs=nnx.Rngs(0)).init_cache(2, 8, dtype=jnp.float16)
    cache = layers.KVCache.empty(batch_size=2, capacity=8, num_kv_heads=2, head_dim=8, dtype=jnp.float16)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, cache) and cache.k.dtype == made.k.dtype
    cache = layers.KVCache(k=cache.k, v=cache.v, length=jnp.array([6, 2]))
    assert cache.positions(count=2).tolist() == [[6, 7], [2, 3]]
    of_lengths = layers.KVCache(k=cache.k, v=cache.v, text_length=jnp.array([7, 3]))
    texts = layers.TextCache(tokens=jnp.zeros((2, 8), jnp.int32), layers=[of_lengths])
    assert texts.capacity == 8 and texts.layers[0].text_length.tolist() == [7, 3]
    np.testing.assert_array_equal(layers.TextCache.empty(layers=[of_lengths]).tokens, texts.tokens)
    cache.check_room(more=2)
    with pytest.raises(ValueError, match="capacity"):
        cache.check_room(more=3)


def test_configs():
    presets = (layers.LlamaConfig.llama3_1b(), layers.LlamaConfig.llama3_8b(), layers.LlamaConfig.qwen3_0_6b())
    assert [config.resolved_head_dim for config in presets] == [64, 128, 128]
    fewer_turns = presets[0].rope_scaling.scaled(jnp.array([1e-6, 1.0])) / jnp.array([1e-6, 1.0])
    close(fewer_turns, [1 / presets[0].rope_scaling.factor, 1])
    config = layers.LlamaConfig(attention_bias=True, attention_out_bias=False, origin="{}")
    assert not config.resolved_attention_out_bias
    assert config == dataclasses.replace(config, origin=None)
    assert layers.GPT2Config(layer_norm_epsilon=1e-3, origin="{}") == layers.GPT2Config(layer_norm_epsilon=1e-3)


def test_models_of_packed_rows():
    labels = (TOKENS + 1) % 7

    @nnx.jit
    def run(model):
        loss, count = model.loss(TOKENS, labels, mask=WHOLE, segment_ids=SEGMENTS, weight_sum=True)
        each = model.token_logprobs(TOKENS, labels, mask=WHOLE, positions="restart", segment_ids=SEGMENTS)
        return loss, count, each

    loss, count, each = run(llama())
    assert count == 10  # the label of the first segment's last token does not count
    close(loss, -jnp.sum(each) / 10)


def test_models_with_every_option():
    llama = nnx.eval_shape(
        lambda: layers.Llama(ONE_LAYER, remat="full", remat_layers=1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    gpt2 = nnx.eval_shape(
        lambda: layers.GPT2(GPT2, attention_implementation=attention, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    for model in (llama, gpt2):
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
        assert nnx.eval_shape(lambda model: model(TOKENS), model).shape == (2, 6, 64)


def test_blocks_of_gpt2():
    def run(x):
        block = gpt2_block(
            GPT2,
            separate_qkv=True,
            attention_implementation=attention,
            dtype=jnp.bfloat16,
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
        assert block.attention.query.kernel.dtype == jnp.float32
        assert block.mlp(x).dtype == jnp.bfloat16
        return run_layers(nnx.List([block]), x, remat="full", remat_layers=1)

    y = jax.eval_shape(run, normal(0, 2, 6, 32))
    assert y.shape == (2, 6, 32) and y.dtype == jnp.float32


def test_names_for_policies():
    assert "name=context" in str(jax.make_jaxpr(lambda x: named(x, "context"))(SCALE))


def test_one_token_of_the_likeliest():
    drawn = nnx.eval_shape(
        lambda model: (
            layers.generate(model, TOKENS, max_new_tokens=2, temperature=1.0, top_k=1, key=jax.random.key(0)).tokens
        ),
        llama(),
    )
    assert drawn.shape == (2, 2)


def test_adapters_by_dtype():
    model = nnx.clone(llama())
    layers.add_lora(model, 2, dtype=jnp.bfloat16, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    adapter = model.layers[0].mlp.down
    assert adapter.lora_a.dtype == jnp.float16 and adapter.dtype == jnp.bfloat16
    other = nnx.clone(llama())
    from_peft(other, *to_peft(model), dtype=jnp.float16, param_dtype=jnp.bfloat16)
    adapter = other.layers[0].mlp.down
    assert adapter.lora_a.dtype == jnp.bfloat16 and adapter.dtype == jnp.float16


def test_checkpoints_of_arrays():
    on_last = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    model = from_hf(to_hf(llama(), ONE_LAYER), ONE_LAYER, shardings=lambda path, shape: on_last)
    assert model.head.kernel[...].sharding == on_last
    there = to_maxtext(model, ONE_LAYER, query_scaled=False)
    scaled = to_maxtext(model, ONE_LAYER, query_scaled=True)
    query = there["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    assert jnp.array_equal(query, 2 * scaled["decoder"]["layers"]["self_attention"]["query"]["kernel"])  # Dh = 4
    back = from_maxtext(there, ONE_LAYER, query_scaled=False)
    assert jnp.array_equal(back.layers[0].attention.qkv.kernel[...], model.layers[0].attention.qkv.kernel[...])


def test_rules_in_force():
    assert not sharding.width_is_cut() and not sharding.keeps_weights()
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",), axis_types=(AxisType.Auto,))

    def run(x, module):
        assert sharding.width_is_cut() and sharding.keeps_weights()
        of_table = sharding.activation_spec((8, 16), "vocab", "embed", beside=("batch",), beside_shape=(8,))
        assert of_table == jax.P(None, None)
        x = sharding.constrain(x, "vocab", "embed", beside=("batch",), beside_shape=(8,))
        return x, sharding.constrain_parameters(module)

    module = layers.Linear(16, 8, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh), sharding.axis_rules(sharding.FSDP):
        x, same = nnx.jit(run)(UP.T[:8], module)
    assert jnp.array_equal(x, UP.T[:8]) and jnp.array_equal(same.kernel[...], module.kernel[...])
    named = sharding.map_named(lambda path, x, names: names, nnx.state(llama().norm))
    assert jax.tree.leaves(named) == ["norm"]
