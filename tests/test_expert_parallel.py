"""A layer's experts under plain jit over a mesh: where the rules put them, with the values of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from flax_layers import sharding
from flax_layers.moe import expert_parallel as of_experts
from flax_layers.moe.expert_parallel import DOWN, GATE_UP, expert_parallel
from flax_layers.moe.routing import sorted_experts
from tests.nvrtc import kernels, needs_nvrtc

D, F, EXPERTS, K = 8, 4, 8, 2
BATCH = {"batch": ("data", "fsdp", "expert")}
FULL = {**BATCH, "expert": "expert", "fan_in": "fsdp", "embed": "fsdp", "mlp": "tensor"}

# The mesh's axes, the rules, and the batch and length of the tokens.
SCHEMES = {
    "one axis": ({"expert": 8}, FULL, (8, 3)),
    "data beside": ({"data": 2, "expert": 4}, FULL, (8, 3)),
    "experts first": ({"expert": 4, "data": 2}, FULL, (8, 3)),
    "fsdp beside": ({"fsdp": 2, "expert": 4}, FULL, (8, 3)),
    "fsdp": ({"fsdp": 8}, FULL, (8, 3)),
    "data": ({"data": 8}, FULL, (8, 3)),
    "tensor beside": ({"expert": 4, "tensor": 2}, FULL, (8, 3)),
    "tensor": ({"data": 2, "tensor": 4}, FULL, (8, 3)),
    "all": ({"fsdp": 2, "expert": 2, "tensor": 2}, FULL, (8, 3)),
    "sequence": ({"expert": 4, "tensor": 2}, {**FULL, "length": "tensor"}, (8, 4)),
    "length": ({"expert": 4, "context": 2}, {**FULL, "length": "context"}, (8, 4)),
    "on the fsdp axis": ({"fsdp": 4, "tensor": 2}, {**FULL, "expert": "fsdp"}, (8, 3)),
    "two axes": ({"data": 2, "expert": 4}, {**FULL, "expert": ("data", "expert")}, (8, 3)),
    "two axes, swapped": ({"data": 2, "expert": 4}, {**FULL, "expert": ("expert", "data")}, (8, 3)),
    "tokens not cut by experts": ({"data": 2, "expert": 4}, {**FULL, "batch": "data"}, (4, 3)),
    "few tokens": ({"fsdp": 2, "expert": 4}, FULL, (1, 1)),
    "half of the tokens' axes": ({"data": 2, "expert": 4}, {**FULL, "expert": ("expert", "data")}, (2, 3)),
    "columns by fsdp": ({"fsdp": 2, "expert": 2, "tensor": 2}, {**FULL, "mlp": ("fsdp", "tensor")}, (8, 3)),
}


def arrays(batch, length, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(batch, length, D), (EXPERTS, D, 2, F), (EXPERTS, F, D)]
    x, gate_up, down = (jnp.asarray(rng.standard_normal(shape) / 4, dtype) for shape in shapes)
    ids = np.argsort(rng.random((batch, length, EXPERTS)), axis=-1)[..., :K]
    weights = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    return x, jnp.asarray(ids, jnp.int32), weights, gate_up, down


def feed_forward(rows, row_scale, group_sizes, gate_up, down):
    return coda.expert_mlp(rows, gate_up, down, group_sizes, row_scale=row_scale, dtype=rows.dtype)


def of_mesh(x, ids, weights, gate_up, down, **options):
    return expert_parallel(feed_forward, x, ids, weights, (gate_up, down), **options)


def of_one_device(x, ids, weights, gate_up, down, **options):
    def experts(*rows):
        return feed_forward(*rows, gate_up, down)

    flat = (z.reshape(-1, z.shape[-1]) for z in (x, ids, weights))
    return sorted_experts(experts, *flat, EXPERTS).reshape(x.shape)


def with_gradients(function):
    def loss(x, weights, gate_up, down, ids):
        y = function(x, ids, weights, gate_up, down)
        return jnp.sum(jnp.sin(y.astype(jnp.float32) * jnp.arange(1, y.shape[-1] + 1))), y

    def run(x, ids, weights, gate_up, down):
        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, gate_up, down, ids)
        return y, *gradients

    return run


def mesh_of(sizes, kind=AxisType.Auto):
    devices = jax.devices("cpu")
    assert len(devices) == 8, "conftest.py asks for eight"
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes), devices=devices)


def placed(mesh, rules, given):
    """The arrays as the rules put them."""
    names = (*[("batch", "length", None)] * 3, GATE_UP, DOWN)
    specs = [sharding.spec_of(axes, rules, mesh=mesh, shape=x.shape) for axes, x in zip(names, given, strict=True)]
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]


def compiled(mesh, rules, given, function=of_mesh):
    def run(*arguments):
        with sharding.axis_rules(rules):
            return with_gradients(function)(*arguments)

    return jax.jit(run).lower(*placed(mesh, rules, given)).compile()


def close(got, want, rtol=2e-5):
    for x, y in zip(got, want, strict=True):
        y = np.asarray(y, np.float64)
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=rtol, atol=rtol * np.abs(y).max())


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_and_gradients_are_those_of_one_device(scheme, kind):
    sizes, rules, tokens = SCHEMES[scheme]
    if "length" in rules and kind is AxisType.Explicit:
        pytest.skip("refused over explicit axes")
    given = arrays(*tokens)
    want = jax.jit(with_gradients(of_one_device))(*given)
    mesh = mesh_of(sizes, kind)
    with jax.set_mesh(mesh):
        run = compiled(mesh, rules, given)
        got = run(*placed(mesh, rules, given))
    close(jax.device_get(got), want)


@pytest.mark.parametrize("scheme", ["all", "sequence", "few tokens"])
def test_bfloat16(scheme):
    """Over float32 parameters: as near to the float32 result as one device's."""
    sizes, rules, tokens = SCHEMES[scheme]
    given = arrays(*tokens)
    narrow = [given[0].astype(jnp.bfloat16), *given[1:]]
    want, plain = (jax.device_get(jax.jit(with_gradients(of_one_device))(*x)) for x in (given, narrow))
    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh):
        got = jax.device_get(compiled(mesh, rules, narrow)(*placed(mesh, rules, narrow)))
    assert [x.dtype for x in got] == [x.dtype for x in plain]
    for x, y, rough in zip(got, want, plain, strict=True):
        y, error = np.asarray(y, np.float64), np.abs(np.asarray(rough, np.float64) - y).max()
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=3 * error, rtol=0)


def test_shares_of_tokens():
    """Each of eight devices computes an equal share, padded with zeros; joined they are all tokens, whatever number."""
    axes, rows = ("expert",), [jnp.arange(1.0, 1 + count * D).reshape(1, count, D) for count in (3, 8, 9)]

    def run(rows):
        shares = [of_experts._share(x, axes) for x in rows]
        return shares, [of_experts._join(y, axes, x.shape[:-1]) for x, y in zip(rows, shares, strict=True)]

    mapped = jax.shard_map(run, mesh=mesh_of({"expert": 8}), in_specs=P(), out_specs=(P("expert"), P()))
    for x, shares, joined in zip(rows, *jax.jit(mapped)(rows), strict=True):
        padding = -x.size % (8 * D)
        np.testing.assert_array_equal(shares, np.pad(x[0], ((0, padding // D), (0, 0))))
        np.testing.assert_array_equal(joined, x)


def stable_hlo(sizes, rules, given, function=of_mesh):
    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh), sharding.axis_rules(rules):
        return jax.jit(with_gradients(function)).lower(*placed(mesh, rules, given)).as_text()


def moved(text, kind):
    """Types of what collectives of a kind are given, sorted."""
    return sorted(
        re.findall(rf'"stablehlo.{kind}"\(.*?\) (?:<\{{.*?\}}> )?(?:\(\{{.*?\}}\) )?: \(tensor<(.*?)>', text, re.DOTALL)
    )


def in_bfloat16(*arguments):
    """The result, sums over experts and residual to come, is wanted in float32."""
    return of_mesh(*arguments, compute_dtype=jnp.bfloat16, dtype=jnp.float32)


@pytest.mark.parametrize("by_columns", [False, True])
def test_fsdp_gathers_parameters_and_scatters_gradients_once(by_columns):
    """Parameters are gathered in the compute dtype and gradients scattered in their own, each once; tokens stay."""
    given = arrays(8, 3)
    given = [given[0].astype(jnp.bfloat16), *given[1:]]
    rules = {**BATCH, "expert": "expert", "mlp": "fsdp"} if by_columns else FULL
    text = stable_hlo({"fsdp": 2, "expert": 4}, rules, given, in_bfloat16)
    gate_up, down = (2, D, 2, F // 2) if by_columns else (2, D // 2, 2, F), (2, F // 2, D)
    parameters = ["x".join(map(str, shape)) for shape in (gate_up, down)]
    # The third is how many rows each device has for each expert.
    assert moved(text, "all_gather") == sorted([*(f"{x}xbf16" for x in parameters), f"1x{EXPERTS}xi32"])
    whole = [f"2x{D}x2x{F}xf32", f"2x{F}x{D}xf32"]
    assert moved(text, "reduce_scatter") == sorted(whole)
    assert moved(text, "all_reduce") == []


def test_a_device_has_the_same_features_of_both_parameters():
    """A device has the same hidden features of both if the mesh axes that shard F come in other orders."""
    sizes, rules, tokens = SCHEMES["all"]
    down = ("expert", ("fan_in", "mlp"), "embed")

    def swapped(*arguments):
        return of_mesh(*arguments, axes=(GATE_UP, down))

    given, mesh = arrays(*tokens), mesh_of(sizes)
    with jax.set_mesh(mesh):
        assert sharding.spec_of(down, rules, shape=given[-1].shape)[1] == ("fsdp", "tensor")
        got = compiled(mesh, rules, given, swapped)(*placed(mesh, rules, given))
    close(got, jax.jit(with_gradients(of_one_device))(*given))


def test_sums_over_the_axis_of_hidden_features():
    """The result is summed in the compute dtype, with as many rows as a device has tokens.

    Sequence parallelism scatters it.
    """
    given = arrays(8, 4)
    given = [given[0].astype(jnp.bfloat16), *given[1:]]
    rules = {**BATCH, "expert": "expert", "mlp": "tensor"}
    text = stable_hlo({"expert": 4, "tensor": 2}, rules, given, in_bfloat16)
    # Of y, and of the gradients of x and of the routing weights.
    assert moved(text, "all_reduce") == ["2x4x2xf32", f"2x4x{D}xbf16", f"2x4x{D}xbf16"]
    text = stable_hlo({"expert": 4, "tensor": 2}, {**rules, "length": "tensor"}, given, in_bfloat16)
    assert moved(text, "reduce_scatter") == [f"2x4x{D}xbf16"]
    assert moved(text, "all_reduce") == ["2x4x2xf32", f"2x4x{D}xbf16"]


@pytest.mark.slow
def test_dropped_rows_are_counted_over_all_devices():
    sizes, rules, tokens = SCHEMES["data beside"]
    given = arrays(*tokens)
    rows = given[1].size // 8  # what a device sends, and receives if all experts are chosen equally often
    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, rules, given)

        def run(capacity_factor, *arguments):
            with sharding.axis_rules(rules):
                return of_mesh(*arguments, capacity_factor=capacity_factor)

        y, dropped = jax.jit(run, static_argnums=0)(3.5 / rows, *arguments)  # four rows
        everything, none = jax.jit(run, static_argnums=0)(4.0, *arguments)
    wanted = np.zeros(EXPERTS, int)
    per_group = np.asarray(given[1]).reshape(2, -1) // 2  # the device of each row, of either half of the batch
    wanted = sum(max(0, np.sum(group == device) - 4) for group in per_group for device in range(4))
    assert dropped == wanted > 0 and none == 0
    assert dropped.sharding.is_fully_replicated
    close([everything], [jax.jit(of_one_device)(*given)])
    assert not np.allclose(y, everything)


def test_without_rules_or_a_mesh_it_is_one_device():
    given = arrays(8, 3)
    want = jax.jit(of_one_device)(*given)
    np.testing.assert_array_equal(jax.jit(of_mesh)(*given), want)
    y, dropped = jax.jit(lambda *x: of_mesh(*x, capacity_factor=0.1))(*given)
    np.testing.assert_array_equal(y, want)
    assert dropped == 0
    with sharding.axis_rules(FULL):
        np.testing.assert_array_equal(jax.jit(of_mesh)(*given), want)
    with jax.set_mesh(mesh_of({"expert": 8})):
        np.testing.assert_array_equal(jax.jit(of_mesh)(*given), want)


def test_inside_a_map_over_some_axes():
    """Over the axes that are left. Values alone: JAX does not differentiate a map inside a map."""
    given = arrays(8, 3)
    mesh = mesh_of({"data": 2, "expert": 4})

    def of_half(*arguments):
        with sharding.axis_rules(FULL):
            return of_mesh(*arguments)

    specs = (*(P("data"),) * 3, P(), P())
    with jax.set_mesh(mesh):
        run = jax.shard_map(of_half, in_specs=specs, out_specs=P("data"), axis_names={"data"})
        close([jax.jit(run)(*given)], [jax.jit(of_one_device)(*given)])


@pytest.mark.slow
def test_scanned_layers_with_remat():
    given = arrays(8, 3)
    sizes, rules, _ = SCHEMES["all"]

    def layers(function):
        def run(x, ids, weights, gate_up, down):
            def layer(x, scale):
                return x + function(x, ids, weights, gate_up * scale, down), None

            return jax.lax.scan(jax.checkpoint(layer), x, jnp.linspace(0.5, 1.0, 3))[0]

        return with_gradients(run)

    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh), sharding.axis_rules(rules):
        got = jax.jit(layers(of_mesh))(*placed(mesh, rules, given))
    close(got, jax.jit(layers(of_one_device))(*given), 1e-4)


@pytest.mark.parametrize(
    ("rules", "experts", "said"),
    [
        ({"expert": "expert"}, 6, r"shapes \[\(6, 8, 2, 4\), \(6, 4, 8\)\], by mesh axes \[\('expert',\)\]"),
        ({"expert": "expert"}, 5, "divide the number of experts evenly"),
    ],
)
def test_experts_that_the_mesh_does_not_divide(rules, experts, said):
    x, ids, weights, gate_up, down = arrays(8, 3)
    mesh = mesh_of({"data": 2, "expert": 4})
    with jax.set_mesh(mesh), sharding.axis_rules(rules), pytest.raises(ValueError, match=said):
        of_mesh(x, ids, weights, gate_up[:experts], down[:experts])


def test_parameters_and_names_belong_together():
    x, ids, weights, gate_up, down = arrays(8, 3)
    with pytest.raises(ValueError, match=r"of 8 experts, with 2 names: \[\(8, 8, 2, 4\), \(7, 4, 8\)\]"):
        of_mesh(x, ids, weights, gate_up, down[1:])
    with pytest.raises(ValueError, match="of 8 experts, with 1 names"):
        expert_parallel(feed_forward, x, ids, weights, (gate_up, down), axes=(GATE_UP,))


@needs_nvrtc
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_products_are_kernels_on_each_part(kind):
    """Two forward and four backward; rows are sent by JAX's collective."""
    sizes, rules, tokens = SCHEMES["all"]
    width, hidden = 64, 32
    shapes = [(*tokens, width), (*tokens, K), (*tokens, K), (EXPERTS, width, 2, hidden), (EXPERTS, hidden, width)]
    dtypes = [jnp.bfloat16, jnp.int32, jnp.float32, jnp.float32, jnp.float32]
    given = [jnp.zeros(*each) for each in zip(shapes, dtypes, strict=True)]
    mesh = mesh_of(sizes, kind)
    with jax.set_mesh(mesh), sharding.axis_rules(rules):
        arguments = placed(mesh, rules, given)
        assert kernels(with_gradients(of_mesh), *arguments) == 6
        lowered = jax.jit(with_gradients(of_mesh)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@ragged_all_to_all") == 6


@pytest.mark.parametrize("capacity_factor", [0, -1.0, float("nan")])
def test_a_capacity_factor_is_positive(capacity_factor):
    with pytest.raises(ValueError, match=r"capacity_factor=.*; it must be positive"):
        of_mesh(*arrays(8, 3), capacity_factor=capacity_factor)
