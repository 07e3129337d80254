"""`python -m benchmarks.loss_head`: a loss and log-probabilities over a large vocabulary, in time and in memory.

In bfloat16, M tokens of D features over V labels, value alone, or value and gradients in x and w: the mean loss by
`coda_jax.linear_cross_entropy`, and log-probabilities, with or without entropies, by `coda_jax.token_logprobs`, whose
gradients are those of a weighted mean. Both work on chunks of tokens; beside them plain JAX with an array of all
logits, and for the loss those peers of benchmarks/peers that are installed. Their values are compared before anything
is timed. Times are the profiler's, of all kernels, the variants interleaved; TFLOP/s count one product for the value
and three with the gradients, though `token_logprobs` computes the logits twice then. Writes
benchmarks/results/<device>_loss_head.csv.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from benchmarks import peers, results, timing


class Case(NamedTuple):
    """A case to compute, and the source of its shape: others publish their times for it."""

    tokens: int
    width: int
    vocabulary: int
    has_gradient: bool
    source: str
    operator: str = "loss"  # or "logprobs", "entropy": log-probabilities and entropies


CASES = [
    Case(4096, 4096, 131072, False, "Liger"),
    Case(16384, 4096, 131072, True, "Liger"),
    Case(32768, 2560, 128256, True, "Marin"),
    Case(2048, 4096, 151936, True, "tokamax"),
    Case(4096, 4096, 131072, False, "Liger", "logprobs"),
    Case(4096, 4096, 131072, False, "Liger", "entropy"),
    Case(16384, 4096, 131072, True, "Liger", "logprobs"),
    Case(16384, 4096, 131072, True, "Liger", "entropy"),
    Case(32768, 2560, 128256, True, "Marin", "logprobs"),
    Case(2048, 4096, 151936, True, "tokamax", "logprobs"),
]
TINY = [
    Case(256, 32, 200, True, "none"),
    Case(256, 32, 200, False, "none", "entropy"),
    Case(256, 32, 200, True, "none", "entropy"),
]
MEMORY = [Case(16384, 4096, 128256, True, "none", operator) for operator in ("loss", "logprobs", "entropy")]
SIZES = ["source", "operator", "tokens", "width", "vocabulary", "gradient"]
COLUMNS = [*SIZES, "variant", "ms", "tflops", "temporaries_gib", "value"]


def plain(operator: str, x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
    """The mean loss, or log-probabilities, or these and entropies, from all logits, float32."""
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=1)
    logprobs = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0] - lse
    if operator == "loss":
        return -jnp.mean(logprobs)
    if operator == "logprobs":
        return logprobs
    logp = logits - lse[:, None]
    return logprobs, -jnp.sum(jnp.exp(logp) * logp, axis=1)


def fused(operator: str, x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
    """The same without an array of all logits."""
    if operator == "loss":
        return coda.linear_cross_entropy(x, w, labels)[0]
    return coda.token_logprobs(x, w, labels, entropy=operator == "entropy")


def program_of(case: Case, f: Callable[..., Any]) -> Callable[..., Any]:
    """The function that is timed, of x, w, labels and the weights of the tokens."""

    def values(x: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
        return f(case.operator, x, w, labels)

    def weighted(*arrays: jax.Array) -> jax.Array:
        outputs = jax.tree.leaves(values(*arrays))
        if case.operator == "loss":
            return outputs[0]
        total: jax.Array = sum(jnp.sum(arrays[-1] * y) for y in outputs)  # type: ignore[assignment]
        return total

    return jax.value_and_grad(weighted, (0, 1)) if case.has_gradient else values


def measure(case: Case, rounds: int, beside: Sequence[peers.LossPeer] = ()) -> list[dict[str, Any]]:
    """A row a variant, and for the loss one a peer."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (case.tokens, case.width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (case.width, case.vocabulary), jnp.float32) / case.width**0.5
    labels = jax.random.randint(keys[2], (case.tokens,), 0, case.vocabulary)
    weights = jax.random.uniform(keys[3], (case.tokens,), minval=0.5, maxval=1.5) / case.tokens
    arrays = (x, w.astype(jnp.bfloat16), labels, weights)
    del w
    functions: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, f in (("coda", fused), ("xla", plain)):
        program = program_of(case, f)

        def named(*arrays: jax.Array, program: Callable[..., Any] = program) -> Any:
            return program(*arrays)

        named.__name__ = f"loss_{name}"  # timing.executions tells programs apart by it
        compiled = jax.jit(named).lower(*arrays).compile()
        functions[f"loss_{name}"] = functools.partial(compiled, *arrays)
        made = functions[f"loss_{name}"]()
        values[name] = jax.device_get(made[0] if case.has_gradient else made)
        memory: Any = compiled.memory_analysis()
        value = float(np.mean(jax.tree.leaves(values[name])[0]))
        rows[name] = {"variant": name, "value": value, "temporaries_gib": memory.temp_size_in_bytes / 2**30}
    for of_coda, of_xla in zip(*map(jax.tree.leaves, (values["coda"], values["xla"])), strict=True):
        np.testing.assert_allclose(of_coda, of_xla, rtol=1e-3, atol=1e-3)
    for peer in beside if case.operator == "loss" else ():
        prepared = peer.prepare(*arrays[:3], case.has_gradient)
        functions[f"loss_{peer.name}"] = timing.Outside(prepared.call, peer.synchronize)
        about = {"value": prepared.value, "temporaries_gib": prepared.temporaries / 2**30}
        np.testing.assert_allclose(prepared.value, values["xla"], rtol=1e-2)  # torch's loss has the logits' dtype
        rows[peer.name] = {"variant": peer.name, **about}
    executed = timing.executions(functions, rounds=rounds)
    work = 2 * case.tokens * case.width * case.vocabulary * (3 if case.has_gradient else 1)
    for name, row in rows.items():
        ns = statistics.median(sum(kernel.duration for kernel in ran) for ran in executed[f"loss_{name}"])
        row |= {"ms": ns / 1e6, "tflops": work / ns / 1e3}
    sizes = {"gradient" if name == "has_gradient" else name: value for name, value in case._asdict().items()}
    return [{**sizes, **row} for row in rows.values()]


def memory(case: Case) -> list[str]:
    """The memory of each variant beside arguments and results, by XLA's analysis, and our products; nothing is run."""
    shapes = ((case.tokens, case.width), (case.width, case.vocabulary), (case.tokens,), (case.tokens,))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    lines = []
    for name, f in (("coda", fused), ("xla", plain)):
        analysis: Any = jax.jit(program_of(case, f)).lower(*arrays).compile().memory_analysis()
        lines.append(f"{name:5s}{analysis.temp_size_in_bytes / 2**30:7.2f} GiB of temporaries")
    found = coda.explain(program_of(case, fused), *arrays, platform="cuda").products
    return [*lines, *(f"{count:5d} {product.epilogue}: {product.a} @ {product.b}" for product, count in found.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.loss_head", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="measured executions of each variant (default 8)")
    parser.add_argument("--tiny", action="store_true", help="a loss that a CPU computes in seconds")
    parser.add_argument("--memory", action="store_true", help="only compile: bytes and products, on any machine")
    parser.add_argument(
        "--operators", nargs="+", choices=["loss", "logprobs", "entropy"], help="only these (default all)"
    )
    options = parser.parse_args(arguments)
    if options.memory:
        for case in [TINY[-1]] if options.tiny else MEMORY:
            print(f"{case.operator} {case.tokens} x {case.width} x {case.vocabulary}", *memory(case), sep="\n")
        return 0
    beside = peers.available(peers.LOSS_MODULES, "load_losses")
    cases = [
        case
        for case in (TINY if options.tiny else CASES)
        if options.operators is None or case.operator in options.operators
    ]
    found = [row for case in cases for row in measure(case, options.rounds, beside)]
    for row in found:
        sizes = f"{row['operator']} {row['tokens']} x {row['width']} x {row['vocabulary']}"
        sizes += " with gradients" if row["gradient"] else ""
        time = f"{row['ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s"
        print(f"{sizes:48s} {row['variant']:5s}{time} {row['temporaries_gib']:7.2f} GiB of temporaries")
    about = {"commit": options.commit, "peers": peers.versions(beside)}
    results.write("_loss_head", COLUMNS, found, folder=options.out, **about)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")  # what is left is the peers'
    sys.exit(main())
