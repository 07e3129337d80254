"""Random programs: the generated visitor and both evaluations against the JAX function."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from coda_jax.epilogue import evaluate, trace
from tests.host_execution import HostPrograms

UNARY = {
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
    "negative": lambda x: -x,
    "square": lambda x: x * x,
    "relu": jax.nn.relu,
    "positive": lambda x: (x > 0).astype(jnp.float32),
    "reciprocal": lambda x: 1 / (1 + jnp.abs(x)),
    "round": jnp.round,
    "scale": lambda x: 0.3 * x - 1,
}
BINARY = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "maximum": jnp.maximum,
    "where": lambda x, y: jnp.where(x < y, y, 2 * x),
}
REDUCTIONS = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "mean": jnp.mean}

# Operands by name; "half" ones need the two halves of N.
SHAPES = {
    "tile": lambda m, n: (m, n),
    "row": lambda m, n: (n,),
    "row2": lambda m, n: (1, n),
    "column": lambda m, n: (m, 1),
    "scalar": lambda m, n: (),
    "half_tile": lambda m, n: (m, n // 2),
    "half_row": lambda m, n: (1, n // 2),
}
DTYPES = {"tile": jnp.bfloat16, "half_tile": jnp.float16}

step = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 99)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("swap"), st.integers(0, 99)),
    st.tuples(st.just("split"), st.integers(0, 99)),
    st.tuples(st.just("join"), st.integers(0, 99), st.integers(0, 99)),
)
reduction = st.tuples(st.sampled_from(sorted(REDUCTIONS)), st.integers(0, 99), st.sampled_from([0, 1, -1, None]))
program = st.fixed_dictionaries(
    {
        "operands": st.lists(st.sampled_from(sorted(SHAPES)), max_size=4),
        "steps": st.lists(step, min_size=1, max_size=8),
        "outputs": st.lists(st.integers(0, 99), max_size=2),
        "reductions": st.lists(reduction, max_size=3),
        "size": st.sampled_from([(8, 8), (1, 8), (5, 6), (7, 4), (2, 16)]),
    }
)


def build(spec: dict[str, Any]) -> Any:
    """The JAX function that `spec` describes: steps pick their inputs from what is there, by shape."""

    def f(acc, *operands):
        whole, half = [acc], []
        n = acc.shape[1]
        for x in operands:
            wide = x.ndim == 0 or x.shape[-1] in (1, n)
            (whole if wide else half).append(x)
        for name, *picks in spec["steps"]:
            pool = half if half and picks[0] % 2 else whole
            inputs = [pool[pick % len(pool)] for pick in picks]
            tile = jnp.broadcast_to(inputs[0], acc.shape) if pool is whole else inputs[0]
            if name in UNARY:
                pool.append(UNARY[name](inputs[0]))
            elif name in BINARY:
                pool.append(BINARY[name](*inputs))
            elif name == "join" and half:
                parts = [jnp.broadcast_to(half[pick % len(half)], (acc.shape[0], n // 2)) for pick in picks]
                whole.append(jnp.concatenate(parts, axis=1))
            elif pool is whole and name == "split":
                half.extend(jnp.split(tile, 2, axis=1))
            elif pool is whole and name == "swap":
                whole.append(jnp.concatenate([tile[:, n // 2 :], tile[:, : n // 2]], axis=1))
        everything = whole + half

        def full(x):
            return jnp.broadcast_to(x, (acc.shape[0], n // 2 if x.ndim and x.shape[-1] == n // 2 else n))

        def picked(pick):
            return everything[pick % len(everything)]

        outputs = [full(picked(pick)) for pick in spec["outputs"]]
        reduced = [
            REDUCTIONS[name](full(picked(pick)) + 0 * _some(acc, picked(pick)), axis=axis)
            for name, pick, axis in spec["reductions"]
        ]
        return outputs, reduced, whole[-1] + acc

    return f


def _some(acc: jax.Array, x: jax.Array) -> jax.Array:
    """A part of acc as wide as x, so that the reduction is over a tile."""
    half = acc.shape[1] // 2
    return acc[:, :half] if x.ndim and x.shape[-1] == half else acc


# Many programs an example, since each example runs g++ and XLA once: shrinking one would take minutes, and `spec` is
# printed anyway.
@pytest.mark.slow
@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(specs=st.lists(program, min_size=16, max_size=16))
def test_random_programs(tmp_path_factory, specs):
    rng = np.random.default_rng(0)
    cases = []
    for spec in specs:
        m, n = spec["size"]
        acc = jnp.asarray(rng.normal(size=(m, n)), jnp.float32)
        kinds = spec["operands"]
        operands = [jnp.asarray(rng.normal(size=SHAPES[k](m, n)), DTYPES.get(k, jnp.float32)) for k in kinds]
        f = build(spec)
        epilogue, captured = trace(f, acc, operands)
        assert captured == ()
        again, _ = trace(build(spec), acc, operands)
        assert again.program == epilogue.program
        cases.append((f, epilogue, acc, operands))
    programs = HostPrograms([epilogue.program for _, epilogue, _, _ in cases], tmp_path_factory.mktemp("random"))

    def everything(arguments):
        out = []
        for (f, epilogue, _, _), (acc, operands) in zip(cases, arguments, strict=True):
            plain = jax.tree.leaves(f(acc, *(x.astype(jnp.float32) for x in operands)))
            out.append((plain, epilogue.call(acc, *operands), evaluate(epilogue.program, acc, *operands)))
        return out

    arguments = [(acc, operands) for _, _, acc, operands in cases]
    jitted = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})(arguments)
    for number, (spec, (plain, evaluated, reference), (acc, operands)) in enumerate(
        zip(specs, jitted, arguments, strict=True)
    ):
        generated = programs.run(number, np.asarray(acc), [np.asarray(x) for x in operands])
        for results in (evaluated, reference, generated):
            for out, expected in zip(results, plain, strict=True):
                assert out.shape == expected.shape, spec
                scale = 1 + float(jnp.abs(jnp.nan_to_num(expected)).max())
                np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-6 * scale, err_msg=str(spec))
