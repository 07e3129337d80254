"""A model in plain JAX and through both doors: what `coda.explain` counts of it, and what XLA makes of it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

import coda_jax as coda
from benchmarks import compare
from benchmarks.lab.zoo.case import (
    LARGE,
    SMALL,
    Case,
    values,
)
from benchmarks.lab.zoo.sources import MODELS, fetch, standing_in


def doors(case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Value and gradient of plain JAX, and of both ways to fuse."""

    def loss(parameters: Any, batch: Mapping[str, Any]) -> Any:
        return case.loss(parameters, **batch)

    yield "plain", jax.value_and_grad(loss, has_aux=case.has_aux)
    yield "grad(fuse)", jax.value_and_grad(coda.fuse(loss), has_aux=case.has_aux)
    yield "fuse(grad)", coda.fuse(jax.value_and_grad(loss, has_aux=case.has_aux))


def explained(case: Case) -> Iterator[dict[str, Any]]:
    """Counts of each door."""
    batch: Any = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.batch.items()}
    parameters = case.parameters
    if case.shardings is not None:
        with_sharding = lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies)  # noqa: E731
        parameters = jax.tree.map(with_sharding, parameters, case.shardings[0])
        batch = jax.tree.map(with_sharding, batch, dict(case.shardings[1]))
    for name, function in doors(case):
        with case.on():
            found = coda.explain(function, parameters, batch, platform="cuda", device="H100")
        totals = found.totals
        yield {
            "door": name,
            "passes": totals.passes_bytes / 1e6,
            "kept": totals.kept_bytes / 1e6,
            "products": sum(found.products.values()) + found.others,
            "fused": found.kernels,
        }


def compiled(case: Case) -> Iterator[dict[str, Any]]:
    """Temporaries and results of each door, beside those of the first."""
    parameters, batch = values(case.parameters), dict(case.batch)
    results = None if case.shardings is None else (None, case.shardings[0])
    if case.shardings is not None:
        parameters, batch = (
            jax.tree.map(jax.device_put, x, lies) for x, lies in zip((parameters, batch), case.shardings, strict=True)
        )
    expected: Any = None
    for name, function in doors(case):
        with case.on():
            program: Any = jax.jit(function, out_shardings=results).lower(parameters, batch).compile()
            value, gradients = jax.device_get(program(parameters, batch))
        value = value[0] if case.has_aux else value
        found = {"door": name, "temporaries": program.memory_analysis().temp_size_in_bytes / 1e6, "loss": float(value)}
        expected = (value, gradients) if expected is None else expected
        apart = abs(float(value) - float(expected[0])) / abs(float(expected[0]))
        yield found | {"distance": compare.distance(gradients, expected[1], floor=1e-2), "loss_distance": apart}


def lines_of(name: str) -> Iterator[dict[str, Any]]:
    """The findings of a model, a dict for each door."""
    entry = MODELS[name]
    folder = Path(os.environ["CODA_JAX_ZOO"])
    fetch(entry, folder)
    sys.path.insert(0, str(folder / "packages"))
    found: dict[str, dict[str, Any]] = {}
    with standing_in(entry.absent):
        for part, sizes in ((explained, LARGE), (compiled, SMALL)):
            try:
                for one in part(entry.make(sizes)):
                    found.setdefault(one["door"], {"model": name}).update(one)
            except Exception as error:
                traceback.print_exc()
                failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                found.setdefault(f"{part.__name__} failed", {"model": name, "failure": failure})
    yield from found.values()
