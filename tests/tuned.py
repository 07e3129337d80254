"""The helpers of tests of coda.tune and of its tables: a table of the test's own, invented times, what must hold."""

import json
import re
import types

import jax
import jax.numpy as jnp

import coda_jax as coda
from coda_jax.tiles import table as tile_table
from coda_jax.tiles.constants import constants_for
from coda_jax.tiles.cost_model import relative_power
from coda_jax.tools import tune

DEVICE = "NVIDIA H200"
A, B = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 6144), jnp.bfloat16)


def product(a, b):
    return coda.gemm(a, b)


def is_no_worse(one, work):
    """Whether a `Tuned` takes no more energy times time than the cost model's choice, but for what counts as equal."""

    def energy(config, us):
        return us * relative_power(work.problem.shape, config.tile, constants_for(work.device))

    first = work.configs[0]
    kept, chosen = energy(one.config, one.us) * one.us, energy(first, one.cost_model_us) * one.cost_model_us
    return kept <= 1.0075**2 * chosen


def own_table(tmp_path, monkeypatch, device_kind):
    """A fixture's generator: a table for the user's, an empty one of the library's, and a stand-in for a GPU.

    Args:
      device_kind: of the GPU, a function without arguments.
    """

    def devices(platform=None):
        if platform == "cuda":
            return [types.SimpleNamespace(device_kind=device_kind(), compute_capability="9.0")]
        return jax.local_devices()

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(tile_table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tile_table, "_reported", set())
    monkeypatch.setenv("CODA_JAX_TUNED", str(tmp_path / "folder" / "table.json"))
    tile_table._load.cache_clear()
    yield tmp_path / "folder" / "table.json"
    tile_table._load.cache_clear()


def cut(function, *types):
    """(tile_m, tile_n, cluster_m) of the custom calls of a function lowered for CUDA."""
    # A new function each time, for JAX keeps what it has lowered.
    text = jax.jit(lambda *xs: function(*xs)).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    return cuts(text)


def cuts(text):
    text = re.sub(r'source = "(\\.|[^"\\])*"', "", text)
    fields = [re.findall(rf"{name} = (\d+)", text) for name in ("tile_m", "tile_n", "cluster_m")]
    return [tuple(map(int, of)) for of in zip(*fields, strict=True)]


def fastest(tile, gain=0.2):
    """A measurement by which this tile takes 1 - gain of the others' time."""

    def measure(works):
        return [
            {config: 1e-3 * (1 - gain * ((config.tile_m, config.tile_n) == tile)) for config in work.configs}
            for work in works
        ]

    return measure


def key_of(function, *types):
    (key,) = tune.products_of(function, *types)
    return key


def write(path, config, devices=(DEVICE,), key=None):
    key = key or key_of(product, A, B)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"format": 1, "devices": {device: {key: {"config": config}} for device in devices}}))
    tile_table._load.cache_clear()
