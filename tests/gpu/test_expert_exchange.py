"""Experts on several GPUs: rows that `jax.lax.ragged_all_to_all` moves are those that blocks do, and one device has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_layers.moe import exchange
from flax_layers.moe.exchange import Buffers, exchange_of, exchanged_experts, send_in_blocks, send_ragged
from flax_layers.moe.routing import sorted_experts

DEVICES = jax.devices()
pytestmark = pytest.mark.skipif(len(DEVICES) < 2, reason="one device")

TOKENS, D, F, K = 512 * len(DEVICES), 256, 128, 4
TOKENS_OF = P("expert")


@pytest.fixture
def mesh():
    return jax.make_mesh((len(DEVICES),), ("expert",), axis_types=(AxisType.Auto,))


def arrays(num_experts, routing, dtype):
    """x, ids, weights, up and down; the numbers of rows of an expert are those of chance, or one has them all."""
    keys = jax.random.split(jax.random.key(1), 5)
    x = jax.random.normal(keys[0], (TOKENS, D), dtype)
    ids = jax.random.randint(keys[1], (TOKENS, K), 0, num_experts)
    if routing == "one":
        ids = jnp.full_like(ids, num_experts - 1)
    elif routing == "few":  # most slices are empty
        ids = ids % 3
    weights = jax.random.uniform(keys[2], (TOKENS, K), jnp.float32, 0.1, 1)
    up = (jax.random.normal(keys[3], (num_experts, D, F)) / D**0.5).astype(dtype)
    down = (jax.random.normal(keys[4], (num_experts, F, D)) / F**0.5).astype(dtype)
    return x, ids, weights, up, down


def feed_forward(rows, row_scale, group_sizes, up, down):
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, up, group_sizes))
    return (jax.lax.ragged_dot(hidden, down, group_sizes) * row_scale[:, None]).astype(rows.dtype)


def of_one_device(x, ids, weights, up, down):
    return sorted_experts(lambda *rows: feed_forward(*rows, up, down), x, ids, weights, up.shape[0])


def of_devices(mesh, **options):
    def of_device(x, ids, weights, up, down):
        num_experts = up.shape[0] * len(DEVICES)
        return exchanged_experts(lambda *rows: feed_forward(*rows, up, down), x, ids, weights, num_experts, **options)

    return jax.shard_map(of_device, mesh=mesh, in_specs=(TOKENS_OF,) * 5, out_specs=TOKENS_OF)


def with_gradients(function):
    def loss(x, weights, up, down, ids):
        y = function(x, ids, weights, up, down)
        return jnp.sum(jnp.sin(y.astype(jnp.float32) * jnp.linspace(0.5, 2, D))), y

    def run(x, ids, weights, up, down):
        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, up, down, ids)
        return y, *gradients

    return run


def close(got, want, dtype):
    """By the norm of each array: products are those of other numbers of rows."""
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape and np.isfinite(x).all()
        assert np.linalg.norm(x - y) <= (0.005 if dtype == jnp.float32 else 0.02) * np.linalg.norm(y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ["random", "few", "one"])
@pytest.mark.parametrize("each", [1, 4, 64])
def test_values_and_gradients_are_those_of_one_device(mesh, monkeypatch, each, routing, dtype):
    """By either way of sending; each of fifty repeats gives the same bits."""
    given = arrays(each * len(DEVICES), routing, dtype)
    want = jax.device_get(jax.jit(with_gradients(of_one_device))(*given))
    placed = jax.device_put(given, NamedSharding(mesh, TOKENS_OF))
    ragged = jax.jit(with_gradients(of_devices(mesh))).lower(*placed).compile()
    assert "ragged-all-to-all" in ragged.as_text()
    got = jax.device_get(ragged(*placed))
    close(got, want, dtype)
    monkeypatch.setattr(exchange, "send_ragged", send_in_blocks)
    blocks = jax.jit(with_gradients(of_devices(mesh))).lower(*placed).compile()
    assert "ragged-all-to-all" not in blocks.as_text()
    close(jax.device_get(blocks(*placed)), want, dtype)
    for _ in range(50):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(ragged(*placed)), got)


@pytest.mark.parametrize("receive_rows", [None, 1000])
@pytest.mark.parametrize(
    ("width", "dtype"), [((), jnp.float32), ((1,), jnp.bfloat16), ((6,), jnp.bfloat16), ((8,), jnp.int32)]
)
def test_rows_of_any_width(mesh, width, dtype, receive_rows):
    """Also those of few bytes, as the routing weights; out and back, uneven slices, some of them empty."""
    rng = np.random.default_rng(0)
    count, num_experts, devices = 2048, 6 * len(DEVICES), len(DEVICES)
    shares = rng.dirichlet(np.full(num_experts, 0.3), devices)
    counts = np.array([rng.multinomial(count, share) for share in shares], np.int32)
    buffers = Buffers(count, devices * count if receive_rows is None else receive_rows)
    rows = jnp.asarray(rng.integers(1, 100, (devices * count, *width))).astype(dtype)

    def out_and_back(way):
        def of_device(rows, counts):
            made = exchange_of(counts, jax.lax.axis_index("expert"), receive_rows)
            received = way(rows, made.sent, made.received, buffers, "expert")
            return received, way(received, made.received, made.sent, Buffers(*buffers[::-1]), "expert")

        mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(TOKENS_OF, P()), out_specs=TOKENS_OF, check_vma=False)
        return jax.device_get(jax.jit(mapped)(rows, jnp.asarray(counts)))

    got, want = out_and_back(send_ragged), out_and_back(send_in_blocks)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if receive_rows is None:
        np.testing.assert_array_equal(got[1], rows)
    else:
        assert (np.asarray(got[1]) == 0).any()
