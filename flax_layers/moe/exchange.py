"""Rows of tokens to the devices of their experts and back, along a mesh axis that shards the experts.

Each of P devices has T tokens and E / P experts, device p those from p E / P on. Its T k routed rows, sorted by expert
(`flax_layers.moe.routing`), are sorted by device as well: those of one expert are a slice of them. Every slice is sent
to its place in the receiver's buffer, which is sorted by expert, and of an expert by sender. So the experts' products
can read the received rows, and nothing is permuted a second time.

    sorted rows of device 0:  | expert 0 | expert 1 | expert 2 | expert 3 |        E = 4, P = 2
    buffer of device 1:       | expert 2 of 0 | of 1 | expert 3 of 0 | of 1 | zeros |

`exchange_of` computes sizes and offsets of all slices from how many rows each device has for each expert: P E integers,
the only numbers that all devices learn of each other. `send` sends the slices: by `jax.lax.ragged_all_to_all`, and on
CPUs, where XLA has none, by an all-to-all of blocks that hold all rows that one device may have for another. Results
are equal. The way back is the same exchange with its ends swapped, and so is the gradient of either.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.extend import vary, varying_axes
from flax_layers.moe.routing import Experts, order_by_expert, sorted_experts

AxisName = str | tuple[str, ...]


class Slices(NamedTuple):
    """One end of an exchange on a device: the slices of its buffer, int32 arrays [peer, expert of the receiver].

    Attributes:
      sizes: how many rows a slice has.
      offsets: where it begins in this device's buffer.
      peer_offsets: where it begins in the peer's buffer.
    """

    sizes: jax.Array
    offsets: jax.Array
    peer_offsets: jax.Array


class Exchange(NamedTuple):
    """The rows that one device sends and receives.

    Attributes:
      sent: slices of its sorted rows, [receiver, expert of the receiver].
      received: slices of its receive buffer, [sender, expert of this device].
      group_sizes: (E / P,) int32, rows of each of its experts in the buffer, which these fill from the start.
      dropped: () int32, how many rows of its own tokens find no place in the receiver's buffer.
    """

    sent: Slices
    received: Slices
    group_sizes: jax.Array
    dropped: jax.Array


def exchange_of(counts: jax.Array, device: Any, receive_rows: int | None = None) -> Exchange:
    """Sizes and offsets of a device's exchange.

    Args:
      counts: (P, E) integers, the rows that each device has for each expert; E a multiple of P.
      device: this one, 0 to P - 1.
      receive_rows: rows of every receive buffer; None where it is large enough for all. Rows without a place are the
        last ones in the order of the buffer: by expert, and of an expert by sender.
    """
    devices, experts = counts.shape
    sender_receiver_expert = (devices, devices, experts // devices)
    counts = counts.astype(jnp.int32)
    sizes = counts.reshape(sender_receiver_expert)
    begins = _exclusive_cumsum(counts).reshape(sender_receiver_expert)
    by_expert = sizes.transpose(1, 2, 0)  # receiver, expert, sender: the order of a receive buffer
    places = _exclusive_cumsum(by_expert.reshape(devices, -1)).reshape(by_expert.shape).transpose(2, 0, 1)
    if receive_rows is None:
        kept = sizes
    else:
        kept = jnp.clip(receive_rows - places, 0, sizes)
        places = jnp.minimum(places, receive_rows)
    return Exchange(
        Slices(kept[device], begins[device], places[device]),
        Slices(kept[:, device], places[:, device], begins[:, device]),
        jnp.sum(kept[:, device], axis=0, dtype=jnp.int32),
        jnp.sum(sizes[device] - kept[device], dtype=jnp.int32),
    )


def _exclusive_cumsum(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes


class Buffers(NamedTuple):
    """The numbers of rows of the two buffers of an exchange, the sender's and the receiver's."""

    source: int
    target: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def send(rows: jax.Array, source: Slices, target: Slices, buffers: Buffers, axis_name: AxisName) -> jax.Array:
    """The slices of `source` on each device, in the places of `target` on the devices that they are for.

    Args:
      rows: (buffers.source, ...), this device's.
      source, target: the ends of an `Exchange`, either way round.
      axis_name: of the mesh axis, which is manual here.

    Returns:
      (buffers.target, ...), zeros where no slice is.
    """
    axes = varying_axes(rows, *source, *target)
    arguments = vary(axes, rows, *source, *target)

    def send_by(way: Any, rows: jax.Array, *ends: jax.Array) -> jax.Array:
        received: jax.Array = way(rows, Slices(*ends[:3]), Slices(*ends[3:]), buffers, axis_name)
        return received

    received: jax.Array = lax.platform_dependent(
        *arguments, cpu=functools.partial(send_by, send_in_blocks), default=functools.partial(send_by, send_ragged)
    )
    return received


def _send_forward(
    rows: jax.Array, source: Slices, target: Slices, buffers: Buffers, axis_name: AxisName
) -> tuple[jax.Array, tuple[Slices, Slices]]:
    return send(rows, source, target, buffers, axis_name), (source, target)


def _send_backward(
    buffers: Buffers, axis_name: AxisName, ends: tuple[Slices, Slices], cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    source, target = ends
    return send(cotangent, target, source, Buffers(buffers.target, buffers.source), axis_name), None, None


send.defvjp(_send_forward, _send_backward)


def send_ragged(rows: jax.Array, source: Slices, target: Slices, buffers: Buffers, axis_name: AxisName) -> jax.Array:
    """`send` by JAX's collective, which sends no other rows."""
    output = jnp.zeros((buffers.target, *rows.shape[1:]), rows.dtype)
    (output,) = vary(varying_axes(rows), output)
    sent_sizes, offsets, peer_offsets = (x.reshape(-1) for x in source)
    return lax.ragged_all_to_all(
        rows, output, offsets, sent_sizes, peer_offsets, target.sizes.reshape(-1), axis_name=axis_name
    )


def send_in_blocks(rows: jax.Array, source: Slices, target: Slices, buffers: Buffers, axis_name: AxisName) -> jax.Array:
    """`send` by an all-to-all of a block for each peer, which holds all rows that may be for it."""
    devices, size = source.sizes.shape[0], min(buffers)

    def in_blocks(sizes: jax.Array) -> jax.Array:
        return _exclusive_cumsum(sizes) + size * jnp.arange(devices, dtype=jnp.int32)[:, None]

    blocks = _copied(rows, source.sizes, source.offsets, in_blocks(source.sizes), devices * size)
    blocks = lax.all_to_all(blocks, axis_name, 0, 0, tiled=True)
    return _copied(blocks, target.sizes, in_blocks(target.sizes), target.offsets, buffers.target)


def _copied(rows: jax.Array, sizes: jax.Array, begins: jax.Array, places: jax.Array, count: int) -> jax.Array:
    """(count, ...): slices of rows, which begin at `begins`, at `places`; zeros elsewhere."""
    sizes, begins, places = (x.reshape(-1) for x in (sizes, begins, places))
    at = jnp.arange(count, dtype=jnp.int32)[:, None]
    inside = (at >= places) & (at < places + sizes)
    index = at[:, 0] + jnp.sum(jnp.where(inside, begins - places, 0), axis=1)
    index = jnp.where(jnp.any(inside, axis=1), index, rows.shape[0])
    return rows.at[index].get(mode="fill", fill_value=0)


@overload
def exchanged_experts(
    experts: Experts,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    num_experts: int,
    *,
    axis_name: AxisName = ...,
    receive_rows: None = None,
    dtype: Any = None,
) -> jax.Array: ...
@overload
def exchanged_experts(
    experts: Experts,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    num_experts: int,
    *,
    axis_name: AxisName = ...,
    receive_rows: int,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
def exchanged_experts(
    experts: Experts,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    num_experts: int,
    *,
    axis_name: AxisName = "expert",
    receive_rows: int | None = None,
    dtype: Any = None,
) -> Any:
    """`sorted_experts` over the devices of a mesh axis: y[t] = sum over j of weights[t, j] * expert ids[t, j] of x[t].

    Called inside a `jax.shard_map` where the axis is manual. Each of its P devices has its own tokens, and E / P of the
    experts.

    Args:
      experts: called with rows (R, D), sorted by expert, their weights (R,) float32 and the number of rows of each of
        this device's experts (E / P,) int32; returns (R, D), multiplied by the weights. Rows beyond the numbers' sum
        are zeros, and their results are ignored.
      x: (T, D), this device's tokens.
      ids: (T, k) integers, the experts of each token, of all E.
      weights: (T, k) float32.
      num_experts: E, a multiple of P.
      axis_name: the mesh axis, or several, the major one first.
      receive_rows: R, rows of the receive buffer. Default P T k, what a device receives if all tokens of all devices
        choose its experts: no token is dropped. With fewer, which save memory, rows without a place in the buffer are
        dropped: those of the last experts of the device, of an expert those of the last senders. They add nothing to
        their tokens' sums, and have no gradient.
      dtype: of the result; default that of what `experts` returns.

    Returns:
      (T, D), sums in float32, rounded once; with receive_rows also () int32, how many of this device's T k rows were
      dropped.

    Raises:
      ValueError: shapes that do not fit, experts that the devices do not divide evenly, a receive_rows that is no
        positive int, or more rows than int32 has numbers.
    """
    devices = lax.axis_size(axis_name)
    if num_experts % devices:
        raise ValueError(
            f"num_experts is {num_experts}; the {devices} devices of {axis_name!r} do not divide it evenly"
        )
    if receive_rows is not None and (not isinstance(receive_rows, int) or receive_rows < 1):
        raise ValueError(f"receive_rows is {receive_rows!r}; it must be a positive int, or None for a place for all")
    routed = ids.size
    buffers = Buffers(routed, devices * routed if receive_rows is None else min(receive_rows, devices * routed))
    if max(buffers) >= 2**31:
        raise ValueError(
            f"a receive buffer of {buffers.target} rows has more than int32 has numbers: give receive_rows"
        )

    def across(rows: jax.Array, row_scale: jax.Array, counts: jax.Array) -> jax.Array:
        exchange = exchange_for(counts)
        out = exchange.sent, exchange.received, buffers, axis_name
        back = exchange.received, exchange.sent, Buffers(buffers.target, buffers.source), axis_name
        return send(experts(send(rows, *out), send(row_scale, *out), exchange.group_sizes), *back)

    def exchange_for(counts: jax.Array) -> Exchange:
        everyones = lax.all_gather(counts, axis_name)
        return exchange_of(everyones, lax.axis_index(axis_name), None if receive_rows is None else buffers.target)

    y = sorted_experts(across, x, ids, weights, num_experts, dtype=dtype)
    if receive_rows is None:
        return y
    return y, exchange_for(order_by_expert(ids, num_experts).group_sizes).dropped
