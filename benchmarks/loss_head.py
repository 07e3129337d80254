"""`python -m benchmarks.loss_head`: the loss over a large vocabulary, in time and in memory, beside plain JAX.

Value alone, or value and gradients in x and w, of the mean loss of M tokens of D features over V labels, in bfloat16:
`coda_jax.linear_cross_entropy`, which works on chunks of tokens, and plain JAX with an array of all logits. Their
losses are compared before anything is timed. Times are the profiler's, of all kernels, the variants interleaved;
TFLOP/s count one product for the value and three with the gradients. Writes benchmarks/results/<device>_loss_head.csv.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from benchmarks import results, timing


class Case(NamedTuple):
    """A loss, and whose the shape is: others publish their times for it."""

    tokens: int
    width: int
    vocabulary: int
    has_gradient: bool
    source: str


CASES = [
    Case(4096, 4096, 131072, False, "Liger"),
    Case(16384, 4096, 131072, True, "Liger"),
    Case(32768, 2560, 128256, True, "Marin"),
    Case(2048, 4096, 151936, True, "tokamax"),
]
TINY = [Case(256, 32, 200, True, "none")]
COLUMNS = ["source", "tokens", "width", "vocabulary", "gradient", "variant", "ms", "tflops", "temporaries_gib", "loss"]


def plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss from all logits, float32."""
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - target)


def fused(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The same without an array of all logits."""
    return coda.linear_cross_entropy(x, w, labels)[0]


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row a variant."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (case.tokens, case.width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.width, case.vocabulary), jnp.float32) / case.width**0.5
    w = w.astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (case.tokens,), 0, case.vocabulary)
    functions: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, loss in (("coda", fused), ("xla", plain)):
        program = jax.value_and_grad(loss, (0, 1)) if case.has_gradient else loss

        def named(*arrays: jax.Array, program: Callable[..., Any] = program) -> Any:
            return program(*arrays)

        named.__name__ = f"loss_{name}"  # timing.executions tells programs apart by it
        compiled = jax.jit(named).lower(x, w, labels).compile()
        functions[f"loss_{name}"] = functools.partial(compiled, x, w, labels)
        value = jax.tree.leaves(functions[f"loss_{name}"]())[0]
        memory: Any = compiled.memory_analysis()
        rows[name] = {"variant": name, "loss": float(value), "temporaries_gib": memory.temp_size_in_bytes / 2**30}
    np.testing.assert_allclose(rows["coda"]["loss"], rows["xla"]["loss"], rtol=1e-3)
    executed = timing.executions(functions, rounds=rounds)
    work = 2 * case.tokens * case.width * case.vocabulary * (3 if case.has_gradient else 1)
    for name, row in rows.items():
        ns = statistics.median(sum(kernel.duration for kernel in ran) for ran in executed[f"loss_{name}"])
        row |= {"ms": ns / 1e6, "tflops": work / ns / 1e3}
    about = {"source": case.source, "tokens": case.tokens, "width": case.width, "vocabulary": case.vocabulary}
    return [{**about, "gradient": case.has_gradient, **row} for row in rows.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.loss_head", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="measured executions of each variant (default 8)")
    parser.add_argument("--tiny", action="store_true", help="a loss that a CPU computes in seconds")
    options = parser.parse_args(arguments)
    found = [row for case in (TINY if options.tiny else CASES) for row in measure(case, options.rounds)]
    for row in found:
        sizes = f"{row['tokens']} x {row['width']} x {row['vocabulary']}{' with gradients' if row['gradient'] else ''}"
        time = f"{row['ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s"
        print(f"{sizes:44s} {row['variant']:5s}{time} {row['temporaries_gib']:7.2f} GiB of temporaries")
    results.write("_loss_head", COLUMNS, found, folder=options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
