"""Score functions of attention, with the arrays that they take; and dense attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend.score import HIDDEN

B, T, S, N, K, H = 2, 37, 29, 4, 2, 16


def positions(s):
    return (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))


def soft_cap(s):
    return 3 * jnp.tanh(s / 3)


def alibi(s):
    row, key = positions(s)
    slopes = jnp.exp2(-8 * jnp.arange(1, s.shape[1] + 1) / s.shape[1])
    return s - slopes[:, None, None] * jnp.abs(row - key)


def alibi_of_slopes(s, slopes):
    return s - slopes[:, None, None] * jnp.abs(jnp.arange(s.shape[2])[:, None] - jnp.arange(s.shape[3]))


def decay(s, of_rows, of_keys):
    return s + of_rows[..., None] - of_keys[:, :, None]


def prefix(s, lengths):
    row, key = positions(s)
    return jnp.where((key <= row) | (key < lengths[:, None, None, None]), s, -jnp.inf)


def documents(s, ids, key_ids):
    row, key = positions(s)
    return jnp.where((ids[:, None, :, None] == key_ids[:, None, None]) & (row >= key), s, -jnp.inf)


def window_2d(s):
    row, key = positions(s)
    near = (jnp.abs(row // 6 - key // 6) <= 1) & (jnp.abs(row % 6 - key % 6) <= 2)
    return jnp.where(near, s, -1e30)


def distance_by_row(s, weights):
    row, key = positions(s)
    return s - weights[..., None] * jnp.log1p(jnp.abs(row - key).astype(jnp.float32))


def gate(s, gates):
    return s * jnp.tanh(gates)[:, None, None]


def causal(s):
    row, key = positions(s)
    return jnp.where(row >= key, s, -jnp.inf)


def t5_buckets(distance, bidirectional=True, buckets=32, most=128):
    """T5's buckets of key - row, int32, as T5X computes them."""
    found = 0
    distance = -distance
    if bidirectional:
        buckets //= 2
        found += (distance < 0).astype(np.int32) * buckets
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(distance, 0)
    exact = buckets // 2
    ratio = jnp.log(distance.astype(np.float32) / exact + np.finfo(np.float32).eps) / jnp.log(most / exact)
    large = exact + (ratio * (buckets - exact)).astype(np.int32)
    return found + jnp.where(distance < exact, distance, jnp.minimum(large, buckets - 1))


def t5_bias(s, table, bidirectional=True):
    """A table (32, N) as an embedding has it."""
    distance = jnp.arange(s.shape[3])[None] - jnp.arange(s.shape[2])[:, None]
    return s + table[t5_buckets(distance, bidirectional)].transpose(2, 0, 1)[None]


def of_ids(s, table, ids, key_ids):
    """A factor of a table (N, 14) for each pair of ids 0 .. 3, out of range for two of the last, where it is 3."""
    pair = 4 * ids[:, None, :, None] + key_ids[:, None, None]
    each = jnp.arange(s.shape[1])[:, None, None]
    return s * table.at[each, pair].get(mode="fill", fill_value=3)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ids(seed, *shape):
    return np.sort(np.random.default_rng(seed).integers(0, 4, shape)).astype(np.int32)


def scores(batch, heads, queries, keys):
    """Functions with their operands, by name."""
    return {
        "soft cap": (soft_cap, ()),
        "ALiBi": (alibi, ()),
        "ALiBi with slopes": (alibi_of_slopes, (np.linspace(0.02, 0.5, heads, dtype=np.float32),)),
        "decay": (decay, (normal(0, batch, heads, queries), normal(1, batch, heads, keys))),
        "prefix": (prefix, (np.arange(5, 5 + 15 * batch, 15, dtype=np.int32),)),
        "documents": (documents, (ids(2, batch, queries), ids(3, batch, keys))),
        "2-D window": (window_2d, ()),
        "distance by row": (distance_by_row, (normal(4, batch, heads, queries),)),
        "gate": (gate, (normal(5, heads),)),
        "causal": (causal, ()),
        "T5's buckets": (t5_bias, (normal(6, 32, heads),)),
        "table of ids": (of_ids, (normal(7, heads, 14), ids(8, batch, queries), ids(9, batch, keys))),
    }


SCORES = scores(B, N, T, S)


def scaled_and_shifted(s, scale, slopes):
    """A scalar, and slopes of sequences and heads."""
    row, key = positions(s)
    return s * scale + slopes[:, :, None, None] * jnp.sqrt(jnp.abs(row - key).astype(jnp.float32))


def of_sequences(s, weights):
    row, key = positions(s)
    return s + weights[:, None, None, None] * (row - key) / 50


def capped(s, cap):
    return cap * jnp.tanh(s / cap)


def by_distance(s, of_keys, of_rows):
    """Keys that all heads share, rows that all sequences share."""
    row, key = positions(s)
    distance = jnp.abs(row - key).astype(jnp.float32)
    return s - of_keys[:, None, None] * jnp.log1p(distance) + of_rows[None, :, :, None] * jnp.sin(distance)


def of_everything(s, slopes, of_keys, of_rows, gates):
    """One of each kind, and one by which the derivative depends on the product, beside a slope that is not 1."""
    row, key = positions(s)
    distance = jnp.abs(row - key).astype(jnp.float32)
    return s * gates[:, None, None] - slopes[:, None, None] * distance + of_keys + of_rows[:, None] * jnp.cos(distance)


def of_tables(s, slope, buckets, near, turns):
    """A scalar and tables by distance: of heads; of few distances, else 0; and one that is read again and again."""
    row, key = positions(s)
    distance = row - key
    found = near.at[distance + 9].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return (
        t5_bias(s, buckets) - slope * jnp.sqrt(jnp.abs(distance).astype(jnp.float32)) + found + turns[distance % 5] / 2
    )


def times_table(s, table):
    """Factors by distance, that heads share; the derivative depends on s."""
    row, key = positions(s)
    return s * table[jnp.clip(row - key, -20, 20) + 20]


def learned(batch, heads, queries, keys):
    """Functions with operands of each kind of which the backward kernel makes the gradients, by name."""
    slopes = np.exp2(-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)
    return {
        "slopes of heads": (alibi_of_slopes, (slopes,)),
        "scalar, slopes of sequences and heads": (scaled_and_shifted, (np.float32(0.8), normal(1, batch, heads))),
        "sequences": (of_sequences, (normal(2, batch),)),
        "gate": (gate, (normal(3, heads),)),
        "cap": (capped, (np.float32(1.5),)),
        "rows and keys": (decay, (normal(4, batch, heads, queries), normal(5, batch, heads, keys))),
        "rows": (distance_by_row, (normal(6, batch, heads, queries),)),
        "shared rows and keys": (by_distance, (normal(7, batch, keys), normal(8, heads, queries))),
        "T5's buckets": (t5_bias, (normal(6, 32, heads),)),
        "tables": (of_tables, (np.float32(0.1), normal(12, 32, heads), normal(13, 12), normal(14, 5))),
        "table of factors": (times_table, (1 + normal(15, 41) / 4,)),
        "everything": (of_everything, (slopes, normal(9, keys), normal(10, queries), 1 + normal(11, heads) / 4)),
    }


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def arrays(dtype=jnp.float32):
    """q, k, v and the cotangent of y."""
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    return [jnp.asarray(normal(10 + i, *shape), dtype) for i, shape in enumerate(shapes)]


def dense(q, k, v, score, operands, seen=True):
    """Attention with a score, in the arrays' dtype; a score of `HIDDEN` or less hides its key."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = score(jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5, *operands)
    is_seen = jnp.broadcast_to(seen, s.shape) & (s > HIDDEN)
    s = jnp.where(is_seen, s, 0)
    e = jnp.where(is_seen, jnp.exp(s - jnp.max(jnp.where(is_seen, s, -1e30), axis=-1, keepdims=True)), 0)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return jnp.einsum("bhts,bshd->bthd", e / jnp.where(total == 0, 1, total), v)


def errors_of_rounding(q, k, v, dy, score, operands, unit, seen=True):
    """For each operand of a floating dtype the norm by which its gradient errs, of 8 draws of roundings the most.

    It is a sum whose terms cancel, of few numbers.
    """
    with jax.enable_x64(True):
        q, k, v, dy = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, dy))
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        given = [jnp.asarray(np.asarray(x, np.float64) if is_float(x) else x) for x in operands]
        places = [i for i, x in enumerate(given) if is_float(x)]
        products = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5

        def of_operands(*differentiated):
            of = dict(enumerate(given)) | dict(zip(places, differentiated, strict=True))
            return score(products, *(of[i] for i in range(len(given))))

        s, pullback = jax.vjp(of_operands, *(given[i] for i in places))
        is_seen = jnp.broadcast_to(seen, s.shape) & (s > HIDDEN)
        p = jnp.where(is_seen, jax.nn.softmax(jnp.where(is_seen, s, -1e30)), 0)
        dp = jnp.einsum("bthd,bshd->bhts", dy, v)

        def gradients(p_error, y_error):
            y = jnp.einsum("bhts,bshd->bthd", p, v) * (1 + y_error)
            ds = p * (1 + p_error) * (dp - jnp.einsum("bthd,bthd->bht", y, dy)[..., None])
            return pullback(ds)

        exact, random = gradients(0, 0), np.random.default_rng(0)
        draws = [gradients(*(unit * (random.random(x.shape) - 0.5) for x in (s, dy))) for _ in range(8)]
        return [
            max(float(jnp.linalg.norm((a - b).ravel())) for a in each) for b, *each in zip(exact, *draws, strict=True)
        ]


def exactly(q, k, v, dy, score, operands, seen=True):
    """y, and the gradients of q, k, v and the operands of floating dtypes, in float64."""
    with jax.enable_x64(True):
        q, k, v, dy = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, dy))
        operands = [jnp.asarray(np.asarray(x, np.float64) if is_float(x) else x) for x in operands]
        places = [i for i, x in enumerate(operands) if is_float(x)]

        def run(q, k, v, *differentiated):
            given = dict(enumerate(operands)) | dict(zip(places, differentiated, strict=True))
            return dense(q, k, v, score, [given[i] for i in range(len(operands))], seen)

        y, pullback = jax.vjp(run, q, k, v, *(operands[i] for i in places))
        return [np.asarray(x) for x in (y, *pullback(dy))]
