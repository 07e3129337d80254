"""`coda.tune`: measures the tiles that a function's products can have, and writes the best to the user's table."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax import ffi
from coda_jax.jaxprs.walk import equations_of
from coda_jax.lowering.launch import problem_of
from coda_jax.lowering.select import select
from coda_jax.primitives.gemm_primitive import PRIMITIVES, coda_gemm_p
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles import arch
from coda_jax.tiles import table as tile_table
from coda_jax.tiles.choose import candidates
from coda_jax.tiles.config import GemmConfig, KernelConfig
from coda_jax.tiles.constants import Constants, constants_in_use
from coda_jax.tiles.cost_model import GemmShape, best_first, relative_power
from coda_jax.tiles.table import Problem

_NOISE = 0.01  # a tile that is better by less is not preferred to the cost model's
_SETS, _SETS_BYTES = 8, 120e6  # at most so many sets of arguments, of so many bytes, that exceed the 50 MB of L2
_PROGRAM_SECONDS = 5e-4  # the least time of a program: for a shorter one the device would wait for the host
_FLOPS, _BYTES = 7e14, 4e12  # that a device computes and transfers in a second
_ROUNDS, _BURST_SECONDS = 7, 2e-3


@dataclasses.dataclass(frozen=True)
class Work:
    """A product to be tuned: the launched problem, the primitive's argument and result types, its parameter, and the
    kind of device.
    """

    problem: Problem
    types: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    spec: GemmSpec = dataclasses.field(hash=False, compare=False)
    device: str | None = None

    @property
    def configs(self) -> list[KernelConfig]:
        """The configurations to measure, the cost model's choice first."""
        return candidates(self.problem.shape, self.problem.program, self.problem.out_dtypes, self.device)


Measure = Callable[[Sequence[Work]], Iterable[dict[KernelConfig, float]]]  # seconds of each work's configs


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of tuning one product.

    Attributes:
      epilogue: its name, "gemm" for a bare product.
      key: its name in the table.
      config: the best by energy and time, or by time alone as ``CODA_JAX_TILES_BY`` says; or the cost model's choice,
        if that is within 1 % of it in both.
      us, cost_model_us: median time in microseconds, and that of the cost model's choice.
    """

    epilogue: str
    key: str
    config: KernelConfig
    us: float
    cost_model_us: float


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The products of a function that run on the kernel, printed as a table.

    Attributes:
      path: the table that has their entries.
      device: kind of device.
    """

    path: pathlib.Path
    device: str
    products: tuple[Tuned, ...]

    def __str__(self) -> str:
        if not self.products:
            name = arch.of(self.device).name
            return f"no product with known sizes is lowered to the {name} kernel with a tile of coda_jax's choice"
        rows = [("epilogue", "product", "tile", "us", "cost model's us")]
        for one in self.products:
            tile = f"{one.config.name}, cluster of {one.config.cluster_m}"
            rows.append((one.epilogue, one.key, tile, f"{one.us:.1f}", f"{one.cost_model_us:.1f}"))
        wide = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            f"{a:{wide[0]}}  {b:{wide[1]}}  {c:{wide[2]}}  {d:>{wide[3]}}  {e:>{wide[4]}}" for a, b, c, d, e in rows
        ]
        return "\n".join([*lines, f"{self.device}: {self.path}"])


def tune(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tuning:
    """Measures the tiles of every product of function(*args, **kwargs) on the attached Hopper GPU, and keeps the best.

    Each product that would be lowered to the kernel, and has no `config`, runs by itself on random data with every tile
    that it can have, all at one clock. In a grouped product every row is in a group, and groups are unequal. The best
    tiles are merged into the user's table, ``$CODA_JAX_TUNED`` or ``tuned.json`` beside the compiled kernels. The best
    tile has the least energy times time, where energy is the measured time times the tile's known power; of those
    within 0.75 % it is the fastest. With ``CODA_JAX_TILES_BY=time`` it is the fastest, in an entry of its own. An entry
    stays until its product is tuned again.

    Functions that are jitted afterwards, here or in later processes with the same setting, use the table. Lowering for
    export does not use it. Nor does a job of several processes, all of which must lower the same program, unless
    ``CODA_JAX_TUNED`` names a table.

    Args:
      function: traceable by JAX; jitted or not. It is not run.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The results, to be printed.

    Raises:
      RuntimeError: there is no Hopper GPU, or kernels cannot be compiled; the job has several processes.
      ValueError: no path for a table is set, it cannot be written, or the file there is no table.

    Example: `print(coda.tune(train_step, state, batch))`
    """
    here = arch.current()
    try:
        device, *_ = jax.local_devices(backend="cuda")
    except RuntimeError:
        raise RuntimeError(
            f"tune: it measures on a {here.name} GPU; JAX runs on {jax.default_backend()} here"
        ) from None
    if device.compute_capability != here.capability:
        raise RuntimeError(
            f"tune: it measures on a {here.name} GPU, of compute capability {here.capability}; the "
            f"{device.device_kind} has {device.compute_capability}"
        )
    if reason := ffi.unavailable_reason():
        raise RuntimeError(f"tune: kernels cannot be compiled: {reason}")
    if jax.process_count() > 1:
        raise RuntimeError(
            f"tune: the job has {jax.process_count()} processes; tune in a job of one, and let CODA_JAX_TUNED name its "
            "table in all"
        )
    measure = functools.partial(measure_on, device=device)
    return tune_with(measure, device.device_kind, function, *args, **kwargs)


def tune_with(measure: Measure, device: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tuning:
    """`tune` with a measurement of one's own."""
    path = tile_table.user_path()
    if path is None:
        raise ValueError("tune: there is no place for a table; CODA_JAX_TUNED or CODA_JAX_CACHE_DIR must not be empty")
    try:
        tile_table.read(path)
    except ValueError as error:
        raise ValueError(f"tune: {path} is not overwritten: {error}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"tune: {path} cannot be written")
    works = [dataclasses.replace(work, device=device) for work in products_of(function, *args, **kwargs).values()]
    tuned = []
    for work, seconds in zip(works, measure(works), strict=True):
        assert work.problem.key is not None
        key, first = tile_table.user_key(work.problem.key, device), work.configs[0]
        energy = energies(work.problem.shape, seconds, constants_in_use(device))
        best = best_first({config: (energy[config], seconds[config]) for config in seconds})[0]
        if all(of[first] <= of[best] * (1 + _NOISE) for of in (energy, seconds)):
            best = first
        one = Tuned(work.spec.name, key, best, 1e6 * seconds[best], 1e6 * seconds[first])
        entry = tile_table.entry(one.config, epilogue=one.epilogue, us=one.us, cost_model_us=one.cost_model_us)
        tile_table.update(path, device, {key: entry})
        tuned.append(one)
    return Tuning(path, device, tuple(tuned))


def energies(shape: GemmShape, times: Mapping[KernelConfig, float], constants: Constants) -> dict[KernelConfig, float]:
    """The energy of each configuration, in the unit of its time and of the power of 128 x 128 tiles."""
    return {config: time * relative_power(shape, config.tile, constants) for config, time in times.items()}


def products_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Work]:
    """The products that the kernel would compute with a tile of the library's choice, each once, by key."""
    works: dict[str, Work] = {}
    equations, num_devices = equations_of(function, *args, **kwargs)
    for equation, _ in equations:
        if equation.primitive not in PRIMITIVES:
            continue
        avals: list[Any] = [v.aval for v in equation.invars]
        spec = equation.params["spec"]
        selected = select(avals, spec, num_devices, anywhere=True)
        if spec.config not in (None, GemmConfig()) or selected.reason is not None or selected.over:
            continue
        problem = problem_of(avals, spec)
        if problem.key is not None and problem.key not in works:
            outs: list[Any] = [v.aval for v in equation.outvars]
            types, results = (tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of) for of in (avals, outs))
            works[problem.key] = Work(problem, types, results, spec)
    return works


def measure_on(works: Sequence[Work], *, device: Any) -> Iterator[dict[KernelConfig, float]]:
    """Seconds of each work's configs on a GPU. Programs are compiled side by side, and measured one work at a time."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # The pool's threads have no mesh: the caller's context of meshes does not apply to these arrays.
        programs = [[pool.submit(compiled, work, config, device) for config in work.configs] for work in works]
        data = [pool.submit(random_sets, work, device) for work in works]
        for work, of, make in zip(works, programs, data, strict=True):
            sets = make.result()()
            calls = [functools.partial(program.result(), *sets) for program in of]
            yield dict(zip(work.configs, [s / number_of_launches(work) for s in interleaved(calls)], strict=True))
            del sets, calls  # before the next product's are made


def compiled(work: Work, config: KernelConfig, device: Any) -> jax.stages.Compiled:
    """`launches`, ready to run."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in work.types)
    # Launches from a command buffer could run in parallel, which they cannot in a step.
    options = {"xla_gpu_enable_command_buffer": ""}
    return jax.jit(launches(work, config)).lower(*[arguments] * number_of_sets(work)).compile(options)


def launches(work: Work, config: KernelConfig) -> Callable[..., Any]:
    """A function of sets of arguments that launches the kernel `number_of_launches` times: on each set, then on a of
    one set and the rest of another, as XLA merges launches on the same arguments.
    """
    spec = work.spec.replace(
        config=GemmConfig(**dataclasses.asdict(config)),
        implementation="cuda",
        input_output_aliases=(),  # XLA would copy arrays that the caller keeps
        out_sharding=None,
    )

    def run(*sets: tuple[jax.Array, ...]) -> list[list[jax.Array]]:
        results = []
        for launch in range(number_of_launches(work)):
            shift, i = divmod(launch, len(sets))
            arguments = sets[i][0], *sets[(i + shift) % len(sets)][1:]
            results.append(coda_gemm_p.bind(*arguments, spec=spec))
        return results

    return run


def number_of_sets(work: Work) -> int:
    return min(_SETS, math.ceil(_SETS_BYTES / _bytes(work.types)))


def number_of_launches(work: Work) -> int:
    """The launches of the kernel in a timed program: one for each set, or for as many pairs of sets as make the program
    long enough, or for all pairs.
    """
    shape, sets = work.problem.shape, number_of_sets(work)
    traffic = _bytes(work.types) + _bytes(work.results)
    seconds = max(2 * shape.batch * shape.m * shape.n * shape.k / _FLOPS, traffic / _BYTES)
    return max(sets, min(sets * sets, math.ceil(_PROGRAM_SECONDS / seconds)))


def _bytes(types: Iterable[jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in types)


def random_array(key: jax.Array, type_: jax.ShapeDtypeStruct) -> jax.Array:
    """A random array of normal numbers, integers from 0 to 9, or booleans."""
    if type_.dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=type_.shape)
    if jnp.issubdtype(type_.dtype, jnp.integer):
        return jax.random.randint(key, type_.shape, 0, 10, type_.dtype)
    return jax.random.normal(key, type_.shape, jnp.float32).astype(type_.dtype)


def random_offsets(key: jax.Array, work: Work) -> jax.Array:
    """Random offsets for a grouped product: each row is in a group, and sizes are up to twice the mean."""
    groups, rows = work.problem.shape.groups, work.spec.matrices.flat_types(work.types)[0].shape[0]
    shifts = jax.random.uniform(key, (groups - 1,), minval=-0.5, maxval=0.5)
    inner = ((jnp.arange(1, groups) + shifts) * (rows / groups)).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.full(1, rows, jnp.int32)])


def random_sets(work: Work, device: Any) -> jax.stages.Compiled:
    """The program that makes the sets of random data, as power, and thus the clock, depends on the data."""

    def arguments(keys: jax.Array) -> tuple[jax.Array, ...]:
        arrays = list(map(random_array, keys, work.types))
        if work.spec.ragged is not None:
            arrays[-1] = random_offsets(keys[-1], work)
        return tuple(arrays)

    def make() -> list[tuple[jax.Array, ...]]:
        # XLA compiles this generator fastest.
        keys = jax.random.split(jax.random.key(0, impl="rbg"), (number_of_sets(work), len(work.types)))
        return list(map(arguments, keys))

    return jax.jit(make, out_shardings=jax.sharding.SingleDeviceSharding(device)).lower().compile()


def interleaved(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of each call by `relative_medians`. A round times bursts of asynchronous calls in a new random order."""
    bursts = []
    for call in calls:
        jax.block_until_ready(call())
        bursts.append(max(2, min(100, math.ceil(_BURST_SECONDS / _burst(call, 2)))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for i in random.sample(range(len(calls)), len(calls)):
            seconds[i].append(_burst(calls[i], bursts[i]))
    return relative_medians(seconds)


def relative_medians(times: Sequence[Sequence[float]]) -> list[float]:
    """The median of each variant's times, one for each round, relative to the mean of all variants in that round.

    The clock hardly changes within a round, but may differ between rounds.
    """
    means = [statistics.geometric_mean(round_times) for round_times in zip(*times, strict=True)]
    level = statistics.median(means)
    return [level * statistics.median(x / mean for x, mean in zip(of, means, strict=True)) for of in times]


def _burst(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count
