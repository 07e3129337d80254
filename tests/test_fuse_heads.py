"""`coda.fuse` of heads that no tile has whole: products stay kernels, and XLA turns the heads."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import coda_jax as coda
from tests.gemm_cases import assert_close
from tests.plain_models import Weights, attention, rms_norm, rotated
from tests.test_fuse import DOORS

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
HEADS, KV_HEADS = 4, 2
IN_NO_TILE, IN_TILES = (16, 48, 80, 112), (64, 96)
SPELLINGS = ("apart", "joined", "with norms")


def loss(p, x, *, size, name=lambda y: y):
    """The sum of squares of a Llama's attention, with norms of heads where there are scales of them.

    Args:
      name: gives q, k and v names for policies.
    """
    h, ends = rms_norm(x, p["norm"]), (HEADS * size, (HEADS + KV_HEADS) * size)
    parts = jnp.split(h @ p["qkv"], ends, axis=-1) if "qkv" in p else [h @ p[name] for name in "qkv"]
    q, k = (name(y).reshape(*y.shape[:-1], -1, size) for y in parts[:2])
    v = name(parts[2].reshape(*parts[2].shape[:-1], -1, size))
    if "scale" in p:
        q, k = (rms_norm(y, p["scale"]) for y in (q, k))
    y = x + attention(rotated(q), rotated(k), v, is_causal=True) @ p["out"]
    return jnp.sum(jnp.square(y.astype(jnp.float32)))


def arguments(spelling, size, dtype, rows=(2, 24)):
    draw, width = Weights(0, dtype), HEADS * size
    p = {"norm": draw(width, mean=1), "out": draw(width, width)}
    columns = {"q": width, "k": KV_HEADS * size, "v": KV_HEADS * size}
    is_joined = spelling.startswith("joined")
    p |= {"qkv": draw(width, sum(columns.values()))} if is_joined else {}
    p |= {} if is_joined else {name: draw(width, count) for name, count in columns.items()}
    p |= {"scale": draw(size, mean=1)} if spelling.endswith("with norms") else {}
    return p, jnp.moveaxis(draw(width, *rows), 0, -1) * width**0.5


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", IN_NO_TILE)
def test_values_and_gradients(size, spelling, door):
    f, args = functools.partial(loss, size=size), arguments(spelling, size, jnp.float32)
    expected = jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
    assert_close(jax.jit(DOORS[door](f))(*args), expected, 2e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", [*IN_NO_TILE, *IN_TILES])
def test_products_are_kernels(size, spelling, door):
    """The plan says which heads XLA turns."""
    f = functools.partial(loss, size=size)
    types = jax.eval_shape(lambda: arguments(spelling, size, jnp.bfloat16, (2, 512)))
    found = coda.explain(DOORS[door](f), *types, platform="cuda")
    assert not [one.reason for one in found.products if one.reason]
    turned = [line for block in found.blocks for line in block.splitlines() if f"heads of {size} columns" in line]
    assert bool(turned) == (size in IN_NO_TILE)


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
def test_names_of_parts_cost_nothing(door):
    """The product's epilogue makes what reads a named part of its columns, and each part is kept once."""
    types = jax.eval_shape(lambda: arguments("joined, with norms", 64, jnp.bfloat16, (2, 512)))
    names = (lambda y: y, lambda y: checkpoint_name(y, "part"))
    found = [
        coda.explain(DOORS[door](functools.partial(loss, size=64, name=name)), *types, platform="cuda")
        for name in names
    ]
    passes = [sum(one.bytes * count for one, count in x.passes.items()) for x in found]
    kept = [sum(one.bytes * count for one, count in x.kept.items()) for x in found]
    assert passes[0] == passes[1] and kept[0] == kept[1]


@pytest.mark.parametrize("door", DOORS)
def test_values_with_names_of_parts(door):
    f = functools.partial(loss, size=64, name=lambda y: checkpoint_name(y, "part"))
    args = arguments("joined, with norms", 64, jnp.float32)
    expected = jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
    assert_close(jax.jit(DOORS[door](f))(*args), expected, 2e-5)
