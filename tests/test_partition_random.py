"""Random epilogues on randomly sharded arrays: the results of one device, whatever the devices are asked to compute."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from tests.gemm_cases import assert_close, total
from tests.partitioned import partitioned_on_cpus
from tests.test_epilogue_random import SHAPES, build, program

M, K, N = 16, 8, 16
MESH = {"data": 2, "model": 4}
AXES = st.sampled_from([(), ("data",), ("model",), ("data", "model"), ("model", "data")])
case = st.fixed_dictionaries(
    {
        "program": program,
        "shardings": st.lists(st.tuples(AXES, AXES), min_size=6, max_size=6),  # of a, b and up to four operands
        "region": st.sampled_from(["automatic", "partly manual"]),
        "backward": st.booleans(),
    }
)


def spec_of(shape, axes, taken=()):
    """A PartitionSpec that names no axis twice, nor one that does not divide."""
    used, entries = set(taken), []
    for size, of_one in zip(shape, axes, strict=False):
        kept = ()
        for axis in of_one:
            if axis not in used and size % np.prod([MESH[name] for name in (*kept, axis)]) == 0:
                kept += (axis,)
        used |= set(kept)
        entries.append(kept or None)
    return PartitionSpec(*entries)


def check(spec):
    rng = np.random.default_rng(0)
    shapes = [(M, K), (K, N), *(SHAPES[kind](M, N) for kind in spec["program"]["operands"])]
    arguments = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    epilogue = build(spec["program"])

    def multiply(*arguments):
        return coda.gemm(*arguments, epilogue=epilogue)

    def summed(*arguments):
        return total(multiply(*arguments))

    function = jax.grad(summed, tuple(range(len(arguments)))) if spec["backward"] else multiply
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    manual = {"data"} if spec["region"] == "partly manual" else set()
    # Over the manual axis every device has the same: what it does beside the others is of interest.
    on_mesh = function
    if manual:
        nothing = PartitionSpec()
        on_mesh = jax.shard_map(function, in_specs=nothing, out_specs=nothing, axis_names=manual, check_vma=False)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec_of(x.shape, axes, manual)))
            for x, axes in zip(arguments, spec["shardings"], strict=False)
        ]
        got = jax.device_get(jax.jit(on_mesh)(*placed))
    assert records, "no device was asked for its part"
    assert_close(got, jax.jit(function)(*arguments), rtol=1e-4)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case)
def test_random_epilogues(spec):
    check(spec)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case)
def test_many_random_epilogues(spec):
    check(spec)
