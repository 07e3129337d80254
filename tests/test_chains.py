"""The chains of products around a deferred norm against the textbook: outputs, every cotangent, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.chain_cases import (
    EPS,
    compare,
    mlp,
    mlp_arguments,
    plain_mlp,
    plain_qkv,
    qk_norm_arguments,
    qkv,
    qkv_arguments,
    squares,
)
from tests.gemm_cases import assert_close, total


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jax.nn.relu, jnp.tanh])
def test_gated_mlp(activation, dtype):
    plain = functools.partial(plain_mlp, activation=activation)
    compare(functools.partial(mlp, activation=activation), plain, mlp_arguments(dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [8, 32])  # turned by XLA, and in the epilogue
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_qkv_projection(dtype, head_dim):
    compare(qkv, plain_qkv, qkv_arguments(dtype, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [8, 32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_qk_norm(dtype, head_dim):
    compare(qkv, plain_qkv, qk_norm_arguments(dtype, head_dim=head_dim))


@pytest.mark.parametrize("head_dim, stored", [(8, 3), (32, 5)])
def test_qk_norm_product_also_stores_unnormed_q_and_k(head_dim, stored):
    """For the backward pass also q and k before their norms, which XLA has where it makes the norms itself."""
    arguments = qk_norm_arguments(jnp.bfloat16, head_dim=head_dim)

    def products(f):
        return [e for e in jax.make_jaxpr(f)(*arguments).eqns for e in _inner(e) if e.primitive.name == "coda_gemm"]

    (forward,) = products(qkv)
    assert len(forward.outvars) == 3
    kept, *_ = products(lambda *a: jax.vjp(qkv, *a)[0])
    assert len(kept.outvars) == stored


def _inner(equation):
    """The equation, and those of the programs that it holds."""
    yield equation
    for value in equation.params.values():
        for inner in getattr(getattr(value, "jaxpr", value), "eqns", ()):
            yield from _inner(inner)


def test_the_statistic_of_the_result():
    x, *rest = mlp_arguments(jnp.bfloat16, (2, 5))
    scale, gate_up, down = rest
    y = coda.gated_mlp(coda.rms_norm(x, scale, epsilon=EPS), gate_up, down)
    assert y.shape == x.shape and y.sumsq.shape == (2, 5) and y.sumsq.dtype == jnp.float32
    np.testing.assert_allclose(y.sumsq, squares(y.x), rtol=1e-2)  # of the values before they are rounded


def test_parameters_and_stream_keep_their_dtypes():
    """Compute in bfloat16, parameters and stream float32: their gradients leave the products in float32."""
    x, *parameters = mlp_arguments(jnp.float32)
    gradients = jax.grad(lambda *a: jnp.sum(mlp(*a, dtype=jnp.bfloat16) ** 2), (0, 1, 2, 3))(x, *parameters)
    exact = jax.grad(lambda *a: jnp.sum(plain_mlp(*a) ** 2), (0, 1, 2, 3))(x, *parameters)
    for got, want in zip(gradients, exact, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))
        assert not (got.astype(jnp.bfloat16) == got).all()  # never rounded to bfloat16
    assert {y.dtype for y in qkv(*qkv_arguments(jnp.float32), dtype=jnp.bfloat16)} == {jnp.dtype(jnp.bfloat16)}


CHAINS = {
    "mlp": (mlp, plain_mlp, mlp_arguments),
    "qkv": (qkv, plain_qkv, qkv_arguments),
    "qkv_in_epilogue": (qkv, plain_qkv, functools.partial(qkv_arguments, head_dim=32)),
    "qk_norm": (qkv, plain_qkv, functools.partial(qk_norm_arguments, head_dim=32)),
}


@pytest.mark.parametrize("chain, plain, arguments", CHAINS.values(), ids=CHAINS)
@pytest.mark.slow
def test_vmap_checkpoint_and_second_derivatives(chain, plain, arguments):
    x, *parameters = arguments(jnp.float32, (2, 3, 5))

    def value(f):
        return lambda x, *parameters: total(f(x, *parameters))

    def summed_gradient(f):
        return lambda *a: total([jnp.sin(g) for g in jax.grad(value(f), range(len(a)))(*a)])

    def mapped(f):
        return jax.vmap(jax.grad(value(f), (0, 1, 2)), (0, None, None, *[None] * (len(parameters) - 2)))

    for transform in (
        mapped,
        lambda f: jax.grad(value(jax.checkpoint(f)), (0, 1, 2)),
        lambda f: jax.grad(summed_gradient(f)),
    ):
        got, want = (jax.jit(transform(f))(x, *parameters) for f in (chain, plain))
        assert_close(got, want, rtol=2e-4)


@pytest.mark.parametrize("chain, plain, arguments", CHAINS.values(), ids=CHAINS)
def test_data_parallel_gradient(chain, plain, arguments):
    """Under shard_map the gradient of a replicated parameter is summed over the shards."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, *parameters = arguments(jnp.float32, (8, 5))
    specs = (jax.P("data"), *[jax.P()] * len(parameters))

    def gradient(f):
        def of_shard(x, *parameters):
            def loss(*a):
                return jax.lax.psum(total(f(*a)), "data")

            return jax.grad(loss, range(1 + len(parameters)))(x, *parameters)

        return jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=specs))(x, *parameters)

    assert_close(gradient(chain), gradient(plain), rtol=1e-4)


@pytest.mark.parametrize("chain, plain, arguments", CHAINS.values(), ids=CHAINS)
def test_explicit_mesh(chain, plain, arguments):
    """The batch is sharded over an explicit axis, the parameters know of no mesh; dx is sharded as x is."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, *parameters = arguments(jnp.float32, (8, 5))

    def gradient(f, x):
        return jax.jit(jax.grad(lambda *a: total(f(*a)), range(1 + len(parameters))))(x, *parameters)

    want = gradient(plain, x)
    with jax.set_mesh(mesh):
        got = gradient(chain, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
    assert jax.typeof(got[0]).sharding.spec == jax.P("data", None, None)
    assert_close(got, want, rtol=1e-4)


def norm(x, sumsq):
    return coda.DeferredNorm(jnp.ones(x), jnp.ones(sumsq), jnp.ones(x[-1:]), epsilon=EPS)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: coda.gated_mlp(norm((4, 8), (5,)), jnp.ones((8, 16)), jnp.ones((8, 8))),
            r"mlp: sumsq has shape \(5,\); beside x \(4, 8\) it must be \(4,\)",
        ),
        (
            lambda: coda.gated_mlp(norm((4, 8), (4,)), jnp.ones((8, 12)), jnp.ones((8, 8))),
            r"w_gate_up has shape \(8, 12\); .* it must be \(8, 16\)",
        ),
        (
            lambda: coda.qkv_projection(
                norm((4, 8), (4,)), *map(jnp.ones, [(8, 13), (4, 2), (4, 2)]), num_heads=1, num_kv_heads=1
            ),
            r"qkv_projection: w has shape \(8, 13\); .* it must be \(8, 12\)",
        ),
        (
            lambda: qkv(*qk_norm_arguments(jnp.float32)[:4]),
            "k_scale is None; q and k are both normalised over their heads, or neither",
        ),
        (
            lambda: coda.qkv_projection(
                norm((4, 8), (4,)), *map(jnp.ones, [(8, 12), (4, 4), (4, 2)]), num_heads=1, num_kv_heads=1
            ),
            r"qkv_projection: cos has shape \(4, 4\); .* \(T, 2\) or .* give cos\[..., :2\]",
        ),
        (
            lambda: coda.rotary(*map(jnp.ones, [(3, 4, 1, 8), (4, 4), (4, 8)])),
            r"rotary: sin has shape \(4, 8\); beside rows \(3, 4\) and heads of 8 .* give sin\[..., :4\]",
        ),
        # Two columns of a doubled table would be broadcast.
        (
            lambda: coda.rotary(*map(jnp.ones, [(4, 1, 2), (4, 2), (4, 2)])),
            r"it must be \(T, 1\) .* give cos\[..., :1\]",
        ),
        (lambda: coda.rotary(*map(jnp.ones, [(4, 1, 8), (5, 4), (5, 4)])), r"cos has shape \(5, 4\); .*\(T, 4\)"),
        (lambda: coda.rotary(*map(jnp.ones, [(4, 1, 7), (4, 3), (4, 3)])), r"x has shape \(4, 1, 7\); .* Dh is even"),
        (
            lambda: qkv(*qkv_arguments(jnp.float32), jnp.ones(8), jnp.ones(4)),
            r"k_scale has shape \(4,\); with heads of 8 it must be \(8,\)",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["mlp", "qkv", "norm_projection"])
def test_scaled_weights_are_kept_where_asked_for(name):
    """Not by default: they would be a copy of the weights. The gradients are the same."""

    def norm_projection(x, scale, kernel, **options):
        return coda.norm_projection(coda.rms_norm(x, scale, epsilon=EPS), kernel, **options)

    chain = {"mlp": mlp, "qkv": qkv, "norm_projection": norm_projection}[name]
    make = mlp_arguments if name == "mlp" else qkv_arguments
    x, scale, kernel, *others = make(jnp.bfloat16)
    scaled = (scale.astype(jnp.float32)[:, None] * kernel.astype(jnp.float32)).astype(jnp.bfloat16)
    gradients = []
    for keep in (False, True):
        outputs, back = jax.vjp(functools.partial(chain, keep_weights=keep), x, scale, kernel, *others)
        kept = [leaf for leaf in jax.tree.leaves(back) if leaf.shape == kernel.shape]
        assert any(bool(jnp.all(leaf == scaled)) for leaf in kept) == keep
        gradients.append(back(jax.tree.map(jnp.ones_like, outputs)))
    jax.tree.map(np.testing.assert_array_equal, *gradients)
