"""`python -m benchmarks.attention`: coda_jax.attention beside what a user would pick instead.

On random arrays in bfloat16, forward, and forward with the gradients of q, k and v: coda_jax.attention, of documents
by segment ids and by intervals, and with gradients that are added in any order; cuDNN by jax.nn.dot_product_attention;
documents in cuDNN's packed layout, by a function that JAX keeps private; and of PyTorch, where it is installed,
attention by cuDNN, rows of several lengths, and FlexAttention. All have the same rows: the lengths of documents are
drawn from the case's seed.

Each variant is compared with float32 on the last row's last key head and its queries: the relative distances are of y,
dq, dk and dv. Times are the profiler's, of all kernels, the variants interleaved in random order in one process; with
--alone each also runs by itself, back to back. TFLOP/s count what the mask leaves, pair by pair: two products forward
and five backward. Temporaries are those of `memory_analysis`, of PyTorch its allocator's. Of a variant that fails or is
wrong the failure is written in the place of its time.

Writes a file a kind of case, benchmarks/results/<device>_attention_<kind>.csv; --explain needs no GPU, tells the cases
and writes nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import alone, attention_cases, attention_forms, peers, results, timing
from benchmarks.attention_cases import Case
from benchmarks.attention_forms import RESULTS, Form
from benchmarks.train_step import use_whole_gpu

PASSES = ("forward", "both")  # forward alone, and with the gradients
TOLERANCE = 2e-2  # of a distance; roundings to bfloat16 make 2e-3 to 5e-3
COLUMNS = (
    *("case", "text", "batch", "length", "heads", "key_heads", "width", "value_width", "window", "mean"),
    *("pairs", "share", "pass", "variant", "ms", "tflops", "alone_ms", "alone_joules", "temporaries_mib"),
    *(*RESULTS, "failure", "includes"),
)

Key = tuple[str, str]  # a pass and the name of a variant


class Program(NamedTuple):
    """A compiled form of a case and a pass, or why there is none."""

    form: Form
    compiled: Any
    failure: str = ""


class Compiled(NamedTuple):
    """The compiled programs of a case: of float32's results, from `reference_arguments`, and of the forms."""

    reference: Any
    programs: dict[Key, Program]


def compile_all(cases: Sequence[Case], forms: Sequence[Form]) -> dict[Case, Compiled]:
    """All forms of all cases, side by side."""

    def reference(case: Case) -> Any:
        return jax.jit(attention_forms.reference).lower(*attention_forms.reference_types(case)).compile()

    def program(case: Case, which: str, form: Form) -> Program:
        try:
            function = form.function(case)
            run = attention_forms.with_gradients(function) if which == "both" else function

            def named(*arrays: jax.Array) -> Any:
                return run(*arrays)

            named.__name__ = form.name  # timing.executions tells programs apart by it
            types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in _arguments(which, case.shapes)]
            return Program(form, jax.jit(named).lower(*types, *jax.eval_shape(lambda: form.extras(case))).compile())
        except Exception as error:  # told in the table, and by the exit status if it is ours
            return Program(form, None, said(error))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        references = {case: pool.submit(reference, case) for case in cases}
        waiting = {
            case: {
                (which, form.name): pool.submit(program, case, which, form)
                for which in PASSES
                for form in forms
                if form.has(case)
            }
            for case in cases
        }
        return {
            case: Compiled(references[case].result(), {key: future.result() for key, future in of.items()})
            for case, of in waiting.items()
        }


def _arguments(which: str, of_all: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a pass among q, k, v and the cotangent of the result."""
    return of_all if which == "both" else of_all[:3]


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def arrays_of(case: Case, seed: int) -> tuple[jax.Array, ...]:
    """q, k, v and the cotangent of the result."""
    # The generator that XLA compiles in no time.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(case.shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, case.shapes, strict=True))


class Measured:
    """The variants of a case: what of them is right can be called, and a row of each."""

    def __init__(self, case: Case, reference: Any, cache_bytes: float):
        self.case = case
        first = arrays_of(case, 0)
        count = timing.sets_beyond(cache_bytes, first, ())
        self.sets = [first, *(arrays_of(case, seed) for seed in range(1, count))]
        expected = reference(*attention_forms.reference_arguments(case, *first))
        self.expected = [np.asarray(x, np.float64) for x in expected]
        self.calls: dict[str, dict[str, Callable[[], Any]]] = {which: {} for which in PASSES}
        self.rows: dict[Key, dict[str, Any]] = {}

    def add_programs(self, programs: Mapping[Key, Program]) -> None:
        extras: dict[str, tuple[jax.Array, ...]] = {}
        for (which, name), program in programs.items():
            row = self._row(which, name, program.form.includes, program.failure)
            if program.compiled is None:
                continue
            row["temporaries_mib"] = program.compiled.memory_analysis().temp_size_in_bytes / 2**20
            if name not in extras:
                extras[name] = program.form.extras(self.case)
            calls = [
                functools.partial(program.compiled, *_arguments(which, arrays), *extras[name]) for arrays in self.sets
            ]
            try:
                made = jax.block_until_ready(calls[0]())
            except jax.errors.JaxRuntimeError as error:
                row["failure"] = said(error)
                continue
            self._judge(which, name, made if which == "both" else (made,), timing.rotated(calls))

    def add_peer(self, peer: peers.AttentionPeer) -> None:
        for which in PASSES:
            try:
                prepared = []
                for arrays in self.sets:
                    one = peer.prepare(self.case, _arguments(which, arrays))
                    if one is None:
                        return
                    prepared.append(one)
                made = prepared[0].to_jax(prepared[0].call())
            except Exception as error:  # of another library, which shall not keep ours from being timed
                self._row(which, peer.name, peer.includes, said(error))
                continue
            row = self._row(which, peer.name, peer.includes)
            row["temporaries_mib"] = prepared[0].temporaries / 2**20
            call = timing.rotated([one.call for one in prepared])
            self._judge(which, peer.name, made, timing.Outside(call, peer.synchronize))

    def time(self, seconds: float, counter: Callable[[], float] | None, alone_seconds: float) -> None:
        """The times of what is right, interleaved; and alone if there is a counter of joules."""
        for which, calls in self.calls.items():
            if not calls:
                continue
            for name, one in self._interleaved(which, calls, seconds).items():
                work = self.case.flops(which == "both")
                self.rows[which, name] |= {"ms": one.total / 1e3, "tflops": work / one.total / 1e6}
            for name, executed in (alone.in_turn(calls, counter, alone_seconds) if counter else {}).items():
                self.rows[which, name] |= {"alone_ms": 1e3 * executed.seconds, "alone_joules": executed.joules}

    def _interleaved(
        self, which: str, calls: Mapping[str, Callable[[], Any]], seconds: float
    ) -> Mapping[str, timing.Times]:
        try:
            return timing.interleaved(calls, seconds=seconds)
        except RuntimeError as error:  # kernels of another library that the trace does not tell apart
            inside = {name: call for name, call in calls.items() if not isinstance(call, timing.Outside)}
            if len(inside) == len(calls):
                raise
            for name in calls.keys() - inside.keys():
                self.rows[which, name]["failure"] = said(error)
            return timing.interleaved(inside, seconds=seconds) if inside else {}

    def _row(self, which: str, name: str, includes: str, failure: str = "") -> dict[str, Any]:
        case = self.case
        sizes = {of: getattr(case, of) for of in ("text", "batch", "length", "heads", "key_heads", "width")}
        mask = {"value_width": case.value_width or case.width, "window": case.window or "", "mean": case.mean or ""}
        of_mask = {"pairs": case.pairs, "share": case.share}
        row = {"case": case.name, **sizes, **mask, **of_mask, "pass": which, "variant": name}
        self.rows[which, name] = row | {"includes": includes, "failure": failure}
        return self.rows[which, name]

    def _judge(self, which: str, name: str, made: tuple[jax.Array, ...], call: Callable[[], Any]) -> None:
        """Notes the distances from float32; what is not beyond the tolerance can be called."""
        found = attention_forms.last_heads(self.case, list(map(np.asarray, made)))
        distances = [
            float(np.linalg.norm(x.astype(np.float64) - y) / np.linalg.norm(y))
            for x, y in zip(found, self.expected, strict=False)
        ]
        errors = dict(zip(RESULTS, distances, strict=False))
        self.rows[which, name] |= errors
        wrong = [f"{of} differs by {error:.3g}" for of, error in errors.items() if not error < TOLERANCE]
        if wrong:
            self.rows[which, name]["failure"] = f"wrong: {', '.join(wrong)} from float32"
        else:
            self.calls[which][name] = call


HEADER = (
    f"  {'variant':16}{'pass':9}{'ms':>9}{'TFLOP/s':>9}{'alone ms':>10}{'joules':>9}{'MiB':>9}"
    f"   {'  '.join(f'{name:6}' for name in RESULTS)} (distances from float32)"
)


def shown(row: Mapping[str, Any]) -> str:
    """A line of the table."""

    def number(name: str, width: int, digits: int) -> str:
        return f"{row[name]:{width}.{digits}f}" if name in row else " " * width

    figures = number("ms", 9, 3) + number("tflops", 9, 0) + number("alone_ms", 10, 3) + number("alone_joules", 9, 2)
    figures += number("temporaries_mib", 9, 1)
    errors = "  ".join(number(name, 6, 4) for name in RESULTS)
    return f"  {row['variant']:16}{row['pass']:9}{figures}   {errors} {row['failure']}".rstrip()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser("benchmarks.attention", __doc__)
    parser.add_argument("--cases", default="", help="a regular expression: only cases whose names have it")
    parser.add_argument("--variants", default="", help="only those, by their names with commas")
    parser.add_argument("--peers", default=",".join(peers.ATTENTION_MODULES), help="modules of benchmarks/peers")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measurement of a case's variants in a pass")
    parser.add_argument("--alone", type=float, default=0.0, help="seconds of each variant alone, in two halves")
    parser.add_argument("--explain", action="store_true", help="the cases alone, on any machine; nothing is written")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    options = parser.parse_args(arguments)
    every = attention_cases.TINY if options.tiny else attention_cases.CASES
    try:
        options.cases = [case for case in every if re.search(options.cases, case.name)]
    except re.error as error:
        parser.error(f"--cases: {options.cases!r} is no regular expression: {error}")
    if not options.cases:
        parser.error(f"--cases: no name has it; the cases are {', '.join(case.name for case in every)}")
    if options.alone < 0 or not 0 < options.seconds < math.inf:
        parser.error(f"--alone must not be negative and --seconds must be positive: {options.alone}, {options.seconds}")
    if not options.tiny and not options.explain and jax.default_backend() != "gpu":
        parser.error("the kernels run on NVIDIA Hopper GPUs, and JAX has none; try --tiny or --explain")
    return options


def measure(
    case: Case,
    compiled: Compiled,
    beside: Sequence[peers.AttentionPeer],
    options: argparse.Namespace,
    counter: Callable[[], float] | None,
) -> list[dict[str, Any]]:
    """A row a pass and variant."""
    measured = Measured(case, compiled.reference, 2e4 if options.tiny else timing.L2_BYTES)
    measured.add_programs(compiled.programs)
    for peer in beside:
        measured.add_peer(peer)
    measured.time(options.seconds, counter, options.alone)
    return sorted(measured.rows.values(), key=lambda row: PASSES.index(row["pass"]))


def main(arguments: Sequence[str] | None = None, counter: Callable[[], float] | None = None) -> int:
    """The command; 1 if a variant of ours failed or is wrong."""
    options = parse(arguments)
    if options.explain:
        for case in options.cases:
            print(*attention_cases.described(case), sep="\n")
        return 0
    beside = peers.available(filter(None, options.peers.split(",")), "load_attention")
    forms = attention_forms.forms(options.tiny)
    if chosen := [name for name in options.variants.split(",") if name]:
        known = [one.name for one in (*forms, *beside)]
        if unknown := [name for name in chosen if name not in known]:
            raise SystemExit(f"--variants: {unknown[0]} is none of {', '.join(known)}")
        forms, beside = ([one for one in some if one.name in chosen] for some in (forms, beside))
    if options.alone and counter is None:
        counter = alone.device_counter()
    is_wrong = False
    for kind in dict.fromkeys(case.kind for case in options.cases):
        rows: list[dict[str, Any]] = []
        of_kind = [case for case in options.cases if case.kind == kind]
        started = time.perf_counter()
        compiled = compile_all(of_kind, forms)
        print(f"{len(of_kind)} cases compiled in {time.perf_counter() - started:.0f} s", flush=True)
        for case in of_kind:
            print(f"{case.name}: {case.text}   [{timing.clock()}]\n{HEADER}", flush=True)
            found = measure(case, compiled.pop(case), beside, options, counter if options.alone else None)
            print(*map(shown, found), sep="\n", flush=True)
            rows += found
        is_wrong |= any(row["failure"] for row in rows if row["variant"].startswith("coda"))
        about = {"commit": options.commit, "peers": peers.versions(beside)}
        results.write(f"_attention_{kind}", COLUMNS, rows, folder=options.out, **about)
    return int(is_wrong)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # PyTorch has memory of its own
    use_whole_gpu()
    sys.exit(main())
