"""Forward mode raises an error that names the operator and the way out; the way out works."""

import functools

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from tests import chain_cases, expert_cases, loss_cases, test_norm_chains
from tests.chain_cases import EPS, normal
from tests.gemm_cases import assert_close, jit
from tests.test_gemm_transforms import rows_only

A, B, X = normal(0, 12, 8), normal(1, 8, 16), normal(2, 12, 16)


def fused(a, **options):
    return coda.gemm(a, B, X, X[0], X[:, :1], 0.5, epilogue=rows_only, **options)


def plain(a):
    return rows_only(a @ B, X, X[0], X[:, :1], 0.5)


def of_first(f, make):
    """A function of its first argument, beside that one: made when a test asks."""

    def made():
        x, *rest = make(jnp.float32)
        return (lambda x: f(x, *rest)), x

    return made


def looped(a):
    return jax.lax.scan(lambda c, _: (c + fused(a)[0], None), X, length=2)[0]


OPERATORS = {
    "gemm 'rows_only'": lambda: (fused, A),
    "gemm 'gemm'": lambda: (lambda a: coda.gemm(a, B), A),
    "gated_mlp": of_first(chain_cases.mlp, chain_cases.mlp_arguments),
    "mlp": of_first(test_norm_chains.layer, test_norm_chains.arguments),
    "expert_mlp": of_first(
        functools.partial(expert_cases.experts, sizes=(3, 0, 9)),
        functools.partial(expert_cases.arguments, sizes=(3, 0, 9)),
    ),
    "norm_projection": of_first(test_norm_chains.projection, test_norm_chains.projection_arguments),
    "qkv_projection": of_first(chain_cases.qkv, chain_cases.qkv_arguments),
    "linear_cross_entropy": of_first(loss_cases.loss, loss_cases.arguments),
    "the deferred norm": lambda: (
        lambda x: coda.DeferredNorm(x, jnp.ones(12), jnp.ones(x.shape[1]), epsilon=EPS).rstd(),
        A,
    ),
}
MODES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "vmap": lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(x[None]),
    "hessian": lambda f, x: jax.hessian(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x)))))(x),
    "checkpoint": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
}


def refused(name):
    return pytest.raises(NotImplementedError, match=rf"^coda_jax: {name} has no forward mode \(jax\.jvp, .*jax\.jacrev")


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_named(name):
    f, x = OPERATORS[name]()
    for mode in ("jvp", "jvp of jit"):
        with refused(name):
            MODES[mode](f, x)


@pytest.mark.parametrize("mode", MODES)
def test_every_forward_mode(mode):
    for f in (fused, functools.partial(fused, residuals="recompute"), functools.partial(fused, implementation="xla")):
        with refused("gemm 'rows_only'"):
            MODES[mode](f, A)
    with refused("gemm 'rows_only'"):
        MODES[mode](looped, A)


def test_a_gradient_is_named():
    """The loss head gives its gradient, in bfloat16, the derivative of another function of the same results."""
    x, *rest = loss_cases.arguments(jnp.bfloat16)
    gradient = jax.grad(lambda x: loss_cases.loss(x, *rest)[0])
    for mode in ("jvp", "jit of jvp"):
        with refused("linear_cross_entropy"):
            MODES[mode](gradient, x)


def test_the_way_out():
    """A Hessian and its products as reverse over reverse."""

    def value(f):
        return lambda a: sum(map(jnp.sum, f(a)))

    small, direction = A[:, :4], normal(3, 12, 8)
    for way in (
        lambda f: jax.jacrev(f)(A),
        lambda f: jax.jacrev(jax.jacrev(lambda s: value(f)(A.at[:, :4].set(s))))(small),
        lambda f: jax.grad(lambda a: jnp.vdot(jax.grad(value(f))(a), direction))(A),
    ):
        assert_close(jit(lambda way=way: way(fused))(), jit(lambda way=way: way(plain))(), rtol=1e-4)
