"""The operators that are timed kernel by kernel."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import timing
from benchmarks.lab import operators

pytestmark = pytest.mark.usefixtures("quick_to_compile")
TINY = operators.Sizes(
    batch=2, length=8, width=16, hidden=24, heads=2, kv_heads=1, head_dim=32, experts=2, expert_hidden=8
)
NAMES = [
    "gated_mlp",
    "gated mlp with biases",
    "mlp of a LayerNorm",
    "norm_projection",
    "norm_projection of a LayerNorm",
    "qkv_projection",
    "qkv_projection with norms of heads",
    "expert_mlp",
]


@pytest.fixture(scope="module")
def cases():
    return operators.cases(TINY)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_runs(name, cases):
    results, cotangents = operators.step(name, cases[name])()
    arrays = jax.tree.leaves((results, cotangents))
    assert len(jax.tree.leaves(cotangents)) == len(cases[name].arrays)
    assert all(bool(jnp.isfinite(x).all()) and bool((x != 0).any()) for x in arrays)


def test_the_table(monkeypatch, capsys):
    """Medians over rounds, of coda_jax's kernels apart from what XLA does."""
    kernels = [[("coda_gemm", 3000.0 + i), ("fusion", 500.0), ("coda_gemm", 1000.0)] for i in (0, 100, 2000)]
    executed = [[timing.Kernel(name, "", 0.0, us) for name, us in one] for one in kernels]
    monkeypatch.setattr(operators, "Sizes", lambda: TINY)

    def executions(steps, rounds):
        assert all(jitted.func.__name__ == name and name.isidentifier() for name, jitted in steps.items())
        return dict.fromkeys(steps, executed)

    monkeypatch.setattr(timing, "executions", executions)
    assert operators.main(["--rounds", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == NAMES
    assert lines[2].split()[1:] == ["4.6", "0.5", "3.1", "1.0"]
