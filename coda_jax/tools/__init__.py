"""The answers to a user's questions about a program: `coda_jax.explain`, `coda_jax.compare` and `coda_jax.tune`."""
