"""Several GPUs in one process: each runs the kernel on what it has, by hand, in shard_map, and under plain jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from benchmarks.sharded_step import schemes
from flax_layers import Llama, LlamaConfig
from tests.nvrtc import kernels

DEVICES = jax.devices()
pytestmark = pytest.mark.skipif(len(DEVICES) < 2, reason="one device")


@pytest.fixture
def mesh():
    return jax.make_mesh((len(DEVICES),), ("data",))


@pytest.mark.parametrize("name", ["residual_sumsq", "swiglu", "bias_gelu"])
def test_every_device_gives_the_same_bits(name):
    m, n, k = 1160, 1552, 264
    program = PROGRAMS[name]
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)
    arguments = (a, b, *program.operands(m, n))

    @jax.jit
    def run(a, b, *operands):
        return coda.gemm(a, b, *operands, epilogue=program.epilogue, implementation="cuda")

    for _ in range(20):  # so that launches on different devices overlap
        results = [run(*jax.device_put(arguments, device)) for device in DEVICES]
    for device, result in zip(DEVICES, results, strict=True):
        assert jax.tree.leaves(result)[0].devices() == {device}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), jax.device_get(results[0]))


def test_a_model_in_shard_map(mesh):
    """The loss, and gradients up to what bfloat16 products of other sizes round, are those of one device."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    graph, params = nnx.split(Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (4 * len(DEVICES), 257), 0, 512)

    def loss(params, tokens):
        return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])

    def of_shard(params, tokens):
        return jax.lax.pmean(loss(params, tokens), "data")

    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    placed = jax.device_put(params, everywhere), jax.device_put(tokens, rows)
    assert kernels(jax.value_and_grad(sharded), *placed) > 10
    got = jax.device_get(jax.jit(jax.value_and_grad(sharded))(*placed))
    want = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, tokens))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
    for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert np.isfinite(x).all() and np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y)


# ---- plain jit over sharded arrays

M, K, N = 512, 256, 768
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(kind, data=None):
    """All devices: `data` of them along "data", the rest along "model"."""
    data = len(DEVICES) if data is None else data
    return jax.make_mesh((data, len(DEVICES) // data), ("data", "model"), axis_types=(kind,) * 2)


def everything(acc, x, row, column):
    y = jax.nn.silu(acc + row) * column + x
    return y, jnp.sum(y * y, axis=1), coda.logsumexp(y, axis=1), jnp.max(y, axis=0), jnp.min(y, axis=1), jnp.mean(y)


def fused(a, b, x, row, column):
    return coda.gemm(a, b, x, row, column, epilogue=everything, out_dtype=(None, *[jnp.float32] * 5))


def arguments():
    """a, b, x, row and column of `fused`."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(M, K), (K, N), (M, N), (N,), (M, 1)]
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    return [arrays[0], arrays[1] / K**0.5, *arrays[2:]]


def close(got, want, rtol):
    """By the norm of each array: parts of other sizes are rounded elsewhere."""
    for x, y in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(jax.device_get(want)), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert x.shape == y.shape and np.isfinite(x).all()
        assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y), (x.shape, np.linalg.norm(x - y), np.linalg.norm(y))


def placed_on(mesh, arrays, specs):
    """The arrays as the specs say, whose last entries may be left out."""
    whole = (P(*spec, *[None] * (x.ndim - len(spec))) for x, spec in zip(arrays, specs, strict=True))
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, whole, strict=True)]


def own_calls(compiled):
    return compiled.as_text().count('custom_call_target="coda_gemm"')


# How a, b, x, row and column lie, and how many devices "data" has; None for all.
LAYOUTS = {
    "data parallel": ((P("data"), P(), P("data"), P(), P("data")), None),
    "FSDP, K": ((P("data"), P("data"), P("data"), P(), P("data")), None),
    "FSDP, N": ((P("data"), P(None, "data"), P("data"), P(), P("data")), None),
    "columns": ((P(), P(None, "model"), P(None, "model"), P("model"), P()), 1),
    "K": ((P(None, "model"), P("model"), P(), P(), P()), 1),
    "K, scattered": ((P(None, "model"), P("model"), P("model"), P(), P("model")), 1),
}


@KINDS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_kernels_on_each_part(layout, kind):
    """Values are those of one device, the kernel's call is in the compiled program, and repeats give the same bits."""
    specs, data = LAYOUTS[layout]
    want = jax.jit(fused)(*arguments())
    mesh = mesh_of(kind, data)
    with jax.set_mesh(mesh):
        placed = placed_on(mesh, arguments(), specs)
        compiled = jax.jit(fused).lower(*placed).compile()
        assert own_calls(compiled) == 1
        got = compiled(*placed)
        close(got, want, 0.01)
        for _ in range(50):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(compiled(*placed)), jax.device_get(got))


@KINDS
def test_gradients_of_a_users_epilogue(kind):
    def loss(a, b, x, row, column):
        y, sums, *_ = fused(a, b, x, row, column)
        return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(jnp.log(sums))

    gradient = jax.grad(loss, range(5))
    want = jax.jit(gradient)(*arguments())
    specs, data = LAYOUTS["FSDP, K"]
    mesh = mesh_of(kind, data)
    with jax.set_mesh(mesh):
        placed = placed_on(mesh, arguments(), specs)
        compiled = jax.jit(gradient).lower(*placed).compile()
        assert own_calls(compiled) >= 3
        close(compiled(*placed), want, 0.02)


@pytest.mark.parametrize("of_w", [P(), P("data"), P(None, "data"), P(None, "model")], ids=str)
def test_the_loss(of_w):
    """Tokens are cut, or the vocabulary is; several chunks a device."""
    width, vocabulary = 128, 1000
    data = 1 if "model" in str(of_w) else None
    keys = jax.random.split(jax.random.key(3), 3)
    x = jax.random.normal(keys[0], (8, 256, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (width, vocabulary), jnp.bfloat16) / width**0.5
    labels = jax.random.randint(keys[2], (8, 256), 0, vocabulary)

    def loss(x, w, labels):
        norm = coda.rms_norm(x, jnp.ones(width, x.dtype))
        return coda.linear_cross_entropy(norm, w, labels, chunk_bytes=vocabulary * 2 * 256)[0]

    gradient = jax.value_and_grad(loss, (0, 1))
    want = jax.jit(gradient)(x, w, labels)
    mesh = mesh_of(AxisType.Auto, data)
    with jax.set_mesh(mesh):
        placed = placed_on(mesh, (x, w, labels), (P("data"), of_w, P("data")))
        compiled = jax.jit(gradient).lower(*placed).compile()
        assert own_calls(compiled) >= 3
        close(compiled(*placed), want, 0.02)


CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8
)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize(
    ("scheme", "kind"),
    [(scheme, AxisType.Auto) for scheme in ("dp", "fsdp", "tp", "sp")]
    + [(scheme, AxisType.Explicit) for scheme in ("dp", "fsdp", "tp")],
    ids=str,
)
def test_models_under_plain_jit(scheme, scan, kind):
    """Loss and gradients of one device; each product is a kernel, of which scanned layers have one set."""
    scheme = next(one for one in schemes(len(DEVICES)) if one.name == scheme)
    options = {"scan_layers": True, "remat": "save_attention"} if scan else {}
    model = Llama(CONFIG, rules=scheme.rules, separate_qkv=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    graph, params = nnx.split(model, nnx.Param)
    tokens = jax.random.randint(jax.random.key(1), (4 * len(DEVICES), 257), 0, CONFIG.vocab_size)

    def loss(params, tokens):
        return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])

    step = jax.jit(jax.value_and_grad(loss))
    want = jax.device_get(step(params, tokens))
    mesh = scheme.mesh(kind)
    with jax.set_mesh(mesh):
        placed, rows = scheme.placed(params, mesh), jax.device_put(tokens, scheme.tokens(mesh, cuts_length=False))
        compiled = step.lower(placed, rows).compile()
        got = compiled(placed, rows)
    assert own_calls(compiled) >= (13 + 3 if scan else 2 * 12 + 3)
    np.testing.assert_allclose(jax.device_get(got[0]), want[0], rtol=1e-3)
    close(got[1], want[1], 0.03)
