"""The exchange of rows between devices that share a layer's experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_layers.moe import exchange
from flax_layers.moe.exchange import exchange_of, exchanged_experts
from flax_layers.moe.routing import sorted_experts

# ---- sizes and offsets


@st.composite
def counts(draw):
    """Rows of each device for each expert: any, none of some devices, all for one expert."""
    devices, local = draw(st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (8, 1), (8, 3)]))
    shape = (devices, devices * local)
    size = st.one_of(st.just(0), st.integers(0, 9))
    made = np.array(draw(st.lists(size, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))).reshape(shape)
    made[draw(st.lists(st.integers(0, devices - 1)))] = 0  # devices without tokens
    if draw(st.booleans()):
        one = draw(st.integers(0, shape[1] - 1))
        total = made.sum(axis=1)
        made[:] = 0
        made[:, one] = total
    return made


def by_hand(counts, receive_rows):
    """The receive buffer of every device as a list of (sender, its sorted row), and the rows of each expert in it."""
    devices, experts = counts.shape
    local = experts // devices
    sorted_rows = [np.repeat(np.arange(experts), of_sender) for of_sender in counts]
    buffers, group_sizes = [], []
    for receiver in range(devices):
        own = range(receiver * local, (receiver + 1) * local)
        buffer = [
            (sender, row, expert)
            for expert in own
            for sender in range(devices)
            for row, of in enumerate(sorted_rows[sender])
            if of == expert
        ][:receive_rows]
        buffers.append([(sender, row) for sender, row, _ in buffer])
        group_sizes.append([sum(of == expert for *_, of in buffer) for expert in own])
    return buffers, group_sizes


def copied(slices, rows, size):
    """Copies the peers' rows in numpy, by the offsets of `slices`, to a buffer of this size, [(peer, row)]."""
    buffer = [None] * size
    for peer, *of_peer in zip(range(len(slices.sizes)), *slices, strict=True):
        for count, offset, peer_offset in zip(*of_peer, strict=True):
            for i in range(count):
                assert buffer[offset + i] is None, "two slices in one place"
                buffer[offset + i] = (peer, rows[peer][peer_offset + i])
    return buffer


@jax.jit
def of_every_device(counts, receive_rows):
    return jax.vmap(lambda device: exchange_of(counts, device, receive_rows))(jnp.arange(counts.shape[0]))


def check_offsets_and_sizes(counts, receive_rows):
    """Each receiver finds its rows in the order of experts and senders, and each sender finds them there again."""
    made = jax.device_get(of_every_device(jnp.asarray(counts), receive_rows))
    exchanges = [jax.tree.map(lambda x, device=device: x[device], made) for device in range(len(counts))]
    buffers, group_sizes = by_hand(counts, receive_rows)
    own_rows = [[*range(total)] for total in counts.sum(axis=1)]
    for device, here in enumerate(exchanges):
        assert copied(here.received, own_rows, len(buffers[device])) == buffers[device]
        assert here.group_sizes.tolist() == group_sizes[device]
        # What comes back to a sorted row is what the receiver has of it.
        back = copied(here.sent, buffers, len(own_rows[device]))
        arrived = [(row, receiver) for receiver, rows in enumerate(buffers) for sender, row in rows if sender == device]
        places = {row: (receiver, (device, row)) for row, receiver in arrived}
        assert back == [places.get(row) for row in own_rows[device]]
        assert here.dropped == sum(row not in places for row in own_rows[device])
        for peer, other in enumerate(exchanges):  # as jax.lax.ragged_all_to_all wants them
            np.testing.assert_array_equal(here.sent.sizes[peer], other.received.sizes[device])
            np.testing.assert_array_equal(here.sent.peer_offsets[peer], other.received.offsets[device])
            np.testing.assert_array_equal(here.sent.offsets[peer], other.received.peer_offsets[device])
            if receive_rows is not None:  # empty slices too
                assert np.all(here.sent.peer_offsets[peer] + here.sent.sizes[peer] <= receive_rows)
            assert np.all(here.sent.offsets[peer] + here.sent.sizes[peer] <= len(own_rows[device]))


@settings(max_examples=200, deadline=None)
@given(counts(), st.one_of(st.none(), st.integers(1, 60)))
@pytest.mark.slow
def test_any_offsets_and_sizes(counts, receive_rows):
    check_offsets_and_sizes(counts, receive_rows)


def test_offsets_and_sizes():
    """Three devices, with room for all rows, for some of one device's, and for a part of an expert's slice."""
    counts = np.array([[3, 0, 2, 1, 0, 4], [0, 0, 0, 0, 0, 0], [5, 1, 0, 2, 6, 0]])
    for receive_rows in (None, 9, 4):
        check_offsets_and_sizes(counts, receive_rows)


# ---- the exchange, and experts over it

D, F = 8, 6


def mesh_of(experts, data=1, kind=AxisType.Auto):
    devices = jax.devices("cpu")[: experts * data]
    assert len(devices) == experts * data, "conftest.py asks for eight"
    return jax.make_mesh((data, experts), ("data", "expert"), axis_types=(kind,) * 2, devices=devices)


def feed_forward(rows, row_scale, group_sizes, up, down):
    """An expert is tanh(x up) down; rows in no group are poisoned, for nobody may read them."""
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, up, group_sizes))
    y = jax.lax.ragged_dot(hidden, down, group_sizes) * row_scale[:, None]
    beyond = jnp.arange(rows.shape[0]) >= jnp.sum(group_sizes)
    return jnp.where(beyond[:, None], jnp.nan, y)


def arrays(tokens, k, num_experts, seed=0, routing="random"):
    rng = np.random.default_rng(seed)
    x, up, down = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((tokens, D), (num_experts, D, F), (num_experts, F, D))
    )
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, k)), jnp.float32)
    if routing == "random":
        ids = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :k]
    elif routing == "one":
        ids = np.full((tokens, k), num_experts - 1)
    else:  # the last device has tokens for the first one's experts alone, and nobody has any for the others
        ids = np.arange(tokens * k).reshape(tokens, k) % 2
    return x, jnp.asarray(ids, jnp.int32), weights, up, down


def of_one_device(x, ids, weights, up, down):
    def experts(*arguments):
        return feed_forward(*arguments, up, down)

    return sorted_experts(experts, x, ids, weights, up.shape[0])


def of_devices(mesh, **options):
    def of_device(x, ids, weights, up, down):
        def experts(*arguments):
            return feed_forward(*arguments, up, down)

        y = exchanged_experts(experts, x, ids, weights, up.shape[0] * mesh.shape["expert"], **options)
        return y if "receive_rows" not in options else (y[0], y[1][None])

    tokens = P(("data", "expert"))
    out = tokens if "receive_rows" not in options else (tokens, tokens)
    specs = (tokens, tokens, tokens, P("expert"), P("expert"))
    return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=out)


def with_gradients(function):
    def loss(x, weights, up, down, ids):
        y = function(x, ids, weights, up, down)
        return jnp.sum(jnp.sin(y * jnp.arange(1, D + 1))), y

    def run(x, ids, weights, up, down):
        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, up, down, ids)
        return y, *gradients

    return jax.jit(run)


def close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * np.abs(y).max())


@pytest.mark.parametrize("routing", ["random", "one", "few"])
@pytest.mark.parametrize(("experts", "data"), [(8, 1), (4, 2), (1, 2)])
def test_values_and_gradients_are_those_of_one_device(experts, data, routing):
    given = arrays(48, 2, 8, routing=routing)
    want = with_gradients(of_one_device)(*given)
    run = with_gradients(of_devices(mesh_of(experts, data)))
    got = run(*given)
    close(got, want)
    for x, y in zip(run(*given), got, strict=True):
        np.testing.assert_array_equal(x, y)


def by_documentation(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which CPUs have not; NaN where sizes of the two ends differ."""
    everyones = [jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)]
    operands, *slices = everyones
    each = len(input_offsets) // jax.lax.axis_size(axis_name)
    here = jax.lax.axis_index(axis_name)
    at = jnp.arange(output.shape[0])
    for sender, (offsets, sizes, places) in enumerate(zip(*slices, strict=True)):
        for i in range(each):
            offset, size, place = (x[here * each + i] for x in (offsets, sizes, places))
            rows = operands[sender].at[offset + at - place].get(mode="fill", fill_value=jnp.nan)
            rows = jnp.where(size == recv_sizes[sender * each + i], rows, jnp.nan)
            is_slice = ((at >= place) & (at < place + size)).reshape(-1, *[1] * (output.ndim - 1))
            output = jnp.where(is_slice, rows, output)
    return output


@pytest.mark.parametrize("receive_rows", [None, 10])
@pytest.mark.parametrize("routing", ["random", "one", "few"])
@pytest.mark.slow
def test_both_ways_of_sending_give_the_same_bits(monkeypatch, routing, receive_rows):
    given, options = arrays(32, 2, 8, routing=routing), {} if receive_rows is None else {"receive_rows": receive_rows}
    dropping = (lambda *x: of_devices(mesh_of(4), **options)(*x)[0]) if options else of_devices(mesh_of(4))
    want = with_gradients(dropping)(*given)
    monkeypatch.setattr(exchange, "send_in_blocks", exchange.send_ragged)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", by_documentation)
    for x, y in zip(with_gradients(dropping)(*given), want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.smoke
@pytest.mark.parametrize("receive_rows", [1, 7, 16, 1000])
def test_a_limited_buffer_drops_and_counts(receive_rows):
    """A row that is dropped is as one of weight zero, in values and gradients; each device counts its own."""
    devices, tokens, k, num_experts = 4, 32, 2, 8
    given = arrays(tokens, k, num_experts)
    ids, mesh = given[1], mesh_of(devices)
    _, dropped = jax.jit(of_devices(mesh, receive_rows=receive_rows))(*given)
    per_device = np.asarray(ids).reshape(devices, -1)
    counts = np.array([np.bincount(one, minlength=num_experts) for one in per_device])
    buffers, _ = by_hand(counts, receive_rows)
    kept = np.zeros_like(per_device, bool)
    for buffer in buffers:
        for sender, row in buffer:
            kept[sender, np.argsort(per_device[sender], kind="stable")[row]] = True
    assert np.asarray(dropped).tolist() == (~kept).sum(axis=1).tolist()
    assert (~kept).any() == (receive_rows < 1000)
    mask = jnp.asarray(kept.reshape(tokens, k))
    got = with_gradients(lambda *x: of_devices(mesh, receive_rows=receive_rows)(*x)[0])(*given)
    want = with_gradients(lambda x, ids, weights, *w: of_one_device(x, ids, weights * mask, *w))(*given)
    close(got, want)


@pytest.mark.parametrize(("platform", "ragged", "blocks"), [("cuda", 6, 0), ("tpu", 6, 0), ("cpu", 0, 6)])
def test_exchange_is_ragged_on_accelerators_and_blocked_on_cpu(platform, ragged, blocks):
    """Rows and their weights out and the result back, and the same in the backward pass."""
    run = with_gradients(of_devices(mesh_of(4)))
    text = run.trace(*arrays(16, 2, 8)).lower(lowering_platforms=(platform,)).as_text()
    assert (text.count("@ragged_all_to_all"), text.count('"stablehlo.all_to_all"')) == (ragged, blocks)


@pytest.mark.parametrize(
    ("options", "num_experts", "said"),
    [
        ({}, 6, "num_experts is 6"),
        ({"receive_rows": 0}, 8, "receive_rows is 0"),
        ({"receive_rows": 1.5}, 8, "receive_rows is 1.5"),
    ],
)
def test_refusals(options, num_experts, said):
    mesh = mesh_of(4)

    def of_device(x, ids, weights):
        return exchanged_experts(lambda rows, *_: rows, x, ids, weights, num_experts, **options)

    with pytest.raises(ValueError, match=said):
        jax.shard_map(of_device, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert"))(*arrays(8, 2, 8)[:3])


def test_more_rows_than_int32_counts():
    mesh = mesh_of(4)
    x = jax.ShapeDtypeStruct((2**28, 1), jnp.float32)
    ids, weights = (jax.ShapeDtypeStruct((2**28, 2), dtype) for dtype in (jnp.int32, jnp.float32))

    def of_device(x, ids, weights):
        return exchanged_experts(lambda rows, *_: rows, x, ids, weights, 8)

    with pytest.raises(ValueError, match="2147483648 rows has more than int32 has numbers"):
        jax.eval_shape(jax.shard_map(of_device, mesh=mesh, in_specs=(P(),) * 3, out_specs=P("expert")), x, ids, weights)
