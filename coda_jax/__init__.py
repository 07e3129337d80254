"""GEMM epilogues written in JAX, run inside Hopper matrix products."""

__version__ = "0.1.0"
