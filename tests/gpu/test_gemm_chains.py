"""The chains around a deferred norm on the kernel, against the textbook."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.operators.head.shifted_heads import EntropyHead
from tests import expert_cases, logprob_cases, loss_cases
from tests.chain_cases import compare, mlp, mlp_arguments, plain_mlp, plain_qkv, qkv, qkv_arguments
from tests.test_norm_chains import CHAINS


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(33, 40, 24), (1160, 520, 1064)])
def test_gated_mlp(activation, dtype, rows, width, hidden):
    chain = functools.partial(mlp, activation=activation, implementation="cuda")
    plain = functools.partial(plain_mlp, activation=activation)
    compare(chain, plain, mlp_arguments(dtype, (rows,), width, hidden))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("sizes", "rows", "width", "hidden"),
    [
        ((7, 0, 1, 12, 9), 37, 40, 24),
        ((301, 0, 513, 129, 1, 200), 1160, 520, 264),
        ((0, 0, 2048, 0), 2048, 256, 512),
        (tuple(range(64)), 2048, 128, 128),
    ],
)
def test_expert_mlp(sizes, rows, width, hidden, dtype):
    given = expert_cases.arguments(dtype, sizes, rows, width, hidden)
    expert_cases.compare(functools.partial(expert_cases.experts, sizes=sizes, implementation="cuda"), given, sizes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("lead", "width"), [((3, 11), 40), ((4, 301), 520)])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 96, 128, 256])
def test_qkv_projection(dtype, lead, width, head_dim):
    compare(functools.partial(qkv, implementation="cuda"), plain_qkv, qkv_arguments(dtype, lead, width, head_dim))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("lead", [(33,), (4, 301)])
@pytest.mark.parametrize("chain, plain, make", CHAINS.values(), ids=CHAINS)
def test_layer_norm_and_biases(chain, plain, make, lead, dtype):
    compare(functools.partial(chain, implementation="cuda"), plain, make(dtype, lead))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(300, 40, 131), (1160, 520, 5000), (640, 256, 50257)])
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "none", "soft_cap": 3.0},
        {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-2, "transpose_w": True},
    ],
    ids=lambda options: options["reduction"],
)
def test_linear_cross_entropy(options, tokens, width, vocabulary, dtype):
    transposed = options.get("transpose_w", False)
    args = loss_cases.arguments(dtype, (tokens,), width, vocabulary, transposed)
    loss_cases.compare(functools.partial(loss_cases.loss, implementation="cuda", **options), args, **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("vocabulary", [131, 5000])
@pytest.mark.parametrize(
    "left_out, options",
    [
        (("low rank", "temperature", "mask"), {}),
        (("low rank",), {"soft_cap": 3.0, "transpose_w": True}),
        ((), {"soft_cap": 5.0, "candidates": True}),
    ],
    ids=["one label", "soft cap, temperature, mask", "everything, candidates"],
)
def test_token_logprobs(left_out, options, vocabulary, dtype):
    options = dict(options)
    candidates, transpose_w = options.pop("candidates", False), options.get("transpose_w", False)
    args = logprob_cases.arguments(dtype, vocabulary, candidates=candidates, transpose_w=transpose_w)
    names = ("x", "scale", "w", "low rank", "low rank", "temperature", "labels", "mask")
    args = [None if name in left_out else x for name, x in zip(names, args, strict=True)]
    chain = functools.partial(logprob_cases.logprobs, implementation="cuda", **options)
    logprob_cases.compare(chain, functools.partial(logprob_cases.plain, **options), args)


@pytest.mark.parametrize("lost", [None, 90.0, -60.0, 1e30])
def test_entropies_of_sums(lost):
    """Twenty runs are the same bits; where one token's sums leave their range, those of the head that reads logits."""
    x, w, labels = logprob_cases.arguments_with_logits(1, 1160, 520, 5000)
    x = x if lost is None else x.at[1000, 0].set(lost)

    def run():
        found = jax.jit(lambda *a: coda.token_logprobs(*a, entropy=True, implementation="cuda"))
        return [np.asarray(found(x, w, labels)) for _ in range(20)]

    got = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EntropyHead, "of", lambda head, _: head)
        want = run()[0]
    for one in got:
        np.testing.assert_array_equal(one, got[0] if lost is None else want)
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parameters", [jnp.bfloat16, jnp.float32])
def test_memory_of_the_loss_head(parameters):
    """16384 tokens, a vocabulary of 128256: what is beside arguments, results and the float32 accumulator."""
    tokens, width, vocabulary = 16384, 2048, 128256
    types = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, width), jnp.bfloat16),
            ((width,), parameters),
            ((width, vocabulary), parameters),
            ((tokens,), jnp.int32),
            ((tokens,), jnp.float32),
        )
    ]

    def loss(*arguments):
        return loss_cases.loss(*arguments, dtype=jnp.bfloat16, implementation="cuda")[0]

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*types).compile()
    accumulator = 4 * width * vocabulary
    text = compiled.as_text()
    copies = [line for line in text.splitlines() if re.search(rf"= f32\[{width},{vocabulary}\]\S* copy\(", line)]
    assert "coda_gemm" in text and not copies, copies
    assert compiled.memory_analysis().temp_size_in_bytes < accumulator + 800_000_000
