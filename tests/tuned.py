"""What holds of all that coda.tune finds, on a device and by invented times."""

from coda_jax.tiles.constants import constants_for
from coda_jax.tiles.cost_model import relative_power


def is_no_worse(one, work):
    """Whether a `Tuned` takes no more energy times time than the cost model's choice, but for what counts as equal."""

    def energy(config, us):
        return us * relative_power(work.problem.shape, config.tile, constants_for(work.device))

    first = work.configs[0]
    kept, chosen = energy(one.config, one.us) * one.us, energy(first, one.cost_model_us) * one.cost_model_us
    return kept <= 1.0075**2 * chosen
