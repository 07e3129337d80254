"""The code that is generated for floats of 8 bits and results in another order, run on the host: bit for bit JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coda_jax.epilogue import trace
from tests.host_execution import HostPrograms
from tests.test_fp8_language import ACC, VALUES, X8, wide
from tests.test_fp8_transposed import RESULTS
from tests.test_whole_maximum import WHOLE

ROWS, COLUMNS = ACC.shape
KINDS = {
    **{f"of {name}": (epilogue, (X8,)) for name, (epilogue, _) in VALUES.items()},
    # A kernel takes no slices apart and transposes them.
    **{f"results {name}": (epilogue, ()) for name, epilogue in RESULTS.items() if name != "slices"},
    **{f"maximum {name}": (epilogue, ()) for name, (epilogue, _) in WHOLE.items() if name != "of heads"},
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """For each case those of the generated code and of JAX, operation by operation."""
    traced = {name: trace(f, ACC, operands) for name, (f, operands) in KINDS.items()}
    programs = HostPrograms([epilogue.program for epilogue, _ in traced.values()], tmp_path_factory.mktemp("host"))
    found = {}
    for number, (name, (_, captured)) in enumerate(traced.items()):
        f, operands = KINDS[name]
        got = programs.run(number, ACC, [np.asarray(x) for x in (*operands, *captured)])
        found[name] = got, jax.tree.leaves(f(jnp.asarray(ACC), *(x.astype(jnp.float32) for x in operands)))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_generated_code(outputs, name):
    for got, want in zip(*outputs[name], strict=True):
        assert got.shape == want.shape
        np.testing.assert_array_equal(wide(got), wide(want))
