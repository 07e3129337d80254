"""What holds of all that coda.tune finds, on a device and by invented times."""

from coda_jax.primitives.cost_model import constants_for, relative_power


def is_no_worse(one, work):
    """Whether a `Tuned` is faster than the cost model's choice, or takes less energy, or is that choice."""

    def energy(tiling, us):
        return us * relative_power(work.problem.product, tiling.cut, constants_for(work.device))

    first = work.tilings[0]
    return one.us <= one.cost_model_us or energy(one.tiling, one.us) <= energy(first, one.cost_model_us)
