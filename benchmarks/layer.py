"""`python -m benchmarks.layer`: a Llama layer without its attention, fused and plain, and its products alone.

From attention's output to the next attention's input: out-projection, residual, norm, gated MLP, residual, norm, next
query, key and value with rotary embedding; at 16384 tokens, forward, and forward with backward. "products" are XLA's
bare products of the same shapes, nothing between them: what is above their time is the overhead of everything else.
Every variant is checked before it is timed. Writes benchmarks/results/<device>_layer.csv.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import compare, plain_llama, results, timing
from coda_jax.extend import in_heads
from coda_jax.operators.qkv_projection import Head, split_heads
from flax_layers import LlamaConfig

# D, F, heads, kv heads: Llama-3-1B's and Llama-3-8B's.
SHAPES = [(2048, 8192, 32, 8), (4096, 14336, 32, 8)]
TINY = [(128, 192, 2, 1)]
Params = dict[str, jax.Array]


def config_of(width: int, hidden: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
    )


def parameters(config: LlamaConfig, dtype: Any) -> Params:
    """Random-normal kernels over the square root of their inputs, in the shapes of the fused layer."""
    width, hidden, head_dim = config.hidden_size, config.intermediate_size, config.resolved_head_dim
    queries, keys = config.num_attention_heads * head_dim, config.resolved_num_key_value_heads * head_dim
    shapes = {
        "out": (queries, width),
        "gate_up": (width, 2 * hidden),
        "down": (hidden, width),
        "qkv": (width, queries + 2 * keys),
    }
    keys_of = jax.random.split(jax.random.key(0, impl="rbg"), len(shapes))
    kernels = {
        name: (jax.random.normal(key, shape) / math.sqrt(shape[0])).astype(dtype)
        for key, (name, shape) in zip(keys_of, shapes.items(), strict=True)
    }
    return kernels | {"mlp_norm": jnp.ones(width, dtype), "attention_norm": jnp.ones(width, dtype)}


def fused(p: Params, x: jax.Array, y: jax.Array, *, config: LlamaConfig) -> tuple[jax.Array, ...]:
    """The stream after the layer and the next q, k, v, from the stream x (B, T, D) and attention's y (B, T, H Dh)."""
    x, *heads = _layer(x, p, y, plain_llama.angles(jnp.arange(x.shape[1]), config), config)
    return x, *(in_heads(z, config.resolved_head_dim) for z in heads)


@coda.block(name="layer")
def _layer(x: Any, p: Any, y: Any, angles: Any, config: LlamaConfig) -> tuple[Any, ...]:
    rms_norm = functools.partial(coda.rms_norm, epsilon=config.rms_norm_eps)
    x = x + y @ p["out"]
    x = x + (rms_norm(x, p["mlp_norm"]) @ p["gate_up"]).map(coda.gated(jax.nn.silu)) @ p["down"]
    dim, queries = config.resolved_head_dim, config.num_attention_heads
    ends = queries * dim, (queries + config.resolved_num_key_value_heads) * dim
    z = rms_norm(x, p["attention_norm"]) @ p["qkv"]
    return x, *split_heads(z, tuple(angles), (), Head(dim, 0.0), ends)


def separate(p: Params, config: LlamaConfig, *, packed_qkv: bool) -> Params:
    """The same kernels as checkpoints have them, for `plain`; query, key and value may stay one."""
    head_dim = config.resolved_head_dim
    queries, keys = config.num_attention_heads * head_dim, config.resolved_num_key_value_heads * head_dim
    p = dict(p)
    p["gate"], p["up"] = jnp.split(p.pop("gate_up"), 2, axis=1)
    if not packed_qkv:
        p["q"], p["k"], p["v"] = jnp.split(p.pop("qkv"), [queries, queries + keys], axis=1)
    return p


def plain(p: Params, x: jax.Array, y: jax.Array, *, config: LlamaConfig) -> tuple[jax.Array, ...]:
    """The results of `fused`, in plain jnp on `separate` kernels."""
    cos, sin = plain_llama.angles(jnp.arange(x.shape[1]), config)
    x = plain_llama.mlp(x + y @ p["out"], p, config.rms_norm_eps)
    return x, *plain_llama.qkv(x, p, cos, sin, config)


def products(multiply: Callable[..., jax.Array], *, backward: bool) -> Callable[..., list[jax.Array]]:
    """The layer's products alone, on what it has at hand: f(p, x, y, hidden, dz, dqkv).

    Args:
      multiply: a @ b, with transpose_a and transpose_b.
      backward: whether the two products of each backward pass come too.
    """

    def run(
        p: Params, x: jax.Array, y: jax.Array, hidden: jax.Array, dz: jax.Array, dqkv: jax.Array
    ) -> list[jax.Array]:
        calls = [(y, p["out"], x), (x, p["gate_up"], dz), (hidden, p["down"], x), (x, p["qkv"], dqkv)]
        out = [multiply(a, b) for a, b, _ in calls]
        if backward:
            out += [multiply(ct, b, transpose_b=True) for _, b, ct in calls]
            out += [multiply(a, ct, transpose_a=True) for a, _, ct in calls]
        return out

    return run


def xla_product(a: jax.Array, b: jax.Array, *, transpose_a: bool = False, transpose_b: bool = False) -> jax.Array:
    contraction = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return jax.lax.dot_general(a, b, (contraction, ((), ())), preferred_element_type=jnp.float32).astype(a.dtype)


def forward_and_backward(layer: Callable[..., Any]) -> Callable[..., Any]:
    """f(p, x, y, cotangents) -> the layer's results, and the gradients of p, x and y."""

    def run(p: Params, x: jax.Array, y: jax.Array, cotangents: Any) -> Any:
        out, pullback = jax.vjp(layer, p, x, y)
        return out, pullback(cotangents)

    return run


def variants(config: LlamaConfig, batch: int, length: int, *, backward: bool) -> dict[str, tuple[Any, tuple]]:
    """Name -> jitted function and its arguments; "coda", "xla" and "xla_packed" compute the same."""
    dtype = jnp.bfloat16
    width, rows = config.hidden_size, batch * length
    p = parameters(config, dtype)
    keys = iter(jax.random.split(jax.random.key(1, impl="rbg"), 16))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    x, y = normal(batch, length, width), normal(batch, length, p["out"].shape[0])
    cotangents = tuple(normal(*one.shape) for one in jax.eval_shape(lambda: fused(p, x, y, config=config)))
    layers = {
        "coda": (fused, p),
        "xla": (plain, separate(p, config, packed_qkv=False)),
        "xla_packed": (plain, separate(p, config, packed_qkv=True)),
    }
    found: dict[str, tuple[Any, tuple]] = {}
    for name, (function, kernels) in layers.items():
        layer = functools.partial(function, config=config)
        if backward:
            found[name] = forward_and_backward(layer), (kernels, x, y, cotangents)
        else:
            # A copy, so that jit finds a function of this variant's name.
            found[name] = (lambda *a, f=layer: f(*a)), (kernels, x, y)
    flat = (p, x.reshape(rows, -1), y.reshape(rows, -1))
    flat += tuple(normal(rows, size) for size in (config.intermediate_size, 2 * config.intermediate_size))
    flat += (normal(rows, p["qkv"].shape[1]),)
    found["products"] = products(xla_product, backward=backward), flat
    found["coda_products"] = products(coda.gemm, backward=backward), flat
    for name, (function, arguments) in found.items():
        function.__name__ = name  # timing.executions tells variants apart by it
        found[name] = jax.jit(function), arguments
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser("benchmarks.layer", __doc__)
    parser.add_argument("--repeats", type=int, default=12, help="measured executions of each variant (default 12)")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    batch, length = (2, 24) if options.tiny else (2, 8192)
    print(f"a Llama layer without attention, {batch * length} tokens, bfloat16   [{timing.clock()}]")
    print(f"{'D':>6}{'F':>7}  {'pass':18}{'variant':15}{'ms':>9}{'over products':>15}{'distance':>10}")
    rows = []
    for shape in TINY if options.tiny else SHAPES:
        for backward in (False, True):
            rows += measure(config_of(*shape), batch, length, backward=backward, repeats=options.repeats)
    print(f"[{timing.clock()}]")
    results.write("_layer", list(rows[0]), rows, folder=options.out, commit=options.commit)


def measure(config: LlamaConfig, batch: int, length: int, *, backward: bool, repeats: int) -> list[dict[str, Any]]:
    """Checks and times the variants of one shape, prints and returns the rows."""
    functions = variants(config, batch, length, backward=backward)

    def call(name: str) -> Callable[[], Any]:
        function, arguments = functions[name]
        return lambda: function(*arguments)

    expected = in_plain_form(call("xla_packed")(), config)
    distances = {
        name: compare.distance(in_plain_form(call(name)(), config), expected) for name in ("coda", "xla", "xla_packed")
    }
    for name, distance in distances.items():
        if not distance <= 0.03:
            raise AssertionError(f"{name}: a result is {distance:.3f} of its size away from xla_packed's")
    executed = timing.executions({name: call(name) for name in functions}, rounds=repeats + 2)
    ms = {
        name: statistics.median(sum(kernel.duration for kernel in kernels) for kernels in every[2:]) / 1e6
        for name, every in executed.items()
    }
    rows = []
    for name, time in ms.items():
        row = {
            "width": config.hidden_size,
            "hidden": config.intermediate_size,
            "tokens": batch * length,
            "pass": "forward, backward" if backward else "forward",
            "variant": name,
            "ms": time,
            "over_products": time / ms["products"],
            "distance": distances.get(name, ""),
        }
        shown = f"{distances[name]:10.4f}" if name in distances else ""
        about = f"{row['width']:6}{row['hidden']:7}  {row['pass']:18}{name:15}"
        print(f"{about}{time:9.3f}{row['over_products']:15.3f}{shown}", flush=True)
        rows.append(row)
    return rows


def in_plain_form(results: Any, config: LlamaConfig) -> Any:
    """Results of a variant, gradients of kernels in the shapes of `separate` with one qkv."""
    if len(results) == 4:  # forward alone
        return results
    out, (dp, dx, dy) = results
    dp = dict(dp)
    if "gate_up" in dp:
        dp = separate(dp, config, packed_qkv=True)
    if "q" in dp:
        dp["qkv"] = jnp.concatenate([dp.pop("q"), dp.pop("k"), dp.pop("v")], axis=1)
    return out, (dp, dx, dy)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    main()
