"""Names of products in tables of tiles: what changes them loses every entry of the library's and of users' tables.

Where that is meant: `python -m tests.test_tile_keys` writes tests/tile_keys.json anew, and the shipped tables too must
be made anew.
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import PROGRAMS
from coda_jax.epilogue import trace
from coda_jax.tiles.cost_model import GemmShape
from coda_jax.tiles.table import SHIPPED, Problem, read

KEYS = pathlib.Path(__file__).with_name("tile_keys.json")
SIZES = re.compile(r"(?P<batch>\d+)x(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+) (?P<a>[NT])(?P<b>[NT]) (?P<dtype>\w+) \w+")


def key(name, m, n, k, *, batch=1, transpose_a=False, transpose_b=True, dtype=jnp.bfloat16):
    program = PROGRAMS[name]
    operands = program.operand_types(m, n)
    traced, _ = trace(program.epilogue, jax.ShapeDtypeStruct((m, n), jnp.float32), operands)
    shape = GemmShape(m, n, k, batch, transpose_b)
    out_dtypes = tuple(np.dtype(dtype) for dtype in program.out_dtypes)
    batched = (False,) * (2 + len(operands))
    return Problem(shape, traced.program, np.dtype(dtype), out_dtypes, transpose_a, batched).key


def keys():
    return {name: key(name, 4096, PROGRAMS[name].columns(4096), 4096) for name in PROGRAMS}


def test_keys_are_those_on_record():
    found, expected = keys(), json.loads(KEYS.read_text())
    assert found.keys() == expected.keys()
    changed = {name for name in found if found[name] != expected[name]}
    # Before 0.12 JAX's own derivative of this GELU multiplies in another order.
    assert changed <= ({"gelu_backward", "geglu_backward"} if jax.__version_info__ < (0, 12) else set())


def test_a_key_tells_products_apart():
    every = [
        *keys().values(),
        key("identity", 4096, 4096, 2048),
        key("identity", 4096, 4096, 4096, batch=2),
        key("identity", 4096, 4096, 4096, transpose_a=True),
        key("identity", 4096, 4096, 4096, transpose_b=False),
        key("identity", 4096, 4096, 4096, dtype=jnp.float16),
    ]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_entry_is_found(path):
    """By the epilogue that it was measured with."""
    for entries in read(path).values():
        for name, entry in entries.items():
            sizes = SIZES.fullmatch(name)
            numbers = {size: int(sizes[size]) for size in ("batch", "m", "n", "k")}
            layout = {"transpose_a": sizes["a"] == "T", "transpose_b": sizes["b"] == "T"}
            assert key(entry["epilogue"], **numbers, **layout, dtype=jnp.dtype(sizes["dtype"])) == name


if __name__ == "__main__":
    KEYS.write_text(json.dumps(keys(), indent=1) + "\n")
