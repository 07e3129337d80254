"""Writes docs/device: the outputs of the pages that need a GPU, each with device, versions, commit and command.

    make docs-device                                   # all, on a machine with a Hopper GPU
    make docs-device ARGS="--only numerics"            # one
    PYTHONPATH=docs python -m tools.device_outputs --rows 64 --out folder

Without a GPU it writes what XLA's form gives, and the header says so: for a try, not for the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from coda_jax.tools import doctor
from tools import pages


def custom_epilogue(rows: int) -> None:
    runpy.run_path(str(pages.ROOT / "examples" / "custom_epilogue.py"))["main"]()


def run_doctor(rows: int) -> None:
    doctor.main()


def numerics(rows: int) -> None:
    """Errors of a feed-forward layer and its gradients against float64: kernels, XLA's form, the textbook."""
    d, f = 2 * rows, 4 * rows
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(4 * rows, d)) * np.exp(rng.normal(size=(4 * rows, 1))),
        1 + rng.normal(size=d) / 4,
        rng.normal(size=(d, 2 * f)) / d**0.5,
        rng.normal(size=(f, d)) / f**0.5,
    ]
    direction = jnp.asarray(rng.normal(size=(4 * rows, d)), jnp.bfloat16)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays]

    def textbook(x: jax.Array, scale: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> jax.Array:
        norm = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        gate, up = jnp.split(norm @ w_gate_up, 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ w_down

    def fused(implementation: str) -> Callable[..., jax.Array]:
        def layer(x: jax.Array, scale: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> jax.Array:
            norm = coda.rms_norm(x, scale)
            return coda.gated_mlp(norm, w_gate_up, w_down, implementation=implementation).array()

        return layer

    def all_of(function: Callable[..., jax.Array], arguments: list[jax.Array], dy: jax.Array) -> list[np.ndarray]:
        y, pullback = jax.jit(lambda *a: jax.vjp(function, *a))(*arguments)
        return [np.asarray(x, np.float64) for x in (y, *pullback(dy))]

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*narrow, direction)]
        exact = all_of(textbook, wide[:-1], wide[-1])
    print(f"gated_mlp of an rms_norm, {4 * rows} x {d}, F = {f}, bfloat16: largest error over largest value\n")
    print(" " * 28 + "".join(f"{name:>12}" for name in ("y", "dx", "dscale", "dw_gate_up", "dw_down")))
    forms = {"textbook": textbook, "gated_mlp, XLA's form": fused("xla"), "gated_mlp, as lowered here": fused("auto")}
    for name, function in forms.items():
        got = all_of(function, narrow, direction)
        errors = (np.max(np.abs(g - e)) / np.max(np.abs(e)) for g, e in zip(got, exact, strict=True))
        print(f"{name:28}" + "".join(f"{error:12.1e}" for error in errors))
    first, second = (all_of(fused("auto"), narrow, direction) for _ in range(2))
    same = all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    print(f"\ntwo runs: {'the same bits' if same else 'DIFFERENT bits'}")


OUTPUTS: dict[str, Callable[[int], None]] = {
    "custom_epilogue": custom_epilogue,
    "doctor": run_doctor,
    "numerics": numerics,
}


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "none"
    return subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True).stdout.split("\n")[0] or "unknown"


def header(command: str) -> str:
    lines = {
        "device": jax.devices()[0].device_kind,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": f"{jax.__version__}, Python {platform.python_version()}",
        "commit": _first_line("git", "rev-parse", "--short", "HEAD"),
        "command": command,
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def main(arguments: list[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser(prog="python -m tools.device_outputs", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=OUTPUTS, help="one of them; default all")
    parser.add_argument("--rows", type=int, default=512, help="the size of what is computed")
    parser.add_argument("--out", type=Path, default=pages.DEVICE)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in [given.only] if given.only else OUTPUTS:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            OUTPUTS[name](given.rows)
        path = given.out / f"{name}.txt"
        command = f'make docs-device ARGS="--only {name}"'
        # Where things lie on the machine is no news: as in a checkout with its environment.
        shown = text.getvalue().replace(str(pages.ROOT), "coda_jax").replace(sys.prefix, ".venv")
        shown = shown.replace(str(Path.home()), "~")
        path.write_text(f"{header(command)}\n\n{shown}")
        print(f"written: {path}")
        written.append(path)
    return written


if __name__ == "__main__":
    main()
