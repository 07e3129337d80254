"""`python -m benchmarks.muon`: updates by Muon, of the layers of a Llama-3-1B and in its training steps.

`flax_layers.muon` stands beside `optax.contrib.muon`, on the same fused model and with the same dimension numbers. A
program "update" is the optimiser's step for the layers' matrices alone; "step" is value and gradient of the loss, and
the update of all parameters, the embedding and the head by AdamW; "sgd" is the same step by gradient descent.
Parameters and state are donated, and FSDP shards them over several devices. Times are the wall clock's of several calls
in a row, each with the results of the one before: the median over rounds, in which variants take turns. The distance is
that of an update from optax's with the same gradients, relative to its norm; Muon's iterations amplify what bfloat16
rounds; from 0.2 on the update is wrong. Writes benchmarks/results/<device>_muon.csv.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import results
from benchmarks.sharded_step import Scheme, use_whole_gpus
from benchmarks.variants import LLAMA_3_1B, TINY, VARIANTS, Setting, fused, step
from flax_layers import sharding
from flax_layers.muon import muon, muon_dimension_numbers

COLUMNS = ("program", "optimiser", "parameters", "layers", "devices", "ms")
COLUMNS += ("temporaries_gib", "arguments_gib", "distance")
WRONG = 0.2  # of an update's norm; with bfloat16 parameters optax's own rounding is 0.07
OPTIMISERS = {"coda_jax": muon, "optax": optax.contrib.muon}


@dataclasses.dataclass
class Program:
    """A compiled program.

    Attributes:
      compiled: (parameters, state, *others) -> (parameters, state).
      carried: parameters and state.
      others: arguments that stay.
    """

    row: dict[str, Any]
    compiled: Any
    carried: tuple[Any, Any]
    others: tuple[Any, ...]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, calls: int) -> float:
        """Seconds of a call, of so many in a row."""
        start = time.perf_counter()
        for _ in range(calls):
            self.carried = self.compiled(*self.carried, *self.others)
        jax.block_until_ready(self.carried)
        return (time.perf_counter() - start) / calls


def compiled(row: dict[str, Any], function: Any, carried: tuple[Any, Any], others: tuple[Any, ...]) -> Program:
    carried = jax.device_put(carried, shardings := jax.tree.map(_placed, carried))
    program = jax.jit(function, donate_argnums=(0, 1), out_shardings=shardings).lower(*carried, *others).compile()
    sizes = program.memory_analysis()
    row |= {
        "temporaries_gib": sizes.temp_size_in_bytes / 2**30,
        "arguments_gib": sizes.argument_size_in_bytes / 2**30,
    }
    return Program(row, program, carried, others)


def _placed(x: jax.Array) -> NamedSharding:
    """The array's own sharding; scalars are on all devices of the mesh in force."""
    placed = isinstance(x.sharding, NamedSharding)
    return x.sharding if placed else NamedSharding(jax.sharding.get_mesh(), PartitionSpec())


def updates(setting: Setting, mesh: Mesh, scanned: bool, names: Sequence[str]) -> list[Program]:
    """The updates of the layers' matrices by each optimiser, from the same gradients; optax's comes first."""
    variant = dataclasses.replace(VARIANTS["coda"], scan=scanned)
    state = nnx.eval_shape(lambda: nnx.state(fused(variant, setting), nnx.Param))
    shardings = nnx.to_pure_dict(sharding.parameter_shardings(state, mesh, setting.rules))["layers"]
    layers = nnx.to_pure_dict(state)["layers"]
    all_numbers = jax.tree.leaves(muon_dimension_numbers(layers), is_leaf=_is_numbers)
    each = zip(*map(jax.tree.leaves, (layers, shardings)), all_numbers, strict=True)
    types, places, numbers = zip(*(one for one in each if one[-1] is not None), strict=True)

    @functools.partial(jax.jit, static_argnums=0, out_shardings=list(places))
    def arrays(seed: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(types))
        return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, types, strict=True)]

    programs: list[Program] = []
    for name in names:
        tx = OPTIMISERS[name](1.0, muon_weight_dimension_numbers=list(numbers))

        def update(params: Any, state: Any, gradients: Any, tx: Any = tx) -> Any:
            changes, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, changes), state

        params = arrays(0)
        row = {"program": "update", "optimiser": name, "layers": "scanned" if scanned else "unrolled"}
        program = compiled(row, update, (params, tx.init(params)), (arrays(1),))
        program.run(1)
        if programs:
            row["distance"] = _distance(program.carried[0], programs[0].carried[0], arrays(0))
        programs.append(program)
    return programs


def steps(setting: Setting, mesh: Mesh, shape: tuple[int, int], names: Sequence[str]) -> list[Program]:
    """Whole training steps on tokens of this shape, with gradient descent and with each optimiser."""
    variant = VARIANTS["coda"]
    loss = step("loss", variant, setting)
    tokens = jax.random.randint(jax.random.key(2, impl="rbg"), shape, 0, setting.config.vocab_size)
    tokens = jax.device_put(tokens, sharding.array_sharding(mesh, setting.rules, "batch", "length"))
    labels = jnp.roll(tokens, -1, axis=1)

    def parameters() -> Any:
        return nnx.state(sharding.create(lambda: fused(variant, setting), mesh=mesh), nnx.Param)

    rows = {"program": "step", "layers": "unrolled"}
    programs = []
    for name in ("sgd", *names):
        options = {"muon_weight_dimension_numbers": muon_dimension_numbers} if name in OPTIMISERS else {}
        tx = (OPTIMISERS | {"sgd": optax.sgd})[name](1e-4, **options)

        def train(params: Any, state: Any, tokens: jax.Array, labels: jax.Array, tx: Any = tx) -> Any:
            _, gradients = loss(params, tokens, labels)
            changes, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, changes), state

        params = parameters()
        programs.append(compiled(rows | {"optimiser": name}, train, (params, tx.init(params)), (tokens, labels)))
    return programs


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)


@jax.jit
def _distance(ours: Any, theirs: Any, before: Any) -> jax.Array:
    """The distance of two updates, from the parameters behind and before them."""
    ours, theirs, before = (jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (ours, theirs, before))
    apart = optax.tree.norm(optax.tree.sub(ours, theirs))
    return apart / optax.tree.norm(optax.tree.sub(theirs, before))


def timed(programs: Sequence[Program], rounds: int, calls: int) -> list[dict[str, Any]]:
    """The rows of the programs, which are run in turns."""
    for program in programs:
        program.run(1)
    for _ in range(rounds):
        for program in random.sample(programs, len(programs)):
            program.seconds.append(program.run(calls))
    return [program.row | {"ms": 1e3 * statistics.median(program.seconds)} for program in programs]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.muon", __doc__)
    parser.add_argument("--programs", default="update,step")
    parser.add_argument("--parameters", default="float32,bfloat16", help="dtypes of the parameters")
    parser.add_argument("--layers", default="unrolled,scanned", help="of the updates")
    parser.add_argument("--optimisers", default="optax,coda_jax")
    parser.add_argument("--devices", default="1", help="numbers of devices, 1,2: FSDP over so many")
    parser.add_argument("--tokens", default="2x8192", help="of each device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    config, names = TINY if options.tiny else LLAMA_3_1B, options.optimisers.split(",")
    batch, length = (2, 24) if options.tiny else map(int, options.tokens.split("x"))
    rows = []
    for dtype, count in itertools.product(options.parameters.split(","), map(int, options.devices.split(","))):
        mesh = Scheme("fsdp", {"fsdp": count}, sharding.FSDP).mesh()
        setting = Setting(config, jnp.bfloat16, jnp.dtype(dtype), rules=sharding.FSDP)
        suites = [
            functools.partial(updates, setting, mesh, layers == "scanned", names)
            for layers in options.layers.split(",")
            if "update" in options.programs.split(",")
        ]
        shape = (batch * count, length)
        suites += [functools.partial(steps, setting, mesh, shape, names)] * ("step" in options.programs.split(","))
        for suite in suites:
            with jax.set_mesh(mesh):
                measured = timed(suite(), options.rounds, options.calls)
            for row in measured:
                rows.append(row | {"parameters": dtype, "devices": count})
                print("  ".join(f"{name} {_shown(rows[-1][name])}" for name in COLUMNS if name in rows[-1]), flush=True)
    results.write("_muon", COLUMNS, rows, folder=options.out, commit=options.commit, tokens=f"{batch}x{length}")
    far = [row for row in rows if row.get("distance", 0.0) > WRONG]
    for row in far:
        print(f"WRONG: {row['optimiser']}'s update is {float(row['distance']):.3g} from optax's", file=sys.stderr)
    return 1 if far else 0


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{float(value):.4g}"


if __name__ == "__main__":
    use_whole_gpus()
    sys.exit(main())
