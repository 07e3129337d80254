"""What holds of all that coda.tune finds, on a device and by invented times."""

from coda_jax.tiles.cost_model import constants_for, relative_power


def is_no_worse(one, work):
    """Whether a `Tuned` takes no more energy times time than the cost model's choice, but for what counts as equal."""

    def energy(tiling, us):
        return us * relative_power(work.problem.product, tiling.cut, constants_for(work.device))

    first = work.tilings[0]
    kept, chosen = energy(one.tiling, one.us) * one.us, energy(first, one.cost_model_us) * one.cost_model_us
    return kept <= 1.0075**2 * chosen
