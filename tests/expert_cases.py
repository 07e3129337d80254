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


def plain(x, w_gate_up, w_down, row_scale=None, *, sizes, activation=jax.nn.silu):
    """A loop over the experts, in the arguments' own dtypes."""
    outputs, end = [], 0
    for gate_up, down, size in zip(w_gate_up, w_down, sizes, strict=True):
        start, end = end, end + size
        gate, up = jnp.split(x[start:end] @ gate_up, 2, axis=-1)
        y = (activation(gate) * up) @ down
        outputs.append(y if row_scale is None else (y * row_scale[start:end, None]).astype(x.dtype))
    return jnp.concatenate([*outputs, jnp.zeros_like(x[end:])])


def experts(x, w_gate_up, w_down, row_scale=None, *, sizes, **options):
    sizes = jnp.asarray(sizes, jnp.int32)
    return coda.expert_mlp(x, w_gate_up, w_down, sizes, row_scale=row_scale, **options)


def compare(function, given, sizes, **options):
    """Values and every gradient; the cotangent too is NaN in rows of no expert."""
    ct = normal(4, *given[0].shape).at[sum(sizes) :].set(jnp.nan)
    reference = functools.partial(plain, sizes=sizes, **options)
    got, rough = pullback(function, given, [ct])(), pullback(reference, given, [ct])()
    with jax.enable_x64(True):
        exact = pullback(reference, [jnp.asarray(as_float64(x)) for x in given], [as_float64(ct)])()
    names = ["y", "dx", "dw_gate_up", "dw_down", "drow_scale"]
    for name, *each in zip(names[: 1 + len(given)], *map(jax.tree.leaves, (got, exact, rough)), strict=True):
        x, e, r = each
        tolerance.check(x, e, r, dtype=r.dtype, name=name)
        if name in ("y", "dx", "drow_scale"):
            assert not np.asarray(x[sum(sizes) :]).any(), f"{name}: rows of no expert are not zeros"
