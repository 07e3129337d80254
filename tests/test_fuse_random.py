"""Random networks under `coda.fuse`: values and gradients, of all doors.

`CODA_JAX_TEST_NETWORKS=200` runs so many of each kind, which are others each time; each takes a few seconds.
"""

import contextlib
import functools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from tests.random_networks import (
    DISCRETE,
    ROUNDED,
    arguments,
    beside,
    beside_arguments,
    beside_network,
    loss_of,
    network,
    networks,
    vocabularies,
    vocabulary_arguments,
    vocabulary_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
COUNT = int(os.environ.get("CODA_JAX_TEST_NETWORKS", "0"))
BOUND = 3e-5
# Steps whose results are others where a value differs in its last place; and a value rounded to 16 bits.
ROUNDING = {"e4m3", "e5m2", "no kernel's", "arithmetic in 8 bits", "reduced", "half", "integers", "best", "counted"}


def settings(few):
    return hypothesis.settings(
        max_examples=COUNT or few,
        deadline=None,
        derandomize=not COUNT,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def with_gradients(loss):
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


DOORS = {
    "grad(fuse)": lambda loss: with_gradients(coda.fuse(loss)),
    "fuse(grad)": lambda loss: coda.fuse(with_gradients(loss)),
    "exact": lambda loss: with_gradients(coda.fuse(loss, exact=True)),
    "memory=None": lambda loss: with_gradients(coda.fuse(loss, memory=None, defer_norms=True)),
}


def all_of(spec, without=frozenset()):
    """A function that has the results of all doors, and as the last those of plain JAX."""
    loss = loss_of(network(spec, without, fuse=coda.fuse))
    functions = [*(door(loss) for door in DOORS.values()), with_gradients(loss_of(network(spec, without)))]
    return lambda *args: [g(*args) for g in functions]


def largest_error(found, expected):
    """The largest error of all arrays, each relative to its own norm, or to a hundredth of the largest norm."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    for x, y in pairs:
        assert x.shape == y.shape and (x.dtype == y.dtype or y.dtype == np.float64)
    norms = [np.linalg.norm(np.float64(y)) for _, y in pairs]
    floor = max(1e-2 * max(norms), 1e-30)
    differences = [np.linalg.norm(np.float64(x) - np.float64(y)) for x, y in pairs]
    assert np.all(np.isfinite(norms)) or np.any(~np.isfinite(differences))
    return max(d / max(norm, floor) for d, norm in zip(differences, norms, strict=True))


def exact_results(spec, args):
    """The results of plain JAX in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        return jax.device_get(jax.jit(with_gradients(loss_of(network(spec))))(*wide))


_MASKS_OF_ONE_ROW = [("transposed", 8, 4, 8), ("split", 5, 8, 4), ("integers", 8, 10, 6)]
_TANGENTS_TRANSPOSED = [("tokens", 6, 2, 1), ("head_norm", 4, 1, 6), ("router", 6, 6, 3)]
_COLUMNS_BESIDE_ONE_ROW = [
    ("cond", 6, 1, 6, [("picked", 11, 11, 7), ("mean_over_tokens", 4, 11, 4)]),
    ("fori", 10, 10, 0, [("outer", 5, 6, 1)]),
    ("one_axis", 3, 11, 5),
    ("named", 8, 9, 5),
]
_AXES_OF_ONE_ROW = {"sizes": ((1, 1, 1), 8, 2), "steps": [("fori", 8, 9, 1, [("linear_attention", 8, 1, 6)])]}


@settings(8)
@hypothesis.example({"sizes": ((1,), 8, 1), "steps": [("split", 5, 5, 11), ("fori", 1, 9, 7, _MASKS_OF_ONE_ROW)]})
@hypothesis.example(
    {"sizes": ((8, 1), 8, 4), "steps": [("vmap", 2, 8, 6, _TANGENTS_TRANSPOSED), ("embedded", 9, 6, 4)]}
)
@hypothesis.example({"sizes": ((1, 1, 1), 8, 2), "steps": _COLUMNS_BESIDE_ONE_ROW})
@hypothesis.given(networks)
def test_a_network_has_its_values_and_gradients(spec):
    args = arguments(spec)
    *found, expected = jax.jit(all_of(spec))(*args)
    errors = {name: largest_error(x, expected) for name, x in zip(DOORS, found, strict=True)}
    if not max(errors.values()) < BOUND:  # a function that magnifies the errors of float32
        exact = exact_results(spec, args)
        own = largest_error(expected, exact)
        errors = {name: largest_error(x, exact) for name, x in zip(DOORS, found, strict=True)}
        assert max(errors.values()) < BOUND + 4 * own, (errors, own)


@settings(4)
@hypothesis.example({"sizes": ((2, 16), 2, 1), "steps": [("dense", 1, 1, 1), ("vmap", 2, 8, 6, [("tied", 9, 6, 4)])]})
@hypothesis.example(
    {"sizes": ((2, 8), 16, 4), "steps": [("rms_norm", 0, 2, 4), ("gated", 0, 3, 0), ("residual", 1, 1, 0)]}
)
@hypothesis.given(networks)
def test_a_network_of_products_in_8_bits_has_its_values_and_gradients(spec):
    """A value between two of 8 bits may become the other one: what one more unit in the last place of x does."""
    (w, x, ids), plain = arguments(spec), loss_of(network(spec, DISCRETE, kinds=ROUNDED))
    fuse = functools.partial(coda.fuse, defer_norms=False)  # else products round what is normalised
    fused = loss_of(network(spec, DISCRETE, fuse=fuse, kinds=ROUNDED))
    near = jnp.nextafter(x, jnp.full_like(x, jnp.inf))

    def every(w, x, ids, near):
        doors = with_gradients(fuse(fused)), fuse(with_gradients(fused))
        return [*(door(w, x, ids) for door in doors), *(with_gradients(plain)(w, at, ids) for at in (near, x))]

    *found, moved, expected = jax.jit(every)(w, x, ids, near)
    bound = BOUND + 4 * largest_error(moved, expected)
    assert max(largest_error(one, expected) for one in found) < bound


@settings(2)
@hypothesis.example(_AXES_OF_ONE_ROW)
@hypothesis.given(networks)
def test_a_network_in_16_bits_is_as_near_to_float32_as_it_was(spec):
    args = arguments(spec, jnp.bfloat16)
    *found, own = jax.jit(all_of(spec, DISCRETE))(*args)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    exact = jax.jit(with_gradients(loss_of(network(spec, DISCRETE))))(*wide)
    assert jax.tree.map(jax.typeof, found[0]) == jax.tree.map(jax.typeof, own)

    def error(results):
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True)
        pairs = [(np.ravel(np.float64(x)), np.ravel(np.float64(y))) for x, y in pairs]
        x, y = map(np.concatenate, zip(*pairs, strict=True))
        return np.linalg.norm(x - y) / np.linalg.norm(y)

    errors = {name: error(x) for name, x in zip(DOORS, found, strict=True)}
    assert max(errors.values()) < 2 * error(own) + 1e-2, (errors, error(own))


@settings(2)
@hypothesis.given(networks)
def test_a_network_of_several_results_runs_as_it_is_called(spec):
    args, f = arguments(spec), network(spec)
    found, expected = coda.fuse(f)(*args), jax.jit(f)(*args)
    assert largest_error(found, expected) < 10 * BOUND


@settings(1)
@hypothesis.given(networks)
def test_a_network_keeps_no_more_than_it_did(spec):
    spec = spec | {"sizes": ((4, 64), 128, 2)}
    args = arguments(spec, jnp.bfloat16)
    plain, fused = loss_of(network(spec)), loss_of(network(spec, fuse=coda.fuse))
    steps = with_gradients(plain), DOORS["grad(fuse)"](fused)
    kept = [coda.explain(step, *args, platform="cuda").totals.kept_bytes for step in steps]
    assert kept[1] <= kept[0] + 256  # numbers, and counts of loops


@settings(3)
@hypothesis.given(vocabularies, st.sampled_from(["grad(fuse)", "fuse(grad)"]), st.booleans())
def test_a_loss_over_a_vocabulary_has_its_value_and_gradient(spec, door, has_mesh):
    args, loss = vocabulary_arguments(spec), vocabulary_loss(spec)
    with (
        jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)))
        if has_mesh
        else contextlib.nullcontext()
    ):
        found, expected = jax.jit(lambda *args: (DOORS[door](loss)(*args), with_gradients(loss)(*args)))(*args)
    assert largest_error(found, expected) < BOUND


BESIDE_DOORS = {
    "grad(fuse)": (lambda f: f, coda.fuse, lambda f: f),
    "exact": (lambda f: f, lambda f: coda.fuse(f, exact=True), lambda f: f),
    "fuse(grad)": (lambda f: f, lambda f: f, coda.fuse),
    "inside": (coda.fuse, lambda f: f, lambda f: f),
}


def step_of(spec, door):
    """A step of training of a network on its mesh; the doors fuse the network, the loss or the step."""
    inside, around, outside = BESIDE_DOORS[door] if door else [lambda f: f] * 3
    f, setting = inside(beside_network(spec)), spec["setting"]
    if setting.startswith("shard_map"):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        specs = jax.P(), jax.P("data"), jax.P("data")
        is_checked = setting != "shard_map unchecked"
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=jax.P("data"), check_vma=is_checked)
    loss = around(lambda *args: jnp.sum(jnp.sin(f(*args).astype(jnp.float32))))
    return outside(jax.value_and_grad(loss, argnums=(0, 1)))


def traced_as_plain(spec, door, *, runs=False):
    """A door's results and those of plain JAX: their types, or arrays; None where plain JAX raises."""
    kinds = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
    with contextlib.ExitStack() as stack:
        if spec["setting"] == "x64":
            stack.enter_context(jax.enable_x64(True))
        args = beside_arguments(spec)
        if spec["setting"] in kinds:
            mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kinds[spec["setting"]],) * 2)
            stack.enter_context(jax.set_mesh(mesh))
            w, *rows = args
            cut = NamedSharding(mesh, jax.P("data")) if spec["sharded"] else NamedSharding(mesh, jax.P())
            w = {name: jax.device_put(x, cut if x.shape[:1] == (8,) else x.sharding) for name, x in w.items()}
            args = w, *(jax.device_put(x, NamedSharding(mesh, jax.P("data"))) for x in rows)
        run = (lambda f: jax.device_get(jax.jit(f)(*args))) if runs else lambda f: jax.eval_shape(f, *args)
        try:
            expected = run(step_of(spec, ""))
        except Exception:  # as a product that sums over an explicit axis
            return None
        return run(step_of(spec, door)), expected


_CAST_OVER_EXPLICIT_AXES = {
    "rows": (8,),
    "dtype": "float16",
    "setting": "explicit",
    "ids": "int32",
    "weights": "float32",
    "steps": ["mask of bools", "norm", "product", "product", "e4m3", "columns", "product"],
    "has_vocabulary": False,
    "sharded": False,
}


@settings(3)
@hypothesis.example(_CAST_OVER_EXPLICIT_AXES, "fuse(grad)")
@hypothesis.given(beside, st.sampled_from(sorted(BESIDE_DOORS)))
def test_operations_beside_products_keep_shapes_and_dtypes(spec, door):
    results = traced_as_plain(spec, door)
    if results is not None:
        assert jax.tree.map(lambda x: (x.shape, x.dtype), results[0]) == jax.tree.map(
            lambda x: (x.shape, x.dtype), results[1]
        )


@settings(1)
@hypothesis.given(beside, st.sampled_from(sorted(BESIDE_DOORS)))
def test_operations_beside_products_keep_their_values(spec, door):
    rounds = [name for name in spec["steps"] if name in ROUNDING]
    spec = spec | {"dtype": "float32", "steps": [name for name in spec["steps"] if name not in rounds]}
    results = traced_as_plain(spec, door, runs=True)
    if results is not None:
        assert largest_error(*results) < 10 * BOUND
