"""The structure of layers: the products they call, what those keep, shapes, names and errors."""

import dataclasses
import functools
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.extend import core
from jax.interpreters import partial_eval
from layer_checks import apply, state_dict

import coda_jax as coda
import flax_layers as layers
from coda_jax import ffi
from coda_jax.primitives import gemm_primitive
from tests.tiny_models import GPT2

CONFIG = layers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def equations(jaxpr):
    """All equations of a jaxpr, those of nested ones in their place."""
    for equation in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in equation.params.values()]
        inner = [x for x in inner if isinstance(x, core.Jaxpr)]
        if not inner:
            yield equation
        for nested in inner:
            yield from equations(nested)


def test_a_llama_is_four_products_a_block_and_the_head():
    """Besides them only attention, and one pass of squares: over the embedding, made by no product."""
    model = layers.Llama(CONFIG, rngs=nnx.Rngs(0))
    found = list(equations(jax.make_jaxpr(model)(jnp.zeros((2, 8), int)).jaxpr))
    gemms = [e for e in found if e.primitive.name == "coda_gemm"]
    names = [e.primitive.name for e in found]
    assert names.count("coda_attention") == 1 and "dot_general" not in names
    assert names.count("reduce_sum") == 1
    assert [(e.params["spec"].name, *e.invars[1].aval.shape) for e in gemms] == [
        ("gemm", 64, 128),  # heads of 16 are turned behind it, by XLA
        ("Llama_1", 64, 64),
        ("Llama_2", 64, 192),
        ("Llama_3", 96, 64),
        ("gemm", 64, 256),
    ]


def frames():
    """The library's own functions among those that are being called, beside JAX's."""
    packages = tuple(str(pathlib.Path(package.__file__).parent) for package in (coda, layers))
    found = [frame for frame in traceback.extract_stack() if frame.filename.startswith(packages)]
    return [f"{pathlib.Path(frame.filename).stem}.{frame.name}" for frame in found]


def call_of_a_layer(layer):
    mlp, norm = layer(64, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), layers.RMSNorm(64, rngs=nnx.Rngs(0))
    return coda.fuse(lambda x: x + mlp(norm(x)))


CALLS = {  # a call, the functions from it to its product's primitive, the last of these, and its products
    "GatedMLP": (call_of_a_layer(layers.GatedMLP), 8, "bind", 2),
    "MLP": (call_of_a_layer(layers.MLP), 8, "bind", 2),
    "gemm": (lambda x: coda.gemm(x, x, epilogue=jax.nn.relu), 3, "bind_beside", 1),
}


@pytest.mark.parametrize("call, steps, last, products", CALLS.values(), ids=CALLS)
def test_a_call_reaches_the_kernel_in_few_steps(call, steps, last, products, monkeypatch):
    """From the call to the primitive, and from the primitive's lowering to the custom call of its kernel."""
    binds, launches = [], []

    def counting(path, function):
        def counted(*arguments, **params):
            path.append(frames())
            return function(*arguments, **params)

        return counted

    bind = counting(binds, gemm_primitive.coda_gemm_p.bind)
    for primitive in gemm_primitive.PRIMITIVES:
        monkeypatch.setattr(primitive, "bind", bind, raising=False)
    monkeypatch.setattr(ffi, "gemm_call", counting(launches, ffi.gemm_call))
    traced = jax.jit(call).trace(ones(64, 64, dtype=jnp.bfloat16))
    assert [(len(path), path[-1]) for path in binds] == [(steps, f"gemm_primitive.{last}")] * products
    if ffi.unavailable_reason() is None:
        traced.lower(lowering_platforms=("cuda",))
        assert [(len(path), path[-1]) for path in launches] == [(3, "launch.kernel_tiles")] * products


@pytest.mark.smoke
def test_backward_pass_keeps_stream_gate_and_up_alone():
    """The residual stream, and gate and up rounded; not the hidden activation, no norm, no float32 (M, N)."""
    dtype = jnp.bfloat16
    mlp = layers.GatedMLP(64, 96, dtype=dtype, rngs=nnx.Rngs(0))
    norm = layers.RMSNorm(64, rngs=nnx.Rngs(0))

    def call(x, params):
        return apply(mlp, params, lambda m, x: x + m(norm(x)), x)

    _, vjp = jax.vjp(coda.fuse(call, defer_norms=True), ones(40, 64, dtype=dtype), state_dict(mlp))
    kept = sorted((x.dtype.name, x.shape) for x in jax.tree.leaves(vjp) if x.ndim > 1 and x.shape[0] == 40)
    wide = [(name, shape) for name, shape in kept if shape[1] > 1]
    assert {name for name, _ in wide} == {"bfloat16"}
    assert {shape for _, shape in wide} == {(40, 64), (40, 192)}  # x; gate and up


@pytest.mark.parametrize("saved, products", [((), 7), (("mlpwi",), 6)])
def test_checkpoint_policies_by_name(saved, products):
    """Recomputing all takes the forward's first product again; the second's results nobody needs."""
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def f(x, sumsq, scale, *weights):
        return coda.gated_mlp(coda.DeferredNorm(x, sumsq, scale), *weights).x

    arguments = ones(16, 8), ones(16), ones(8), ones(8, 16), ones(8, 8)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda *a: f(*a).sum(), argnums=(0, 2, 3, 4)))(*arguments)
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * 5)
    assert [e.primitive.name for e in equations(live)].count("coda_gemm") == products


@pytest.mark.smoke
def test_the_training_step_lowers_to_kernels_for_hopper():
    """Lowered for CUDA on any machine, every product of a bfloat16 Llama is the kernel's; XLA's own are attention's."""
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    model = layers.Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params, tokens):
        return jnp.sum(nnx.merge(graphdef, params)(tokens).astype(jnp.float32) ** 2)

    traced = jax.jit(jax.grad(loss)).trace(params, jnp.zeros((2, 128), int))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@coda_gemm") == 15  # forward, and two for each in the gradient
    # Scores and values, forward, the scores again in the gradient, and two for each; none where a kernel has them.
    assert text.count("stablehlo.dot_general") == (0 if "coda_launch" in text else 7)


@pytest.mark.slow
def test_blocks_go_through_jit_scan_and_checkpoint():
    block = layers.LlamaBlock(32, 48, 2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 6, 32))

    def scanned(x, wrap):
        last, _ = jax.lax.scan(lambda stream, _: (wrap(block)(stream), None), block(x), length=2)
        return jnp.sum(last**2)

    def unrolled(x):
        return jnp.sum(block(block(block(x))) ** 2)

    expected = jax.jit(jax.grad(unrolled))(x)
    for wrap in (lambda f: f, jax.checkpoint):
        got = jax.jit(jax.grad(lambda x, wrap=wrap: scanned(x, wrap)))(x)
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * float(jnp.max(jnp.abs(expected))))


def test_partitioned_initialisers():
    """Every kernel carries the sharding that its initialiser gives; gate_up that of (D, F)."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        block = layers.LlamaBlock(16, 24, 4, kernel_init=init, rngs=nnx.Rngs(0))
        plain = layers.LlamaBlock(16, 24, 4, rngs=nnx.Rngs(0))
        assert block.mlp.gate_up[...].sharding.spec == jax.P(None, None, "model")
        assert block.attention.qkv.kernel[...].sharding.spec == jax.P(None, "model")
        np.testing.assert_array_equal(block.mlp.gate_up[...], plain.mlp.gate_up[...])
        x = jax.random.normal(jax.random.key(0), (2, 8, 16))
        np.testing.assert_allclose(nnx.jit(block)(x), nnx.jit(plain)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16), (0, 16), (7, 16)])
def test_empty_and_unbatched_inputs(shape):
    y = jax.jit(lambda x: layers.LlamaBlock(16, 24, 4, rngs=nnx.Rngs(0))(x))(ones(*shape))
    assert y.shape == shape and jnp.isfinite(y).all()


def test_separate_kernels_of_other_checkpoints():
    attention = layers.Attention(32, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    q, k, v = attention.split_kernel()
    assert (q.shape, k.shape, v.shape) == ((32, 32), (32, 16), (32, 16))
    np.testing.assert_array_equal(jnp.concatenate([q, k, v], axis=1), attention.qkv.kernel[...])
    mlp = layers.GatedMLP(8, 12, rngs=nnx.Rngs(0))
    assert mlp.gate_up.shape == (8, 2, 12)
    np.testing.assert_array_equal(jnp.stack(mlp.split_kernel(), axis=1), mlp.gate_up[...])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_export_with_any_number_of_tokens(dtype):
    graphdef, state = nnx.split(layers.Llama(CONFIG, dtype=dtype, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    tokens = jax.ShapeDtypeStruct(export.symbolic_shape("batch, length"), jnp.int32)
    exported = export.export(run, platforms=("cpu",))(state, tokens)
    for shape in ((2, 7), (1, 1)):
        tokens = jax.random.randint(jax.random.key(1), shape, 0, 20)
        np.testing.assert_allclose(
            exported.call(state, tokens).astype(jnp.float32),
            run(state, tokens).astype(jnp.float32),
            rtol=1e-4,
            # Where a norm is applied depends on the number of rows, and so do the places of bfloat16's roundings.
            atol=1e-5 if dtype == jnp.float32 else 4e-3,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        lambda: layers.Llama(CONFIG, rngs=nnx.Rngs(0)),
        lambda: layers.Llama(CONFIG, scan_layers=True, remat="full", rngs=nnx.Rngs(0)),
        lambda: layers.GPT2(GPT2, rngs=nnx.Rngs(0)),
    ],
    ids=["llama", "scan", "gpt2"],
)
def test_on_a_mesh_with_explicit_axes(model):
    model = model()
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 20)
    gradient = nnx.jit(nnx.value_and_grad(lambda model, tokens: model.loss(tokens[:, :-1], tokens[:, 1:])))
    want = gradient(model, tokens)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        nnx.update(model, jax.device_put(nnx.state(model), jax.P()))
        tokens = jax.device_put(tokens, jax.P("data"))
        got = gradient(model, tokens)
        assert model(tokens).sharding.spec[0] == "data"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: layers.LlamaConfig(head_dim=0), "head_dim=0; it must be an integer, 1 or more"),
        (lambda: layers.LlamaConfig(num_hidden_layers=-1), "num_hidden_layers=-1; it must be an integer, 0 or more"),
        (lambda: layers.LlamaConfig(sliding_window=2.5), "sliding_window=2.5; it must be an integer"),
        (lambda: layers.LlamaConfig(rms_norm_eps=-1), "rms_norm_eps=-1; it must be a number, 0 or more"),
        (lambda: layers.LlamaConfig(rope_theta=0.0), "rope_theta=0.0; it must be positive"),
        (lambda: layers.LlamaConfig(rope_scaling={"rope_type": "llama3"}), "must be a RopeScaling, another"),
        (lambda: layers.GPT2Config(n_head=0), "GPT2Config: n_head=0; it must be an integer, 1 or more"),
        (lambda: layers.Linear(8, 4, rngs=nnx.Rngs(0))(ones(2, 9)), r"over 8 features .*\(2, 9\)"),
        (lambda: layers.Linear(8, 4, rngs=nnx.Rngs(0))(jnp.float32(1)), r"wants \(\.\.\., 8\), got shape \(\)"),
        (lambda: layers.Attention(8, 0, rngs=nnx.Rngs(0)), "num_heads=0 .* must be at least 1"),
        (lambda: layers.Attention(8, 2, rngs=nnx.Rngs(0))(ones(2, 2, 3, 8)), r"got shape \(2, 2, 3, 8\)"),
        (
            lambda: layers.Attention(8, 2, rngs=nnx.Rngs(0))(ones(2, 3, 8), positions=jnp.arange(4)),
            r"positions has shape \(4,\) beside an input of shape \(2, 3, 8\)",
        ),
        (
            lambda: layers.LMHead(8, 4, tied=True, rngs=nnx.Rngs(0))(ones(2, 8), embedding=ones(5, 8)),
            r"embedding has shape \(5, 8\), not \(4, 8\)",
        ),
        (lambda: layers.RMSNorm(8, rngs=nnx.Rngs(0))(ones(2, 9)), r"8 features .*\(2, 9\)"),
        (lambda: layers.Attention(30, 4, rngs=nnx.Rngs(0)), "in_features=30 is not a multiple of num_heads=4"),
        (lambda: layers.Attention(32, 4, num_kv_heads=3, rngs=nnx.Rngs(0)), "num_heads=4 .* num_kv_heads=3"),
        (lambda: layers.Attention(12, 4, rngs=nnx.Rngs(0)), "head_dim=3 is odd"),
        (lambda: layers.LMHead(8, 4, tied=True, rngs=nnx.Rngs(0))(ones(2, 8)), "tied LMHead .* give it embedding="),
        (lambda: layers.LMHead(8, 4, rngs=nnx.Rngs(0))(ones(2, 8), embedding=ones(4, 8)), "takes no embedding="),
        (
            lambda: layers.Llama(dataclasses.replace(CONFIG, max_position_embeddings=4), rngs=nnx.Rngs(0))(
                jnp.zeros((1, 5), int)
            ),
            "5 tokens exceed .*=4",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()
