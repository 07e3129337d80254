"""A block as a graph of products and tile-local maps, closed under differentiation.

`values` are what it is made of, `derivative` the graph of their cotangents. `plan` puts the maps of both into the
epilogues of their products, `run` runs a plan, and `function` is the graph as a function that JAX differentiates.
`evaluate` runs a graph as plain JAX.
"""
