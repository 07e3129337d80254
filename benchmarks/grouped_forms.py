"""Ways in which a grouped product and an expert's MLP are written in JAX; each is a `Form`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks.grouped import Product
from flax_layers.moe import sorted_experts

ROWS_OF_GROUPS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@dataclasses.dataclass(frozen=True)
class Form:
    """Grouped products as one library has them, on rows that are sorted by group.

    Attributes:
      name: in tables, and of XLA modules.
      multiply: (a (R, K), b (G, K, N) or (G, N, K), sizes (G,), transpose_b) -> (R, N).
      contract: (a (R, K), b (R, N), sizes (G,)) -> (G, K, N).
      gated: (a (R, K), b (G, K, 2, I), sizes) -> silu(gate) * up, (R, I). Default: `multiply`, and XLA's pass.
      mlp: (x (R, H), w_gate_up (G, H, 2, I), w_down (G, I, H), sizes) -> (R, H). Default: `gated`, then `multiply`.
      layer: as the function `layer` of this module gives it, which is the default.
      only_equal: whether groups are taken to be equal, whatever the sizes say.
      compiler_options: of XLA, for its programs.
      version: of another library, for the results.
      includes: what the figure of another library includes.
    """

    name: str
    multiply: Callable[..., jax.Array]
    contract: Callable[..., jax.Array]
    gated: Callable[..., jax.Array] | None = None
    mlp: Callable[..., jax.Array] | None = None
    layer: Callable[..., jax.Array] | None = None
    only_equal: bool = False
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: str = ""
    includes: str = ""

    def product(self, product: Product) -> Callable[..., jax.Array]:
        """f(a, b, sizes) of one product."""
        if product.contraction:
            return self.contract

        def run(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
            if product.gated:
                return self.swiglu(a, b.reshape(*b.shape[:2], 2, -1), sizes)
            return self.multiply(a, b, sizes, transpose_b=product.transpose_b)

        return run

    def swiglu(self, x: jax.Array, w_gate_up: jax.Array, sizes: jax.Array) -> jax.Array:
        if self.gated is not None:
            return self.gated(x, w_gate_up, sizes)
        groups, width, _, hidden = w_gate_up.shape
        gate, up = jnp.split(self.multiply(x, w_gate_up.reshape(groups, width, 2 * hidden), sizes), 2, axis=1)
        return jax.nn.silu(gate) * up

    def experts(self, x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, sizes: jax.Array) -> jax.Array:
        """The experts' MLPs: (silu(gate) * up) w_down, with gate and up the halves of x w_gate_up, (R, H)."""
        if self.mlp is not None:
            return self.mlp(x, w_gate_up, w_down, sizes)
        return self.multiply(self.swiglu(x, w_gate_up, sizes), w_down, sizes)

    @property
    def whole_layer(self) -> Callable[..., jax.Array]:
        """f(x, weights, w_gate_up, w_down, ids), as `layer` of this module."""
        return self.layer or layer(self)


def gradients(form: Form) -> Callable[..., Any]:
    """f(x, w_gate_up, w_down, dy, sizes) -> the MLPs' result, and the gradients of x and both weights."""

    def run(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, dy: jax.Array, sizes: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda *arrays: form.experts(*arrays, sizes), x, w_gate_up, w_down)
        return y, pullback(dy)

    return run


def layer(form: Form, dtype: Any = None) -> Callable[..., jax.Array]:
    """f(x, weights, w_gate_up, w_down, ids) -> y (T, H): each token's rows to its experts, weighted, and summed.

    x (T, H); weights (T, top_k) float32 and ids (T, top_k) are the router's. Rows are sorted by expert, gathered, and
    come back by the inverse permutation. `dtype` is that of the weighted sum; default x's.
    """

    def run(x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, ids: jax.Array) -> jax.Array:
        tokens, top_k = ids.shape
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=w_down.shape[0]).astype(jnp.int32)
        y = form.experts(x[order // top_k], w_gate_up, w_down, sizes)
        y = y.astype(dtype or y.dtype)
        y *= weights.reshape(-1)[order, None].astype(y.dtype)
        return y[jnp.argsort(order)].reshape(tokens, top_k, -1).sum(axis=1).astype(x.dtype)

    return run


def layer_gradients(form: Form) -> Callable[..., Any]:
    """f(x, weights, w_gate_up, w_down, dy, ids) -> the layer's result, and the gradients of the first four."""

    def run(
        x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, dy: jax.Array, ids: jax.Array
    ) -> Any:
        y, pullback = jax.vjp(lambda *arrays: form.whole_layer(*arrays, ids), x, weights, w_gate_up, w_down)
        return y, pullback(dy)

    return run


def with_gradient(multiply: Callable[..., jax.Array], contract: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A `Form.multiply` of a library that has no derivatives: two more of its products."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def product(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool) -> jax.Array:
        return multiply(a, b, sizes, transpose_b=transpose_b)

    def forward(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool) -> Any:
        return product(a, b, sizes, transpose_b), (a, b, sizes)

    def backward(transpose_b: bool, kept: Any, dy: jax.Array) -> Any:
        a, b, sizes = kept
        db = contract(dy, a, sizes) if transpose_b else contract(a, dy, sizes)
        return multiply(dy, b, sizes, transpose_b=not transpose_b), db, None

    product.defvjp(forward, backward)
    return lambda a, b, sizes, transpose_b=False: product(a, b, sizes, transpose_b)


# --- plain JAX ---


def _ragged_dot(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
    return jax.lax.ragged_dot(a, b.swapaxes(1, 2) if transpose_b else b, sizes)


def _ragged_contraction(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot_general(a, b, sizes, ROWS_OF_GROUPS)


def _grouped(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows as (G, R / G, ...), for groups that are equal."""
    return x.reshape(sizes.size, -1, x.shape[-1])


def _einsum(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
    subscripts = "gmk,gnk->gmn" if transpose_b else "gmk,gkn->gmn"
    y = jnp.einsum(subscripts, _grouped(a, sizes), b)
    return y.reshape(a.shape[0], -1)


def _einsum_contraction(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    return jnp.einsum("grm,grn->gmn", _grouped(a, sizes), _grouped(b, sizes))


XLA = Form("xla", _ragged_dot, _ragged_contraction)
# The same by cuDNN, which XLA takes for it if it is asked to.
XLA_CUDNN = dataclasses.replace(
    XLA, name="xla_cudnn", compiler_options={"xla_gpu_experimental_use_ragged_dot_fusion": True}
)
XLA_BATCHED = Form("xla_batched", _einsum, _einsum_contraction, only_equal=True)


# --- ours ---


def swiglu(acc: jax.Array) -> jax.Array:
    """Epilogue: silu(gate) * up, the halves of the columns."""
    gate, up = jnp.split(acc, 2, axis=1)
    return jax.nn.silu(gate) * up


def batched(config: Any = None, gemm: Callable[..., Any] = coda.gemm) -> Form:
    """`jax.vmap` of `coda.gemm` over groups that are equal: whose speed a tile grouped products are held against."""

    def multiply(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
        product = functools.partial(gemm, transpose_b=transpose_b, config=config)
        return jax.vmap(product)(_grouped(a, sizes), b).reshape(a.shape[0], -1)

    def gated(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        product = functools.partial(gemm, epilogue=swiglu, config=config)
        flat = b.reshape(*b.shape[:2], -1)
        return jax.vmap(product)(_grouped(a, sizes), flat).reshape(a.shape[0], -1)

    def contract(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        product = functools.partial(gemm, transpose_a=True, config=config)
        return jax.vmap(product)(_grouped(a, sizes), _grouped(b, sizes))

    return Form("coda_batched", multiply, contract, gated, only_equal=True)


def ours(config: Any = None, implementation: str = "auto") -> Form:
    """`coda.ragged_gemm` and `coda.ragged_contraction`."""
    options = {"config": config, "implementation": implementation}

    def multiply(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
        return coda.ragged_gemm(a, b, sizes, transpose_b=transpose_b, **options)

    def gated(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return coda.ragged_gemm(a, b, sizes, epilogue=swiglu, **options)

    def contract(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return coda.ragged_contraction(a, b, sizes, **options)

    return Form("coda", multiply, contract, gated)


def expert_mlp() -> Form:
    """`coda.expert_mlp`; as a layer within `flax_layers.moe.sorted_experts`, the routing weights in its epilogue."""

    def whole(x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, ids: jax.Array) -> jax.Array:
        def experts(rows: jax.Array, row_scale: jax.Array, sizes: jax.Array) -> jax.Array:
            return coda.expert_mlp(rows, w_gate_up, w_down, sizes, row_scale=row_scale)

        return sorted_experts(experts, x, ids, weights, w_down.shape[0])

    return dataclasses.replace(ours(), name="coda_mlp", mlp=coda.expert_mlp, layer=whole)


def fused() -> Form:
    """The form `XLA` of an expert's MLP and of a layer under `coda.fuse`, with no other line changed."""
    return dataclasses.replace(XLA, name="coda_fused", mlp=coda.fuse(XLA.experts), layer=coda.fuse(layer(XLA)))


# --- what all are compared with ---


def in_turn(longest: int) -> Form:
    """Group after group, each as the product of so many rows from its first on: rows beyond it are overwritten."""

    def slices(x: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        padded = jnp.pad(x, ((0, longest), (0, 0)))
        return jnp.cumulative_sum(sizes, include_initial=True)[:-1], lambda start: jax.lax.dynamic_slice_in_dim(
            padded, start, longest
        )

    def multiply(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
        starts, rows = slices(a, sizes)
        n = b.shape[1] if transpose_b else b.shape[2]

        def body(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
            start, w = group
            product = jnp.matmul(rows(start), w.T if transpose_b else w)
            return jax.lax.dynamic_update_slice_in_dim(y, product, start, 0), None

        empty = jnp.zeros((a.shape[0] + longest, n), a.dtype)
        return jax.lax.scan(body, empty, (starts, b))[0][: a.shape[0]]

    def contract(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        starts, rows_a = slices(a, sizes)
        _, rows_b = slices(b, sizes)

        def body(group: Any) -> jax.Array:
            start, size = group
            kept = jnp.where((jnp.arange(longest) < size)[:, None], rows_a(start), 0)
            return kept.T @ rows_b(start)

        return jax.lax.map(body, (starts, sizes))

    form = Form("in_turn", with_gradient(multiply, contract), contract)
    return dataclasses.replace(form, layer=layer(form, jnp.float32))
