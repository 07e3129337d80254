"""A block as a graph of products and tile-local maps, closed under differentiation.

`values` are its nodes, and `derivative` makes the graph of their cotangents. `plan` puts the maps of both into the
epilogues of their products, `run` runs a plan, and `function` is the graph as a function that JAX differentiates.
`evaluate` runs a graph as plain JAX. `calls` are functions that are neither products nor maps. Authors of blocks see
`author`, the values that a block is written with, `norm` and `normed`, `opaque`, and `block`.
"""

from coda_jax.graph.author import Value as Value
from coda_jax.graph.block import block as block
from coda_jax.graph.check import check as check
from coda_jax.graph.opaque import opaque as opaque
