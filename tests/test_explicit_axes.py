"""Models over explicit mesh axes, where JAX refuses what no type says: few key heads, biases, adapters, odd batches."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
import flax_layers as layers
from flax_layers import sharding
from flax_layers.attend import attend
from flax_layers.checkpoints import load_peft_folder, save_peft_folder
from tests.gemm_cases import assert_close

P = PartitionSpec
WIDTH, HEADS, HEAD_DIM = 32, 8, 8
LLAMA = layers.LlamaConfig(
    vocab_size=64,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
)
TOKENS = jax.random.randint(jax.random.key(0), (8, 16), 0, 64)
SEGMENTS = jnp.repeat(jnp.arange(2), 8)[None]
PLANS = {
    "tensor": (sharding.TENSOR, {"tensor": 4}),
    "fsdp": (sharding.FSDP, {"fsdp": 4}),
    "fsdp and tensor": (sharding.FSDP_TENSOR, {"fsdp": 2, "tensor": 4}),
    "two axes": (dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("outer", "inner")), {"outer": 2, "inner": 2}),
}
# Heads of keys and values are fewer than the 4 devices along tensor.
MODELS = {
    "few": {},
    "one": {"num_key_value_heads": 1},
    "one, packed": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True},
    "norms": {"qk_norm": True, "num_key_value_heads": 1},
    "norms and biases": {"qk_norm": True, "attention_bias": True},
    "adapters": {"num_key_value_heads": 1},
    "adapters and biases": {"attention_bias": True, "qk_norm": True},
    "scanned": {},
}


def model_of(name, rules=None):
    if name == "gpt2":
        config = layers.GPT2Config(vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=4)
        return layers.GPT2(config, separate_qkv=True, rules=rules, rngs=nnx.Rngs(0))
    config = dataclasses.replace(LLAMA, **MODELS[name])
    options = {"separate_qkv": "packed" not in name, "scan_layers": name == "scanned"}
    model = layers.Llama(config, rules=rules, rngs=nnx.Rngs(0), **options)
    if "adapters" in name:
        layers.add_lora(model, 4, targets=(*layers.lora.PROJECTIONS[1:6], "down", "head"), rngs=nnx.Rngs(1))
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.LoRA):  # 0 would hide all that goes through it
                module.lora_b[...] = jnp.full_like(module.lora_b[...], 0.02)
    return model


def mesh_of(sizes, kind=AxisType.Explicit):
    devices = jax.devices("cpu")[: int(np.prod([*sizes.values()]))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def values(model, tokens):
    """Logits and log-probabilities."""
    return model(tokens), model.token_logprobs(tokens, tokens)


def step(model, tokens):
    """The loss of packed sequences, and its gradient."""
    segments = jnp.broadcast_to(SEGMENTS, tokens.shape)
    return nnx.value_and_grad(lambda model: model.loss(tokens, tokens, segment_ids=segments))(model)


def of_logprobs(model, tokens):
    """The gradient of log-probabilities."""
    return nnx.grad(lambda model: jnp.sum(model.token_logprobs(tokens, tokens) * jnp.arange(16)))(model)


def decoded(model, tokens):
    """Logits after a prompt, and after padded tokens more."""
    first, cache = model.decode(tokens[:, :4], model.init_cache(tokens.shape[0], 12))
    second, _ = model.decode(tokens[:, 4:7], cache, lengths=jnp.arange(tokens.shape[0]) % 3 + 1)
    return first, second


def program(function, graphdef):
    """function(model, tokens) as a jitted function of the model's state."""
    return jax.jit(lambda state, tokens: function(nnx.merge(graphdef, state), tokens))


def traced(function, name, plan, kind=AxisType.Explicit, batch=8):
    """A program traced for arguments that lie as the plan says, with their shardings and the mesh."""
    rules, sizes = PLANS[plan]
    mesh = mesh_of(sizes, kind)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: model_of(name, rules)))
    lie = (
        sharding.parameter_shardings(state, mesh, rules),
        NamedSharding(mesh, sharding.spec_of(("batch", None), rules, mesh=mesh, shape=(batch, None))),
    )
    types = jax.tree.map(
        lambda x, of_x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_x), (state, TOKENS[:batch]), lie
    )
    with jax.set_mesh(mesh):
        return program(function, graphdef).trace(*types), lie, mesh


@functools.cache
def wanted(function, name, batch):
    """The state of a model, and what it gives on one device."""
    graphdef, state = nnx.split(model_of(name))
    return state, jax.device_get(program(function, graphdef)(state, TOKENS[:batch]))


def compared(function, name, plan, batch=8, **options):
    state, want = wanted(function, name, batch)
    run, lie, mesh = traced(function, name, plan, batch=batch, **options)
    with jax.set_mesh(mesh):
        got = run.lower().compile()(*jax.device_put((state, TOKENS[:batch]), lie))
    assert_close(jax.device_get(got), want, rtol=1e-4)


@pytest.mark.parametrize("function", [values, step])
def test_values(function):
    compared(function, "few", "tensor")


@pytest.mark.slow
@pytest.mark.parametrize("function", [values, step, of_logprobs, decoded])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("few", "fsdp and tensor"),
        ("adapters and biases", "two axes"),
        ("one, packed", "tensor"),
        ("norms", "tensor"),
    ],
)
def test_values_of_other_models(name, plan, function):
    compared(function, name, plan)


QUICK = {
    ("few", "tensor"),
    ("norms and biases", "tensor"),
    ("gpt2", "fsdp and tensor"),
    ("one, packed", "fsdp and tensor"),
    ("adapters", "fsdp and tensor"),
    ("adapters and biases", "two axes"),
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
        for case in itertools.product([*MODELS, "gpt2"], PLANS)
    ],
)
def test_types(name, plan):
    """JAX traces every model under every plan: all that it would refuse it refuses there."""
    for function in (values, step, of_logprobs, decoded):
        traced(function, name, plan)


def test_decoding():
    compared(decoded, "one", "tensor")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("few", "fsdp and tensor"),
        ("gpt2", "fsdp"),
        ("adapters", "fsdp and tensor"),
        pytest.param("few", "fsdp", marks=pytest.mark.slow),
        pytest.param("gpt2", "fsdp and tensor", marks=pytest.mark.slow),
        pytest.param("adapters", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_types_of_a_batch_that_the_mesh_does_not_divide(name, plan):
    for function in (step, of_logprobs):
        traced(function, name, plan, batch=3)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (AxisType.Explicit, "fsdp"),
        (AxisType.Auto, "fsdp"),
        pytest.param(AxisType.Explicit, "fsdp and tensor", marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, "fsdp and tensor", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_of_a_batch_that_the_mesh_does_not_divide(kind, plan):
    compared(step, "few", plan, kind=kind, batch=1)


def test_each_device_has_the_key_heads_of_its_queries():
    """Attention is that of a device's own query heads, also if key heads are fewer than devices."""
    seen = []

    def attention(q, k, v, *, mask, is_causal, local_window_size):
        seen.append((q.shape[-2], k.shape[-2]))
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal)

    rules, sizes = PLANS["tensor"]
    make = functools.partial(layers.Llama, LLAMA, separate_qkv=True, attention_implementation=attention)
    with jax.set_mesh(mesh_of(sizes)):
        model = sharding.create(lambda: make(rules=rules, rngs=nnx.Rngs(0)))
        seen.clear()
        got = nnx.jit(lambda model: model(TOKENS))(model)
    assert seen == [(HEADS // 4, 1)]
    assert_close(jax.device_get(got), wanted(values, "few", 8)[1][0], rtol=1e-4)


@pytest.mark.parametrize("spec", [P("fsdp", None, "tensor"), P(None, "fsdp", "tensor")], ids=str)
def test_attention_lies_as_its_queries(spec):
    """Rows or positions are cut, and heads; keys are whole. Packed rows with a window, forward and backward."""
    shapes = ((2, 16, HEADS, HEAD_DIM), *((2, 16, 2, HEAD_DIM),) * 2)
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    segment_ids = jnp.repeat(jnp.arange(8), 4).reshape(2, 16)

    def run(q, k, v, segment_ids):
        y, pullback = jax.vjp(lambda *x: attend(*x, segment_ids=segment_ids, sliding_window=3)[0], q, k, v)
        return y, pullback(jnp.cos(y))

    want, mesh = jax.jit(run)(*arrays, segment_ids), mesh_of({"fsdp": 2, "tensor": 4})
    with jax.set_mesh(mesh):
        rows = P(spec[0])
        lie = [NamedSharding(mesh, x) for x in (spec, rows, rows, rows)]
        got = jax.jit(run)(*jax.device_put([*arrays, segment_ids], lie))
    y, (dq, dk, _) = got
    assert [jax.typeof(x).sharding.spec for x in (y, dq, dk)] == [P(*spec, None)] * 2 + [P(spec[0], None, None, None)]
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4)


@pytest.mark.parametrize(
    "of_keys", [P(), P("tensor"), pytest.param(P(None, "tensor"), marks=pytest.mark.slow)], ids=str
)
def test_weights_that_lie_apart(of_keys):
    """Kernels of queries that are cut, and of keys and values that are cut otherwise or whole, without rules."""
    mesh = mesh_of({"tensor": 4})
    rng = np.random.default_rng(0)
    x, q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 16, WIDTH), (WIDTH, HEADS * HEAD_DIM), (WIDTH, 2 * HEAD_DIM), (WIDTH, 2 * HEAD_DIM))
    )
    tables = layers.attention.rotary_angles(jnp.arange(16), HEAD_DIM, 1e4)

    def total(x, *w):
        norm = coda.rms_norm(x, jnp.ones(WIDTH))
        heads = coda.qkv_projection(norm, w, *tables, num_heads=HEADS, num_kv_heads=2)
        plain = coda.norm_projection(norm, w, tuple(jnp.ones(part.shape[1]) for part in w))
        return sum(jnp.sum(jnp.sin(y)) for y in (*heads, *plain))

    want = jax.jit(jax.value_and_grad(total, range(4)))(x, q, k, v)
    with jax.set_mesh(mesh):
        specs = (P(), P(None, "tensor"), of_keys, of_keys)
        placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip((x, q, k, v), specs, strict=True)]
        got = jax.jit(jax.value_and_grad(total, range(4)))(*placed)
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4)


@pytest.mark.parametrize("scanned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_put_in_and_taken_out(scanned, tmp_path):
    """`gate_up` (D, 2, F), cut by F, becomes (D, 2F) and is again what it was, outside of jit and of jax.set_mesh."""
    rules, sizes = PLANS["fsdp and tensor"]

    def make(rules=None):
        return layers.Llama(LLAMA, separate_qkv=True, scan_layers=scanned, rules=rules, rngs=nnx.Rngs(0))

    def adapted(model):
        layers.add_lora(model, 4, rngs=nnx.Rngs(1))
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.LoRA):
                module.lora_b[...] = jnp.full_like(module.lora_b[...], 0.1)

    mesh, want = mesh_of(sizes), make()
    model = sharding.create(lambda: make(rules), mesh=mesh)
    given = jax.tree.map(lambda x: x, nnx.state(model))
    adapted(model)
    mlp = model.layers.mlp if scanned else model.layers[0].mlp
    assert mlp.gate_up.base_module.kernel[...].sharding.spec == P(*[None] * scanned, "fsdp", "tensor")
    save_peft_folder(model, tmp_path / "adapters")
    low_rank = jax.device_get(nnx.state(model, nnx.LoRAParam))
    for _ in range(2):
        layers.remove_lora(model)
        for x, y in zip(*map(jax.tree.leaves, (nnx.state(model), given)), strict=True):
            assert x.sharding == y.sharding and jnp.all(x == y)
        load_peft_folder(model, tmp_path / "adapters")
        assert_close(jax.device_get(nnx.state(model, nnx.LoRAParam)), low_rank)
    layers.remove_lora(model)
    for changed in (model, want):
        adapted(changed)
        layers.merge_lora(changed)
    assert jax.tree.map(lambda x: x.sharding, nnx.state(model)) == jax.tree.map(lambda x: x.sharding, given)
    assert_close(jax.device_get(nnx.state(model)), jax.device_get(nnx.state(want)), rtol=1e-5)


def test_sub_layers_without_a_residual():
    """Both factors of the last product are cut along what is summed over, and no residual says how the sum lies."""
    model, mesh = model_of("biases", sharding.TENSOR), mesh_of({"tensor": 4})
    x = jax.random.normal(jax.random.key(0), (2, 16, WIDTH))

    def run(state, x):
        block = nnx.merge(graphdef, state)
        return block.attention(x), block.mlp(x)

    graphdef, state = nnx.split(model.layers[0])
    want = jax.jit(run)(state, x)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(sharding.normalized(sharding.TENSOR)):
        placed = jax.device_put(state, sharding.parameter_shardings(state, mesh, sharding.TENSOR))
        got = jax.jit(run)(placed, x)
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4)


def test_a_product_that_its_factors_leave_open():
    mesh = mesh_of({"tensor": 4})
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 8, 32), (32, 16)))

    def total(a, b, **options):
        y = coda.gemm(a, b, epilogue=jnp.tanh, **options)
        return jnp.sum(y * y), y

    want = jax.value_and_grad(total, (0, 1), has_aux=True)(a, b)
    with jax.set_mesh(mesh):
        specs = P(None, None, "tensor"), P("tensor")
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs, strict=True)]
        with pytest.raises(Exception, match="ambiguous"):  # JAX's ShardingTypeError, which has no public name
            jax.jit(total).trace(*placed)
        said = functools.partial(total, out_sharding=P(None, "tensor"))
        got = jax.jit(jax.value_and_grad(said, (0, 1), has_aux=True))(*placed)
        for spec, message in ((P("tensor"), "evenly"), (P("other"), r"axes \('tensor',\), and no \['other'\]")):
            with pytest.raises(ValueError, match=message):
                jax.jit(functools.partial(total, out_sharding=spec)).trace(*placed)
    assert got[0][1].sharding.spec == P(None, "tensor", None)
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4)


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_tiles_beside_a_product_whose_sharding_is_said(residuals):
    """They are moved to it, from wherever they lie."""
    mesh = mesh_of({"data": 2, "tensor": 4})
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 8, 32), (32, 16), (2, 8, 16))]

    def total(a, b, tile, **options):
        outputs = coda.gemm(a, b, tile, epilogue=lambda acc, x: (jnp.sin(acc + x), acc * x), **options)
        return sum(map(jnp.sum, outputs)), outputs

    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    want = jax.jit(gradient(total))(*arrays)
    said = functools.partial(total, out_sharding=P(None, None, "tensor"), residuals=residuals)
    with jax.set_mesh(mesh):
        specs = (P(None, None, "tensor"), P("tensor"), P("data"))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        got = jax.jit(gradient(said))(*placed)
    assert [x.sharding.spec for x in got[0][1]] == [P(None, None, "tensor")] * 2
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(got[1], placed, strict=True))
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4)


@pytest.mark.parametrize("spec", [P(), P(None, "tensor"), P("tensor")], ids=str)
def test_a_product_computed_again_beside_a_tile(spec):
    """The tile decides how a product over a sharded K is, forward and where its gradient computes it again."""
    mesh = mesh_of({"tensor": 4})
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((32, 64), (64, 48), (32, 48))]

    def total(a, b, tile):
        sums = coda.gemm(a, b, tile, residuals="recompute", epilogue=lambda acc, x: jax.nn.logsumexp(acc + x, axis=1))
        return jnp.sum(sums)

    gradient = jax.grad(total, (0, 1, 2))
    want = jax.jit(gradient)(*arrays)
    with jax.set_mesh(mesh):
        specs = (P(None, "tensor"), P("tensor", None), spec)
        placed = [jax.device_put(x, NamedSharding(mesh, one)) for x, one in zip(arrays, specs, strict=True)]
        got = jax.jit(gradient)(*placed)
    assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-4)


@pytest.mark.parametrize("spec", [P(), P("data"), P("data", None, "tensor")], ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_hidden_activations_with_fewer_entries_than_axes(spec, packed):
    """Entries that a PartitionSpec leaves out are None, also where the halves of a gate are an axis."""
    x, w_down = jax.random.normal(jax.random.key(0), (4, 6, 8)), jax.random.normal(jax.random.key(1), (16, 8)) / 16
    w_up = jax.random.normal(jax.random.key(2), (8, 2, 16))
    w_up = w_up if packed else (w_up[:, 0], w_up[:, 1])

    def loss(x, *weights, spec=None):
        y = coda.gated_mlp(coda.rms_norm(x, jnp.ones(8)), *weights, dtype=jnp.float32, hidden_sharding=spec)
        return jnp.sum(jnp.sin(y.x))

    want = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w_up, w_down)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(functools.partial(loss, spec=spec), argnums=(0, 1, 2)))(x, w_up, w_down)
    jax.tree.map(functools.partial(assert_close, rtol=1e-5), got, want)
