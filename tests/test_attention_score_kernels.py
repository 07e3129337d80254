"""Score functions in attention's kernels on the host: values and gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Kernel, Mask, Schedule, check_case, common_headers, scored

LATE_COPIES, AT_RANDOM = Schedule(1, -1, 0, 1, 0), Schedule(3, 7, 0, 0, 1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return common_headers(tmp_path_factory.mktemp("attention"))


def positions(s):
    return (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))


def soft_cap(s):
    return 2 * jnp.tanh(s / 2)


def alibi(s, slopes):
    row, key = positions(s)
    return s - slopes[:, None, None] * jnp.abs(row - key)


def causal(s):
    row, key = positions(s)
    return jnp.where(row >= key, s, -jnp.inf)


def gated(s, gate, offset, table):
    return s * jnp.tanh(gate) + offset + table


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


SIZES = {"queries": 200, "keys": 150, "heads": 2, "batch": 2}
SCORES = {
    "soft cap": (soft_cap, ()),
    "alibi": (alibi, (np.array([0.1, 0.02], np.float32),)),
    "causal": (causal, ()),
    "gated": (gated, (random(0, 2, 2, 200, 1), random(1, 2, 1, 150), random(2, 200, 150))),
}


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("name", SCORES)
def test_scores(folder, name, head):
    score, operands = SCORES[name]
    check_case(scored(Kernel(head, head), Mask(), score, operands, **SIZES), folder, schedule=LATE_COPIES)
