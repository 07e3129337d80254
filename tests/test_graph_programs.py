"""The programs of blocks, by form: what their epilogues do, what is kept, and what is left to XLA.

tests/graph_programs.json is the record, so that no rule of the plan moves kernels or memory unseen. Where a change is
meant, `python -m tests.test_graph_programs` writes it anew, and its diff shows what the change does.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from coda_jax.epilogue.code_size import instructions
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from tests.block_cases import FORMS, arguments, in_block, loss

RECORD = pathlib.Path(__file__).with_name("graph_programs.json")
SIZES = {"batch": 2, "length": 64, "width": 128, "hidden": 256, "rank": 16}
pytestmark = pytest.mark.usefixtures("quick_to_compile")


def programs(name):
    """The products of a form's value and gradients in their order, the columns that are kept, and XLA's tiles."""
    x, p = jax.eval_shape(lambda: arguments(jnp.bfloat16, **SIZES))
    tables = {key: p.pop(key) for key in ("cos", "sin")}
    block = in_block(name)
    step = jax.value_and_grad(lambda x, p, tables: loss(block)(x, p | tables), (0, 1))
    found, _ = equations_of(step, x, p, tables)
    specs = [one.params["spec"] for one, _ in found if one.primitive in PRIMITIVES]
    (traced,) = block._graphs.values()
    (derivative,) = (one for one in traced.graph._derivatives.values() if one._passes)
    (backward,) = derivative._passes.values()
    rows, width_of_tables = math.prod(x.shape[:-1]), tables["cos"].shape[-1]
    kept = [v for v in derivative.kept if v.shape[:1] == (rows,)]
    return {
        "products": [_product(spec) for spec in specs],
        "kept columns": [math.prod(v.shape[1:]) for v in kept],
        "passes": [  # without the tables' cotangents, which jax 0.10 asks for and nothing reads
            [list(v.shape) for v in plan.by_xla if v.is_tile and v.shape[0] == rows and v.shape[1] != width_of_tables]
            for plan in (derivative.forward_plan, backward.plan)
        ],
    }


def _product(spec):
    program = spec.program
    operands = " ".join(operand.kind.word for operand in program.operands)
    shape = f"{len(program.stores)} stores, {len(program.reductions)} reductions"
    return f"{spec.name}: {instructions(program)} instructions, {shape}, {operands or 'no operands'}"


@pytest.mark.parametrize("name", FORMS)
def test_programs_are_those_of_record(name):
    assert programs(name) == json.loads(RECORD.read_text())[name]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: programs(name) for name in FORMS}, indent=1) + "\n")
