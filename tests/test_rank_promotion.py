"""With `jax_numpy_rank_promotion="raise"` no operator broadcasts an array to a higher rank by itself."""

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from tests.chain_cases import EPS, HEADS, KV_HEADS, WIDTH, normal
from tests.nvrtc import needs_nvrtc

LEAD, HIDDEN, HEAD_DIM = (3, 11), 64, 32


def _gemm(epilogue, *shapes, residuals="preactivation"):
    def run(x, b, *operands):
        return coda.gemm(x, b, *operands, epilogue=epilogue, residuals=residuals)

    return run, [(*LEAD, WIDTH), (WIDTH, HIDDEN), *shapes]


def _row_and_sums(acc, row, column):
    y = jax.nn.gelu(acc + row) * column
    return y, jnp.sum(y, axis=1), jnp.max(y, axis=0, keepdims=True), coda.logsumexp(y, keepdims=True)


def _vector(acc, row):
    return acc * row[None, :]


def _heads(acc, scale, table):
    heads = acc.reshape(acc.shape[0], 2, 32)
    rstd = jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + 1e-6)
    y = jax.nn.softmax(heads * rstd * scale[None, None, :], axis=-1)
    return (y * table[:, None, :]).reshape(acc.shape)


def _mlp(x, scale, up, down, up_bias, down_bias):
    return coda.mlp(coda.rms_norm(x, scale, epsilon=EPS), up, down, up_bias=up_bias, down_bias=down_bias)


def _layer_norm_mlp(x, scale, norm_bias, *arrays):
    norm = coda.layer_norm(x, scale, norm_bias, epsilon=EPS)
    return coda.mlp(norm, *arrays[:2], up_bias=arrays[2], down_bias=arrays[3])


def _experts(x, gate_up, down, row_scale):
    return coda.expert_mlp(x, gate_up, down, jnp.array([7, 0, 20], jnp.int32), row_scale=row_scale)


def _projection(x, scale, kernel, bias):
    return coda.norm_projection(coda.rms_norm(x, scale, epsilon=EPS), kernel, bias)


def _layer_norm_projection(x, scale, norm_bias, kernel, bias):
    return coda.norm_projection(coda.layer_norm(x, scale, norm_bias, epsilon=EPS), kernel, bias)


def _qkv(x, scale, kernel, cos, sin, q_scale=None, k_scale=None):
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "q_scale": q_scale, "k_scale": k_scale}
    return coda.qkv_projection(coda.rms_norm(x, scale, epsilon=EPS), kernel, cos, sin, **heads)


def _loss(x, scale, kernel, **options):
    labels = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % kernel.shape[1]
    h = x if scale is None else coda.rms_norm(x, scale, epsilon=EPS)
    return coda.linear_cross_entropy(h, kernel, labels, chunk_bytes=1, **options)


QKV = [(*LEAD, WIDTH), (WIDTH,), (WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), *[(LEAD[1], HEAD_DIM // 2)] * 2]
MLP = [(WIDTH, HIDDEN), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH,)]
CASES = {
    "gemm_of_a_row": _gemm(_row_and_sums, (1, HIDDEN), (*LEAD, 1)),
    "gemm_of_a_vector": _gemm(_vector, (HIDDEN,)),
    "gemm_of_heads": _gemm(_heads, (32,), (*LEAD, 32)),
    "gemm_recompute": _gemm(_row_and_sums, (1, HIDDEN), (*LEAD, 1), residuals="recompute"),
    "gemm_of_heads_recompute": _gemm(_heads, (32,), (*LEAD, 32), residuals="recompute"),
    "gated_mlp": (
        lambda x, scale, *weights: coda.gated_mlp(coda.rms_norm(x, scale, epsilon=EPS), *weights),
        [(*LEAD, WIDTH), (WIDTH,), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)],
    ),
    "mlp": (_mlp, [(*LEAD, WIDTH), (WIDTH,), *MLP]),
    "mlp_layer_norm": (_layer_norm_mlp, [(*LEAD, WIDTH), (WIDTH,), (WIDTH,), *MLP]),
    "expert_mlp": (_experts, [(WIDTH, 24), (3, 24, 2 * HIDDEN), (3, HIDDEN, 24), (WIDTH,)]),
    "norm_projection": (_projection, [(*LEAD, WIDTH), (WIDTH,), (WIDTH, HIDDEN), (HIDDEN,)]),
    "norm_projection_layer_norm": (
        _layer_norm_projection,
        [(*LEAD, WIDTH), (WIDTH,), (WIDTH,), (WIDTH, HIDDEN), (HIDDEN,)],
    ),
    "qkv_projection": (_qkv, QKV),
    "qkv_projection_norms": (_qkv, [*QKV, (HEAD_DIM,), (HEAD_DIM,)]),
    "linear_cross_entropy": (_loss, [(*LEAD, WIDTH), (WIDTH,), (WIDTH, 136)]),
    "linear_cross_entropy_options": (
        lambda x, kernel: _loss(x, None, kernel, label_smoothing=0.1, z_loss=0.01, soft_cap=20.0),
        [(*LEAD, WIDTH), (WIDTH, 136)],
    ),
}


def _gradient(run):
    def total(*arrays):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(run(*arrays)))

    return lambda *arrays: jax.value_and_grad(total, tuple(range(len(arrays))))(*arrays)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradient(name):
    run, shapes = CASES[name]
    arrays = [normal(i, *shape) for i, shape in enumerate(shapes)]
    with jax.numpy_rank_promotion("raise"):
        jax.jit(run)(*arrays)
        jax.jit(_gradient(run))(*arrays)


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_lowering_for_a_gpu(name):
    run, shapes = CASES[name]
    arrays = [
        normal(i, *shape).astype(jnp.bfloat16 if len(shape) > 1 else jnp.float32) for i, shape in enumerate(shapes)
    ]
    with jax.numpy_rank_promotion("raise"):
        jax.jit(_gradient(run)).trace(*arrays).lower(lowering_platforms=("cuda",))


def test_promotion_inside_an_epilogue_raises_jax_error():
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match=r"could not be broadcast.*rank"):
        run, shapes = _gemm(lambda acc, row: acc + row, (HIDDEN,))
        run(*(normal(i, *shape) for i, shape in enumerate(shapes)))
