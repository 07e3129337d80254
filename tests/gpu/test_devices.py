"""Several GPUs in one process: each runs the kernel on what it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from coda_jax.primitives import notes
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


def test_what_xla_partitions_takes_its_form(mesh, monkeypatch):
    monkeypatch.setattr(notes, "_reported", set())
    a = jax.device_put(jnp.ones((1024, 256), jnp.bfloat16), NamedSharding(mesh, P("data")))
    b = jax.device_put(jnp.ones((256, 512), jnp.bfloat16), NamedSharding(mesh, P()))
    with pytest.warns(coda.FallbackWarning, match="mesh axes data; inside a jax.shard_map"):
        out = jax.jit(lambda a, b: coda.gemm(a, b, epilogue=jax.nn.silu))(a, b)
    assert out.sharding.is_equivalent_to(a.sharding, 2) and bool(jnp.all(out == 256))
