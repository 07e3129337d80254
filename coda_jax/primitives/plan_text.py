"""A text in a program for `coda.explain`: an identity on an array, which costs nothing at run time."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

coda_plan_text_p = core.Primitive("coda_plan_text")


def with_plan_text(x: jax.Array, text: str) -> jax.Array:
    """x, with a text that travels with the program: through jit, grad, vmap and remat."""
    out: jax.Array = coda_plan_text_p.bind(x, text=text)
    return out


def _same(x: Any, *, text: str) -> Any:
    return x


def _batch(xs: Any, axes: Any, *, text: str) -> Any:
    return coda_plan_text_p.bind(*xs, text=text), axes[0]


coda_plan_text_p.def_impl(_same)
coda_plan_text_p.def_abstract_eval(_same)
ad.deflinear2(coda_plan_text_p, lambda ct, _, **__: [ct])
batching.primitive_batchers[coda_plan_text_p] = _batch
mlir.register_lowering(coda_plan_text_p, lambda _, x, **__: [x])
