"""The table of operations that keep rows, read in both directions: (B, T, ...) to (M, ...), and back."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import coda_jax as coda
from coda_jax.graph.row_axes import KEEPS_ROWS, RowAxes, with_rows
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.evaluate import bound, evaluate
from tests.gemm_cases import assert_close

ROWS, REST = (2, 3), (4, 5)
SAMPLES = {  # operations on (2, 3, 4, 5) that keep the first two axes as they are
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 3, 7, 4, 5), (0, 1, 3, 4)),
    "reshape": lambda x: x.reshape(2, 3, 20),
    "slice": lambda x: x[:, :, 1:3, ::2],
    "split": lambda x: tuple(jnp.split(x, [1], axis=-1)),
    "squeeze": lambda x: lax.squeeze(x[..., :1], (3,)),
    "tile": lambda x: jnp.tile(x, (1, 1, 3, 2)),
    "transpose": lambda x: x.transpose(0, 1, 3, 2),
    "concatenate": lambda x: lax.concatenate([x, x, x], 3),
    "iota": lambda x: lax.broadcasted_iota(jnp.int32, x.shape, 2),
    "pad": lambda x: lax.pad(x, 1.0, [(0, 0, 0), (0, 0, 0), (1, 0, 2), (-1, 2, 0)]),
    "reduce_sum": lambda x: jnp.sum(x, axis=(2, 3)),
    "reduce_max": lambda x: jnp.max(x, axis=2),
    "reduce_min": lambda x: jnp.min(x, axis=3),
    "reduce_prod": lambda x: jnp.prod(x, axis=3),
    "reduce_and": lambda x: jnp.all(x > -1.0, axis=3),
    "reduce_or": lambda x: jnp.any(x > 1.0, axis=2),
    "argmax": lambda x: jnp.argmax(x, axis=2),
    "argmin": lambda x: jnp.argmin(x, axis=3),
}
MOVED = {  # the same operations, along an axis of rows
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 7, 3, 4, 5), (0, 2, 3, 4)),
    "slice": lambda x: x[:, 1:],
    "stride": lambda x: x[:, ::2],
    "split": lambda x: tuple(jnp.split(x, [1], axis=1)),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "tile": lambda x: jnp.tile(x, (1, 2, 1, 1)),
    "transpose": lambda x: x.transpose(1, 0, 2, 3),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "iota": lambda x: lax.broadcasted_iota(jnp.int32, x.shape, 1),
    "pad": lambda x: lax.pad(x, 1.0, [(0, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 0)]),
    "reduce_sum": lambda x: jnp.sum(x, axis=(1, 3)),
    "argmax": lambda x: jnp.argmax(x, axis=0),
}
X = jax.random.normal(jax.random.key(0), (*ROWS, *REST))


def traced(f, name):
    """The last equation of this name, and its inputs."""
    found = []

    def apply(equation, inputs):
        if equation.primitive.name == name:
            found.append((equation, [jnp.asarray(x) for x in inputs]))
        return bound(equation, inputs)

    closed = jax.make_jaxpr(f)(X)
    evaluate(closed.jaxpr, closed.consts, [X], apply)
    return found[-1]


def test_each_operation_has_a_sample():
    assert SAMPLES.keys() == KEEPS_ROWS.keys()


@pytest.mark.parametrize("name", KEEPS_ROWS)
def test_merged_rows_and_back(name):
    equation, inputs = traced(SAMPLES[name], name)
    merged = with_rows(name, equation.params, RowAxes(2, (6,)))
    assert with_rows(name, merged, RowAxes(1, ROWS)) == equation.params
    flat = [x.reshape(6, *x.shape[2:]) if x.ndim else x for x in inputs]
    for y, z in zip(bind(equation.primitive, flat, merged), bound(equation, inputs), strict=True):
        assert y.shape == (6, *z.shape[2:])
        assert_close(y.reshape(z.shape), z, 0)


@pytest.mark.parametrize("name", MOVED)
def test_moved_rows(name):
    equation, _ = traced(MOVED[name], "slice" if name == "stride" else name)
    assert with_rows(equation.primitive.name, equation.params, RowAxes(2, (6,))) is None


ALIKE = {  # functions (B, T, F) of operations in the table, and the same in words that maps knew before
    "tile": (
        lambda h: jax.nn.silu(h) * jnp.tile(jnp.max(h, -1, keepdims=True), h.shape[-1]),
        lambda h: jax.nn.silu(h) * jnp.max(h, -1, keepdims=True),
    ),
    "reduce_or": (
        lambda h: jnp.where(jnp.any(h > 1, -1, keepdims=True), 0, jax.nn.silu(h)),
        lambda h: jnp.where(jnp.max(h, -1, keepdims=True) > 1, 0, jax.nn.silu(h)),
    ),
    "reduce_and": (
        lambda h: jnp.where(jnp.all(h > -1, -1, keepdims=True), 0, jax.nn.silu(h)),
        lambda h: jnp.where(jnp.min(h, -1, keepdims=True) > -1, 0, jax.nn.silu(h)),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_fused_function_moves_no_more_bytes_for_it(name):
    def loss(of_rows, x, up, down):
        return jnp.mean(jnp.square(x + of_rows(x @ up) @ down))

    def gradients(f):
        return jax.jit(jax.value_and_grad(f, (0, 1, 2)))

    one, other = (functools.partial(loss, of_rows) for of_rows in ALIKE[name])
    shapes = (2, 32, 64), (64, 128), (128, 64)
    arrays = [jax.random.normal(jax.random.key(i), shape) / 8 for i, shape in enumerate(shapes)]
    assert_close(gradients(coda.fuse(one))(*arrays), gradients(one)(*arrays), 1e-5)
    types = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays]
    every = [coda.explain(gradients(coda.fuse(f)), *types, platform="cuda") for f in (one, other)]
    (found, expected) = ([x.bytes for x in explained.passes] for explained in every)
    assert 0 < sum(found) <= sum(expected)
