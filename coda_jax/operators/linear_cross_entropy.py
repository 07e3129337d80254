"""The loss of a language model: softmax cross-entropy of a projection to the vocabulary, without all of its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, of_rows
from coda_jax.operators.loss_head import Hidden, LossHead, columns_of
from coda_jax.primitives.arguments import check_floats, resolve_dtype
from coda_jax.primitives.mesh_types import explicit_axes, explicit_sharding, vary, varying_axes
from coda_jax.primitives.reverse_mode import differentiable
from coda_jax.primitives.row_shards import Columns, on_row_shards

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    transpose_w: bool = False,
    chunk_bytes: int | None = None,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of softmax(x w) with integer labels, without an array of all logits; x may be a norm.

        z = x w,  or soft_cap * tanh(that / soft_cap)        lse[m] = log(sum_v exp(z[m, v]))
        loss[m] = lse - (1 - label_smoothing) z[m, labels[m]] - label_smoothing mean_v z[m, v] + z_loss lse^2

    Tokens are worked on in chunks. Where no gradient is asked for, one product a chunk gives the three sums over the
    vocabulary in its epilogue, and logits never exist. Where one is, the chunk's logits are kept for a moment, rounded;
    one elementwise pass turns them into their cotangent, and two products make the chunk's dx and add to dw in
    place, in float32. So the gradients are formed in the forward pass, with the weights; the backward pass scales
    them by the loss's cotangent. That of reduction="none" is not known in the forward pass: there the backward
    pass computes the logits again, four products instead of three.

    A norm is applied on its way into the product, not in the epilogue as elsewhere: with V > D a pass over (M, D) is
    cheaper than one over w, where the scale would be folded, and as accurate.

    Over a device mesh each device works on chunks of its own tokens. Automatic axes that cut the vocabulary leave each
    device its part of w: sums over the vocabulary, vectors, are finished over them in each chunk, and dx once. Over
    explicit axes and those that cut tokens w is gathered, once, in the compute dtype.

    Args:
      x: (..., D), what is projected, or a DeferredNorm of it.
      w: (D, V); with transpose_w (V, D), as of a tied embedding.
      labels: (...) integers from 0 to V - 1, or ignore_index. For any other label, loss and gradient are NaN.
      weights: (...), of the tokens; default 1. They receive their gradient.
      reduction: "mean": sum(weights * loss) / sum(weights), and 0 where nothing has weight; "sum": sum(weights * loss);
        "none": weights * loss.
      ignore_index: tokens with this label have weight 0 (their x must be finite all the same); None: there is none.
      label_smoothing: in [0, 1), the part of the target distribution that is spread over all of the vocabulary.
      z_loss: coefficient of lse^2, which keeps the logits from drifting.
      soft_cap: bound of the logits, as in Gemma 2; None: none.
      chunk_bytes: the most that a chunk's logits take; they are those of a multiple of 128 tokens, at least 128. The
        default is 2^29, 2048 tokens for V = 128256 and bfloat16, and half of it where a copy of w in the
        compute dtype stands beside them. Adding to dw costs 5 % of its product with 2048 tokens and 40 % with
        1024 (H200). A symbolic number of tokens is one chunk.
      dtype: compute dtype, of the products' inputs and the chunk's logits, but that these are float32 where it is
        float16, beyond whose range, 65504, logits without a norm may be; default the promotion of x and w.
      implementation: as in `gemm`.

    Returns:
      The loss, float32, () or with reduction="none" (...); and the sum of the weights, () float32. Over
      devices or microbatches the mean is sum(losses) / sum(weight sums), of reduction="sum".

    Raises:
      TypeError: labels that are no integers, or a floating array or dtype that is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or an option out of its range.

    Numerics: lse and the label's logit come from the float32 accumulator, the other logits of the gradient are rounded:
    in bfloat16 a probability whose logit is 20 is off by up to 6 %. dx and dw leave it in float32 where x
    or w are. In 16-bit dtypes a vocabulary that is no multiple of 8 is padded to one of 128, in a copy of w.
    Source: the algebra is CODA's (arXiv 2605.19269), the order of the products that of Liger's fused linear
    cross-entropy (arXiv 2410.10989).
    """
    _check_arrays(x, w, labels, weights, transpose_w)
    array = x.x if isinstance(x, DeferredNorm) else x
    dtype = resolve_dtype("linear_cross_entropy", dtype, array, w)
    _check_options(reduction, label_smoothing, z_loss, soft_cap, chunk_bytes)
    vocabulary = w.shape[0 if transpose_w else 1]
    lead, width = array.shape[:-1], array.shape[-1]
    h = of_rows(x) if isinstance(x, DeferredNorm) else x.reshape(-1, width)
    labels = labels.reshape(-1).astype(jnp.promote_types(labels.dtype, jnp.int32))
    weights = jnp.ones_like(labels, jnp.float32) if weights is None else weights.reshape(-1).astype(jnp.float32)
    ignored = jnp.zeros_like(labels, bool) if ignore_index is None else labels == ignore_index
    known = ignored | (labels >= 0) & (labels < vocabulary)
    weights = jnp.where(known, jnp.where(ignored, 0.0, weights), jnp.nan)
    labels = labels.astype(jnp.int32)  # not before: a label beyond int32 is not to become another

    total = jnp.sum(weights)
    columns = columns_of(vocabulary, dtype)
    if chunk_bytes is None:
        chunk_bytes = 2**29 if w.dtype == dtype and columns == vocabulary else 2**28
    head = LossHead(
        vocabulary=vocabulary,
        columns=columns,
        chunk_bytes=chunk_bytes,
        transpose_w=transpose_w,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        soft_cap=None if soft_cap is None else float(soft_cap),
        dtype=dtype,
        implementation=implementation,
        total=vocabulary,
    )
    if reduction == "none":
        return (weights * _on_shards(head, _each, h, w, labels)).reshape(lead), total
    loss = jnp.sum(_on_shards(head, _summed, h, w, labels, weights))
    return loss / jnp.where(total == 0, 1.0, total) if reduction == "mean" else loss, total


def _on_shards(head: LossHead, f: Callable[..., jax.Array], h: Hidden, w: jax.Array, *others: jax.Array) -> jax.Array:
    """f(head, h, w, *others), on each shard where tokens are sharded over explicit mesh axes.

    A chunk of all tokens would be the tokens of a few devices. The other explicit axes have copies of everything.
    """

    def run(*arguments: Any) -> jax.Array:
        axes = varying_axes(*jax.tree.leaves(arguments))
        return f(head, *jax.tree.map(lambda a: vary(axes, a)[0], arguments))

    arguments = (h, w, *others)
    sharding = explicit_sharding(h.x if isinstance(h, DeferredNorm) else h)
    names = None if sharding is None else sharding.spec[0]
    if sharding is None or names is None:
        return run(*arguments)
    mesh, rows = sharding.mesh, jax.P(names)
    of_h: Any = rows
    if isinstance(h, DeferredNorm):
        none = jax.P()
        of_h = dataclasses.replace(jax.tree.map(lambda _: rows, h), scale=none, bias=None if h.bias is None else none)
    specs = (of_h, jax.P(), *(rows for _ in others))
    on_shards = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=specs,
        out_specs=rows,
        axis_names=set(explicit_axes(mesh)),
    )

    def placed(x: jax.Array, spec: jax.P) -> jax.Array:
        return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))

    return on_shards(*jax.tree.map(placed, arguments, specs))


def _differentiable(head: LossHead, *rules: Callable[..., Any]) -> Callable[..., jax.Array]:
    return differentiable("linear_cross_entropy", *(partial(rule, head) for rule in rules))


def _summed(head: LossHead, *arguments: Any) -> jax.Array:
    """sum(weights * losses), (1,); its gradients are formed in the forward pass."""
    return _differentiable(head, _summed_value, _summed_forward, _summed_backward)(*arguments)


def _summed_value(head: LossHead, h: Hidden, w: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(weights * _losses(head, h, w, labels), keepdims=True)


def _summed_forward(
    head: LossHead, h: Hidden, w: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    losses, dh, dw = _losses_and_gradients(head, h, w, labels, weights)
    return jnp.sum(weights * losses, keepdims=True), (h, w, losses, dh, dw)


def _summed_backward(head: LossHead, kept: Any, dloss: jax.Array) -> tuple[Any, ...]:
    h, w, losses, dh, dw = kept
    of_matrices = dloss[:, None]
    dh = _through_norm(head, h, of_matrices * dh.astype(jnp.float32))
    return dh, (of_matrices * dw).astype(w.dtype), None, dloss * losses


def _each(head: LossHead, *arguments: Any) -> jax.Array:
    """The losses (M,); their gradients are formed in the backward pass, from logits computed again."""
    return _differentiable(head, _each_value, _each_forward, _each_backward)(*arguments)


def _each_value(head: LossHead, h: Hidden, w: jax.Array, labels: jax.Array) -> jax.Array:
    return _losses(head, h, w, labels)


def _each_forward(head: LossHead, h: Hidden, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    return _each(head, h, w, labels), (h, w, labels)


def _each_backward(head: LossHead, kept: Any, dlosses: jax.Array) -> tuple[Any, ...]:
    h, w, labels = kept
    _, dh, dw = _losses_and_gradients(head, h, w, labels, dlosses)
    return _through_norm(head, h, dh.astype(jnp.float32)), dw.astype(w.dtype), None


def _losses(head: LossHead, h: Hidden, w: jax.Array, labels: jax.Array) -> jax.Array:
    (losses,) = on_row_shards(
        head.losses,
        h,
        w.astype(head.dtype),
        labels,
        rows=(_rows_of(h), False, True),
        sums=(False,),
        columns=Columns(1, None, _vocabulary_axis(head), lambda *cut: head.of_part(*cut).losses),
    )
    return losses


def _losses_and_gradients(
    head: LossHead, h: Hidden, w: jax.Array, labels: jax.Array, weights: jax.Array
) -> list[jax.Array]:
    # w is cast here: what is gathered of it has the compute dtype.
    return on_row_shards(
        head.losses_and_gradients,
        h,
        w.astype(head.dtype),
        labels,
        weights,
        rows=(_rows_of(h), False, True, True),
        sums=(False, False, True),
        columns=Columns(1, 2, _vocabulary_axis(head), lambda *cut: head.of_part(*cut).losses_and_gradients),
    )


def _vocabulary_axis(head: LossHead) -> int:
    return 0 if head.transpose_w else 1


def _rows_of(h: Hidden) -> Any:
    """Which of its arrays have a row for each token."""
    if not isinstance(h, DeferredNorm):
        return True
    return dataclasses.replace(jax.tree.map(lambda _: True, h), scale=False, bias=None if h.bias is None else False)


def _through_norm(head: LossHead, h: Hidden, dh: jax.Array) -> Hidden:
    """The cotangent of h from that of what is projected."""
    formed, pullback = jax.vjp(head.normalize, h)
    (cotangent,) = pullback(dh.astype(formed.dtype))
    return cotangent


def _check_arrays(
    x: jax.Array | DeferredNorm, w: jax.Array, labels: jax.Array, weights: jax.Array | None, transpose_w: bool
) -> None:
    if isinstance(x, DeferredNorm):
        check_arrays("linear_cross_entropy", x)
        x = x.x
    check_floats("linear_cross_entropy", x=x, w=w)
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.floating):
        check_floats("linear_cross_entropy", weights=weights)
    width = x.shape[-1]
    for name, array in (("labels", labels), ("weights", weights)):
        if array is not None and array.shape != x.shape[:-1]:
            raise ValueError(
                f"linear_cross_entropy: {name} has shape {array.shape}; beside x {x.shape} it must be {x.shape[:-1]}"
            )
    if w.ndim != 2 or w.shape[1 if transpose_w else 0] != width or 0 in w.shape:
        must = f"(V, {width})" if transpose_w else f"({width}, V)"
        raise ValueError(
            f"linear_cross_entropy: w has shape {w.shape}; beside x {x.shape} it must be {must}"
            + (" with transpose_w" if transpose_w else "")
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"linear_cross_entropy: labels have dtype {labels.dtype}; they must be integers")


def _check_options(
    reduction: str, label_smoothing: float, z_loss: float, soft_cap: float | None, chunk_bytes: int | None
) -> None:
    for name, value, fits, rule in (
        ("reduction", reduction, reduction in REDUCTIONS, f"one of {', '.join(map(repr, REDUCTIONS))}"),
        ("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "in [0, 1)"),
        ("z_loss", z_loss, 0 <= z_loss < float("inf"), "0 or a positive number"),
        ("soft_cap", soft_cap, soft_cap is None or 0 < soft_cap < float("inf"), "a positive number or None"),
        ("chunk_bytes", chunk_bytes, chunk_bytes is None or chunk_bytes > 0, "positive"),
    ):
        if not fits:
            raise ValueError(f"linear_cross_entropy: {name} = {value!r}; it must be {rule}")
