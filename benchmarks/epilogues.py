"""Epilogues of many kinds as a user writes them: `coda_jax`'s public names and JAX alone.

Benchmarks, device tests and the comparison of two commits' kernels run them, so they stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda


@dataclasses.dataclass(frozen=True)
class EpilogueCase:
    """An epilogue and the types of its operands, as functions of m and n."""

    epilogue: Callable[..., Any] | None
    operand_types: Callable[[int, int], tuple[jax.ShapeDtypeStruct, ...]] = lambda m, n: ()
    out_dtypes: tuple = (jnp.bfloat16,)  # of the tile outputs
    multiple: int = 1  # n is a multiple of it

    def columns(self, n: int) -> int:
        """The least n that is at least as large and that the epilogue takes."""
        return -(-n // self.multiple) * self.multiple

    def out_dtype(self, m: int, n: int) -> Any:
        """`out_dtypes` in the structure that the epilogue returns; None where an output is no tile."""
        m = max(m, 2)  # with one row, tiles that do not depend on acc are row vectors
        floats = [
            array(x.shape, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for x in (array((m, n)), *self.operand_types(m, n))
        ]
        outputs = jax.eval_shape(self.epilogue or (lambda acc: acc), *floats)
        leaves, tree = jax.tree.flatten(outputs)
        dtypes = iter(self.out_dtypes)
        is_tile = [leaf.ndim == 2 and leaf.shape[1] > 1 for leaf in leaves]
        return jax.tree.unflatten(tree, [next(dtypes) if tile else None for tile in is_tile])


def array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _residual(acc, x):
    return acc + x


def _residual_sumsq(acc, x):
    y = acc + x
    return y, jnp.sum(y * y, axis=1)


def _swiglu_backward(acc, z, dz):
    gate, up = jnp.split(z, 2, axis=1)
    dgate, dup = jnp.split(acc + dz, 2, axis=1)
    s = jax.nn.sigmoid(gate)
    out = jnp.concatenate([dgate * up * (s + gate * s * (1 - s)), dup * gate * s], axis=1)
    return out, jnp.sum(out * z, axis=1)


def _bias_gelu(acc, bias):
    return jax.nn.gelu(acc + bias)


def _gelu_erf(acc):
    return jax.nn.gelu(acc, approximate=False)


def _gelu_backward(acc, z):
    return jax.vjp(jax.nn.gelu, z)[1](acc)[0]


def _column_sum(acc, bias):
    y = acc + bias
    return y, jnp.sum(y, axis=0)


def _extrema(acc):
    return acc, jnp.max(acc, axis=1), jnp.min(acc, axis=1), jnp.max(acc, axis=0)


def _accumulate(acc, total):
    return acc + total


def _every_vector(acc, scale, shift, index, mask, x, column):
    y = jnp.where(mask, acc * scale + shift, x) + column
    return y + index.astype(jnp.float32), jnp.sum(y, axis=0)


def _two_outputs(acc, x):
    y = acc + x
    return {"sum": y, "half": y.astype(jnp.float16), "full": y * 2}


def _causal(acc):
    row = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    column = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1)
    return jnp.where(row >= column, acc, -1e9)


def _exp_sum(acc):
    return jnp.sum(jnp.exp(acc), axis=1), jnp.sum(jnp.log(acc * acc), axis=0)


def _logsumexp_pick(acc, rstd, target):
    """A loss head: the logits, their log-sum-exp, and the target's."""
    z = acc * rstd
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    return z, coda.logsumexp(z, axis=1), jnp.sum(jnp.where(column == target, z, 0), axis=1)


def _mean_square(acc):
    return acc, jnp.mean(acc * acc, axis=1, keepdims=True)


def _rotary(x, cos, sin, dim=64):
    """Heads of `dim`, turned by tables (M, dim / 2)."""
    a, b = jnp.split(x.reshape(x.shape[0], x.shape[1] // dim, dim), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def _rotary_qkv(acc, rstd, cos, sin):
    q, k, v = jnp.split(acc * rstd, 3, axis=1)
    return _rotary(q, cos, sin), _rotary(k, cos, sin), v


def _rotary_96(acc, cos, sin):
    return _rotary(acc, cos, sin, 96)


def _rotary_256(acc, cos, sin):
    return _rotary(acc, cos, sin, 256)


def _rotary_repeated(acc, cos, sin):
    """Tables of fewer rows than the product, which repeat."""
    cos, sin = (jnp.tile(table, (acc.shape[0] // table.shape[0], 1)) for table in (cos, sin))
    return _rotary(acc, cos, sin)


def _period(m):
    return next((m // parts for parts in (3, 2) if m % parts == 0), m)


def _rotary_positions(acc, rstd, position, frequency):
    """Heads of 128, turned by position * frequency, whose sine and cosine the kernel computes."""
    q, k, v = jnp.split(acc * rstd, 3, axis=1)
    angle = position * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return _rotary(q, cos, sin, 128), _rotary(k, cos, sin, 128), v


def _rms_norm(x, scale, dim):
    heads = x.reshape(x.shape[0], x.shape[1] // dim, dim)
    rstd = jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + 1e-6)
    return (heads * rstd * scale).reshape(x.shape)


def _qk_norm_rotary(dim):
    """Queries and keys normalised over each head, with scales (Dh,), and turned."""

    def qk_norm_rotary(acc, rstd, q_scale, k_scale, cos, sin):
        q, k, v = jnp.split(acc * rstd, 3, axis=1)
        q, k = (_rotary(_rms_norm(x, scale, dim), cos, sin, dim) for x, scale in ((q, q_scale), (k, k_scale)))
        return q, k, v

    return EpilogueCase(
        qk_norm_rotary,
        lambda m, n: (
            *(array(shape, jnp.float32) for shape in ((m, 1), (dim,), (dim,))),
            *(array((m, dim // 2), jnp.float32) for _ in range(2)),
        ),
        (jnp.bfloat16,) * 3,
        multiple=3 * dim,
    )


def _softmax_of_heads(acc, bias):
    """Heads of 32: a maximum, and then a sum of what it was subtracted from."""
    heads = (acc + bias).reshape(acc.shape[0], acc.shape[1] // 32, 32)
    y = jax.nn.softmax(heads, axis=-1).reshape(acc.shape)
    return y, jnp.sum(y * acc, axis=1), jnp.max(y, axis=0)


def _layer_norm_of_neighbours(acc, scale, bias):
    """LayerNorm of heads of 64, whose even and odd columns then change places."""
    heads = acc.reshape(acc.shape[0], acc.shape[1] // 64, 64)
    centred = heads - jnp.mean(heads, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6) * scale + bias
    return jnp.stack([y[..., 1::2], y[..., 0::2]], axis=-1).reshape(acc.shape)


def _rotary_whole_tables(acc, cos, sin, bias):
    """Heads of 128 and tables as wide; with sums along rows and columns."""
    x = (acc + bias).reshape(acc.shape[0], acc.shape[1] // 128, 128)
    rotated = jnp.concatenate([-x[..., 64:], x[..., :64]], axis=-1)
    y = (x * cos[:, None, :] + rotated * sin[:, None, :]).reshape(acc.shape)
    return y, jnp.sum(y * y, axis=1), jnp.sum(y, axis=0)


def _rotary_neighbours(acc, x, cos, sin):
    """Heads of 64 whose pairs are neighbouring columns, tables (M, 32)."""
    heads = (acc + x).reshape(acc.shape[0], acc.shape[1] // 64, 64)
    a, b = heads[..., 0::2], heads[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(acc.shape)
    return y, jnp.sum(y, axis=0)


def _parts(acc, bias):
    y = acc + bias
    third = acc.shape[1] // 3
    first, second, last = y[:, :third], y[:, third : 2 * third], y[:, 2 * third :]
    return first, jnp.tanh(second), last * 2, y, jnp.sum(y * y, axis=1)


def _parts_of_sum(acc, x):
    y = acc + x
    third = acc.shape[1] // 3
    return y[:, :third], jnp.tanh(y[:, third : 2 * third]), y[:, 2 * third :]


EPILOGUES: dict[str, EpilogueCase] = {
    "identity": EpilogueCase(None),
    "residual": EpilogueCase(_residual, lambda m, n: (array((m, n)),)),
    "residual_sumsq": EpilogueCase(_residual_sumsq, lambda m, n: (array((m, n)),)),
    "swiglu_backward": EpilogueCase(_swiglu_backward, lambda m, n: (array((m, n)), array((m, n)))),
    "bias_gelu": EpilogueCase(_bias_gelu, lambda m, n: (array((n,)),)),
    "gelu_erf": EpilogueCase(_gelu_erf),
    "gelu_backward": EpilogueCase(_gelu_backward, lambda m, n: (array((m, n)),)),
    "mish": EpilogueCase(jax.nn.mish),
    "column_sum": EpilogueCase(_column_sum, lambda m, n: (array((n,), jnp.float32),)),
    "extrema": EpilogueCase(_extrema),
    "accumulate": EpilogueCase(_accumulate, lambda m, n: (array((m, n), jnp.float32),), (jnp.float32,)),
    "every_vector": EpilogueCase(
        _every_vector,
        lambda m, n: (
            array((), jnp.float32),
            array((1, n), jnp.float16),
            array((n,), jnp.int32),
            array((m, 1), jnp.bool_),
            array((m, n), jnp.float16),
            array((m, 1), jnp.bfloat16),
        ),
    ),
    "two_outputs": EpilogueCase(_two_outputs, lambda m, n: (array((m, n)),), (jnp.bfloat16, jnp.float16, jnp.float32)),
    "causal": EpilogueCase(_causal),
    "exp_sum": EpilogueCase(_exp_sum, out_dtypes=()),
    "logsumexp_pick": EpilogueCase(
        _logsumexp_pick, lambda m, n: (array((m, 1), jnp.float32), array((m, 1), jnp.int32))
    ),
    "mean_square": EpilogueCase(_mean_square),
    "rotary_qkv": EpilogueCase(
        _rotary_qkv,
        lambda m, n: (array((m, 1), jnp.float32), array((m, 32), jnp.float32), array((m, 32), jnp.float32)),
        (jnp.bfloat16,) * 3,
        multiple=192,
    ),
    "rotary_96": EpilogueCase(_rotary_96, lambda m, n: (array((m, 48)), array((m, 48))), multiple=96),
    "rotary_256": EpilogueCase(_rotary_256, lambda m, n: (array((m, 128)), array((m, 128))), multiple=256),
    "rotary_repeated": EpilogueCase(
        _rotary_repeated, lambda m, n: (array((_period(m), 32), jnp.float32), array((_period(m), 32))), multiple=64
    ),
    "rotary_positions": EpilogueCase(
        _rotary_positions,
        lambda m, n: (array((m, 1), jnp.float32), array((m, 1), jnp.int32), array((64,), jnp.float32)),
        (jnp.bfloat16,) * 3,
        multiple=384,
    ),
    "qk_norm_rotary": _qk_norm_rotary(128),
    "qk_norm_rotary_64": _qk_norm_rotary(64),
    "qk_norm_rotary_192": _qk_norm_rotary(192),
    # Two heads at least: of one that is all columns, a reduction is one of whole rows.
    "softmax_of_heads": EpilogueCase(_softmax_of_heads, lambda m, n: (array((n,), jnp.float32),), multiple=64),
    "layer_norm_of_neighbours": EpilogueCase(
        _layer_norm_of_neighbours, lambda m, n: (array((64,)), array((1, 64), jnp.float32)), multiple=128
    ),
    "rotary_whole_tables": EpilogueCase(
        _rotary_whole_tables,
        lambda m, n: (array((m, 128)), array((m, 128)), array((n,), jnp.float32)),
        multiple=128,
    ),
    "rotary_neighbours": EpilogueCase(
        _rotary_neighbours,
        lambda m, n: (array((m, n)), array((m, 32), jnp.float32), array((m, 32), jnp.float32)),
        multiple=64,
    ),
    "parts": EpilogueCase(
        _parts,
        lambda m, n: (array((n,), jnp.float32),),
        (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16),
        multiple=24,
    ),
    "parts_of_sum": EpilogueCase(
        _parts_of_sum, lambda m, n: (array((m, n)),), (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16), multiple=24
    ),
}
