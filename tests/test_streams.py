"""Streams: arithmetic on them, and where their gradient goes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda


def ones(*shape):
    return jnp.ones(shape)


def test_arithmetic_on_a_stream_drops_the_statistic():
    stream = coda.Stream(ones(3, 8), 8 * ones(3))
    for other in (stream + ones(3, 8), ones(3, 8) + stream, stream - 1.0, 2.0 * stream, stream + stream):
        assert isinstance(other, coda.Stream)
        assert other.sumsq is None
    assert stream.astype(jnp.bfloat16).sumsq is None
    assert stream.astype(jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(dataclasses.FrozenInstanceError):
        stream.x = ones(3, 8)
    np.testing.assert_allclose(coda.rms_norm(2.0 * stream, ones(8), epsilon=0.0).rstd(), 0.5, rtol=1e-6)


def test_no_gradient_goes_to_the_statistic_and_all_of_it_to_x():
    x = jax.random.normal(jax.random.key(0), (3, 8))

    def with_statistic(x, sumsq):
        return jnp.sum(coda.rms_norm(coda.Stream(x, sumsq), ones(8), epsilon=1e-6).rstd())

    dx, dsumsq = jax.grad(with_statistic, argnums=(0, 1))(x, jnp.sum(x * x, axis=1))
    plain = jax.grad(lambda x: jnp.sum(jax.lax.rsqrt(jnp.mean(x * x, axis=1) + 1e-6)))(x)
    without = jax.grad(lambda x: jnp.sum(coda.rms_norm(x, ones(8), epsilon=1e-6).rstd()))(x)
    np.testing.assert_allclose(dx, plain, rtol=1e-5)
    np.testing.assert_allclose(without, plain, rtol=1e-5)
    np.testing.assert_array_equal(dsumsq, 0)


def test_arithmetic_of_streams():
    x = np.linspace(1, 2, 8, dtype=np.float32).reshape(2, 4)
    stream = coda.Stream(jnp.asarray(x), ones(2))
    for got, expected in [
        (stream + 1, x + 1),
        (x + stream, 2 * x),
        (1.0 - stream, 1 - x),
        (stream - x, 0 * x),
        (2 * stream, 2 * x),
        (stream / 2, x / 2),
        (-stream, -x),
        (jnp.asarray(x) * stream, x * x),
        (stream.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    ]:
        assert isinstance(got, coda.Stream) and got.sumsq is None
        np.testing.assert_array_equal(got.x, expected)
