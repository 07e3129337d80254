"""`python -m benchmarks.train_step`: value and gradient of a Llama's loss, fused and plain, in time and in memory.

Sizes of Llama-3-1B by default. The variants run interleaved in one process on the same parameters; their losses and
gradients are compared before anything is timed. Times are the profiler's, of all kernels of a step; without a GPU the
wall clock's. With --alone each variant also runs by itself, back to back as in training: its wall clock's time and its
energy. Packed variants have documents of --documents tokens in their rows, in the mean, and are compared with each
other. Writes benchmarks/results/<device>_train_step.csv, with _float32 in its name for such parameters and _packed for
packed variants: a row a variant, a row a class of kernels, and a row for each number of layers with which the first
fused and the first plain variant were traced and lowered, of which nothing is compiled or run. Of other models than 1B
and of variants in fp8 the file's name says so too; the latter take the scales of steps before from four steps that are
not timed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import compare, hlo, results, timing
from benchmarks.alone import Execution, device_counter, executed
from benchmarks.variants import DEFAULTS, END, MODELS, TINY, VARIANTS, Parameters, Setting, Variant, step

# Layers of random weights multiply errors: rounding to three bits makes the gradients of 1B's 16 differ by 0.43 from
# bfloat16's, ours and XLA's alike, and those of 8B's 32 by 1.19. Of fp8 the loss alone tells whether a step is right.
FP8_GRADIENT_RTOL = math.inf


@dataclasses.dataclass
class Measured:
    """A compiled variant and what was found out about it."""

    name: str
    variant: Variant
    compiled: Any
    compile_seconds: float
    epilogues: dict[str, hlo.Operation]
    call: functools.partial[Any]
    loss: float = float("nan")
    distance: float = float("nan")
    failure: str = ""
    executions: list[list[timing.Kernel]] = dataclasses.field(default_factory=list)
    alone: Execution | None = None

    @contextlib.contextmanager
    def noting_lack_of_memory(self) -> Iterator[None]:
        """A block of code that may exceed the GPU's memory: that is this variant's failure, and no exception."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.failure = "out of memory"

    def judge(self, expected: float, reference: str, *, loss_rtol: float, gradient_rtol: float) -> None:
        """Notes a failure where the loss, or the gradients' distance, is too far from what `reference` found."""
        if not abs(self.loss - expected) <= loss_rtol * abs(expected):
            self.failure = f"wrong: loss {self.loss}, {expected} in {reference}"
        elif not self.distance <= gradient_rtol:
            self.failure = f"wrong: gradients differ by {self.distance:.3g} from those of {reference}"

    def memory_gib(self) -> dict[str, float]:
        """Temporaries, arguments, results and all of them, as XLA planned them."""
        sizes = self.compiled.memory_analysis()
        gib = {
            "temporaries": sizes.temp_size_in_bytes,
            "arguments": sizes.argument_size_in_bytes,
            "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        }
        return {name: size / 2**30 for name, size in (gib | {"peak": sum(gib.values())}).items()}

    def milliseconds(self) -> float:
        """Median over the executions of the time of all kernels."""
        return statistics.median(sum(kernel.duration for kernel in kernels) for kernels in self.executions) / 1e6

    def span(self) -> float:
        """Median over the executions of the time from the first kernel's start to the last one's end."""
        ends = [max(kernel.start + kernel.duration for kernel in kernels) for kernels in self.executions]
        spans = [end - kernels[0].start for end, kernels in zip(ends, self.executions, strict=True)]
        return statistics.median(spans) / 1e6

    def profile(self) -> dict[str, tuple[float, float]]:
        """Class of kernels -> milliseconds and kernels of an execution, means; the largest first."""
        classes: dict[str, list[float]] = collections.defaultdict(list)
        for kernels in self.executions:
            for kernel in kernels:
                classes[kernel_class(kernel, self.epilogues)].append(kernel.duration)
        count = len(self.executions)
        rows = {name: (sum(times) / count / 1e6, len(times) / count) for name, times in classes.items()}
        return dict(sorted(rows.items(), key=lambda row: -row[1][0]))


def kernel_class(kernel: timing.Kernel, operations: Mapping[str, hlo.Operation]) -> str:
    """The class of a kernel: "coda: <epilogue>", "product", "attention", or the kind of fusion and what it ends with.

    Args:
      kernel: of the trace.
      operations: the operations of the compiled program by name.
    """
    operation = operations.get(kernel.instruction)
    kind = operation.kernel if operation else ""
    if "coda_gemm" in kernel.name:
        return f"coda: {kind or '?'}"
    if kind.startswith(hlo.ATTENTION) or re.search(r"coda_attention|cudnn|flash|sdpa|fmha", kernel.name):
        return hlo.ATTENTION
    if kind == hlo.PRODUCT or re.search(r"gemm|nvjet|cutlass|cublas|xmma|splitK", kernel.name, re.IGNORECASE):
        return hlo.PRODUCT
    if re.search(r"memcpy|memset", kernel.name, re.IGNORECASE):
        return "copy or fill"
    if kind:  # the finish of reductions, say, in a custom call of ours
        return f"coda: {kind}"
    name = re.sub(r"[._]?\d+", "", kernel.name)
    ends_with = operation.scope.rpartition("/")[2] if operation else ""
    return f"{name} ({ends_with})" if ends_with else name


def beyond(profile: Mapping[str, tuple[float, float]]) -> float:
    """Milliseconds of what is neither a product, with its epilogue, nor attention."""
    known = (hlo.PRODUCT, hlo.ATTENTION)
    return sum(ms for name, (ms, _) in profile.items() if name not in known and not name.startswith("coda: "))


def compile_all(
    names: Sequence[str],
    parameters: Parameters,
    tokens: jax.Array,
    labels: jax.Array,
    *,
    shardings: Callable[[Any], Any] = lambda _: None,
) -> list[Measured]:
    """Compiles the variants side by side; `shardings` gives those of the gradient, from the parameters."""

    def steps() -> Iterator[Step]:
        for name in names:
            arguments = (parameters.of(VARIANTS[name]), tokens, labels)
            function = step(name, VARIANTS[name], parameters.setting, gradient_shardings=shardings(arguments[0]))
            yield Step(name, VARIANTS[name], function, arguments)

    return compile_steps(steps())


def settle(one: Measured, parameters: Parameters) -> None:
    """Runs a variant whose scales are of steps before until they fit: a layer's last products have theirs first."""
    of, *others = one.call.args
    for _ in range(4 if one.variant.fp8 in ("delayed", "flax") else 0):
        of = parameters.of_next_step(one.variant, of, one.compiled(of, *others)[1])
    one.call = functools.partial(one.compiled, of, *others)


class Step(NamedTuple):
    """A variant's jitted function and its arguments."""

    name: str
    variant: Variant
    function: Any
    arguments: tuple[Any, ...]


def compile_steps(steps: Iterable[Step]) -> list[Measured]:
    """Compiles the steps side by side, each as soon as it is made."""

    def compiled(lowered: Any, options: Mapping[str, Any] | None) -> tuple[Any, float, str]:
        start, failure = time.perf_counter(), ""
        try:
            made = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # What it would need is known all the same, if XLA tries no kernels.
            made, failure = lowered.compile({**(options or {}), "xla_gpu_autotune_level": 0}), "out of memory"
        return made, time.perf_counter() - start, failure

    found = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = []
        for one in steps:
            lowered = one.function.lower(*one.arguments)
            waiting.append((one, pool.submit(compiled, lowered, one.variant.compiler_options)))
        for one, future in waiting:
            function, seconds, failure = future.result()
            computations = hlo.hlo_computations(function.as_text(), inside_fusions=True)
            named = hlo.with_first_names(one for computation in computations for one in computation)
            operations = {one.name: one for one in named}
            call = functools.partial(function, *one.arguments)
            found.append(Measured(one.name, one.variant, function, seconds, operations, call, failure=failure))
    return found


def traced(
    names: Sequence[str], setting: Setting, numbers_of_layers: Sequence[int], tokens: jax.Array
) -> list[dict[str, Any]]:
    """Rows of the CSV: seconds that tracing and lowering a step take, by variant and number of layers."""
    rows = []
    for name in names:
        for layers in numbers_of_layers:
            config = dataclasses.replace(setting.config, num_hidden_layers=layers)
            one = dataclasses.replace(setting, config=config)
            variant = VARIANTS[name]
            parameters = jax.eval_shape(lambda one=one, variant=variant: Parameters(one).of(variant))
            times = [time.perf_counter()]
            trace = step(name, variant, one).trace(parameters, tokens, tokens)
            times.append(time.perf_counter())
            trace.lower()
            times.append(time.perf_counter())
            trace_s, lower_s = (round(end - start, 3) for start, end in itertools.pairwise(times))
            rows.append({"kind": "tracing", "variant": name, "layers": layers, "trace_s": trace_s, "lower_s": lower_s})
            print(f"{name:20}{layers:4} layers: traced in {trace_s:.2f} s, lowered in {lower_s:.2f} s", flush=True)
    return rows


def _kind(path: Any) -> str:
    """The kind of a parameter, the same in every layer."""
    return "/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def check(measured: Sequence[Measured], parameters: Parameters, *, loss_rtol: float, gradient_rtol: float) -> None:
    """Runs every variant once and compares with the first plain one, or the first; notes losses and failures."""
    for is_packed in (False, True):
        if alike := [one for one in measured if one.variant.packed == is_packed]:
            _check_alike(alike, parameters, loss_rtol=loss_rtol, gradient_rtol=gradient_rtol)


def _check_alike(
    measured: Sequence[Measured], parameters: Parameters, *, loss_rtol: float, gradient_rtol: float
) -> None:
    plain = (one for one in measured if not one.variant.fused and one.variant.fp8 is None and not one.failure)
    reference = next(plain, measured[0])
    expected: tuple[float, Any] | None = None
    for one in (reference, *(one for one in measured if one is not reference)):
        if one.failure:
            continue
        with one.noting_lack_of_memory():
            settle(one, parameters)
            loss, gradient = jax.block_until_ready(one.call())
        if one.failure:
            continue
        gradient = parameters.plain_gradient(one.variant, gradient)
        one.loss = float(loss)
        if expected is None:
            expected = one.loss, gradient
        one.distance = compare.distance(gradient, expected[1], _kind)
        allowed = gradient_rtol if one.variant.fp8 is None else FP8_GRADIENT_RTOL
        one.judge(expected[0], reference.name, loss_rtol=loss_rtol, gradient_rtol=allowed)
        del gradient


def run_interleaved(measured: Sequence[Measured], repeats: int) -> list[Measured]:
    """Runs the variants that did not fail, interleaved, notes `repeats` executions of each, and returns them."""
    good = [one for one in measured if not one.failure]
    if good:
        interleaved = timing.executions({one.name: one.call for one in good}, rounds=repeats + 1)
        for one in good:
            one.executions = interleaved[one.name][1:]  # the first round warms the chip
    return good


def report(measured: Sequence[Measured], about: Mapping[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Prints the tables; the rows of the CSV."""
    rows: list[dict[str, Any]] = []
    print(
        f"{'variant':20}{'ms':>9}{'span':>9}{'beyond':>9}{'tokens/s':>10}{'temp GiB':>10}{'args':>7}{'peak':>7}"
        f"{'loss':>9}{'grad':>8}{'compile s':>11}"
    )
    for one in measured:
        memory = one.memory_gib()
        row = {"kind": "step", "variant": one.name, "loss": one.loss, "gradient_distance": one.distance}
        row |= {f"{name}_gib": round(size, 3) for name, size in memory.items()}
        row |= {"compile_s": round(one.compile_seconds, 1), **about, "failure": one.failure}
        shown = ""
        if one.executions:
            ms = one.milliseconds()
            row |= {"ms": ms, "span_ms": one.span(), "beyond_ms": beyond(one.profile())}
            if one.alone:
                row |= {"alone_ms": 1e3 * one.alone.seconds, "alone_joules": one.alone.joules}
            shown = f"{ms:9.2f}{row['span_ms']:9.2f}{row['beyond_ms']:9.2f}{tokens / ms * 1e3:10.0f}"
        print(
            f"{one.name:20}{shown:37}{memory['temporaries']:10.2f}{memory['arguments']:7.2f}{memory['peak']:7.2f}"
            f"{one.loss:9.4f}{one.distance:8.4f}{one.compile_seconds:11.1f}  {one.failure}",
            flush=True,
        )
        rows.append(row)
    for one in measured:
        if one.alone:
            joules, seconds = one.alone
            print(f"{one.name} alone: {1e3 * seconds:.2f} ms, {joules:.1f} J, {joules / seconds:.0f} W")
    for one in measured:
        if one.executions:
            print(f"\n{one.name}: milliseconds and number of kernels by class")
            for name, (ms, count) in one.profile().items():
                print(f"{ms:10.3f}{count:8.0f}  {name}")
                rows.append({"kind": "kernels", "variant": one.name, "class": name, "ms": ms, "count": count, **about})
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser("benchmarks.train_step", __doc__)
    parser.add_argument("--variants", default=",".join(DEFAULTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=4, help="measured executions of each variant (default 4)")
    parser.add_argument("--alone", type=float, default=0.0, help="seconds in which each variant also runs by itself")
    parser.add_argument("--model", default="1b", choices=[*MODELS])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--param-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--documents", type=int, default=1024, help="mean tokens of a document of packed rows")
    parser.add_argument("--traced-layers", default="16,32,80", help="numbers of layers to trace (default 16,32,80)")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds, on (2, 24) tokens")
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        parser.error(f"--variants: {unknown[0]} is none of {', '.join(VARIANTS)}")
    if min(options.repeats, options.batch, options.length, options.layers or 1, options.documents) < 1:
        parser.error("--repeats, --batch, --length, --layers and --documents must be at least 1")
    if options.alone < 0:
        parser.error(f"--alone: {options.alone} seconds")
    numbers = [x for x in options.traced_layers.split(",") if x]
    if not all(x.isdecimal() and int(x) for x in numbers):
        parser.error(f"--traced-layers: {options.traced_layers!r} are no numbers of layers")
    options.traced_layers = [int(x) for x in numbers]
    return options


def prepare(options: argparse.Namespace) -> tuple[Parameters, jax.Array, jax.Array]:
    """Parameters, and random tokens and labels (B, T)."""
    config = TINY if options.tiny else MODELS[options.model]
    config = dataclasses.replace(config, num_hidden_layers=options.layers or config.num_hidden_layers)
    shape = (2, 24) if options.tiny else (options.batch, options.length)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    if any(VARIANTS[name].packed for name in options.variants):
        tokens = jnp.where(jax.random.bernoulli(jax.random.key(2), 1 / options.documents, shape), END, tokens)
    return (
        Parameters(Setting(config, jnp.bfloat16, jnp.dtype(options.param_dtype))),
        tokens,
        jnp.roll(tokens, -1, axis=1),
    )


def main(arguments: Sequence[str] | None = None, counter: Callable[[], float] | None = None) -> int:
    """The command; 1 if a variant's results are wrong."""
    options = parse(arguments)
    parameters, tokens, labels = prepare(options)
    about = {
        "batch": tokens.shape[0],
        "length": tokens.shape[1],
        "layers": parameters.config.num_hidden_layers,
        "param_dtype": options.param_dtype,
    }
    if options.model != "1b":
        about["model"] = options.model
    print(f"value and gradient of a Llama's loss, {about}   [{timing.clock()}]", flush=True)
    measured = compile_all(options.variants, parameters, tokens, labels)
    # Two roundings to bfloat16 that differ everywhere make gradients of 16 layers differ by a few percent.
    check(measured, parameters, loss_rtol=3e-3, gradient_rtol=0.1)
    good = run_interleaved(measured, options.repeats)
    if good:
        print(f"[{timing.clock()}]")
    if options.alone:
        for one in good:
            one.alone = executed(one.call, counter or device_counter(), options.alone)
    rows = report(measured, about, tokens.size)
    firsts = {VARIANTS[name].fused: name for name in reversed(options.variants)}
    rows += [about | row for row in traced([*firsts.values()][::-1], parameters.setting, options.traced_layers, tokens)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    suffix = "_train_step" if options.param_dtype == "bfloat16" else f"_train_step_{options.param_dtype}"
    suffix += "" if options.model == "1b" else f"_{options.model}"
    suffix += "_packed" * any(one.variant.packed for one in measured)
    suffix += "_fp8" * any(one.variant.fp8 is not None for one in measured)
    results.write(suffix, columns, rows, folder=options.out, commit=options.commit)
    return int(any(one.failure.startswith("wrong") for one in measured))


def use_whole_gpu() -> None:
    """Settings that must be made before JAX starts its GPU.

    A plain scan needs 49 GiB beside the parameters; and what a CUDA graph launches has no instruction's name in the
    profile. The launches, a thousand in 300 ms, hide behind the kernels as they are.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if "command_buffer" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="


if __name__ == "__main__":
    use_whole_gpu()
    sys.exit(main())
