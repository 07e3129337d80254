"""Models of other libraries with this one in their layers: `python examples/adopting/run.py tunix`

NAME.diff changes at most 20 lines of a pinned version of a package. This program brings that version from the package
index into a folder of its own, with what its model imports, and applies the diff to a copy. Both copies run at tiny
sizes on eight CPU devices under FSDP, with the same parameters. These rules hold, or it exits with 1:

* Parameters have the same names, shapes and shardings, so that checkpoints load; gradients are asked for as they lie.
* In float32 each gradient is within 0.01 % of the original's.
* In bfloat16 it is within 1 % of the original's, or no further from float32's than the original's is; or, where the
  original's is not within 1 % of float32's itself, no further than one and a half times that.
* In bfloat16 XLA's analysis finds no more temporaries, but for one array: the analysis is that of a CPU, where the
  float32 sums of a layer's widest product are in memory. A kernel has them in registers. XLA of jax 0.10 has up to four
  such arrays at once.

A distance is the Euclidean norm of a difference, relative. pip and patch are needed, and the package index; no GPU is.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from packages import DEVICES, PACKAGES, WIDEST_SUMS, WIDTH, standing_in

MOST_LINES, IN_FLOAT32, IN_BFLOAT16, FURTHER = 20, 1e-4, 1e-2, 1.5


class Step(NamedTuple):
    """One copy's gradients by the parameter's name, how the parameters lie, and bytes of temporaries."""

    gradients: Mapping[str, np.ndarray]
    lie: Mapping[str, tuple[Any, ...]]
    temporaries: int


def changed_lines(diff: str) -> int:
    """How many lines a diff changes: a line replaced is one, and so is one added or removed."""
    signs = (" " if line.startswith(("+++", "---")) else line[:1] for line in diff.splitlines())
    runs = (list(run) for is_change, run in itertools.groupby(signs, lambda sign: sign in ("+", "-")) if is_change)
    return sum(max(run.count("+"), run.count("-")) for run in runs)


def fetch(package: Any, diff: str, folder: Path) -> None:
    """The pinned version in `theirs`, with the diff in `ours`, and what it imports in `packages`."""
    target = folder / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, *package.requirements], check=True)
    (folder / "theirs").mkdir()
    shutil.move(target / package.folder, folder / "theirs" / package.folder)
    for inner in package.emptied:  # these import what the model does not need
        (folder / "theirs" / inner / "__init__.py").write_text("")
    shutil.copytree(folder / "theirs", folder / "ours")
    patch = ["patch", "--strip=1", "--fuzz=0", "--silent"]
    subprocess.run(patch, cwd=folder / "ours", input=diff, text=True, check=True)


def load(package: Any, folder: Path) -> Any:
    """The models of one copy."""
    for name in [name for name in sys.modules if name.split(".")[0] == package.folder]:
        del sys.modules[name]
    sys.path[:0] = [str(folder), str(folder.parent / "packages")]
    try:
        with standing_in(package.not_called):
            return package()
    finally:
        del sys.path[:2]


def array(leaf: Any, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """A parameter: near 1 if it is a vector, else normal. float32 and bfloat16 have the same values."""
    x = rng.normal(size=leaf.shape)
    inputs = leaf.size // WIDTH if leaf.shape[-1] == WIDTH else WIDTH
    return np.asarray(1 + x / 10 if leaf.ndim == 1 else x / (2 * inputs**0.5), jnp.bfloat16).astype(dtype)


def by_name(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): x for path, x in flat}


def step(models: Any, dtype: Any) -> Step:
    """The gradients of a loss, computed in this dtype."""
    with models.on_mesh() as mesh:
        graph, abstract, rest = nnx.split(models.make(dtype), nnx.Param, ...)
        shardings = models.shardings(abstract, mesh)
        rng, stored = np.random.default_rng(0), models.stored or dtype
        made = jax.tree.map(lambda leaf, lies: jax.device_put(array(leaf, stored, rng), lies), abstract, shardings)
        over = jax.NamedSharding(mesh, jax.P("fsdp"))
        batch = {name: jax.device_put(x, over) for name, x in models.batch(dtype).items()}

        def loss(parameters: Any, batch: Any) -> jax.Array:
            return models.loss(nnx.merge(graph, parameters, rest), **batch)

        compiled: Any = jax.jit(jax.grad(loss), out_shardings=shardings).lower(made, batch).compile()
        found = by_name(compiled(made, batch))
    gradients = {name: np.asarray(x, np.float64) for name, x in found.items()}
    lie = {name: (x.shape, x.sharding.spec) for name, x in found.items()}
    return Step(gradients, lie, compiled.memory_analysis().temp_size_in_bytes)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def table(theirs: list[Step], ours: list[Step], sums: int = WIDEST_SUMS) -> Iterator[tuple[str, bool]]:
    """Lines, and whether what each says is allowed. Both have a step in float32 and one in bfloat16.

    Args:
      sums: bytes of the array that ours may have beside the original's temporaries.
    """
    alike = all(a.lie == b.lie for a, b in zip(theirs, ours, strict=True))
    yield f"{len(ours[0].lie)} parameters: names, shapes, shardings are {'the same' if alike else 'others'}", alike
    if any(a.gradients.keys() != b.gradients.keys() for a, b in zip(theirs, ours, strict=True)):
        return
    yield f"{'':44s}{'float32':>12s}{'bfloat16, from float32':>26s}{'bfloat16':>12s}", True
    yield f"{'gradient of':44s}{'from theirs':>12s}{'theirs':>14s}{'ours':>12s}{'from theirs':>12s}", True
    for name, exact in theirs[0].gradients.items():
        a, b = theirs[1].gradients[name], ours[1].gradients[name]
        in_float32, of_theirs, of_ours = (
            distance(ours[0].gradients[name], exact),
            distance(a, exact),
            distance(b, exact),
        )
        apart = distance(b, a)
        near = apart <= IN_BFLOAT16 or of_ours <= (FURTHER if of_theirs > IN_BFLOAT16 else 1.0) * of_theirs
        line = f"{name:44s}{in_float32:12.5%}{of_theirs:14.3%}{of_ours:12.3%}{apart:12.3%}"
        yield line, near and in_float32 <= IN_FLOAT32
    a, b = theirs[1].temporaries, ours[1].temporaries
    yield f"temporaries in bfloat16, bytes a device: theirs {a:,}, ours {b:,}, of sums {sums:,}", b - sums <= a


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=PACKAGES)
    package = PACKAGES[parser.parse_args().name]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    diff = (Path(__file__).parent / f"{package.__name__.lower()}.diff").read_text()
    with tempfile.TemporaryDirectory() as folder:
        fetch(package, diff, Path(folder))
        steps = []
        for copy in ("theirs", "ours"):
            models = load(package, Path(folder) / copy)
            steps.append([step(models, dtype) for dtype in (jnp.float32, jnp.bfloat16)])
    print(f"{package.requirements[0]}, jax {jax.__version__}, {jax.device_count()} CPU devices")
    lines = changed_lines(diff)
    failed = lines > MOST_LINES
    print(f"{lines} lines changed{'  FAILS' if failed else ''}")
    arrays = 4 if jax.__version__.startswith("0.10.") else 1
    for line, allowed in table(*steps, sums=arrays * WIDEST_SUMS):
        failed |= not allowed
        print(line if allowed else f"{line}  FAILS")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
