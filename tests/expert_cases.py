"""The feed-forward of experts, a loop over them, and their comparison in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import coda_jax as coda
from tests import tolerance
from tests.chain_cases import normal
from tests.gemm_cases import as_float64, pullback

ROWS, WIDTH, HIDDEN = 37, 24, 16
SIZES = {
    "unaligned": (7, 0, 1, 12, 9),
    "all rows": (5, 11, 2, 18, 1),
    "first and last empty": (0, 3, 30, 0),
    "one expert": (33,),
    "one of four": (0, 0, 37, 0),
    "no rows": (0, 0, 0),
}


def arguments(dtype, sizes, rows=ROWS, width=WIDTH, hidden=HIDDEN, poison=True):
    """x, w_gate_up, w_down, row_scale; NaN in rows of no expert."""
    x, scale = normal(0, rows, width), 1 + 0.3 * normal(1, rows)
    gate_up = normal(2, len(sizes), width, 2 * hidden) / width**0.5
    down = normal(3, len(sizes), hidden, width) / hidden**0.5
    if poison:
        x, scale = (a.at[sum(sizes) :].set(jnp.nan) for a in (x, scale))
    return [*(array.astype(dtype) for array in (x, gate_up, down)), scale]


def biases(sizes, width=WIDTH, hidden=HIDDEN, dtype=jnp.float32):
    """up_bias and down_bias; NaN in those of experts without rows."""
    used = jnp.asarray(sizes)[:, None] > 0
    arrays = (normal(5, len(sizes), 2 * hidden), normal(6, len(sizes), width))
    return [jnp.where(used, x, jnp.nan).astype(dtype) for x in arrays]


def clipped(gate, up):
    """gpt-oss's, with clips that many elements reach."""
    gate, up = jnp.minimum(gate, 0.7), jnp.clip(up, -0.7, 0.7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def plain(x, w_gate_up, w_down, row_scale=None, up_bias=None, down_bias=None, *, sizes, activation=jax.nn.silu):
    """A loop over the experts, in the arguments' own dtypes; `clipped` is of gate and up."""
    outputs, end = [], 0
    for i, size in enumerate(sizes):
        start, end = end, end + size
        z = x[start:end] @ w_gate_up[i]
        z = z if up_bias is None else (z + up_bias[i]).astype(x.dtype)
        gate, up = jnp.split(z, 2, axis=-1)
        hidden = clipped(gate, up) if activation is clipped else activation(gate) * up
        y = hidden @ w_down[i]
        y = y if down_bias is None else (y + down_bias[i]).astype(x.dtype)
        outputs.append(y if row_scale is None else (y * row_scale[start:end, None]).astype(x.dtype))
    return jnp.concatenate([*outputs, jnp.zeros_like(x[end:])])


def experts(x, w_gate_up, w_down, row_scale=None, up_bias=None, down_bias=None, *, sizes, **options):
    sizes = jnp.asarray(sizes, jnp.int32)
    if options.get("activation") is clipped:
        options["activation"] = coda.gated(clipped, of_both=True)
    options |= {"row_scale": row_scale, "up_bias": up_bias, "down_bias": down_bias}
    return coda.expert_mlp(x, w_gate_up, w_down, sizes, **options)


def compare(function, given, sizes, **options):
    """Values and every gradient; the cotangent too is NaN in rows of no expert."""
    ct = normal(4, *given[0].shape).at[sum(sizes) :].set(jnp.nan)
    reference = functools.partial(plain, sizes=sizes, **options)
    got, rough = pullback(function, given, [ct])(), pullback(reference, given, [ct])()
    with jax.enable_x64(True):
        exact = pullback(reference, [jnp.asarray(as_float64(x)) for x in given], [as_float64(ct)])()
    names = ["y", "dx", "dw_gate_up", "dw_down", "drow_scale", "dup_bias", "ddown_bias"]
    for name, *each in zip(names[: 1 + len(given)], *map(jax.tree.leaves, (got, exact, rough)), strict=True):
        x, e, r = each
        tolerance.check(x, e, r, dtype=r.dtype, name=name)
        if name in ("y", "dx", "drow_scale"):
            assert not np.asarray(x[sum(sizes) :]).any(), f"{name}: rows of no expert are not zeros"
