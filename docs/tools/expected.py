"""The cost model's time of a layer: the page that says whether the library is worth it asks for it on two chips."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_of
from coda_jax.lowering.launch import problem_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.tiles.table import config_for, expected_nanoseconds


def layer(
    stream: jax.Array, context: jax.Array, weights: tuple[jax.Array, ...], angles: Any, heads: int, kv_heads: int
) -> Any:
    """A Llama layer without attention, from its out-projection to the next q, k and v, and its gradient."""

    def run(stream: jax.Array, context: jax.Array, weights: tuple[jax.Array, ...]) -> Any:
        out, attention_scale, gate_up, down, scale, qkv = weights
        projected = coda.project(context, out, residual=stream)
        stream = coda.gated_mlp(coda.rms_norm(projected, attention_scale), gate_up, down)
        return coda.qkv_projection(coda.rms_norm(stream, scale), qkv, *angles, num_heads=heads, num_kv_heads=kv_heads)

    results, pullback = jax.vjp(run, stream, context, weights)
    return pullback(results)


def layer_ms(width: int, hidden: int, heads: int, kv_heads: int, head_dim: int, tokens: int, device: str) -> float:
    """The products' time forward and backward, in bfloat16, on "NVIDIA H200" or "NVIDIA H100 80GB HBM3"."""
    q = heads * head_dim

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = (
        array(q, width),
        array(width),
        array(width, 2 * hidden),
        array(hidden, width),
        array(width),
        array(width, q + 2 * kv_heads * head_dim),
    )
    angles = (array(tokens, head_dim // 2, dtype=jnp.float32),) * 2
    found, _ = equations_of(
        lambda *arrays: layer(*arrays, heads, kv_heads), array(tokens, width), array(tokens, q), weights, angles
    )
    total = 0
    for equation, times in found:
        if equation.primitive in PRIMITIVES:
            problem = problem_of([variable.aval for variable in equation.invars], equation.params["spec"])
            expected = expected_nanoseconds(problem, config_for(problem, None, device)[0], device)
            assert expected is not None
            total += times * expected
    return total / 1e6
