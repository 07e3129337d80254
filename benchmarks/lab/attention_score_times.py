"""`python -m benchmarks.lab.attention_score_times`: what score functions, sinks and dropout cost on a Hopper GPU.

For each form and size milliseconds of `coda.attention` forward, and of it and its gradients of q, k, v, the sinks and
the operands that are floats, by the profiler, causal, in bfloat16. All forms of a size are interleaved in one run.
Writes benchmarks/results/<device>_attention_scores.csv.

    python -m benchmarks.lab.attention_score_times --sizes 64 --forms "none,soft cap,ALiBi"
"""

from __future__ import annotations

import concurrent.futures
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import results, timing
from benchmarks.attention_cases import Case
from benchmarks.lab import attention_scores


class Size(NamedTuple):
    """q (B, T, H, D), k and v (B, T, K, D)."""

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int


SIZES = {64: Size(2, 8192, 32, 8, 64), 128: Size(2, 8192, 32, 8, 128), 256: Size(1, 8192, 8, 4, 256)}
MEAN = 1000  # of documents' lengths
Options = Mapping[str, Any]


def _slopes(size: Size) -> jax.Array:
    return jnp.exp2(-8 * jnp.arange(1, size.heads + 1) / size.heads)


def alibi(s: jax.Array) -> jax.Array:
    row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    heads = s.shape[1]
    return s - jnp.exp2(-8 * jnp.arange(1, heads + 1) / heads)[:, None, None] * (row - key)


def _documents(size: Size) -> jax.Array:
    case = Case("documents", size.length, size.heads, size.key_heads, size.width, batch=size.batch, mean=MEAN)
    return jnp.asarray(case.segment_ids())


FORMS: dict[str, Callable[[Size], Options]] = {
    "none": lambda size: {},
    "soft cap": lambda size: {"score": attention_scores.soft_cap},
    "soft cap, documents": lambda size: {"score": attention_scores.soft_cap, "segment_ids": _documents(size)},
    "documents": lambda size: {"segment_ids": _documents(size)},
    "ALiBi": lambda size: {"score": alibi},
    "ALiBi, learned slopes": lambda size: {"score": attention_scores.alibi_of_slopes, "operands": (_slopes(size),)},
    "decay, learned gates": lambda size: {
        "score": attention_scores.decay,
        "operands": (jnp.zeros((size.batch, size.heads, size.length)),),
    },
    "T5 buckets": lambda size: {
        "score": attention_scores.t5_buckets,
        "operands": (jnp.zeros((32, size.heads)),),
    },
    "tanh gate": lambda size: {"score": attention_scores.gate, "operands": (jnp.ones(size.heads),)},
    "sinks": lambda size: {"sinks": jnp.zeros(size.heads)},
    "dropout": lambda size: {"dropout_key": jax.random.key(0), "dropout_rate": 0.1},
}


def calls(form: str, size: Size) -> dict[str, Callable[[], Any]]:
    """Forward, and forward and backward, compiled, by the names of their programs."""
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 4)
    heads = (size.heads, size.key_heads, size.key_heads)
    q, k, v = (
        jax.random.normal(key, (size.batch, size.length, count, size.width), jnp.bfloat16)
        for key, count in zip(keys[:3], heads, strict=True)
    )
    dy = jax.random.normal(keys[3], q.shape, jnp.bfloat16)
    given = dict(FORMS[form](size))
    learned = {"sinks": given.pop("sinks", None), "operands": given.pop("operands", ())}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, learned: Any) -> jax.Array:
        return coda.attention(q, k, v, is_causal=True, implementation="cuda", **learned, **given)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, learned: Any, dy: jax.Array) -> Any:
        y, back = jax.vjp(attention, q, k, v, learned)
        return y, back(dy)

    attention.__name__ = f"{re.sub(r'[^a-z]+', '_', form.lower())}_{size.width}"  # timing tells programs apart by it
    both.__name__ = f"{attention.__name__}_both"
    arguments = {attention: (q, k, v, learned), both: (q, k, v, learned, dy)}
    return {f.__name__: functools.partial(jax.jit(f).lower(*x).compile(), *x) for f, x in arguments.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.lab.attention_score_times", __doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="widths of heads")
    parser.add_argument("--forms", default=";".join(FORMS), help="names, with semicolons between")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measured execution of each size")
    options = parser.parse_args(arguments)
    print(f"ms forward | forward and backward   [{timing.clock()}]", flush=True)
    rows: list[dict[str, Any]] = []
    for width in map(int, options.sizes.split(",")):
        size = SIZES[width]
        forms = options.forms.split(";")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = dict(zip(forms, pool.map(functools.partial(calls, size=size), forms), strict=True))
        flat = {name: call for of_form in found.values() for name, call in of_form.items()}
        times = timing.interleaved(flat, seconds=options.seconds, burst=2)
        for form, names in found.items():
            forward, both = (times[name].total / 1e3 for name in names)
            rows.append({"form": form, **size._asdict(), "forward_ms": forward, "both_ms": both})
            print(f"{width:4} {form:24}{forward:8.3f} | {both:.3f}", flush=True)
    results.write("_attention_scores", list(rows[0]), rows, folder=options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
