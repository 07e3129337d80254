"""coda.attention by XLA: values and gradients against dense float64 attention, for all masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda

pytestmark = pytest.mark.usefixtures("quick_to_compile")
B, T, S, N, K, H, HV = 2, 37, 29, 4, 2, 16, 24


def dense(q, k, v, dy, dlse, *, bias=0.0, seen=True, scale=None):
    """y, lse, and the gradients of q, k, v and the bias (B, N, T, S), in float64."""
    q, k, v, dy, dlse, bias = (np.asarray(x, np.float64) for x in (q, k, v, dy, dlse, bias))
    groups, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = (np.repeat(x, groups, axis=2) for x in (k, v))
    s = scale * np.einsum("btnh,bsnh->bnts", q, keys) + bias
    s = np.where(np.broadcast_to(seen, s.shape), s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0].transpose(0, 2, 1)
    y = np.einsum("bnts,bsnh->btnh", p, values)
    dp = np.einsum("btnh,bsnh->bnts", dy, values)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True) + dlse.transpose(0, 2, 1)[..., None])

    def of_kv_heads(x):
        return x.reshape(*x.shape[:2], k.shape[2], groups, x.shape[3]).sum(3)

    dq = scale * np.einsum("bnts,bsnh->btnh", ds, keys)
    dk = of_kv_heads(scale * np.einsum("bnts,btnh->bsnh", ds, q))
    return y, lse, dq, dk, of_kv_heads(np.einsum("bnts,btnh->bsnh", p, dy)), ds


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def arrays(queries=T, keys=S, heads=N, kv_heads=K, dtype=jnp.float32, batch=B):
    """q, k, v, dy and dlse."""
    return (
        normal(0, batch, queries, heads, H, dtype=dtype),
        normal(1, batch, keys, kv_heads, H, dtype=dtype),
        normal(2, batch, keys, kv_heads, HV, dtype=dtype),
        normal(3, batch, queries, heads, HV, dtype=dtype),
        normal(4, batch, queries, heads),
    )


def check(given, seen=True, *, bias=None, tolerance=2e-6, **options):
    """Values and gradients are those of dense attention over the pairs that see each other."""
    q, k, v, dy, dlse = given

    def run(*given):
        *factors, bias, dy, dlse = given
        results, pullback = jax.vjp(lambda *x: coda.attention(*x, return_residual=True, **options), *factors, bias)
        return *results, pullback((dy, dlse))

    y, lse, gradients = jax.jit(run)(q, k, v, bias, dy, dlse)
    expected = dense(*given, bias=0.0 if bias is None else bias, seen=seen, scale=options.get("scale"))
    for name, got, exact in zip(("y", "lse", "dq", "dk", "dv"), (y, lse, *gradients[:3]), expected, strict=False):
        got, exact = np.asarray(got, np.float64), np.asarray(exact)
        assert got.shape == exact.shape, name
        assert np.array_equal(np.isneginf(got), np.isneginf(exact)), name
        size = np.max(np.abs(exact[np.isfinite(exact)]), initial=1.0)
        np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance * size, err_msg=name)
    if bias is not None:
        axes = tuple(i for i, size in enumerate(bias.shape) if size == 1)
        dbias = np.sum(expected[5], axis=axes, keepdims=True)
        assert gradients[3].dtype == bias.dtype
        np.testing.assert_allclose(
            gradients[3], dbias, rtol=tolerance, atol=tolerance * np.max(np.abs(dbias), initial=1)
        )
    return y, lse


ROWS, KEYS = np.arange(T)[:, None], np.arange(S)


@pytest.mark.smoke
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_groups_of_heads(kv_heads):
    check(arrays(kv_heads=kv_heads))


@pytest.mark.parametrize("offset", [None, 0, 5, -6, 40, np.array([3, -40], np.int32)], ids=str)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (4, 2)}], ids=str)
def test_offsets(options, offset):
    """Queries are at their row and the offset; some see nothing."""
    position = ROWS + np.asarray(0 if offset is None else offset).reshape(-1, 1, 1)
    seen = position >= KEYS if "is_causal" in options else (position - 4 <= KEYS) & (position + 2 >= KEYS)
    check(arrays(), seen[:, None], query_offset=offset, **options)
