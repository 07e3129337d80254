"""The CSV files that benchmarks write, benchmarks/results/<device><suffix>.csv."""

from __future__ import annotations

import argparse
import csv
import datetime
import pathlib
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from benchmarks import timing

FOLDER = pathlib.Path(__file__).parent / "results"


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark's command line: where its results go and what commit they say."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=pathlib.Path, default=FOLDER, help="folder of the results")
    made.add_argument("--commit", default=commit(), help="written into the results")
    return made


def commit() -> str:
    """The commit of the checkout, shortened."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def write(
    suffix: str,
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    folder: pathlib.Path = FOLDER,
    **about: Any,
) -> pathlib.Path:
    """Writes the rows, and in each of them the device, all versions, the date, the clock and what `about` says."""
    device = jax.devices()[0].device_kind
    common = {
        "device": device,
        "driver": timing.driver(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        **about,
        "date": datetime.date.today().isoformat(),
        "clock": timing.clock(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device.replace(' ', '_').lower()}{suffix}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *common], restval="")
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
    print(f"written: {path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path}\n")
    return path
