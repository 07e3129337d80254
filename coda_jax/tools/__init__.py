"""What a user asks about a program: `explain` and `tune`."""

from coda_jax.tools.explain import Explanation as Explanation
from coda_jax.tools.explain import explain as explain
from coda_jax.tools.tune import Tuning as Tuning
from coda_jax.tools.tune import tune as tune
