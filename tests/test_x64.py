"""Under jax_enable_x64 operators give what they give without, and refuse float64 by the argument's name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from tests.chain_cases import EPS, HEADS, KV_HEADS, angles, mlp_arguments, normal, qk_norm_arguments, squares
from tests.expert_cases import arguments as expert_arguments
from tests.loss_cases import arguments as loss_arguments

EPSILON = np.float64(EPS)  # what a configuration read by NumPy gives: a strong float64 under x64


def gemm_case(dtype):
    def epilogue(acc, x, row, label):
        y = jax.nn.gelu(acc * 0.5 + row) + x
        column = jax.lax.broadcasted_iota(jnp.int32, acc.shape, 1)
        return y, jnp.sum(jnp.where(column == label, y, 0.0), axis=1), jnp.mean(y, axis=0), coda.logsumexp(y, axis=1)

    a, b, x, row = (normal(i, *shape).astype(dtype) for i, shape in enumerate(((12, 16), (16, 24), (12, 24), (24,))))
    given = {"a": a, "b": b, "operand 0": x, "operand 1": row}
    label = jnp.arange(12, dtype=jnp.int32)[:, None]
    return lambda a, b, x, row: coda.gemm(a, b, x, row, label, epilogue=epilogue), given


def gated_mlp_case(dtype):
    names = ("x", "scale", "w_gate_up", "w_down")
    x, *_ = arrays = mlp_arguments(dtype)

    def run(x, sumsq, scale, **weights):
        return coda.gated_mlp(coda.DeferredNorm(x, sumsq, scale, epsilon=EPSILON), **weights)

    return run, dict(zip(names, arrays, strict=True)) | {"sumsq": squares(x)}


def mlp_case(dtype, layer):
    x, scale, gate_up, down = mlp_arguments(dtype)
    norm = coda.layer_norm(x, scale) if layer else coda.rms_norm(x, scale)
    given = {"x": x, "sumsq": norm.sumsq, "scale": scale, "w_up": gate_up[:, : down.shape[0]], "w_down": down}
    given |= {"up_bias": normal(8, down.shape[0]).astype(dtype), "down_bias": scale}

    def run(x, sumsq, scale, **weights):
        bias = scale if layer else None
        return coda.mlp(coda.DeferredNorm(x, sumsq, scale, norm.mean, bias, EPSILON), **weights)

    return run, given


def norm_projection_case(dtype):
    x, scale, kernel, _ = mlp_arguments(dtype)
    norm = coda.layer_norm(x, scale)
    given = {"x": x, "scale": scale, "w": kernel, "sumsq": norm.sumsq, "mean": norm.mean, "bias of the norm": scale}
    given["bias"] = normal(8, kernel.shape[1]).astype(dtype)

    def run(x, sumsq, scale, mean, w, bias, dtype=None, **of_norm):
        norm = coda.DeferredNorm(x, sumsq, scale, mean, of_norm["bias of the norm"], EPSILON)
        return coda.norm_projection(norm, w, bias, dtype=dtype)

    return run, given


def qkv_projection_case(dtype, head_dim):
    x, scale, kernel, q_scale, k_scale = qk_norm_arguments(dtype, head_dim=head_dim)
    cos, sin = angles(x, kernel)
    given = {"x": x, "sumsq": squares(x), "scale": scale, "w": kernel, "cos": cos, "sin": sin}

    def run(x, sumsq, scale, **arrays):
        norm = coda.DeferredNorm(x, sumsq, scale, epsilon=EPSILON)
        return coda.qkv_projection(norm, num_heads=HEADS, num_kv_heads=KV_HEADS, **arrays)

    return run, {**given, "q_scale": q_scale, "k_scale": k_scale}


def linear_cross_entropy_case(dtype, reduction):
    x, scale, kernel, labels, weights = loss_arguments(dtype, (200,))
    given = {"x": x, "sumsq": squares(x), "scale": scale, "w": kernel, "weights": weights}
    options = {name: np.float64(value) for name, value in (("label_smoothing", 0.1), ("z_loss", 1e-3), ("soft_cap", 9))}
    options |= {"reduction": reduction, "chunk_bytes": 1}

    def run(x, sumsq, scale, **given):
        wide = np.asarray(labels, np.int64)  # as NumPy's loaders give them
        norm = coda.DeferredNorm(x, sumsq, scale, epsilon=EPSILON)
        return coda.linear_cross_entropy(norm, **given, labels=jnp.asarray(wide), **options)

    return run, given


def expert_mlp_case(dtype):
    names = ("x", "w_gate_up", "w_down", "row_scale")
    given = dict(zip(names, expert_arguments(dtype, (5, 0, 9), rows=16), strict=True))
    sizes = jnp.array([5, 0, 9], jnp.int32)
    return lambda dtype=None, **arrays: coda.expert_mlp(**arrays, group_sizes=sizes, dtype=dtype), given


CASES = {
    "gemm": gemm_case,
    "gated_mlp": gated_mlp_case,
    "mlp": functools.partial(mlp_case, layer=True),
    "mlp_rms": functools.partial(mlp_case, layer=False),
    "expert_mlp": expert_mlp_case,
    "norm_projection": norm_projection_case,
    "qkv_projection": functools.partial(qkv_projection_case, head_dim=8),
    "qkv_projection_in_epilogue": functools.partial(qkv_projection_case, head_dim=32),
    "linear_cross_entropy": functools.partial(linear_cross_entropy_case, reduction="mean"),
    "linear_cross_entropy_each": functools.partial(linear_cross_entropy_case, reduction="none"),
    "rms_norm": lambda dtype: (coda.rms_norm, {"x": normal(0, 7, 16).astype(dtype), "scale": normal(1, 16)}),
    "layer_norm": lambda dtype: (coda.layer_norm, {"x": normal(0, 7, 16).astype(dtype), "scale": normal(1, 16)}),
    "rotary": lambda dtype: (
        coda.rotary,
        {"x": normal(0, 2, 7, 3, 8).astype(dtype), "cos": normal(1, 7, 4), "sin": normal(2, 7, 4)},
    ),
}


def called(f, given):
    """f by position where its arguments have no such names."""
    return lambda arrays: f(*arrays.values()) if "operand 0" in given else f(**arrays)


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_as_without(case, dtype):
    f, given = CASES[case](dtype)

    def value_and_gradient(arrays):
        outputs, pullback = jax.vjp(called(f, given), arrays)
        return outputs, pullback(jax.tree.map(lambda x: jnp.cos(x.astype(jnp.float32)).astype(x.dtype), outputs))

    want = jax.jit(value_and_gradient)(given)
    with jax.enable_x64(True):
        got = jax.jit(value_and_gradient)(given)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("case", [name for name in CASES if not name.endswith(("_rms", "_each", "_in_epilogue"))])
def test_float64_is_refused_by_name(case):
    f, given = CASES[case](jnp.float32)
    for name in given:
        with jax.enable_x64(True):
            arrays = given | {name: given[name].astype(jnp.float64)}
            assert arrays[name].dtype == jnp.float64
            with pytest.raises(TypeError, match=f"^{case}: {name} has dtype float64; it must be bfloat16"):
                called(f, given)(arrays)


@pytest.mark.parametrize(
    "case", ["gated_mlp", "mlp", "expert_mlp", "norm_projection", "qkv_projection", "linear_cross_entropy"]
)
def test_a_compute_dtype_of_float64_is_refused(case):
    f, given = CASES[case](jnp.float32)
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match=f"^{case}: dtype = float64; it must be bfloat16, float16"),
    ):
        f(**given, dtype=jnp.float64)


def test_a_label_beyond_int32_is_no_other():
    x, kernel = jnp.ones((2, 8)), jnp.ones((8, 16))
    with jax.enable_x64(True):
        labels = jnp.array([3, 2**32 + 3])
        losses, _ = coda.linear_cross_entropy(x, kernel, labels, reduction="none")
    np.testing.assert_allclose(losses, [np.log(16), np.nan], rtol=1e-6)
