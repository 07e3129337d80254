"""The epilogues that benchmarks and device tests run, each an ordinary JAX function, with operands to run them on."""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import logsumexp, trace
from coda_jax.primitives import deferred_norm, kernel
from coda_jax.primitives.config import GemmConfig, choose_tiling
from coda_jax.primitives.cost_model import Product
from coda_jax.primitives.gated_mlp import gated_backward, row_scale_gated
from coda_jax.primitives.tune import random_array


@dataclasses.dataclass(frozen=True)
class Program:
    """An epilogue and the types of its operands, as functions of m and n."""

    epilogue: Callable[..., Any] | None
    operand_types: Callable[[int, int], tuple[jax.ShapeDtypeStruct, ...]] = lambda m, n: ()
    out_dtypes: tuple = (jnp.bfloat16,)  # of the tile outputs
    multiple: int = 1  # n is a multiple of it

    def columns(self, n: int) -> int:
        """The least n that is at least as large and that the program takes."""
        return -(-n // self.multiple) * self.multiple

    def operands(self, m: int, n: int, seed: int = 7) -> tuple[jax.Array, ...]:
        """Random-normal operands (integers 0 to 9, booleans at random)."""
        keys = jax.random.split(jax.random.key(seed), 16)
        return tuple(random_array(key, type_) for key, type_ in zip(keys, self.operand_types(m, n), strict=False))

    def out_dtype(self, m: int, n: int) -> Any:
        """`out_dtypes` in the structure that the epilogue returns; None where an output is no tile."""
        m = max(m, 2)  # with one row, tiles that do not depend on acc are row vectors
        epilogue, _ = trace(self.epilogue, _type((m, n), jnp.float32), self.operand_types(m, n))
        leaves: list[Any] = [None] * epilogue.program.num_outputs
        for store, dtype in zip(epilogue.program.stores, self.out_dtypes, strict=True):
            leaves[store.output] = dtype
        return jax.tree.unflatten(epilogue.out_tree, leaves)


def _type(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
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
    return z, logsumexp(z, axis=1), jnp.sum(jnp.where(column == target, z, 0), axis=1)


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

    return Program(
        qk_norm_rotary,
        lambda m, n: (
            *(_type(shape, jnp.float32) for shape in ((m, 1), (dim,), (dim,))),
            *(_type((m, dim // 2), jnp.float32) for _ in range(2)),
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


def _back_through_gate(activation: Callable[[jax.Array], jax.Array]) -> Program:
    return Program(
        functools.partial(gated_backward, activation=activation),
        lambda m, n: (_type((m, 2 * n)), _type((m, 1), jnp.float32)),
        (jnp.bfloat16, jnp.bfloat16),
    )


PROGRAMS: dict[str, Program] = {
    "identity": Program(None),
    "residual": Program(_residual, lambda m, n: (_type((m, n)),)),
    "residual_sumsq": Program(_residual_sumsq, lambda m, n: (_type((m, n)),)),
    "swiglu": Program(
        functools.partial(row_scale_gated, activation=jax.nn.silu, keep=True),
        lambda m, n: (_type((m, 1), jnp.float32),),
        (jnp.bfloat16, jnp.bfloat16),
    ),
    "swiglu_backward": Program(_swiglu_backward, lambda m, n: (_type((m, n)), _type((m, n)))),
    "gated_backward": _back_through_gate(jax.nn.silu),
    "geglu_backward": _back_through_gate(jax.nn.gelu),
    "norm_backward": Program(
        deferred_norm.norm_backward, lambda m, n: (_type((m, n)), _type((m, 1), jnp.float32), _type((m, n)))
    ),
    "scale_backward": Program(
        deferred_norm.scale_backward,
        lambda m, n: (_type((m, n), jnp.float32), _type((m, 1), jnp.float32)),
        (jnp.float32,),
    ),
    "bias_gelu": Program(_bias_gelu, lambda m, n: (_type((n,)),)),
    "gelu_erf": Program(_gelu_erf),
    "gelu_backward": Program(_gelu_backward, lambda m, n: (_type((m, n)),)),
    "mish": Program(jax.nn.mish),
    "column_sum": Program(_column_sum, lambda m, n: (_type((n,), jnp.float32),)),
    "extrema": Program(_extrema),
    "accumulate": Program(_accumulate, lambda m, n: (_type((m, n), jnp.float32),), (jnp.float32,)),
    "every_vector": Program(
        _every_vector,
        lambda m, n: (
            _type((), jnp.float32),
            _type((1, n), jnp.float16),
            _type((n,), jnp.int32),
            _type((m, 1), jnp.bool_),
            _type((m, n), jnp.float16),
            _type((m, 1), jnp.bfloat16),
        ),
    ),
    "two_outputs": Program(_two_outputs, lambda m, n: (_type((m, n)),), (jnp.bfloat16, jnp.float16, jnp.float32)),
    "causal": Program(_causal),
    "exp_sum": Program(_exp_sum, out_dtypes=()),
    "logsumexp_pick": Program(_logsumexp_pick, lambda m, n: (_type((m, 1), jnp.float32), _type((m, 1), jnp.int32))),
    "mean_square": Program(_mean_square),
    "rotary_qkv": Program(
        _rotary_qkv,
        lambda m, n: (_type((m, 1), jnp.float32), _type((m, 32), jnp.float32), _type((m, 32), jnp.float32)),
        (jnp.bfloat16,) * 3,
        multiple=192,
    ),
    "rotary_96": Program(_rotary_96, lambda m, n: (_type((m, 48)), _type((m, 48))), multiple=96),
    "rotary_256": Program(_rotary_256, lambda m, n: (_type((m, 128)), _type((m, 128))), multiple=256),
    "rotary_repeated": Program(
        _rotary_repeated, lambda m, n: (_type((_period(m), 32), jnp.float32), _type((_period(m), 32))), multiple=64
    ),
    "rotary_positions": Program(
        _rotary_positions,
        lambda m, n: (_type((m, 1), jnp.float32), _type((m, 1), jnp.int32), _type((64,), jnp.float32)),
        (jnp.bfloat16,) * 3,
        multiple=384,
    ),
    "qk_norm_rotary": _qk_norm_rotary(128),
    "qk_norm_rotary_64": _qk_norm_rotary(64),
    # Two heads at least: of one that is all columns, a reduction is one of whole rows.
    "softmax_of_heads": Program(_softmax_of_heads, lambda m, n: (_type((n,), jnp.float32),), multiple=64),
    "layer_norm_of_neighbours": Program(
        _layer_norm_of_neighbours, lambda m, n: (_type((64,)), _type((1, 64), jnp.float32)), multiple=128
    ),
    "rotary_whole_tables": Program(
        _rotary_whole_tables,
        lambda m, n: (_type((m, 128)), _type((m, 128)), _type((n,), jnp.float32)),
        multiple=128,
    ),
    "rotary_neighbours": Program(
        _rotary_neighbours,
        lambda m, n: (_type((m, n)), _type((m, 32), jnp.float32), _type((m, 32), jnp.float32)),
        multiple=64,
    ),
    "parts": Program(
        _parts,
        lambda m, n: (_type((n,), jnp.float32),),
        (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16),
        multiple=24,
    ),
    "parts_of_sum": Program(
        _parts_of_sum, lambda m, n: (_type((m, n)),), (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16), multiple=24
    ),
}


def kernel_source(
    program: Program,
    m: int,
    n: int,
    k: int,
    dtype: Any = jnp.bfloat16,
    *,
    transpose_a: bool = False,
    transpose_b: bool = True,
    config: GemmConfig | None = None,
) -> str:
    """The CUDA source of the program's kernel, for a (M, K) and b (N, K) unless the flags say otherwise."""
    operands = program.operand_types(m, n)
    epilogue, captured = trace(program.epilogue, _type((m, n), jnp.float32), operands)
    if captured:
        raise ValueError("the programs here capture nothing")
    out_dtypes = [np.dtype(out_dtype) for out_dtype in program.out_dtypes]
    return kernel.lower(
        epilogue.program,
        _type((k, m) if transpose_a else (m, k), dtype),
        _type((n, k) if transpose_b else (k, n), dtype),
        operands,
        out_dtypes=out_dtypes,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        batched=(False,) * (2 + len(operands)),
        tiling=choose_tiling(Product(m, n, k, transpose_b=transpose_b), epilogue.program, out_dtypes, config),
        name=epilogue.name,
    ).source


@dataclasses.dataclass(frozen=True)
class ResourceUsage:
    registers: int
    spilled_bytes: int


def resource_usage(log: str) -> ResourceUsage:
    """Registers a thread and spilled bytes, from the assembler's report."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise ValueError(f"no resource report in the compiler's log: {log!r}")
    return ResourceUsage(int(registers[1]), int(spills[1]) + int(spills[2]))


def machine_instructions(cubin: bytes) -> int:
    """Of a compiled kernel: 16 bytes each in the sections of its ELF file that hold code."""
    headers_at, header_size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers_at + i * header_size) for i in range(count)]
    names_at = sections[names][4]
    return sum(size // 16 for name, _, _, _, _, size in sections if cubin[names_at + name :].startswith(b".text"))


def check(name: str, out: Any, expected: Any) -> None:
    """Raises unless the two trees agree to the rounding of a 16-bit output and the order of a float32 sum."""
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        error = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
        if not error < 1e-2:
            raise AssertionError(f"{name}: relative error {error}")
