"""The README's code runs as printed, on smaller arrays."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
EPILOGUE, MODEL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_epilogue():
    names = {"x": jnp.ones((8, 4)), "w": jnp.ones((4, 16)), "bias": jnp.zeros(16)}
    exec(EPILOGUE, names)
    assert names["y"].shape == (8, 16) and names["largest"].shape == (8,)


def test_flax_model_trains():
    small = MODEL.replace("512", "32").replace("1408", "48").replace("=8", "=2")
    names = {}
    exec(small, names)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 256)
    losses = [float(names["step"](names["model"], names["optimizer"], tokens)) for _ in range(5)]
    assert losses[-1] < losses[0]
