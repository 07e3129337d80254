"""Calls of cuDNN's attention in a function that is fused: they become `coda.attention`, where their masks are known.

cuDNN is absent here: what asks for it is replaced, and calls that stay are seen in the jaxpr alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import coda_jax as coda
from coda_jax.attend.primitive import FORMS
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.walk import equations
from coda_jax.tools.attention import in_words
from tests import tolerance

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
B, T, N, K, D = 2, 64, 4, 2, 16
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (B, T)), axis=1))
LENGTHS = jnp.array([64, 40], jnp.int32)
fuse = functools.partial(coda.fuse, implementation="xla")


@pytest.fixture(autouse=True)
def has_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 92000)
    monkeypatch.setattr(cudnn, "check_is_flash_attention", lambda *args, **kwargs: None)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def same(ids):
    return ids[:, None, :, None] == ids[:, None, None]


def causal():
    return jnp.tril(jnp.ones((T, T), bool))


# Options of jax.nn.dot_product_attention, of the further arguments, and the mask that coda.attention has.
CASES = {
    "nothing": (dict, (), "none"),
    "causal": (lambda: {"is_causal": True}, (), "causal"),
    "a window": (lambda: {"is_causal": True, "local_window_size": (7, 0)}, (), "from i - 7 to i + 0"),
    "documents": (lambda ids: {"mask": same(ids) & causal()}, (IDS,), "causal, ids"),
    "documents beside is_causal": (lambda ids: {"mask": same(ids), "is_causal": True}, (IDS,), "causal, ids"),
    "a bias": (lambda b: {"bias": b, "is_causal": True}, (normal(5, 1, N, T, T),), "causal, a bias"),
    "a bias and documents": (
        lambda b, ids: {"bias": b, "mask": same(ids) & causal()},
        (normal(5, 1, N, T, T), IDS),
        "causal, ids, a bias",
    ),
    "lengths": (
        lambda n: {"query_seq_lengths": n, "key_value_seq_lengths": n, "is_causal": True},
        (LENGTHS,),
        "an interval",
    ),
}
QKV = normal(0, B, T, N, D), normal(1, B, T, K, D), normal(2, B, T, K, D)


def attention(name, implementation):
    options, _, _ = CASES[name]

    def function(q, k, v, *others):
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options(*others))

    return function


def with_gradients(function, args):
    """A number that depends on all results, differently on each, and its gradients."""
    weights = jax.random.normal(jax.random.key(0), QKV[0].shape)
    floats = tuple(i for i, x in enumerate(args) if is_float(x.dtype))
    return jax.value_and_grad(lambda *xs: jnp.sum(function(*xs).astype(jnp.float32) * weights), floats)


def found(function, args):
    """The masks of `coda.attention`'s calls, in words, and the names of all equations."""
    every = [e for e, _ in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    return [in_words(e.params["spec"].mask) for e in every if e.primitive in FORMS], [e.primitive.name for e in every]


def calls_cudnn(names):
    return any(name.startswith("dot_product_attention") for name in names)


@pytest.mark.parametrize("name", CASES)
def test_a_call_becomes_attention(name):
    _, others, says = CASES[name]
    args = *QKV, *others
    masks, names = found(fuse(attention(name, "cudnn")), args)
    assert masks == [says] and not calls_cudnn(names)
    assert calls_cudnn(found(attention(name, "cudnn"), args)[1])


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    args = *QKV, *CASES[name][1]
    plain = jax.jit(with_gradients(attention(name, "xla"), args))(*args)
    wide = [x.astype(jnp.float32) if is_float(x.dtype) else x for x in args]
    exact = jax.jit(with_gradients(attention(name, "xla"), wide))(*wide)
    own = attention(name, "cudnn")
    for door in (with_gradients(fuse(own), args), fuse(with_gradients(own, args))):
        assert not calls_cudnn(found(door, args)[1])
        for one, reference, rough in zip(
            *map(jax.tree.leaves, (jax.jit(door)(*args)[1], exact[1], plain[1])), strict=True
        ):
            tolerance.check(one, np.asarray(reference, np.float64), rough)


def of_heads(q, k, v, *, own):
    """Arrays (B, N, T, H)."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if own is None:
        return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True).swapaxes(1, 2)
    return cudnn.dot_product_attention(q, k, v, scale=D**-0.5, mask_type=own, qkv_layout="BNTH")


def test_another_layout():
    mine = fuse(functools.partial(of_heads, own=cudnn.MaskType.CAUSAL))
    masks, names = found(mine, QKV)
    assert masks == ["causal"] and not calls_cudnn(names)
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (mine(*QKV), of_heads(*QKV, own=None))), atol=0.02)


def dropped(q, k, v):
    return cudnn.dot_product_attention(q, k, v, dropout_rate=0.1)


def with_statistics(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", return_residual=True)


def of_any_mask(q, k, v):
    """A bias of scores that other scores make."""
    bias = jnp.einsum("btnh,bsnh->bnts", q, q)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, implementation="cudnn")


@pytest.mark.parametrize("function", [dropped, with_statistics, of_any_mask])
def test_a_call_that_is_not_known_stays(function):
    fused = fuse(function)
    masks, names = found(fused, QKV)
    assert masks == [] and calls_cudnn(names) and "exp" not in names


def test_the_report_says_why_a_call_stays():
    report = coda.fuse.report(lambda q, k, v, w: of_any_mask(q, k, v).reshape(B * T, -1) @ w, *QKV, normal(3, N * D, 8))
    (one,) = (x for x in report.products if "cuDNN" in x.reason)
    assert "two products of scores" in one.reason and "test_fuse_cudnn.py" in one.line


def test_one_call_stays_beside_another():
    def both(q, k, v):
        return of_any_mask(q, k, v) + attention("causal", "cudnn")(q, k, v)

    masks, names = found(fuse(both), QKV)
    assert masks == ["causal"] and calls_cudnn(names) and "exp" not in names


def test_calls_stay_where_attention_does():
    masks, names = found(fuse(attention("documents", "cudnn"), attention=False), (*QKV, IDS))
    assert masks == [] and calls_cudnn(names)


def test_a_layer_in_a_loop_and_a_checkpoint():
    def layers(x, k, v, ids, w):
        @jax.checkpoint
        def layer(x, w):
            return x + attention("documents", "cudnn")((x.reshape(B * T, -1) @ w).reshape(x.shape), k, v, ids)

        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    args = *QKV, IDS, normal(7, 3, N * D, N * D)
    for function in (fuse(layers), with_gradients(fuse(layers), args)):
        masks, names = found(function, args)
        assert set(masks) == {"causal, ids"} and not calls_cudnn(names)


def test_layers_in_a_loop_and_its_backward_loop():
    def layers(x, k, v, ids, w):
        def layer(x, w):
            return x + attention("documents", "cudnn")((x.reshape(B * T, -1) @ w).reshape(x.shape), k, v, ids)

        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    args = *QKV, IDS, normal(7, 3, N * D, N * D)
    step = jax.value_and_grad(lambda *args: jnp.sum(layers(*args).astype(jnp.float32) ** 2), (0, 1, 2, 4))
    masks, names = found(fuse(step), args)
    assert masks == ["causal, ids", "causal, ids"] and not calls_cudnn(names)
