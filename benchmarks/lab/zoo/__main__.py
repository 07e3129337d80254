"""The command, `python -m benchmarks.lab.zoo`: a table of all models."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lab.zoo import (  # noqa: F401
    easydel,
    equinox,
    flax_examples,
    haiku,
    keras_models,
    linen_models,
    maxtext,
    t5x,
    tunix,
)
from benchmarks.lab.zoo.case import (
    DEVICES,
)
from benchmarks.lab.zoo.doors import lines_of
from benchmarks.lab.zoo.sources import MODELS

MORE, GRADIENT = 1.01, 1e-4


def worse(one: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Names what of a door is worse than plain JAX."""
    if "failure" in one:
        return str(one["failure"])
    names = [
        name for name in ("passes", "kept", "temporaries") if one.get(name, 0) > MORE * plain.get(name, 1e30) + 0.1
    ]
    names += [name for name in ("distance", "loss_distance") if one.get(name, 0) > GRADIENT]
    names += ["not finite"] if not np.isfinite(one.get("loss", 0)) else []
    return ", ".join(names)


HEADINGS = (
    f"{'model':20}{'door':12}{'passes MB':>10}{'kept MB':>9}{'products':>10}{'temporaries MB':>16}{'gradients':>11}"
)


def show(found: list[dict[str, Any]]) -> None:
    """Prints the lines of a model."""
    plain = found[0]
    for one in found:
        products = f"{one.get('fused', 0)}/{one.get('products', 0)}"
        numbers = f"{one.get('passes', np.nan):10.0f}{one.get('kept', np.nan):9.0f}{products:>10}"
        numbers += f"{one.get('temporaries', np.nan):16.2f}{one.get('distance', np.nan):11.1e}"
        print(f"{one['model']:20}{one.get('door', ''):12}{numbers}  {worse(one, plain)}", flush=True)


def main() -> int:
    """The command; 1 where something is worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*MODELS], metavar="NAME", default=[*MODELS])
    parser.add_argument("--folder", type=Path, help="where packages and files lie, and stay")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)  # of one model, in this process
    options = parser.parse_args()
    if options.json:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
        print(json.dumps([*lines_of(options.only[0])]))
        return 0
    failed = False
    print(HEADINGS)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in options.only:
            command = [sys.executable, "-m", "benchmarks.lab.zoo", "--json", "--only", name]
            environment = os.environ | {"CODA_JAX_ZOO": str(folder.absolute()), "KERAS_BACKEND": "jax"}
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
            if run.returncode:
                print(f"{name:20}failed", flush=True)
                failed = True
                continue
            found = json.loads(run.stdout.splitlines()[-1])
            show(found)
            failed |= any(worse(one, found[0]) for one in found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
