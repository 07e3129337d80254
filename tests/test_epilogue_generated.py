"""Generated code on the host where there is much of it: sections, passes over a head, one of two neighbours read."""

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import evaluate, finish, trace
from tests.host_execution import HostPrograms

M, N, DIM = 5, 40, 8
RNG = np.random.default_rng(0)


def _values(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def _heads(x):
    return x.reshape(x.shape[0], -1, DIM)


def _five_parts(acc, bias):
    """Each with arithmetic of its own: five programs."""
    y = acc + bias
    first, second, third, fourth, last = jnp.split(y, 5, axis=1)
    return first, jnp.tanh(second), third * 2, fourth - 1, jnp.exp(last), jnp.sum(y, axis=1)


def _five_passes(acc):
    """Each of five reductions of a head needs the one before it."""
    x = _heads(acc)
    for op in (jnp.mean, jnp.max, jnp.sum, jnp.min, jnp.mean):
        x = jnp.cos(x) - 0.25 * op(x, axis=-1, keepdims=True)
    return x.reshape(acc.shape)


def _odd_columns(acc, tile, bias, table, scale):
    """Reads only the second of two neighbouring columns of each operand."""
    even, odd = _heads(acc)[..., 0::2], _heads(acc)[..., 1::2]
    of_tile, of_bias = _heads(tile)[..., 1::2], _heads(bias[None, :])[..., 1::2]
    of_table, of_scale = table[:, None, 1::2], scale[None, None, 1::2]
    return jnp.stack([even * of_tile + of_bias, odd * of_table * of_scale], axis=-1).reshape(acc.shape)


CASES = [
    (_five_parts, (_values(N),)),
    (_five_passes, ()),
    (_odd_columns, (_values(M, N), _values(N), _values(M, DIM), _values(DIM))),
]


def test_generated_code(tmp_path):
    acc = _values(M, N)
    programs = [trace(f, acc, operands)[0].program for f, operands in CASES]
    assert max(programs[1].head_levels.values()) == 4
    generated = HostPrograms(programs, tmp_path)
    for number, (f, operands) in enumerate(CASES):
        want = jax.tree.leaves(f(acc, *operands))
        results = generated.run(number, np.asarray(acc), list(map(np.asarray, operands)))
        for out, again, expected in zip(results, evaluate(programs[number], acc, *operands), want, strict=True):
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6, err_msg=f.__name__)
            np.testing.assert_allclose(again, expected, rtol=2e-5, atol=2e-6, err_msg=f.__name__)


def test_a_count_of_the_whole_tile_is_exact_beyond_2_to_the_24():
    program = trace(lambda acc: jnp.count_nonzero(acc > 0), _values(3, N), ())[0].program
    (count,) = finish(program, [jnp.asarray([2.0**24 - 1, 1, 1], jnp.float32)], (), 3).values()
    assert count.dtype == jnp.int32
    assert int(count) == 2**24 + 1  # which float32 does not have
