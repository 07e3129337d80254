"""`fuse`: functions that were written without this library get fused epilogues."""

from coda_jax.fusion.fuse import Fused as Fused
from coda_jax.fusion.fuse import fuse as fuse
from coda_jax.fusion.marks import opaque as opaque
