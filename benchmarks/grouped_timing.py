"""Forms of grouped products beside each other: compiled, compared with group after group, timed, and told."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import grouped, grouped_forms, peers, timing
from benchmarks.grouped import Case, Work
from benchmarks.grouped_forms import Form

REFERENCE = "coda_batched"
OURS = ("coda", "coda_mlp", REFERENCE)  # of which none may fail
SLOW = 10  # times the reference's time, from which a variant is timed apart
SLOW_ROUNDS = 5
RUN_AHEAD_BYTES = 2e8  # of results from which each execution is waited for: many at once would fill the memory


@dataclasses.dataclass(frozen=True)
class Part:
    """A computation on the arrays of a case, which every form does.

    Attributes:
      name: in tables.
      flops: of the rows that there are.
      function: form -> f(*arrays, routing).
      arrays: all but the routing.
      routing: sizes of groups (G,) -> the last argument.
      tolerance: the largest error, in shares of the largest value of a result: one rounding to bfloat16, or several.
      product: whether it is a single product.
    """

    name: str
    flops: int
    function: Callable[[Form], Callable[..., Any]]
    arrays: Callable[[], Sequence[jax.Array]]
    routing: Callable[[np.ndarray], jax.Array]
    tolerance: float = 1e-2
    product: bool = False


Beside = Sequence[peers.GroupedPeer]


@dataclasses.dataclass
class Variant:
    """A part in one form, or of another library.

    Attributes:
      form: None of a library outside of XLA.
      work: of its kernels; None if they are not all ours.
      compiled: None if it cannot be compiled or does not fit.
    """

    name: str
    form: Form | None = None
    includes: str = ""
    work: list[Work] | None = None
    compiled: Any = None
    temporaries: int | None = None
    failure: str = ""


def named(form: Form, part: Part) -> Callable[..., Any]:
    """A function of the form's name, by which `timing.executions` tells programs apart."""
    inner = part.function(form)

    def run(*arguments: jax.Array) -> Any:
        return inner(*arguments)

    run.__name__ = form.name
    return run


def compile_all(forms: Sequence[Form], part: Part, types: Sequence[Any], in_use: int) -> dict[str, Variant]:
    """All forms of a part, side by side. in_use: bytes of arrays that stay on the device."""

    def one(form: Form) -> Variant:
        variant = Variant(form.name, form, form.includes)
        function = named(form, part)
        try:
            if form.name.startswith("coda"):
                variant.work = grouped.work_of(function, *types)
            lowered = jax.jit(function).lower(*types)
            variant.compiled = _compiled(lowered, form.compiler_options)
        except Exception as error:  # another library's, or no memory for XLA to choose a kernel by trying
            variant.failure = _said(error)
            if "RESOURCE_EXHAUSTED" in variant.failure:
                variant.compiled = _compiled(lowered, {"xla_gpu_autotune_level": 0})
                variant.failure = "does not fit"
            elif form.name in OURS:
                raise
        if variant.compiled is not None:
            sizes = variant.compiled.memory_analysis()
            variant.temporaries = sizes.temp_size_in_bytes
            if not fits(in_use + sizes.temp_size_in_bytes + sizes.output_size_in_bytes):
                variant.compiled, variant.failure = None, "does not fit"
        return variant

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return {variant.name: variant for variant in pool.map(one, forms)}


def _compiled(lowered: Any, options: Mapping[str, Any]) -> Any:
    # What a command buffer launches has no module's name in the trace.
    every = dict(options) if jax.default_backend() != "gpu" else {"xla_gpu_enable_command_buffer": "", **options}
    return lowered.compile(compiler_options={name: one for name, one in every.items() if _known(name)})


def _known(option: str) -> bool:
    return jax.default_backend() == "gpu" or not option.startswith("xla_gpu")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def fits(size: float) -> bool:
    """Whether the device has so many bytes; a CPU has."""
    about = jax.devices()[0].memory_stats()
    return about is None or size < 0.97 * about["bytes_limit"]


def check(name: str, found: Any, expected: Any, tolerance: float) -> float:
    """The largest error of any result, in shares of its largest value.

    Raises:
      AssertionError: it is beyond the tolerance, or no number.
    """
    errors = [_error(x, y) for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]
    error = max(float(one) for one in errors) if all(math.isfinite(one) for one in errors) else math.nan
    if not error < tolerance:
        raise AssertionError(f"{name}: results differ from group after group by {error} of the largest value")
    return error


@jax.jit
def _error(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))


def measure(
    case: Case, part: Part, beside: Beside, forms: Sequence[Form], kinds: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """A row a variant and kind of sizes, in the order of the kinds."""
    arrays = part.arrays()
    every_sizes = {kind: grouped.sizes_of(kind, case) for kind in kinds}
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*arrays, part.routing(every_sizes[kinds[0]]))]
    in_use = sum(x.nbytes for x in arrays)
    variants = compile_all(forms, part, types, in_use)
    longest = int(max(sizes.max() for sizes in every_sizes.values()))
    in_turn = jax.jit(part.function(grouped_forms.in_turn(longest)))
    for kind, sizes in every_sizes.items():
        arguments = (*arrays, part.routing(sizes))
        expected = jax.block_until_ready(in_turn(*arguments))
        said = f"{case.name}, {part.name}, {kind}"
        calls, errors = checked_calls(said, variants, arguments, expected, part.tolerance, kind)
        for peer in beside:
            variants[peer.name] = Variant(peer.name, includes=peer.includes)
            try:
                if (prepared := peer.prepare(part.name, arguments)) is None:
                    del variants[peer.name]
                    continue
                found = prepared.to_jax(prepared.call())
                errors[peer.name] = check(f"{said}: {peer.name}", found, expected, part.tolerance)
                calls[peer.name] = timing.Outside(prepared.call, peer.synchronize)
            except Exception as error:  # of another library, which shall not keep ours from being timed
                variants[peer.name].failure = _said(error)
        del expected
        us = times(calls, seconds)
        for name, variant in variants.items():
            if name in us or variant.failure:
                yield {
                    **_sizes(case, kind, sizes, part.name),
                    **_figures(part, variant, sizes, us.get(name), us.get(REFERENCE), variants.get(REFERENCE)),
                    "error": errors.get(name, ""),
                }


def checked_calls(
    said: str,
    variants: Mapping[str, Variant],
    arguments: Sequence[jax.Array],
    expected: Any,
    tolerance: float,
    kind: str,
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The calls of the variants that are right, and their errors; of the reference also where it is for other sizes.

    Raises:
      AssertionError: one of ours is wrong.
    """
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for name, variant in variants.items():
        fits_sizes = variant.form is not None and (kind == "equal" or not variant.form.only_equal)
        if variant.compiled is None or not (fits_sizes or name.startswith(REFERENCE)):
            continue
        run = functools.partial(variant.compiled, *arguments)
        try:
            found = jax.block_until_ready(run())
            if fits_sizes:
                errors[name] = check(f"{said}: {name}", found, expected, tolerance)
        except (jax.errors.JaxRuntimeError, AssertionError) as error:
            if name in OURS:
                raise
            variant.failure, variant.compiled = _said(error), None
            continue
        size = sum(x.nbytes for x in jax.tree.leaves(found))
        calls[name] = run if size < RUN_AHEAD_BYTES else functools.partial(_finished, run)
    return calls, errors


def _finished(run: Callable[[], Any]) -> Any:
    return jax.block_until_ready(run())


def times(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Microseconds of each call; those of slow ones at the clock of the reference, beside which they are timed."""
    walls = {name: _wall(call) for name, call in calls.items()}
    level = SLOW * walls.get(REFERENCE, min(walls.values(), default=0.0))
    fast = {name: call for name, call in calls.items() if walls[name] <= level}
    found = {name: one.total for name, one in timing.interleaved(fast, seconds=seconds).items()} if fast else {}
    for name in calls.keys() - fast.keys():
        beside = {one: calls[one] for one in (REFERENCE, name) if one in calls}
        executed = timing.executions(beside, rounds=SLOW_ROUNDS)
        us = {
            one: statistics.median(sum(kernel.duration for kernel in of) for of in every[1:]) / 1e3
            for one, every in executed.items()
        }
        found[name] = us[name] * (found[REFERENCE] / us[REFERENCE] if REFERENCE in found else 1)
    return found


def _wall(call: Callable[[], Any]) -> float:
    timing.wait(call, call())
    start = time.perf_counter()
    timing.wait(call, call())
    return time.perf_counter() - start


def _sizes(case: Case, kind: str, sizes: np.ndarray, part: str) -> dict[str, Any]:
    return {
        "shape": case.name,
        "rows": case.rows,
        "experts": case.experts,
        "hidden": case.hidden,
        "intermediate": case.intermediate,
        "kind": kind,
        "largest": int(sizes.max()),
        "part": part,
    }


def _figures(
    part: Part, variant: Variant, sizes: np.ndarray, us: float | None, of_batch: float | None, batch: Variant | None
) -> dict[str, Any]:
    """The columns of a row beside its sizes."""
    row: dict[str, Any] = {"variant": variant.name, "includes": variant.includes, "failure": variant.failure}
    if variant.temporaries is not None:
        row["temporaries_gib"] = round(variant.temporaries / 2**30, 3)
    if us is not None:
        row |= {"ms": us / 1e3, "tflops": part.flops / us / 1e6}
    if variant.work:
        row["tile_work"] = sum(one.flops(sizes) for one in variant.work) / part.flops
        if len(variant.work) == 1:
            (one,) = variant.work
            row |= {"tile": one.rows_at_once, "tiles": one.units(sizes)}
        if us is not None and of_batch is not None and batch is not None and batch.work:
            multiplied = [sum(one.flops(sizes) for one in work) for work in (variant.work, batch.work)]
            row["tile_speed"] = multiplied[0] / us / (multiplied[1] / of_batch)
    return row
