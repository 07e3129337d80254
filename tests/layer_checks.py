"""Judges a module by the tolerance rule: its output and the gradient of its input and of every parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tolerance import check


def state_dict(module: nnx.Module) -> dict[str, Any]:
    """The module's parameters as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def apply(module: nnx.Module, params: dict[str, Any], call: Callable[..., Any], *args: Any) -> Any:
    """call(module with these parameters, *args)."""
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)
    return call(nnx.merge(graphdef, state), *args)


def check_module(
    module: nnx.Module,
    call: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    *args: jax.Array,
    by_rows: bool = False,
) -> None:
    """Judges call(module, *args) and its gradients against plain(params, *args).

    Floating args have the working dtype and are differentiated; plain follows the dtype of what it is given, here the
    working dtype and float64. by_rows judges the output row by row.
    """
    params = state_dict(module)
    out_type = jax.eval_shape(plain, params, *args)
    cotangent = jax.random.normal(jax.random.key(7), out_type.shape, jnp.float32).astype(out_type.dtype)
    out, got = _with_gradients(lambda p, *a: apply(module, p, call, *a), params, args, cotangent)
    rough_out, rough = _with_gradients(plain, params, args, cotangent)
    with jax.enable_x64(True):
        exact_out, exact = _with_gradients(plain, *jax.tree.map(_to_float64, (params, args, cotangent)))

    def rows(x: jax.Array) -> np.ndarray:
        return np.asarray(x).reshape(-1, x.shape[-1])

    check(rows(out), rows(exact_out), rows(rough_out), dtype=rough_out.dtype, by_rows=by_rows)
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), e, r in zip(paths, jax.tree.leaves(exact), jax.tree.leaves(rough), strict=True):
        check(x, e, r, dtype=r.dtype, name=f"gradient{jax.tree_util.keystr(path)}")


def _to_float64(x: jax.Array) -> jax.Array:
    return jnp.asarray(np.asarray(x).astype(np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _with_gradients(
    function: Callable[..., jax.Array], params: Any, args: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, Any]:
    """function(params, *args) and its pullback of the cotangent to params and the floating args."""
    floating = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    # These run once: optimising them takes longer than running them.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(params: Any, args: Any, cotangent: jax.Array) -> tuple[jax.Array, Any]:
        def of_floating(params: Any, *values: jax.Array) -> jax.Array:
            full = list(args)
            for i, value in zip(floating, values, strict=True):
                full[i] = value
            return function(params, *full)

        out, vjp = jax.vjp(of_floating, params, *(args[i] for i in floating))
        return out, vjp(cotangent)

    return both(params, args, cotangent)
