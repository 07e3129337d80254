"""The tiles of kernels, and their choice for a product: the code that changes when a chip is measured."""

from coda_jax.tiles.config import GemmConfig as GemmConfig
