"""The README's code runs as printed, on smaller arrays."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
EPILOGUE, MODEL, PARALLEL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_epilogue():
    names = {"x": jnp.ones((8, 4)), "w": jnp.ones((4, 16)), "bias": jnp.zeros(16)}
    exec(EPILOGUE, names)
    assert names["y"].shape == (8, 16) and names["largest"].shape == (8,)


SMALL = MODEL.replace("512", "32").replace("1408", "48").replace("=8", "=2")


def test_flax_model_trains():
    names = {}
    exec(SMALL, names)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 256)
    losses = [float(names["step"](names["model"], names["optimizer"], tokens)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_data_parallel_training_is_the_same():
    """Four steps on four devices, and on one."""
    one, several = {}, {}
    for names in (one, several):
        exec(SMALL.replace("jnp.bfloat16", "jnp.float32"), names)
    exec(PARALLEL, several)
    tokens = jax.random.randint(jax.random.key(0), (2 * jax.device_count(), 9), 0, 256)
    placed = jax.device_put(tokens, several["NamedSharding"](several["mesh"], several["P"]("data")))
    assert len(placed.sharding.device_set) == jax.device_count() > 1
    for _ in range(4):
        expected = one["step"](one["model"], one["optimizer"], tokens)
        got = several["parallel_step"](several["model"], several["optimizer"], placed)
        assert jnp.allclose(got, expected, rtol=1e-5)
