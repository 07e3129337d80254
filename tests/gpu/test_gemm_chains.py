"""The chains around a deferred norm on the kernel, against the textbook."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.chain_cases import compare, mlp, mlp_arguments, plain_mlp, plain_qkv, qkv, qkv_arguments


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(33, 40, 24), (1160, 520, 1064)])
def test_gated_mlp(activation, dtype, rows, width, hidden):
    chain = functools.partial(mlp, activation=activation, implementation="cuda")
    plain = functools.partial(plain_mlp, activation=activation)
    compare(chain, plain, mlp_arguments(dtype, (rows,), width, hidden))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("lead", "width"), [((3, 11), 40), ((4, 301), 520)])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 128])
def test_qkv_projection(dtype, lead, width, head_dim):
    compare(functools.partial(qkv, implementation="cuda"), plain_qkv, qkv_arguments(dtype, lead, width, head_dim))
