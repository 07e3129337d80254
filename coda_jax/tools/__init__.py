"""What a user asks about a program: `coda_jax.explain`, `coda_jax.plan_costs` and `coda_jax.tune`."""
