"""How a kernel is cut into tiles, and which tiles a product gets: what changes when a chip is measured."""

from coda_jax.tiles.config import GemmConfig as GemmConfig
