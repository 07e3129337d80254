"""The feed-forward of experts against a loop over them: values, gradients, what is kept, how many products it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks.lab.machine_code import resource_usage
from coda_jax import ffi
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.tiles.arch import SM90
from tests.expert_cases import HIDDEN, ROWS, SIZES, WIDTH, arguments, biases, clipped, compare, experts, plain
from tests.gemm_cases import assert_close, jit
from tests.nvrtc import kernels, needs_nvrtc


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(sizes, dtype):
    compare(functools.partial(experts, sizes=sizes), arguments(dtype, sizes), sizes)


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.relu, jnp.tanh])
def test_any_activation(activation):
    sizes, options = SIZES["unaligned"], {"activation": activation}
    compare(functools.partial(experts, sizes=sizes, **options), arguments(jnp.bfloat16, sizes), sizes, **options)


def test_without_row_scale():
    sizes = SIZES["unaligned"]
    compare(functools.partial(experts, sizes=sizes), arguments(jnp.bfloat16, sizes)[:3], sizes)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_biases_and_a_gate_of_both(sizes, dtype):
    """As of gpt-oss: the bias of each row's expert, the second one times the row's weight."""
    given = [*arguments(dtype, sizes), *biases(sizes, dtype=dtype)]
    compare(functools.partial(experts, sizes=sizes, activation=clipped), given, sizes, activation=clipped)


@pytest.mark.parametrize("kept", ["up_bias", "down_bias", "both, no row_scale"])
def test_one_bias(kept):
    sizes = SIZES["unaligned"]
    given, (up_bias, down_bias) = arguments(jnp.bfloat16, sizes), biases(sizes)
    x, gate_up, down, row_scale = given

    def of(function, arrays):
        x, gate_up, down, a, b = arrays
        options = {"up_bias": (a, b, None), "down_bias": (a, None, b)}.get(kept, (None, a, b))
        return function(x, gate_up, down, *options, sizes=sizes)

    others = {"up_bias": (row_scale, up_bias), "down_bias": (row_scale, down_bias)}.get(kept, (up_bias, down_bias))
    args = [x.at[sum(sizes) :].set(0).astype(jnp.float32), *(w.astype(jnp.float32) for w in (gate_up, down))]
    args += [jnp.nan_to_num(a) for a in others]
    got, want = (gradients(lambda *arrays, f=f: of(f, arrays), args) for f in (experts, plain))
    assert_close(got, want, rtol=1e-4)


def test_weights_of_an_expert_without_rows_are_not_read():
    """They may hold anything, forward and backward: of operators, of products, and of a block as plain JAX."""
    sizes = SIZES["unaligned"]
    args = arguments(jnp.float32, sizes, poison=False)
    spoilt = [args[0], args[1].at[1].set(jnp.inf), args[2].at[1].set(jnp.nan), args[3]]
    groups = jnp.asarray(sizes, jnp.int32)

    def product(x, w, *_):
        return coda.ragged_gemm(x, w, groups, epilogue=jnp.tanh)

    def turned(x, w, *_):
        return coda.ragged_gemm(x, w.mT, groups, transpose_b=True)

    lines = coda.block(
        lambda x, w, v, _: x.ragged_dot(w, groups).map(gated).ragged_dot(v, groups), implementation="xla"
    )
    for f in (functools.partial(experts, sizes=sizes), product, turned, lines):
        outputs, expected = ([y, *back(jnp.cos(y))] for y, back in (jax.vjp(jax.jit(f), *a) for a in (spoilt, args)))
        for one, other in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def gated(u):
    gate, up = jnp.split(u, 2, axis=-1)
    return gate * up


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_random_sizes(seed):
    """Up to 64 experts, many of them without a row; the first rows are not filled evenly."""
    generator = np.random.default_rng(seed)
    count, rows = int(generator.integers(2, 65)), int(generator.integers(1, 200))
    cuts = np.sort(generator.integers(0, rows + 1, count))
    sizes = tuple(int(n) for n in np.diff(cuts, prepend=0))
    compare(
        functools.partial(experts, sizes=sizes),
        arguments(jnp.bfloat16, sizes, rows=rows, width=16, hidden=8),
        sizes,
    )


def halves(x, w_gate_up, *rest, **options):
    return experts(x, w_gate_up.reshape(*w_gate_up.shape[:2], 2, -1), *rest, **options)


def pair(x, w_gate_up, *rest, **options):
    return experts(x, tuple(jnp.split(w_gate_up, 2, axis=-1)), *rest, **options)


@pytest.mark.parametrize("layout", [halves, pair])
@pytest.mark.slow
def test_layouts_of_gate_and_up(layout):
    sizes = SIZES["unaligned"]
    given = arguments(jnp.bfloat16, sizes)
    compare(functools.partial(layout, sizes=sizes), given, sizes)
    packed, apart = (gradients(functools.partial(f, sizes=sizes), given) for f in (experts, layout))
    jax.tree.map(np.testing.assert_array_equal, packed, apart)


def loss_of(function):
    return lambda *given: jnp.sum(jnp.sin(function(*given).astype(jnp.float32)))


def gradients(function, given):
    return jit(jax.value_and_grad(loss_of(function), range(len(given))))(*given)


@pytest.mark.slow
def test_parameters_and_rows_keep_their_dtypes():
    """Compute in bfloat16, all arguments float32: their gradients leave the products in float32."""
    sizes = SIZES["unaligned"]
    given = arguments(jnp.float32, sizes, poison=False)
    value, found = gradients(functools.partial(experts, sizes=sizes, dtype=jnp.bfloat16), given)
    expected, exact = gradients(functools.partial(plain, sizes=sizes), given)
    assert abs(value - expected) < 0.02 * abs(expected)
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))
        assert not (got.astype(jnp.bfloat16) == got).all()  # never rounded to bfloat16
    mixed = [x.astype(jnp.bfloat16) if i == 0 else x for i, x in enumerate(given)]
    y, dx = jax.vjp(lambda x: experts(x, *mixed[1:], sizes=sizes, dtype=jnp.bfloat16), mixed[0])
    assert y.dtype == dx(y)[0].dtype == jnp.bfloat16


def products_of(function, given):
    """The products of a function, and its other equations."""
    each = [equation for equation, _ in equations_of(function, *given)[0]]
    products = [equation for equation in each if equation.primitive in PRIMITIVES]
    return products, [equation for equation in each if equation.primitive not in PRIMITIVES]


@pytest.mark.parametrize("layout", ["halves", "pair", "halves of one"])
def test_layouts_of_biases(layout):
    sizes = SIZES["unaligned"]
    given = [*arguments(jnp.float32, sizes, poison=False), *map(jnp.nan_to_num, biases(sizes))]

    def apart(x, w_gate_up, w_down, row_scale, up_bias, down_bias, **options):
        if layout.startswith("halves"):
            up_bias = up_bias.reshape(len(up_bias), 2, -1)
            w_gate_up = w_gate_up.reshape(*w_gate_up.shape[:2], 2, -1) if layout == "halves" else w_gate_up
        if layout == "pair":
            w_gate_up, up_bias = (tuple(jnp.split(a, 2, axis=-1)) for a in (w_gate_up, up_bias))
        return experts(x, w_gate_up, w_down, row_scale, up_bias, down_bias, **options)

    got, want = (gradients(functools.partial(f, sizes=sizes), given) for f in (apart, plain))
    assert_close(got, want, rtol=1e-4)


def test_a_step_with_biases_is_eight_grouped_products():
    """Two more are narrow; one pass multiplies dy by the rows' weights, for the second bias's gradient."""
    sizes = SIZES["unaligned"]
    given = [*arguments(jnp.bfloat16, sizes), *biases(sizes)]

    def step(*given):
        y, back = jax.vjp(functools.partial(experts, sizes=sizes, activation=clipped), *given)
        return y, back(y)

    products, _ = products_of(step, given)
    kinds = {x.params["spec"].name: [o.kind.word for o in x.params["spec"].program.operands] for x in products}
    assert kinds["expert_mlp_0"] == kinds["expert_mlp_1"] == ["group_vector", "column_vector", "group_offsets"]
    assert kinds["expert_mlp_backward_1"] == ["tile", "column_vector", "group_offsets"]
    shapes = [x.aval.shape for one in products for x in one.outvars]
    narrow = {(len(sizes), 8, 2 * HIDDEN), (len(sizes), 8, WIDTH)}
    assert len(products) == 8 and narrow < set(shapes)
    leaves = jax.tree.leaves(jax.vjp(functools.partial(experts, sizes=sizes), *given)[1])
    kept = sorted((leaf.shape, leaf.dtype.name) for leaf in leaves if leaf.size and leaf.dtype != jnp.int32)
    own = [(x.shape, x.dtype.name) for x in given]
    assert kept == sorted([*own, ((ROWS, 2 * HIDDEN), "bfloat16")])


@pytest.mark.parametrize("layout", [experts, halves])
def test_the_step_is_six_grouped_products_and_no_pass_between_them(layout):
    sizes = SIZES["unaligned"]
    given = arguments(jnp.bfloat16, sizes)

    def step(*given):
        y, back = jax.vjp(functools.partial(layout, sizes=sizes), *given)
        return y, back(y)

    products, others = products_of(step, given)
    names = [equation.params["spec"].name for equation in products]
    chained = ["expert_mlp_0", "ragged_gemm", "expert_mlp_backward_0"]
    assert names == [*chained, "ragged_contraction", "ragged_gemm", "ragged_contraction"]
    assert all(equation.params["spec"].ragged is not None for equation in products)
    passes = [
        str(equation.primitive)
        for equation in others
        for x in equation.outvars
        if jnp.issubdtype(x.aval.dtype, jnp.floating) and x.aval.size >= ROWS * HIDDEN
    ]
    assert set(passes) <= {"name", "coda_plan_text", "reshape", "pjit", "jit", "custom_vjp_call"}, passes


@needs_nvrtc
@pytest.mark.parametrize("rows, width, hidden, count", [(16384, 2048, 3072, 8), (131072, 2048, 768, 128)])
@pytest.mark.slow
def test_kernels_on_a_gpu(monkeypatch, rows, width, hidden, count):
    """Six, of which none but the first backward spills, 64 bytes; that takes as long as one that does not."""
    sources = {}
    monkeypatch.setattr(ffi, "compile_async", lambda source, name, arch: sources.update({source: name}))
    shapes = [
        ((rows, width), "bfloat16"),
        ((count, width, 2 * hidden), "bfloat16"),
        ((count, hidden, width), "bfloat16"),
    ]
    shapes += [((rows,), "float32"), ((count,), "int32")]

    def step(*given):
        *arrays, sizes = given
        y, back = jax.vjp(functools.partial(experts, sizes=sizes), *arrays)
        return y, back(y)

    assert kernels(step, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)) == 6
    assert {"expert_mlp_0", "expert_mlp_backward_0"} < set(sources.values())
    for source, name in sources.items():
        spilled = resource_usage(ffi.compile(source, name, SM90.target).log).spilled_bytes
        assert spilled <= (64 if name == "expert_mlp_backward_0" else 0), name


def test_only_the_preactivation_is_kept_beside_the_arguments():
    """u alone is kept beside the arguments: no hidden activation, no result, no weight in another dtype."""
    sizes = SIZES["unaligned"]
    x, *weights, row_scale = arguments(jnp.float32, sizes)
    x = x.astype(jnp.bfloat16)

    def kept(**options):
        function = functools.partial(experts, sizes=sizes, dtype=jnp.bfloat16, **options)
        leaves = jax.tree.leaves(jax.vjp(function, x, *weights, row_scale)[1])
        return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves if leaf.size and leaf.dtype != jnp.int32)

    expected = [(a.shape, a.dtype.name) for a in (x, *weights, row_scale)] + [((ROWS, 2 * HIDDEN), "bfloat16")]
    assert kept() == sorted(expected)
    copies = [(w.shape, "bfloat16") for w in weights]
    assert kept(keep_weights=True) == sorted([*expected, *copies])


@pytest.mark.parametrize("keep", [False, True])
def test_weights_are_cast_again_behind_a_barrier(keep):
    """Else XLA takes the forward pass's copies, and so keeps them."""
    sizes = SIZES["unaligned"]
    given = arguments(jnp.float32, sizes)
    function = functools.partial(experts, sizes=sizes, dtype=jnp.bfloat16, keep_weights=keep)
    _, others = products_of(jax.value_and_grad(loss_of(function), range(4)), given)
    barriers = [equation for equation in others if str(equation.primitive) == "optimization_barrier"]
    shapes = sorted(x.aval.shape for equation in barriers for x in equation.outvars)
    assert shapes == ([] if keep else sorted(w.shape for w in given[1:3]))


def test_gradients_with_weights_kept_are_the_same():
    sizes = SIZES["unaligned"]
    given = arguments(jnp.float32, sizes, poison=False)
    options = {"sizes": sizes, "dtype": jnp.bfloat16}
    found = [gradients(functools.partial(experts, keep_weights=keep, **options), given) for keep in (False, True)]
    jax.tree.map(np.testing.assert_array_equal, *found)


# Products of a step: 2 of the forward pass, 4 of the backward pass, and what is run again.
POLICIES = {
    "everything": (jax.checkpoint_policies.everything_saveable, 6),
    "the name": (jax.checkpoint_policies.save_only_these_names("mlpwi"), 6),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 7),
}


@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("policy, count", POLICIES.values(), ids=POLICIES)
def test_remat(policy, count, with_biases):
    sizes = SIZES["unaligned"]
    given = arguments(jnp.float32, sizes, poison=False)
    given += map(jnp.nan_to_num, biases(sizes)) if with_biases else []
    function = functools.partial(experts, sizes=sizes)
    again = jax.checkpoint(function, policy=policy)
    assert_close(gradients(again, given), gradients(function, given))
    step = jax.value_and_grad(loss_of(again), range(len(given)))
    assert len(products_of(step, given)[0]) == count + 2 * with_biases


def test_scan_over_layers():
    sizes, layers = SIZES["unaligned"], 2
    x, *rest = arguments(jnp.float32, sizes, poison=False)
    stacked = [jnp.stack([w * (1 + 0.1 * i) for i in range(layers)]) for w in rest]

    def looped(function, x, *stacked):
        step = jax.checkpoint(lambda x, layer: (x + function(x, *layer, sizes=sizes), None))
        return jax.lax.scan(step, x, stacked)[0]

    got, want = (gradients(functools.partial(looped, f), [x, *stacked]) for f in (experts, plain))
    assert_close(got, want, rtol=1e-4)


def test_sizes_known_when_it_runs():
    """One compiled function takes any sizes."""
    given = arguments(jnp.float32, SIZES["unaligned"], poison=False)

    @jit
    def step(sizes, *given):
        return jax.value_and_grad(loss_of(functools.partial(experts, sizes=sizes)), range(4))(*given)

    for sizes in ((7, 0, 1, 12, 9), (0, 0, 0, 0, 37), (5, 11, 2, 18, 1)):
        expected = gradients(functools.partial(plain, sizes=sizes), given)
        assert_close(step(jnp.asarray(sizes, jnp.int32), *given), expected, rtol=1e-4)
    assert step._cache_size() == 1


@pytest.mark.parametrize("shared", ["weights", "nothing", "rows"])
@pytest.mark.slow
def test_vmap(shared):
    """Both orders of vmap and gradient, each element with sizes of its own."""
    sizes = np.array([(7, 0, 1, 12, 9), (0, 20, 0, 4, 13), (37, 0, 0, 0, 0)], np.int32)
    given = arguments(jnp.float32, sizes[0], poison=False)
    axes = {"weights": (0, None, None, 0), "nothing": (0,) * 4, "rows": (None, 0, 0, None)}[shared]
    batch = [
        x if axis is None else jnp.stack([x * (1 + 0.2 * i) for i in range(3)])
        for x, axis in zip(given, axes, strict=True)
    ]

    def of_one(i):
        return [x if axis is None else x[i] for x, axis in zip(batch, axes, strict=True)]

    def value(sizes, *given):
        return loss_of(functools.partial(experts, sizes=sizes))(*given)

    each = [gradients(functools.partial(plain, sizes=sizes[i]), of_one(i)) for i in range(3)]
    values, expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    of_each = jax.vmap(jax.value_and_grad(value, range(1, 5)), (0, *axes))
    assert_close(jit(of_each)(sizes, *batch), (values, expected), rtol=1e-4)

    def of_batch(*given):
        return jnp.sum(jax.vmap(value, (0, *axes))(sizes, *given))

    summed = [g.sum(0) if axis is None else g for g, axis in zip(expected, axes, strict=True)]
    got = jit(jax.value_and_grad(of_batch, range(4)))(*batch)
    assert_close(got, (values.sum(), tuple(summed)), rtol=1e-4)


@pytest.mark.parametrize("with_biases", [False, True])
def test_second_derivatives(with_biases):
    sizes = SIZES["unaligned"]
    given = arguments(jnp.float32, sizes, poison=False)
    given += map(jnp.nan_to_num, biases(sizes)) if with_biases else []
    numbers = range(len(given))

    def of_gradient(function):
        of_first = jax.grad(loss_of(functools.partial(function, sizes=sizes)), numbers)
        return lambda *given: sum(jnp.sum(jnp.sin(g)) for g in of_first(*given))

    got, want = (jit(jax.grad(of_gradient(f), numbers))(*given) for f in (experts, plain))
    assert_close(got, want, rtol=2e-4)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("others", [False, True], ids=["all axes", "one of two axes"])
def test_data_parallel_gradient(others, kind):
    """Under shard_map each device has rows and sizes of its own; a replicated weight's gradient is summed over them.

    The weights are cut over the other axis of the mesh, which shard_map leaves to XLA or to types.
    """
    shape = (2, 2) if others else (2,)
    kinds = (jax.sharding.AxisType[kind],) * len(shape)
    devices = jax.devices()[: len(shape) * 2]
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=kinds, devices=devices)
    sizes = np.array([(7, 0, 1, 12, 9), (0, 20, 0, 4, 13)], np.int32)
    given = arguments(jnp.float32, sizes[0], rows=2 * ROWS, poison=False)
    specs = (jax.P("data"), jax.P(), jax.P(), jax.P("data"))
    cuts = (specs[0], jax.P(None, None, "model"), jax.P(None, "model"), specs[3]) if others else specs

    def of_shard(sizes, *given):
        def loss(*given):
            return jax.lax.psum(loss_of(functools.partial(experts, sizes=sizes[0]))(*given), "data")

        return jax.value_and_grad(loss, range(4))(*given)

    def on_one(*given):
        x, gate_up, down, row_scale = given
        parts = [
            loss_of(functools.partial(plain, sizes=sizes[i]))(x[rows], gate_up, down, row_scale[rows])
            for i, rows in enumerate((slice(ROWS), slice(ROWS, None)))
        ]
        return sum(parts)

    with jax.set_mesh(mesh):
        shards = jax.shard_map(
            of_shard, in_specs=(jax.P("data"), *specs), out_specs=(jax.P(), specs), axis_names={"data"}
        )
        each = zip((sizes, *given), (jax.P("data"), *cuts), strict=True)
        got = jit(shards)(*(jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in each))
    assert_close(got, jit(jax.value_and_grad(on_one, range(4)))(*given), rtol=1e-4)


SHARDED = {
    "rows": (jax.P("data"), jax.P(), jax.P(), jax.P("data")),
    "hidden features": (jax.P(), jax.P(None, None, "data"), jax.P(None, "data"), jax.P()),
    "width of weights": (jax.P("data"), jax.P(None, "data"), jax.P(None, None, "data"), jax.P()),
    "width of rows": (jax.P(None, "data"), jax.P(), jax.P(), jax.P()),
}


# And of the biases.
SHARDED_BIASES = {
    "rows": (jax.P(), jax.P()),
    "hidden features": (jax.P(None, "data"), jax.P()),
    "width of weights": (jax.P(), jax.P(None, "data")),
    "width of rows": (jax.P(), jax.P()),
}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("cut", SHARDED)
def test_sharded_arguments(cut, kind, with_biases):
    """Rows of all experts and weights are cut over a mesh axis; gradients are cut as their arguments are."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType[kind],), devices=jax.devices()[:2])
    sizes, specs = SIZES["unaligned"], SHARDED[cut]
    given = arguments(jnp.float32, sizes, rows=40, poison=False)
    if with_biases:
        given += map(jnp.nan_to_num, biases(sizes))
        specs += SHARDED_BIASES[cut]
    want = gradients(functools.partial(plain, sizes=sizes), given)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]
        got = gradients(functools.partial(experts, sizes=sizes), placed)
        if kind == "Explicit":
            assert [jax.typeof(x).sharding for x in got[1]] == [jax.typeof(x).sharding for x in placed]
    assert_close(got, want, rtol=1e-4)


def test_forward_mode_is_refused_by_name():
    given = arguments(jnp.float32, SIZES["unaligned"])
    with pytest.raises(NotImplementedError, match=r"^coda_jax: expert_mlp has no forward mode"):
        jax.jvp(lambda x: experts(x, *given[1:], sizes=SIZES["unaligned"]), given[:1], given[:1])


def called(**changes):
    ones, shapes = jnp.ones, {"x": (6, 8), "w_gate_up": (3, 8, 20), "w_down": (3, 10, 8), "row_scale": (6,)}
    given = {name: ones(shape) for name, shape in shapes.items()} | {"group_sizes": ones(3, jnp.int32)} | changes
    return coda.expert_mlp(**given)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"x": (2, 3, 8)}, ValueError, r"x has shape \(2, 3, 8\) and w_down \(3, 10, 8\); they must be \(R, D\)"),
        ({"w_down": (10, 8)}, ValueError, r"w_down \(10, 8\); they must be \(R, D\) and \(E, F, D\)"),
        (
            {"w_down": (3, 10, 9)},
            ValueError,
            r"w_down has shape \(3, 10, 9\); beside x \(6, 8\) it must be \(3, 10, 8\)",
        ),
        ({"w_gate_up": (3, 8, 10)}, ValueError, r"w_gate_up has shape \(3, 8, 10\); .* it must be \(3, 8, 20\)"),
        ({"w_gate_up": (2, 8, 20)}, ValueError, r"w_gate_up has shape \(2, 8, 20\); .* it must be \(3, 8, 20\)"),
        ({"w_gate_up": (3, 8, 3, 10)}, ValueError, r"\(3, 8, 3, 10\); .* it must be \(3, 8, 2, 10\)"),
        ({"w_gate_up": [(3, 8, 10)] * 3}, ValueError, r"w_gate_up are arrays of shapes .* two arrays of 3 axes"),
        ({"w_gate_up": [(8, 10)] * 2}, ValueError, r"w_gate_up are arrays of shapes \(8, 10\), \(8, 10\)"),
        ({"up_bias": (3, 10)}, ValueError, r"up_bias has shape \(3, 10\); beside x \(6, 8\) it must be \(3, 20\)"),
        ({"up_bias": (3, 20, 1)}, ValueError, r"up_bias has shape \(3, 20, 1\); .* it must be \(3, 2, 10\)"),
        ({"down_bias": (10,)}, ValueError, r"down_bias has shape \(10,\); beside x \(6, 8\) it must be \(3, 8\)"),
        ({"down_bias": jnp.ones((3, 8), jnp.int32)}, TypeError, "down_bias has dtype int32"),
        ({"activation": clipped}, TypeError, "clipped cannot be called with one array, the gate; .* of_both=True"),
        ({"row_scale": (6, 1)}, ValueError, r"row_scale has shape \(6, 1\); beside x \(6, 8\) it must be \(6,\)"),
        (
            {"group_sizes": jnp.ones(4, jnp.int32)},
            ValueError,
            r"group_sizes has shape \(4,\); beside w_down \(3, 10, 8\) it must be \(3,\)",
        ),
        ({"group_sizes": jnp.ones(3)}, TypeError, "group_sizes has dtype float32; it must be int32"),
        ({"group_sizes": [2, 2, 2]}, TypeError, "group_sizes is list; it must be an array"),
        ({"x": jnp.ones((6, 8), jnp.int32)}, TypeError, "x has dtype int32; it must be bfloat16, float16 or float32"),
        ({"row_scale": jnp.ones(6, jnp.int32)}, TypeError, "row_scale has dtype int32"),
        (
            {"w_gate_up": (0, 8, 20), "w_down": (0, 10, 8)},
            ValueError,
            r"w_down has shape \(0, 10, 8\); the number of ex",
        ),
        ({"implementation": "gpu"}, ValueError, "expert_mlp: implementation = 'gpu'; it must be one of 'auto', 'cuda'"),
        ({"activation": "silu"}, TypeError, "activation = 'silu'; it must be a function"),
        ({"dtype": jnp.int32}, TypeError, "dtype = int32; it must be bfloat16, float16 or float32"),
    ],
)
def test_errors_name_the_value_and_the_rule(changes, error, message):
    def array(x):
        return jnp.ones(x) if isinstance(x, tuple) else x

    given = {
        k: [array(x) for x in v] if k == "w_gate_up" and isinstance(v, list) else array(v) for k, v in changes.items()
    }
    with pytest.raises(error, match=message):
        called(**given)
