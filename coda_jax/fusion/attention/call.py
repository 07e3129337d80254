"""The call of `coda.attention` that a site becomes.

`coda.attention` has 0 where a row sees no key. The original has NaN where its masks put -inf in the place of scores,
the mean of all values where they put one finite number there or add a large one, and 0 where probabilities are set to
0. So behind it stands what the original has, where it is not known that each row sees a key.

A bias may be any array. Where it makes all scores of a row less than -2e4, that row has its value and no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coda_jax.attend.attention import attention
from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.fusion.attention.axes import Atom, Labels, Unlike, labels_of, size_of
from coda_jax.fusion.attention.layout import Layout, layout_of
from coda_jax.fusion.attention.masks import ADDED_MEAN, LOW, MEAN, NAN, Masks, masks_of
from coda_jax.fusion.attention.meanings import Site
from coda_jax.fusion.attention.terms import Terms, terms_of
from coda_jax.fusion.attention.trees import Node, Trees, merged, value_of
from coda_jax.fusion.dots import Equation, is_precise
from coda_jax.graph.values import is_float
from coda_jax.primitives.mesh_types import explicit_cuts


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A site as a call of `coda.attention`.

    Attributes:
      site: what it replaces.
      layout: of its arrays.
      terms: of its scores.
      masks: as arguments.
      shardings: of q, as its scores or probabilities are asked to be sharded.
      implementation: of `coda.attention`.
    """

    site: Site
    layout: Layout
    terms: Terms
    masks: Masks
    shardings: tuple[Any, ...]
    implementation: str | None

    @property
    def products(self) -> list[Equation]:
        """The products that it makes."""
        return [self.site.product, self.site.values]

    @property
    def arguments(self) -> list[Any]:
        """The variables that it reads, each once."""
        nodes = [node for node, _ in (*self.terms.row_factors, *self.terms.result_factors, *self.masks.biases)]
        nodes += [node for node, _ in (*self.masks.rows, *self.masks.keys, *self.masks.dense)]
        nodes += () if self.masks.function is None else self.masks.function.read
        nodes += () if self.terms.sink is None else (self.terms.sink,)
        nodes += [node for x in self.masks.bounds for option in x.options for _, node in option.terms.values()]
        nodes += self.masks.ids or ()
        arrays = (self.layout.q.var, self.layout.k.var, self.layout.v.var)
        return list(dict.fromkeys([*arrays, *(leaf.var for node in nodes for leaf in node.leaves)]))

    def result(self, values: Mapping[Any, Any]) -> jax.Array:
        """The site's result, from the values of `arguments`."""
        layout, terms = self.layout, self.terms
        q, k, v = layout.arrays(values)
        for constrained in self.shardings:
            q = jax.lax.with_sharding_constraint(q, constrained)
        for node, divides in terms.row_factors:
            factor = self._of_rows(node, values)
            wide = q.astype(factor.dtype)
            q = (wide / factor if divides else wide * factor).astype(q.dtype)
        options = {"scale": terms.scale, "implementation": self.implementation, **self.masks.arguments(values)}
        if terms.sink is not None:
            options["sinks"] = self._of_heads(terms.sink, values)
        if (function := self.masks.function) is not None:
            options |= {"score": function, "operands": function.operands(values)}
        if self.masks.empty in (NAN, MEAN, ADDED_MEAN):
            y, lse = attention(q, k, v, return_residual=True, **options)
            if self.masks.has_low_biases:
                y = jnp.where((lse < LOW)[..., None], jax.lax.stop_gradient(y), y)
            y = _with_empty_rows(y, lse == -jnp.inf, (q * terms.scale, k, v), self.masks.empty)
        else:
            y = attention(q, k, v, **options)
        for node, divides in terms.result_factors:
            factor = self._of_rows(node, values)
            wide = y.astype(factor.dtype)
            y = (wide / factor if divides else wide * factor).astype(y.dtype)
        (out,) = self.site.equation.outvars
        return layout.result(y, self.site.labels, out.aval.shape).astype(out.aval.dtype)

    def _of_heads(self, node: Node, values: Mapping[Any, Any]) -> jax.Array:
        """A number of each head, (N,), in float32."""
        heads = (*self.layout.heads, *self.layout.groups)
        x = merged(value_of(node, values, heads), [heads])
        return jnp.broadcast_to(x.astype(jnp.promote_types(x.dtype, jnp.float32)), (size_of(heads),))

    def _of_rows(self, node: Node, values: Mapping[Any, Any]) -> jax.Array:
        """A factor of rows and heads, (B, T, N, 1) or with axes of one element, in float32."""
        layout = self.layout
        groups = [layout.batch, layout.rows, (*layout.heads, *layout.groups)]
        x = merged(value_of(node, values, [atom for group in groups for atom in group]), groups)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))[..., None]


def _with_empty_rows(y: jax.Array, is_empty: jax.Array, arrays: Sequence[jax.Array], kind: str) -> jax.Array:
    """y (B, T, N, Hv) with the original's value where a row sees nothing.

    Args:
      y: the result.
      is_empty: (B, T, N), where a row sees nothing.
      arrays: q, times the scale, k and v.
      kind: "mean" of v; "added mean", of which q and k have the gradient of a softmax whose probabilities are equal;
        or "nan". Then the gradient of all values is NaN too, where there is such a row.
    """
    q, k, v = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)
    groups = y.shape[2] // v.shape[2]
    mean = jnp.mean(v, axis=1, keepdims=True)  # (B, 1, K, Hv)
    if kind == ADDED_MEAN:  # p = (1 + s - mean(s)) / S near s = 0
        centred = jax.lax.stop_gradient(v - mean)
        slopes = jnp.repeat(jnp.einsum("bskd,bskv->bkdv", k, centred) / k.shape[1], groups, axis=1)
        slope = jnp.einsum("btnd,bndv->btnv", q, slopes)
        mean = jnp.repeat(mean, groups, axis=2) + slope - jax.lax.stop_gradient(slope)
    else:
        mean = jnp.repeat(mean, groups, axis=2)
    if kind == NAN:
        mean = mean * jnp.where(jnp.any(is_empty, axis=1, keepdims=True), jnp.nan, 1.0)[..., None]
    return jnp.where(is_empty[..., None], mean.astype(y.dtype), y)


def call_of(site: Site, trees: Trees, implementation: str | None) -> Call:
    """The call that a site becomes.

    Raises:
      Unlike: it becomes none.
    """
    precision = site.product.params.get("precision"), site.values.params.get("precision")
    terms = terms_of(site, trees)
    dependent = frozenset(atom for mask in terms.masks for atom in mask.condition.atoms())
    layout = layout_of(site, trees.makers, dependent)
    if layout.dtype == FLOAT32 and any(map(is_precise, precision)):
        raise Unlike("it asks for a precision that attention does not have")
    if not is_float(site.result.aval.dtype):
        raise Unlike(f"its result is {site.result.aval.dtype}")
    if any(any(explicit_cuts(x.var.aval)) for x in (layout.q, layout.k, layout.v)):
        raise Unlike("its arrays are sharded over explicit axes of a mesh")
    if not size_of(layout.width):
        raise Unlike("its heads have no columns")
    if terms.sink is not None and not terms.sink.atoms() <= {*layout.heads, *layout.groups}:
        raise Unlike("it has a sink of each row, or of each sequence")
    shardings = tuple(_sharding(equation, labels, layout) for equation, labels in site.constraints)
    return Call(site, layout, terms, masks_of(terms, layout, trees), shardings, implementation)


def _sharding(equation: Equation, labels: Labels, layout: Layout) -> Any:
    """The sharding of q (B, T, N, H) where that of scores is asked to be as an equation says.

    Raises:
      Unlike: queries or keys are cut.
    """
    sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
    if not isinstance(sharding, NamedSharding):
        raise Unlike("its scores are asked to have a sharding of another kind")
    entries: dict[Atom, Any] = {}
    for axis, (entry, label) in enumerate(zip(sharding.spec, labels_of(labels), strict=False)):
        if entry is None or entry is P.UNCONSTRAINED or axis in equation.params.get("unconstrained_dims", ()):
            continue
        if any(atom in (*layout.rows, *layout.keys) for atom in label):
            raise Unlike("a sharding cuts the rows or the keys of its scores")
        entries |= dict.fromkeys(label[:1], entry)
    groups = layout.batch, (*layout.heads, *layout.groups)
    batch, heads = (entries.get(group[0], P.UNCONSTRAINED) if group else P.UNCONSTRAINED for group in groups)
    return sharding.update(spec=P(batch, P.UNCONSTRAINED, heads, P.UNCONSTRAINED))
