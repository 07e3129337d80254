"""What a user asks about a program: `coda_jax.explain` and `coda_jax.tune`."""
