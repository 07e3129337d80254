"""`python -m benchmarks.lab.operators`: operators, forward and backward, kernel by kernel.

Value and cotangents of each operator at the sizes of models of about 1B: microseconds in all, of each of its kernels in
their order, and of what XLA does between them; medians of interleaved rounds. Two commits are compared by running it in
both, in turn, on one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import timing

_THETA = 10_000.0  # of rotary angles


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The arrays' sizes: rows are (batch, length), all others are numbers of columns."""

    batch: int = 2
    length: int = 8192
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    experts: int = 8
    expert_hidden: int = 3072


class Case(NamedTuple):
    """An operator, and the arrays that it is differentiated by."""

    function: Callable[..., Any]
    arrays: Sequence[jax.Array]


class Times(NamedTuple):
    """Microseconds of a call, and of each of its kernels that are coda_jax's."""

    total: float
    kernels: list[float]

    @property
    def others(self) -> float:
        """The time that XLA's passes take."""
        return self.total - sum(self.kernels)


def cases(sizes: Sizes, dtype: Any = jnp.bfloat16) -> dict[str, Case]:
    """By name."""
    keys = (jax.random.key(i) for i in itertools.count())

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return (mean + scale * jax.random.normal(next(keys), shape)).astype(dtype)

    d, f, e, h = sizes.width, sizes.hidden, sizes.experts, sizes.expert_hidden
    x, scale, shift = normal(sizes.batch, sizes.length, d), normal(d, scale=0.1, mean=1), normal(d, scale=0.1)
    rms = lambda x, scale: coda.rms_norm(x, scale)  # noqa: E731
    tables = _tables(sizes.length, sizes.head_dim)
    rows = sizes.batch * sizes.length
    columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    groups = jnp.full((e,), rows // e, jnp.int32)
    heads: dict[str, Any] = {"num_heads": sizes.heads, "num_kv_heads": sizes.kv_heads}

    def gated(x: Any, scale: Any, up: Any, down: Any) -> Any:
        return coda.gated_mlp(rms(x, scale), up, down).x

    def biased(x: Any, scale: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
        options: dict[str, Any] = {"up_bias": up_bias, "down_bias": down_bias}
        return coda.mlp(rms(x, scale), up, down, activation=coda.gated(jax.nn.gelu), **options).x

    def of_layer_norm(x: Any, scale: Any, shift: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
        return coda.mlp(coda.layer_norm(x, scale, shift), up, down, up_bias=up_bias, down_bias=down_bias).x

    def qkv(x: Any, scale: Any, w: Any, *scales: Any) -> Any:
        norms = dict(zip(("q_scale", "k_scale"), scales, strict=False))
        return coda.qkv_projection(rms(x, scale), w, *tables, **heads, **norms)

    up, gate_up, down = normal(d, f, scale=d**-0.5), normal(d, 2, f, scale=d**-0.5), normal(f, d, scale=f**-0.5)
    biases = [normal(n, scale=0.1) for n in (f, 2 * f, d, 3 * d)]
    w, w_qkv = normal(d, 3 * d, scale=d**-0.5), normal(d, columns, scale=d**-0.5)
    of_heads = [normal(sizes.head_dim, scale=0.1, mean=1) for _ in range(2)]
    experts = normal(e, d, 2 * h, scale=d**-0.5), normal(e, h, d, scale=h**-0.5)
    weights = jax.random.uniform(next(keys), (rows,))
    return {
        "gated_mlp": Case(gated, [x, scale, gate_up, down]),
        "gated mlp with biases": Case(biased, [x, scale, gate_up, biases[1], down, biases[2]]),
        "mlp of a LayerNorm": Case(of_layer_norm, [x, scale, shift, up, biases[0], down, biases[2]]),
        "norm_projection": Case(lambda x, s, w, b: coda.norm_projection(rms(x, s), w, b), [x, scale, w, biases[3]]),
        "norm_projection of a LayerNorm": Case(
            lambda x, s, t, w, b: coda.norm_projection(coda.layer_norm(x, s, t), w, b), [x, scale, shift, w, biases[3]]
        ),
        "qkv_projection": Case(qkv, [x, scale, w_qkv]),
        "qkv_projection with norms of heads": Case(qkv, [x, scale, w_qkv, *of_heads]),
        "expert_mlp": Case(
            lambda x, up, down, row_scale: coda.expert_mlp(x, up, down, groups, row_scale=row_scale),
            [x.reshape(rows, d), *experts, weights],
        ),
    }


def _tables(length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    angles = jnp.arange(length)[:, None] * _THETA ** -jnp.linspace(0, 1, head_dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


def step(name: str, case: Case) -> Callable[[], Any]:
    """The jitted call of an operator and its cotangents."""
    results = jax.eval_shape(case.function, *case.arrays)
    cotangents = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype), results)

    def value_and_cotangents(arrays: Sequence[jax.Array], cotangents: Any) -> Any:
        results, pullback = jax.vjp(case.function, *arrays)
        return results, pullback(cotangents)

    value_and_cotangents.__name__ = name
    return functools.partial(jax.jit(value_and_cotangents), case.arrays, cotangents)


def measured(sizes: Sizes, rounds: int) -> Iterator[tuple[str, Times]]:
    """Each operator's times on the GPU here."""
    made = cases(sizes)
    names = {name.replace(" ", "_"): name for name in made}  # of functions: a program's name has no spaces
    steps = {of: step(of, made[name]) for of, name in names.items()}
    for call in steps.values():
        jax.block_until_ready(call())
    for name, executions in timing.executions(steps, rounds=rounds).items():
        each = [[kernel.duration / 1e3 for kernel in one if kernel.name.startswith("coda")] for one in executions]
        total = statistics.median(sum(kernel.duration for kernel in one) / 1e3 for one in executions)
        yield names[name], Times(total, [statistics.median(of) for of in zip(*each, strict=True)])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of all operators in turn")
    options = parser.parse_args(arguments)
    print(f"{jax.devices()[0].device_kind}, us\n{'operator':36}{'all':>9}{'XLA':>8}  kernels")
    for name, times in measured(Sizes(), options.rounds):
        print(f"{name:36}{times.total:9.1f}{times.others:8.1f}  {' '.join(f'{us:.1f}' for us in times.kernels)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
