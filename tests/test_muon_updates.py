"""flax_layers.muon.muon beside optax's Muon: updates, states, precisions, groups of matrices, and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import flax_layers as layers
from flax_layers import newton_schulz
from flax_layers.muon import muon, muon_dimension_numbers
from tests.nvrtc import needs_nvrtc
from tests.partitioned import moves, partitioned_on_cpus
from tests.tiny_models import LLAMA

NUMBERS = {
    "wide": MuonDimensionNumbers(),
    "tall": MuonDimensionNumbers(),
    "also wide": MuonDimensionNumbers(),
    "bias": None,
    "gate_up": MuonDimensionNumbers(1, 3),  # (layers, D, 2, F)
    "heads": MuonDimensionNumbers(0, (1, 2)),  # (D, H, Dh)
    "turned": MuonDimensionNumbers(2, 0),  # (N, batch, K)
    "empty": MuonDimensionNumbers(1, 2),
}
NUMBERS_OF_MATRICES = {name: numbers is not None for name, numbers in NUMBERS.items()}
SHAPES = {
    "wide": (24, 40),
    "tall": (40, 24),
    "also wide": (24, 40),
    "bias": (7,),
    "gate_up": (3, 24, 2, 40),
    "heads": (24, 5, 8),
    "turned": (40, 2, 24),
    "empty": (0, 4, 4),
}


def normal(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def updates_of(tx, params, count=2, state=None):
    """The updates of some steps, and the state behind them."""
    state, found = tx.init(params) if state is None else state, []
    update = jax.jit(tx.update)
    for seed in range(count):
        changes, state = update(normal(seed + 1, params["wide"].dtype), state, params)
        found.append(changes)
    return found, state


def distance(found, expected):
    """The relative distance of the two trees' furthest leaves."""
    each = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    norm = np.linalg.norm
    pairs = [(np.float64(x).ravel(), np.float64(y).ravel()) for x, y in each if x.size]
    return max(norm(x - y) / norm(y) for x, y in pairs)


OPTIONS = {
    "defaults": {},
    "no nesterov": {"nesterov": False},
    "adaptive": {"adaptive": True},
    "spectral": {"preconditioning": "spectral"},
    "aol": {"preconditioning": "aol"},
    "schatten": {"preconditioning": "schatten"},
    "preset": {"ns_coeffs": "dion"},
    "coefficients": {"ns_coeffs": (3.0, -3.2, 1.2), "ns_steps": 2, "beta": 0.8, "eps": 1e-3},
    "rms": {"consistent_rms": 0.2, "weight_decay": 0.1},
    "mask": {"weight_decay": 0.1, "weight_decay_mask": lambda params: jax.tree.map(lambda x: x.ndim == 2, params)},
    "momentum": {"mu_dtype": jnp.bfloat16},
    "schedule": {"learning_rate": optax.linear_schedule(0.1, 0.0, 10)},
    "adam": {
        "adam_b1": 0.8,
        "adam_b2": 0.9,
        "adam_eps_root": 1e-3,
        "adam_weight_decay": 0.1,
        "adam_learning_rate": 0.3,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_are_those_of_optax(name):
    options = {"learning_rate": 0.02, "muon_weight_dimension_numbers": NUMBERS} | OPTIONS[name]
    params = normal(0)
    expected, expected_state = updates_of(optax.contrib.muon(**options), params)
    found, state = updates_of(muon(**options, precision="float32"), params)
    assert distance(found, expected) < 2e-5
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state, expected_state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_all_arguments():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    ours = muon(
        learning_rate=schedule,
        ns_coeffs=((3.0, -3.2, 1.2), (2.8, -3.0, 1.2)),
        ns_steps=2,
        beta=0.9,
        eps=1e-6,
        weight_decay=0.1,
        weight_decay_mask=NUMBERS_OF_MATRICES,
        mu_dtype=jnp.float32,
        nesterov=True,
        adaptive=False,
        preconditioning="frobenius",
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps_root=1e-3,
        adam_weight_decay=0.2,
        adam_learning_rate=0.3,
        muon_weight_dimension_numbers=NUMBERS,
        consistent_rms=0.2,
        precision="float32",
    )
    theirs = optax.contrib.muon(
        schedule,
        ((3.0, -3.2, 1.2), (2.8, -3.0, 1.2)),
        2,
        0.9,
        1e-6,
        0.1,
        NUMBERS_OF_MATRICES,
        jnp.float32,
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps_root=1e-3,
        adam_weight_decay=0.2,
        adam_learning_rate=0.3,
        muon_weight_dimension_numbers=NUMBERS,
        consistent_rms=0.2,
    )
    params = normal(0)
    assert distance(updates_of(ours, params)[0], updates_of(theirs, params)[0]) < 2e-5


@pytest.mark.parametrize("numbers", ["none", "function", "prefix"])
def test_dimension_numbers_as_optax_takes_them(numbers):
    params = {"a": {"x": normal(0)["wide"], "y": normal(1)["wide"]}, "b": normal(0)["bias"]}
    given = {
        "none": None,
        "function": lambda params: jax.tree.map(lambda x: MuonDimensionNumbers(1, 0) if x.ndim > 1 else None, params),
        "prefix": {"a": MuonDimensionNumbers(), "b": None},
    }[numbers]
    gradients = jax.tree.map(jnp.sin, params)
    found, expected = (
        tx.update(gradients, tx.init(params), params)[0]
        for tx in (
            of(0.1, muon_weight_dimension_numbers=given)
            for of in (functools.partial(muon, precision="float32"), optax.contrib.muon)
        )
    )
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_singular_values(precision, dtype):
    """They are f(s) of the momentum's, in float64, within twice the error of optax's Muon in bfloat16."""
    steps, coefficients = 5, (3.4445, -4.7750, 2.0315)
    x = normal(3, dtype)["gate_up"]
    rows = np.float64(x[1, :, 1])
    u, s, v = np.linalg.svd(rows, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(steps):
        s = sum(c * s**power for c, power in zip(coefficients, (1, 3, 5), strict=True))
    exact = u * s @ v

    def error(tx, dtype):
        params = {"x": jnp.zeros(x.shape, dtype)}
        (changes, _) = tx.update({"x": x.astype(dtype)}, tx.init(params), params)
        return np.linalg.norm(-np.float64(changes["x"][1, :, 1]) - exact) / np.linalg.norm(exact)

    options = {"nesterov": False, "muon_weight_dimension_numbers": {"x": NUMBERS["gate_up"]}, "ns_steps": steps}
    factor = np.sqrt(40 / 24)
    exact = exact * factor
    allowed = 2 * error(optax.contrib.muon(1.0, **options), jnp.bfloat16)
    assert error(muon(1.0, precision=precision, **options), dtype) < allowed < 0.2


def test_the_size_of_a_gradient_does_not_matter():
    """Gradients of 1e-12 and of 1e12, by powers of two, give the same bits."""
    tx = muon(1.0, muon_weight_dimension_numbers=NUMBERS, nesterov=False, eps=0.0)
    gradients = normal(5)
    base, *others = (
        tx.update(jax.tree.map(lambda x, f=factor: x * f, gradients), tx.init(gradients), gradients)[0]["wide"]
        for factor in (1.0, 2.0**-40, 2.0**40)
    )
    for other in others:
        np.testing.assert_array_equal(other, base)


def test_zeros_stay_zeros():
    params = jax.tree.map(jnp.zeros_like, normal(0))
    for preconditioning in ("frobenius", "aol", "schatten"):
        tx = muon(1.0, muon_weight_dimension_numbers=NUMBERS, preconditioning=preconditioning)
        changes, _ = tx.update(params, tx.init(params), params)
        assert all(not np.any(x) for x in jax.tree.leaves(changes))


def test_a_state_goes_from_optax_to_ours_and_back():
    params, options = normal(0), {"muon_weight_dimension_numbers": NUMBERS}
    ours, theirs = muon(0.02, precision="float32", **options), optax.contrib.muon(0.02, **options)
    _, state = updates_of(theirs, params)
    found, state_of_ours = updates_of(ours, params, state=state)
    expected, _ = updates_of(theirs, params, state=state)
    assert distance(found, expected) < 2e-5
    back, _ = updates_of(theirs, params, state=state_of_ours)
    assert np.isfinite(distance(back, expected))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_variables_of_a_model(scan_layers):
    """A state of nnx keeps its variables, and the matrices are the layers'."""
    model = layers.Llama(LLAMA, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    found, expected = (
        jax.jit(tx.update)(gradients, tx.init(params), params)[0]
        for tx in (
            muon(0.1, muon_weight_dimension_numbers=muon_dimension_numbers, precision="float32"),
            optax.contrib.muon(0.1, muon_weight_dimension_numbers=muon_dimension_numbers),
        )
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert distance(found, expected) < 2e-5


def test_groups_do_not_change_a_matrix(monkeypatch):
    params = normal(0)
    together, _ = updates_of(muon(0.02, muon_weight_dimension_numbers=NUMBERS), params, 1)
    calls = []
    iterated = newton_schulz._iterated
    monkeypatch.setattr(newton_schulz, "_iterated", lambda x, *rest: calls.append(x.shape) or iterated(x, *rest))
    monkeypatch.setattr(newton_schulz, "_GROUP_BYTES", 3 * 24 * 40 * 2)
    apart, _ = updates_of(muon(0.02, muon_weight_dimension_numbers=NUMBERS), params, 1)
    # Eleven of (24, 40): two by themselves, three twice in gate_up, one of heads, two that are turned.
    assert sorted(calls) == sorted([(2, 24, 40), (3, 24, 40), (3, 24, 40), (3, 24, 40), (1, 40, 24)])
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("sizes", "most"), [([5], 2), ([1, 1, 1], 16), ([16, 48, 3], 16), ([0, 7, 0], 3), ([], 4)])
def test_groups(sizes, most):
    groups = list(newton_schulz._groups(sizes, most))
    counts = [sum(end - first for _, first, end in group) for group in groups]
    assert len(groups) == -(-sum(sizes) // most) and max(counts, default=0) <= most
    assert max(counts, default=0) - min(counts, default=0) <= 1
    found = [(i, at) for group in groups for i, first, end in group for at in range(first, end)]
    assert found == [(i, at) for i, size in enumerate(sizes) for at in range(size)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_each_device_has_its_share(kind, tmp_path):
    """Each has one of eight matrices; of two matrices, six devices have zeros. What is sent has 16 bits."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    numbers = {"many": MuonDimensionNumbers(1, 2), "two": MuonDimensionNumbers(1, 2)}
    specs = {"many": P(None, "data", "model"), "two": P(None, None, "data")}
    x = {
        "many": jax.random.normal(jax.random.key(0), (8, 32, 64)),
        "two": jax.random.normal(jax.random.key(1), (2, 64, 32)),
    }
    tx = muon(1.0, muon_weight_dimension_numbers=numbers, ns_steps=2)

    def update(gradients, state):
        return tx.update(gradients, state, gradients)[0]

    alone = jax.jit(update)(x, tx.init(x))
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = {name: jax.device_put(x[name], NamedSharding(mesh, specs[name])) for name in x}
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tx.init(x), tx.init(placed))
        shared = jax.jit(update)(placed, state)
        if kind is AxisType.Explicit:
            assert {name: jax.typeof(shared[name]).sharding.spec for name in x} == specs
        _, *found, _ = moves(jax.jit(update).lower(placed, state), mesh, tmp_path)
    for name in x:
        np.testing.assert_array_equal(shared[name], alone[name])
    sent = [move for counter in found for move in counter if move.size_bytes > 64]
    assert sent and all(move.dtype == "bf16" for move in sent)
    parts = [types[0].shape for spec, types, _ in records if types and len(types[0].shape) == 3]
    assert parts and all(shape[0] == 1 for shape in parts)
    assert {spec.symmetric for spec, _, _ in records} == {True, False}


@needs_nvrtc
def test_muon_iteration_is_three_kernels_per_group():
    """Three kernels an iteration and group, whatever the parameters' dtype; in float32 none."""
    params = {
        name: jax.ShapeDtypeStruct((4, 256, 512) if name == "stack" else (256, 512), jnp.float32)
        for name in ("stack", "one")
    }
    numbers = {"stack": MuonDimensionNumbers(1, 2), "one": MuonDimensionNumbers()}

    def count(**options):
        tx = muon(0.1, muon_weight_dimension_numbers=numbers, ns_steps=4, **options)
        lowered = (
            jax.jit(tx.update)
            .trace(params, jax.eval_shape(tx.init, params), params)
            .lower(lowering_platforms=("cuda",))
        )
        return lowered.as_text().count("@coda_gemm(")

    assert count() == count(precision="float16") == 3 * 4
    assert count(precision="float32") == 0


def test_bad_options_and_matrices_are_refused():
    params = {"x": jnp.ones((4, 4))}
    for options, match in (
        ({"precision": "float64"}, "precision = 'float64'; it must be one of 'bfloat16', 'float16', 'float32'"),
        ({"preconditioning": "none"}, "preconditioning = 'none'; it must be one of 'frobenius'"),
        ({"ns_coeffs": "unknown"}, "unknown"),
    ):
        with pytest.raises(ValueError, match=match):
            muon(0.1, **options)
    tx = muon(0.1, muon_weight_dimension_numbers={"x": MuonDimensionNumbers(0, 0)})
    with pytest.raises(ValueError, match=r"axes \[0\] as rows and as columns"):
        tx.update(params, tx.init(params), params)
    tx, turned = muon(0.1), {"x": jnp.ones((4, 4), jnp.complex64)}
    with pytest.raises(TypeError, match="complex64; matrices must be real"):
        tx.update(turned, tx.init(turned), turned)
