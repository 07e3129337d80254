"""The epilogues that benchmarks and device tests run, with operands to run them on: users' and the library's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.epilogues import EPILOGUES, EpilogueCase, array
from coda_jax.epilogue import Epilogue, trace
from coda_jax.lowering import kernel
from coda_jax.lowering.launch import problem_of
from coda_jax.operators.feed_forward import gated
from coda_jax.primitives.spec import CallOptions, GemmSpec
from coda_jax.tiles.config import GemmConfig
from coda_jax.tools.tune import random_array


class Program(EpilogueCase):
    """An epilogue that can be given operands."""

    def operands(self, m: int, n: int, seed: int = 7) -> tuple[jax.Array, ...]:
        """Random-normal operands (integers 0 to 9, booleans at random)."""
        keys = jax.random.split(jax.random.key(seed), 16)
        return tuple(random_array(key, type_) for key, type_ in zip(keys, self.operand_types(m, n), strict=False))


def swiglu(acc: jax.Array, rstd: jax.Array, *, keep: bool) -> Any:
    """SwiGLU of rstd * acc, and that too if it is to be kept."""
    u = acc * rstd
    hidden = gated(jax.nn.silu)(u)
    return (hidden, u) if keep else hidden


def norm_backward(acc: jax.Array, dresidual: jax.Array, x: jax.Array, factor: jax.Array) -> jax.Array:
    """The cotangent of an RMSNorm's x, with that of the residual stream."""
    return dresidual + acc + x * factor


def scale_backward(acc: jax.Array, scale: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cotangents of a weight and of the norm's scale in it."""
    return scale * acc, jnp.sum(acc * w, axis=1)


def gated_backward(
    acc: jax.Array, rstd: jax.Array, z: jax.Array, *, activation: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, ...]:
    """The cotangent of z / rstd from that of activation(gate) * up, that again, and the row sums of z dz."""
    _, pullback = jax.vjp(gated(activation), z)
    (dz,) = pullback(acc)
    return rstd * dz, gated(activation)(z), jnp.sum(z * dz, axis=1)


def _back_through_gate(activation: Callable[[jax.Array], jax.Array]) -> Program:
    return Program(
        functools.partial(gated_backward, activation=activation),
        lambda m, n: (array((m, 1), jnp.float32), array((m, 2 * n))),
        (jnp.bfloat16, jnp.bfloat16),
    )


PROGRAMS: dict[str, Program] = {name: Program(**vars(epilogue)) for name, epilogue in EPILOGUES.items()} | {
    "swiglu": Program(
        functools.partial(swiglu, keep=True),
        lambda m, n: (array((m, 1), jnp.float32),),
        (jnp.bfloat16, jnp.bfloat16),
    ),
    "gated_backward": _back_through_gate(jax.nn.silu),
    "geglu_backward": _back_through_gate(jax.nn.gelu),
    "norm_backward": Program(norm_backward, lambda m, n: (array((m, n)), array((m, n)), array((m, 1), jnp.float32))),
    "scale_backward": Program(
        scale_backward,
        lambda m, n: (array((m, 1), jnp.float32), array((m, n), jnp.float32)),
        (jnp.float32,),
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
    yields: bool = False,
) -> str:
    """The CUDA source of the program's kernel, for a (M, K) and b (N, K) unless the flags say otherwise."""
    operands = program.operand_types(m, n)
    epilogue, captured = trace(program.epilogue, array((m, n), jnp.float32), operands)
    if captured:
        raise ValueError("the programs here capture nothing")
    a, b = array((k, m) if transpose_a else (m, k), dtype), array((n, k) if transpose_b else (k, n), dtype)
    spec = spec_of(program, epilogue, transpose_a=transpose_a, transpose_b=transpose_b)
    return lowered((a, b, *operands), spec, config, yields=yields).call.source


def spec_of(program: Program, epilogue: Epilogue, **options: Any) -> GemmSpec:
    """The primitive's parameter for this traced program, with `CallOptions`."""
    out_dtypes = [out.dtype for out in epilogue.out_avals]
    for store, dtype in zip(epilogue.program.stores, program.out_dtypes, strict=True):
        out_dtypes[store.output] = np.dtype(dtype)
    return GemmSpec.of(CallOptions(**options), epilogue.program, out_dtypes, epilogue.name)


def lowered(types: Sequence[Any], spec: GemmSpec, config: GemmConfig | None, *, yields: bool = False) -> kernel.Kernel:
    """The kernel of a product, with what `config` leaves open chosen for an H200; `yields` as in `kernel.lower`."""
    return kernel.lower(types, spec, problem_of(types, spec).config(config, None), yields=yields)


def check(name: str, out: Any, expected: Any) -> None:
    """Raises unless the two trees agree to the rounding of a 16-bit output and the order of a float32 sum."""
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        error = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
        if not error < 1e-2:
            raise AssertionError(f"{name}: relative error {error}")
