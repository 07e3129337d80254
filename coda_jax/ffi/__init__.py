"""The XLA FFI module: compiles generated kernels with NVRTC and launches them on XLA's stream."""

from coda_jax.ffi._ffi import ABI

__all__ = ["ABI"]
