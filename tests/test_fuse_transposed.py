"""`coda.fuse` reads factors that a function transposes as they lie: without a copy, forward and backward."""

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from tests.test_fuse import DOORS, largest_error, with_gradients

M, K, N = 256, 128, 192
pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")


def gram(x, w):
    return jnp.tanh(x @ x.T) + jnp.tanh(w @ w.T).sum()


def of_an_activation(x, w):
    h = jnp.tanh(x @ w.T)
    return jnp.tanh(h @ h.T)


def newton_schulz(x, w):
    x = (x + w[:1]) / 40
    for _ in range(2):
        a = x @ x.T
        b = 2.0 * (a @ a) - 4.7 * a
        x = 3.4 * x + b @ x
    return x


def token_loss(x, w):
    logits = (x @ w.T).astype(jnp.float32)
    labels = jnp.arange(len(x)) % len(w)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]


FUNCTIONS = {
    "weight": lambda x, w: jnp.tanh(x @ w.T),
    "swapaxes": lambda x, w: jnp.tanh(x @ jnp.swapaxes(w, -1, -2)),
    "rows of two axes": lambda x, w: jnp.tanh(x.reshape(2, -1, K) @ w.T),
    "used both ways": lambda x, w: jnp.tanh(jnp.tanh(x @ w.T) @ w),
    "transposed twice": lambda x, w: jnp.tanh(x @ w.T + x @ w.T.T.T),
    "a cast weight": lambda x, w: jnp.tanh(x @ w.astype(x.dtype).T),
    "gram": gram,
    "an activation": of_an_activation,
    "Newton-Schulz": newton_schulz,
    "token loss": token_loss,
}


def loss_of(f):
    return lambda x, w: jnp.mean(f(x, w).astype(jnp.float32) ** 2)


def arguments(dtype):
    """x (M, K) and w (N, K), whose products have about unit variance."""
    sizes = ((M, K), (N, K))
    return [(jax.random.normal(jax.random.key(i), size) / K**0.25).astype(dtype) for i, size in enumerate(sizes)]


def transposes(f, *args):
    """The passes that copy an array with its axes in another order."""
    found = coda.explain(f, *args, device="NVIDIA H200")
    assert not found.other_products and found.products
    return [one for one in found.passes if "transpose" in one.operation]


@pytest.mark.smoke
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, door):
    loss = loss_of(FUNCTIONS[name])
    found, expected = (jax.jit(f)(*arguments(jnp.float32)) for f in (DOORS[door](loss), with_gradients(loss)))
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_copied(name, door):
    if name == "token loss" and door == "exact":
        pytest.skip("an exact loss over a vocabulary stays as it is")
    assert not transposes(DOORS[door](loss_of(FUNCTIONS[name])), *arguments(jnp.bfloat16))


def products(f, *args):
    return [(one.a, one.b) for one in coda.explain(coda.fuse(f), *args, device="NVIDIA H200").products]


def test_how_factors_are_read():
    x, w = arguments(jnp.bfloat16)
    of_x, of_w, of_both = f"bfloat16[{M},{K}]", f"bfloat16[{N},{K}]", f"bfloat16[{K},{M}]"
    assert products(lambda x, w: jnp.tanh(x @ w.T), x, w) == [(of_x, f"{of_w}^T")]
    assert products(lambda x: x @ x.T, x) == [(of_x, f"{of_x}^T")]
    assert products(lambda x: x.T @ x, x) == [(f"{of_x}^T", of_x)]
    assert products(lambda x: jnp.tanh(x.T @ x), x) == [(of_both, of_x)]


def test_a_first_factor_is_copied_where_the_product_has_an_epilogue():
    """Its product would sum over rows, and what follows it would be a pass."""
    x, _ = arguments(jnp.bfloat16)
    y = jnp.concatenate([x, x[:, :64]], axis=1)
    for f, args in ((lambda x, y: jnp.tanh(x.T @ y), (x, y)), (lambda x, v: jnp.tanh(x.T @ v.T), (x, x.T))):
        found = coda.explain(coda.fuse(f), *args, device="NVIDIA H200")
        assert [one.operation for one in found.passes] == ["transpose"]


def test_a_weight_whose_columns_would_come_in_another_order_is_copied():
    """And not the result, which has the rows of x."""
    x, w = arguments(jnp.bfloat16)
    v = jnp.stack([w[:64], w[64:128]])  # (2, 64, K)

    def f(x, v):
        return jnp.tanh(jnp.tensordot(x, v.transpose(2, 1, 0), 1))

    (copy,) = transposes(coda.fuse(f), x, v)
    assert copy.bytes_written == 2 * v.size < 2 * M * N


def test_products_that_read_a_transpose_beside_others():
    """Another reader of the transpose has it."""

    def loss(x, w):
        y = w.T
        return jnp.mean(jnp.tanh(x @ y) ** 2) + jnp.sum(y * jnp.cos(y))

    for door in DOORS.values():
        found, expected = (jax.jit(f)(*arguments(jnp.float32)) for f in (door(loss), with_gradients(loss)))
        assert largest_error(found, expected) < 1e-5
