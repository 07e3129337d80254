"""The loss head against the textbook: losses and every cotangent, chunks, options, memory, transformations."""

import functools

import jax.numpy as jnp
import pytest

from tests.loss_cases import arguments, compare, loss

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Three chunks, the last of which is shorter. 16-bit logits of 131 columns are padded.
CASES = {
    "mean": (BF16, 131, {}),
    "mean_float32": (F32, 131, {"transpose_kernel": True}),
    "mean_tied": (F16, 131, {"transpose_kernel": True}),
    "none": (BF16, 136, {"reduction": "none", "soft_cap": 3.0}),
    "none_tied": (F32, 131, {"reduction": "none", "z_loss": 1e-2, "transpose_kernel": True}),
    "sum": (F16, 136, {"reduction": "sum", "label_smoothing": 0.1}),
    "everything": (BF16, 131, {"label_smoothing": 0.2, "z_loss": 1e-2, "soft_cap": 5.0, "transpose_kernel": True}),
    "everything_float32": (F32, 136, {"label_smoothing": 0.2, "z_loss": 1e-2, "soft_cap": 5.0}),
}


@pytest.mark.parametrize("dtype, vocabulary, options", CASES.values(), ids=CASES)
def test_against_the_textbook(dtype, vocabulary, options):
    args = arguments(dtype, vocabulary=vocabulary, transpose_kernel=options.get("transpose_kernel", False))
    compare(functools.partial(loss, **options), args, **{"reduction": "mean", **options})
