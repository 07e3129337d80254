"""Operators of one row, x (D,), and under vmap: values, gradients, and the products that they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.chain_cases import normal
from tests.gemm_cases import assert_close, jit

BATCH, T, D, F, V = 3, 2, 16, 24, 40
X = normal(0, BATCH, T, D)
PARAMETERS = {
    "scale": 1 + 0.1 * normal(1, D),
    "shift": 0.1 * normal(2, D),
    "up": normal(3, D, F) / 4,
    "down": normal(4, F, D) / 5,
    "gate_up": normal(5, D, 2 * F) / 4,
    "bias": normal(6, F),
    "head": normal(7, D, V) / 4,
}


def norm(x, p):
    return coda.rms_norm(x, p["scale"])


def centred(x, p):
    return coda.layer_norm(x, p["scale"], p["shift"])


ANGLES = jnp.arange(T * 2.0).reshape(T, 2)
OPERATORS = {
    "mlp": lambda x, p: coda.mlp(norm(x, p), p["up"], p["down"], up_bias=p["bias"], down_bias=p["shift"]),
    "mlp of layer norm": lambda x, p: coda.mlp(centred(x, p), p["up"], p["down"], up_bias=p["bias"]),
    "gated mlp": lambda x, p: coda.gated_mlp(norm(x, p), p["gate_up"], p["down"]),
    "gated mlp of halves": lambda x, p: coda.gated_mlp(
        norm(x, p), p["gate_up"].reshape(D, 2, F), p["down"], residual=2 * x
    ),
    "norm projection": lambda x, p: coda.norm_projection(centred(x, p), p["up"], p["bias"]),
    "norm projections": lambda x, p: coda.norm_projection(norm(x, p), (p["up"], p["gate_up"])),
    "project": lambda x, p: coda.project(x, p["up"], bias=p["bias"]).x,
    "project onto a stream": lambda x, p: coda.rms_norm(
        coda.project(x, p["up"] @ p["down"], residual=x), p["scale"]
    ).array(),
    "qkv": lambda x, p: coda.qkv_projection(
        norm(x, p), p["up"], jnp.cos(ANGLES), jnp.sin(ANGLES), num_heads=4, num_kv_heads=1
    ),
    "loss": lambda x, p: coda.linear_cross_entropy(norm(x, p), p["head"], jnp.full(x.shape[:-1], 5))[0],
    "log-probabilities": lambda x, p: coda.token_logprobs(x, p["head"], jnp.full(x.shape[:-1], 5)),
    "gemm": lambda x, p: coda.gemm(
        jnp.atleast_2d(x),
        p["up"],
        p["bias"],
        epilogue=lambda acc, bias: (jnp.sin(acc + bias), jnp.max(acc, axis=1), jnp.sum(jnp.cos(acc))),
    ),
}
WITHOUT_WEIGHT_SUMS = {"loss", "log-probabilities"}  # their loops are batched


def total(operator):
    def of(x, p):
        return sum(jnp.sum(jnp.sin(y) * (1 + i)) for i, y in enumerate(jax.tree.leaves(OPERATORS[operator](x, p))))

    return of


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) - {"qkv"}))
def test_one_row(operator):
    """x (D,) is x (1, D) with one axis less, in values and gradients."""
    f, x = total(operator), X[0, 0]
    value, (dx, dp) = jit(jax.value_and_grad(f, (0, 1)))(x, PARAMETERS)
    expected, (of_row, dp_of_row) = jit(jax.value_and_grad(f, (0, 1)))(x[None], PARAMETERS)
    assert dx.shape == x.shape
    assert_close((value, dx, dp), (expected, of_row[0], dp_of_row))
    shapes = (
        jax.eval_shape(OPERATORS[operator], x, PARAMETERS),
        jax.eval_shape(OPERATORS[operator], x[None], PARAMETERS),
    )
    if operator != "gemm":
        assert [s.shape for s in jax.tree.leaves(shapes[0])] == [
            s.shape[1:] if s.shape else s.shape for s in jax.tree.leaves(shapes[1])
        ]


def test_one_row_of_no_positions_is_refused():
    with pytest.raises(ValueError, match=r"qkv_projection: x has shape \(16,\); it must be \(..., T, D\)"):
        OPERATORS["qkv"](X[0, 0], PARAMETERS)


@pytest.mark.parametrize(
    "operator, rows",
    [(operator, "(T, D)") for operator in OPERATORS]
    + [(operator, "(D,)") for operator in ("mlp of layer norm", "gated mlp of halves", "norm projections", "gemm")],
)
@pytest.mark.slow
def test_a_batch_that_shares_the_weights(operator, rows):
    """Both orders of vmap and gradient; the gradient of a vmap has the products of more rows, none of them batched."""
    x, f = X[:, 0] if rows == "(D,)" else X, total(operator)
    each = [jit(jax.value_and_grad(f, (0, 1)))(one, PARAMETERS) for one in x]
    values, (dx, dp) = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def of_batch(x, p):
        return jnp.sum(jax.vmap(jax.jit(f), (0, None))(x, p))

    of_sum = jax.value_and_grad(of_batch, (0, 1))
    assert_close(jit(of_sum)(x, PARAMETERS), (values.sum(), (dx, jax.tree.map(lambda g: g.sum(0), dp))), rtol=1e-4)
    per_example = jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None))
    assert_close(jit(per_example)(x, PARAMETERS), (values, (dx, dp)), rtol=1e-4)

    if operator not in WITHOUT_WEIGHT_SUMS:
        found = products(of_sum, x)
        assert {k for spec, k in found if spec.transpose_a} == {x.size // D}  # the batch is in K
    if operator not in WITHOUT_WEIGHT_SUMS | {"gemm"}:  # whose sum over rows is one for each of the batch
        assert not any(any(spec.batched) for spec, _ in [*found, *products(of_batch, x)])


def products(f, x):
    """The products of f(x, PARAMETERS), and K of each."""
    equations = [equation for equation, _ in equations_of(f, x, PARAMETERS)[0] if equation.primitive in PRIMITIVES]
    found = []
    for equation in equations:
        spec, a = equation.params["spec"], equation.invars[0].aval.shape
        k = a[any(spec.batched) :][: spec.axes.k] if spec.transpose_a else a[len(a) - spec.axes.k :]
        found.append((spec, int(np.prod(k))))
    return found


@pytest.mark.slow
def test_a_batch_in_a_batch_and_a_second_derivative():
    x, f = normal(8, 2, BATCH, T, D), total("mlp")

    def nested(x, p):
        return jnp.sum(jax.vmap(jax.vmap(f, (0, None)), (1, None))(x, p))

    def flat(x, p):
        return jnp.sum(jnp.stack([f(one, p) for of in x for one in of]))

    assert_close(*(jit(jax.grad(g, (0, 1)))(x, PARAMETERS) for g in (nested, flat)), rtol=1e-4)
    assert {k for spec, k in products(jax.grad(nested, 1), x) if spec.transpose_a} == {x.size // D}

    def of_gradient(g):
        return jax.grad(lambda p: sum(jnp.sum(y**2) for y in jax.tree.leaves(jax.grad(g, 1)(x[0], p))))

    def batched(x, p):
        return jnp.sum(jax.vmap(f, (0, None))(x, p))

    def unrolled(x, p):
        return sum(f(one, p) for one in x)

    assert_close(*(jit(of_gradient(g))(PARAMETERS) for g in (batched, unrolled)), rtol=1e-3)


@pytest.mark.parametrize(
    "operator, name",
    [
        *(("norm projection", "up"), ("norm projection", "shift"), ("qkv", "scale"), ("mlp", "up"), ("gemm", "bias")),
        ("gated mlp", "up"),  # which it does not have
    ],
)
def test_a_batch_of_parameters(operator, name):
    """x, and the x that an operator returns, is shared: its gradient is that of all, once."""
    f = total(operator)
    parameters = [PARAMETERS | {name: (1 + 0.1 * i) * PARAMETERS[name]} for i in range(2)]
    stacked = PARAMETERS | {name: jnp.stack([p[name] for p in parameters])}
    axes = {key: 0 if key == name else None for key in PARAMETERS}

    def of_batch(x, p):
        outputs = jax.vmap(OPERATORS[operator], (None, axes))(x, p)
        return sum(jnp.sum(jnp.sin(y) * (1 + i)) for i, y in enumerate(jax.tree.leaves(outputs)))

    def unrolled(x, p):
        return sum(f(x, p | {name: one}) for one in p[name])

    found, expected = (jit(jax.grad(g, (0, 1)))(X[0], stacked) for g in (of_batch, unrolled))
    assert_close(found, expected, rtol=1e-4)
