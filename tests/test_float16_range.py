"""float16 where a product leaves its range, 65504: gradients are finite and as right as the plain formula's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests import chain_cases, loss_cases, test_norm_chains, tolerance
from tests.chain_cases import EPS, compare, normal, rms_norm
from tests.gemm_cases import as_float64, pullback, total

F16, F32 = jnp.float16, jnp.float32
LARGE = 2e4  # a stream of this size has products with weights of 1 far beyond 65504


def large(x):
    """x as a stream: of the same signs, at most 6e4."""
    return LARGE * jnp.clip(x, -3, 3)


@pytest.mark.parametrize("out_dtype", [F16, F32])
@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_products_beyond_the_range(residuals, out_dtype):
    """A value that the epilogue brings back into the range has its gradient; acc itself is up to 3e5."""
    a, b = (100 * normal(i, *shape) for i, shape in enumerate(((40, 64), (64, 48))))
    a, b = a.astype(F16), b.astype(F16)
    scale = jnp.float32(1e-5)

    def function(multiply):
        return lambda a, b, scale: multiply(a, b, lambda acc, s: jnp.tanh(acc * s), scale)

    def fused(a, b, f, scale):
        return coda.gemm(a, b, scale, epilogue=f, out_dtype=out_dtype, residuals=residuals)

    def rounded(a, b, f, scale):  # what a user writes who knows of the range
        return f(jnp.matmul(a, b, preferred_element_type=F32), scale).astype(out_dtype)

    cotangent = 100 * normal(7, 40, 48)  # of acc it is 1e-5 of that, which float16 must hold
    got, rough = (pullback(function(f), [a, b, scale], [cotangent])() for f in (fused, rounded))
    largest = float(jnp.abs(a.astype(F32) @ b.astype(F32)).max())
    assert largest > 2e5
    with jax.enable_x64(True):
        wide = [jnp.asarray(as_float64(x)) for x in (a, b, scale)]
        exact = pullback(function(lambda a, b, f, s: f(a @ b, s)), wide, [as_float64(cotangent)])()
    for x, e, r in zip(*map(jax.tree.leaves, (got, exact, rough)), strict=True):
        tolerance.check(x, e, r, dtype=r.dtype)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_maximum_beyond_the_range(axis):
    """Its derivative needs the finished maximum, and so a kept acc, or that of the product computed again."""
    a, b = (jnp.asarray(100 * normal(i, 16, 16), F16) for i in range(2))

    def value(residuals):
        return lambda a: total(coda.gemm(a, b, epilogue=lambda acc: jnp.max(acc, axis), residuals=residuals)) * 1e-3

    want = jax.grad(lambda a: total(jnp.max(a @ b.astype(F32), axis)) * 1e-3)(a.astype(F32))
    for residuals in ("preactivation", "recompute"):
        got = jax.grad(value(residuals))(a)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-3 * float(jnp.abs(want).max()))


def test_gradient_keeps_acc_as_float32():
    """acc as float32, so that nothing overflows; an output that is acc in float32 serves as it."""
    a, b = jnp.ones((16, 8), F16), jnp.ones((8, 24), F16)

    def kept(f, **options):
        _, pullback = jax.vjp(lambda a, b: coda.gemm(a, b, epilogue=f, **options), a, b)
        return sorted(x.dtype.name for x in jax.tree.leaves(pullback) if x.shape == (16, 24))

    def both(acc):
        return acc, jnp.tanh(acc)

    assert kept(jnp.tanh) == ["float32"]
    assert kept(jnp.tanh, residuals="recompute") == []
    assert kept(both, out_dtype=(F32, F16)) == ["float32"]


CHAINS = {
    "gated_mlp": (chain_cases.mlp, chain_cases.plain_mlp, chain_cases.mlp_arguments),
    "qkv": (chain_cases.qkv, chain_cases.plain_qkv, chain_cases.qkv_arguments),
    "qk_norm": (chain_cases.qkv, chain_cases.plain_qkv, chain_cases.qk_norm_arguments),
    **{f"norm_{name}": case for name, case in test_norm_chains.CHAINS.items()},
}


@pytest.mark.parametrize("scale", [1, 2.0**-10], ids=["", "small cotangents"])
@pytest.mark.parametrize("chain, plain, make", CHAINS.values(), ids=CHAINS)
def test_chains_of_a_large_stream(chain, plain, make, scale):
    """The norm's row factor, 5e-5, may take nothing out of the range that the formula written in float16 holds."""
    x, *parameters = make(F32)

    def scaled(f):
        return lambda *a: jax.tree.map(lambda y: y * scale, f(*a))

    compare(scaled(chain), scaled(plain), [array.astype(F16) for array in (large(x), *parameters)])


@pytest.mark.parametrize("gated", [True, False])
def test_a_deferred_norm_outside_the_chains(gated):
    """As layers without a residual use it: the row factor is in the epilogue, acc is of the stream's size."""
    x, scale, kernel, _ = chain_cases.mlp_arguments(F32)

    def activated(z):
        gate, up = jnp.split(z, 2, axis=1)
        return jax.nn.silu(gate) * up if gated else jax.nn.gelu(z)

    def fused(x, scale, kernel):
        rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(F32)), axis=-1, keepdims=True) + EPS)
        folded = (scale.astype(F32)[:, None] * kernel).astype(F16)
        return coda.gemm(x, folded, rstd, epilogue=lambda acc, rstd: activated(acc * rstd))

    def plain(x, scale, kernel):
        return activated(rms_norm(x, scale) @ kernel)

    compare(fused, plain, [array.astype(F16) for array in (large(x), scale, kernel)])


def test_logits_beyond_the_range():
    """Without a norm logits have any size. Four of 6e4, four of 1e5, one of which is larger by 2000 and has it all."""
    x, kernel = jnp.full((4, 8), 250.0, F16), jnp.repeat(jnp.array([30.0, 50.0]), 4)
    kernel = jnp.broadcast_to(kernel.at[4].add(1), (8, 8)).astype(F16)
    gradient = jax.grad(lambda x: loss_cases.loss(x, None, kernel, jnp.full(4, 2), None, reduction="sum")[0])(x)
    np.testing.assert_array_equal(gradient, jnp.full((4, 8), 51.0 - 30.0, F16))
