"""coda.tune on the device: what it finds is kept, lowered, and right."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.tiles import table as tile_table
from coda_jax.tools import tune
from tests.tuned import is_no_worse


@pytest.mark.timed
def test_tune(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_JAX_TUNED", str(tmp_path / "table.json"))
    a = jax.random.normal(jax.random.key(0), (1000, 512), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (512, 768), jnp.bfloat16)
    x = jnp.ones((1000, 768), jnp.bfloat16)

    def f(a, b, x):
        def residual_sums(acc, x):
            return acc + x, jnp.sum(acc, axis=1), jnp.sum(acc, axis=0)

        small = jax.vmap(coda.gemm)(jnp.stack([a[:64]] * 3), jnp.stack([b] * 3))
        return coda.gemm(a, b, x, epilogue=residual_sums), small

    try:
        found = coda.tune(f, a, b, x)
        works = tune.products_of(f, a, b, x)
        assert len(found.products) == len(works) == 2
        for one in found.products:
            work = dataclasses.replace(works[one.key], device=found.device)
            assert 0 < one.us < 1e4 and is_no_worse(one, work)
        assert json.loads((tmp_path / "table.json").read_text())["devices"].keys() == {found.device}
        shown = str(coda.explain(f, a, b, x))
        assert shown.count("(tuned)") == 2, shown
        # The same with XLA: the tiles differ, the sums' order too.
        with jax.disable_jit():
            expected = f(a, b, x)
        for got, want in zip(jax.tree.leaves(jax.jit(f)(a, b, x)), jax.tree.leaves(expected), strict=True):
            got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
            assert np.max(np.abs(got - want)) <= 1e-2 * np.max(np.abs(want))
    finally:
        tile_table._load.cache_clear()
