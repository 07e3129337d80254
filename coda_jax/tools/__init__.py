"""The answers to a user's questions about a program: `coda_jax.explain`, `coda_jax.plan_costs` and `coda_jax.tune`."""
