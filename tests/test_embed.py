"""The token embedding beside flax.nnx.Embed: the same rows, and gradients that do not stagnate."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_layers import Embed, sharding

dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["f32", "bf16", "f16"])
param_dtypes = pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16], ids=["param_f32", "param_bf16"])


@dtypes
@param_dtypes
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_rows_are_those_of_nnx(shape, param_dtype, dtype):
    ours, stock = (kind(7, 16, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)) for kind in (Embed, nnx.Embed))
    tokens = jax.random.randint(jax.random.key(1), shape, -7, 7)  # negative ones count from the end
    rows = jax.jit(lambda tokens: ours(tokens))(tokens)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, stock(tokens))


def test_rows_outside_the_table_are_nan():
    rows = Embed(7, 16, rngs=nnx.Rngs(0))(jnp.array([6, 7, -8]))
    assert np.isfinite(rows[0]).all() and np.isnan(rows[1:]).all()


@dtypes
@param_dtypes
def test_the_gradient_of_a_frequent_token_is_rounded_once(param_dtype, dtype):
    """4096 tokens of one row and 64 of another. Sums in bfloat16 end near 256 times their addends."""
    embed = Embed(3, 8, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    tokens = jnp.repeat(jnp.array([0, 2]), jnp.array([4096, 64]), total_repeat_length=4160)
    weights = jax.random.normal(jax.random.key(0), (tokens.size, 8)).astype(dtype)

    def loss(embed):
        return jnp.sum((embed(tokens) * weights).astype(jnp.float32))

    gradient = nnx.grad(loss)(embed).embedding[...]
    assert gradient.dtype == param_dtype
    exact = np.zeros((3, 8))
    np.add.at(exact, np.asarray(tokens), np.asarray(weights, np.float64))
    tolerance = 0.0 if param_dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(np.asarray(gradient, np.float64), exact, rtol=tolerance, atol=2e-4)


def test_floating_tokens_are_refused():
    with pytest.raises(ValueError, match="tokens are integers, got float32"):
        Embed(7, 16, rngs=nnx.Rngs(0))(jnp.zeros(3))


def over_devices(param_dtype, axis_type):
    """A mesh, the sum of the squares of an embedding's rows as a function of its parameters and tokens, these, and the
    check of its gradient.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    graphdef, params = nnx.split(Embed(5, 8, dtype=jnp.bfloat16, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (6,), 0, 5)

    def loss(params, tokens, **options):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params)(tokens, **options).astype(jnp.float32)))

    whole = jax.grad(loss)(params, tokens)

    def check(gradient):
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7)

    return mesh, loss, params, tokens, check


@param_dtypes
def test_gradient_in_a_sharded_map(param_dtype):
    """The table is whole on every device, the tokens are not: its gradients are summed over the mesh."""
    mesh, loss, params, tokens, check = over_devices(param_dtype, jax.sharding.AxisType.Auto)
    specs = jax.P(), jax.P("data")
    check(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=jax.P())(params, tokens))


@param_dtypes
@pytest.mark.parametrize("options", [{"out_sharding": jax.P("data", None)}, {}], ids=["given", "default"])
def test_on_a_mesh_with_explicit_axes(param_dtype, options):
    mesh, loss, params, tokens, check = over_devices(param_dtype, jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, tokens = jax.device_put(params, jax.P()), jax.device_put(tokens, jax.P("data"))
        gradient = jax.grad(functools.partial(loss, **options))
        check(jax.jit(gradient)(params, tokens))


def test_rows_are_exchanged_not_the_table():
    """Under FSDP: of a large table each device keeps its columns, forward and backward; a small one is gathered."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])

    def compiled(vocabulary):
        with jax.set_mesh(mesh), sharding.axis_rules(sharding.FSDP):
            embed = sharding.create(lambda: Embed(vocabulary, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), sharding.FSDP)
            tokens = jax.device_put(
                jax.random.randint(jax.random.key(0), (4, 32), 0, vocabulary), NamedSharding(mesh, P("fsdp"))
            )
            graphdef, state = nnx.split(embed)

            def loss(state, tokens):
                return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(tokens).astype(jnp.float32)))

            return jax.jit(jax.grad(loss)).lower(state, tokens).compile(), (state, tokens)

    large, arguments = compiled(512)
    found = set(re.findall(r" (all-[\w-]+|reduce-scatter)\(", large.as_text()))
    assert "all-to-all" in found and not {"all-reduce", "reduce-scatter"} & found
    assert not [line for line in large.as_text().splitlines() if "all-gather(" in line and "[512," in line]
    small, _ = compiled(16)
    assert " all-to-all(" not in small.as_text()
    (gradient,) = jax.tree.leaves(large(*arguments))
    (table,) = jax.tree.leaves(arguments[0])
    want = jnp.zeros_like(table).at[arguments[1]].add(jnp.cos(table[arguments[1]].astype(jnp.bfloat16)))
    np.testing.assert_allclose(jax.device_get(gradient), jax.device_get(want), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("sizes", "dtype", "moved"),
    [
        ({"data": 4}, jnp.bfloat16, ["tensor<128x16xbf16>"]),
        ({"data": 4, "tensor": 1}, jnp.bfloat16, ["tensor<128x16xbf16>"]),
        ({"data": 4}, jnp.float16, []),  # which a part of a sum may overflow
        ({"data": 2, "tensor": 2}, jnp.bfloat16, []),  # the vocabulary is cut
    ],
    ids=str,
)
def test_gradient_of_a_table_that_is_whole(sizes, dtype, moved):
    """Under data parallelism the devices' sums of a bfloat16 table move in bfloat16, else XLA adds them."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), sharding.axis_rules(sharding.TENSOR):
        made = Embed(128, 16, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(made)
        state = jax.device_put(state, sharding.parameter_shardings(state, mesh, sharding.TENSOR))
        tokens = jax.random.randint(jax.random.key(0), (4, 32), 0, 128)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))

        def loss(state, tokens):
            return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(tokens).astype(jnp.float32)))

        lowered = jax.jit(jax.grad(loss)).lower(state, tokens)
        summed = re.findall(r"stablehlo.all_reduce.*?\((tensor<\S+>)\) ->", lowered.as_text(), re.DOTALL)
        (gradient,) = jax.tree.leaves(lowered.compile()(state, tokens))
    assert summed == moved
    table = jax.tree.leaves(state)[0].astype(jnp.float32)
    want = jnp.zeros_like(table).at[tokens].add(jnp.cos(table[tokens]).astype(dtype))
    np.testing.assert_allclose(jax.device_get(gradient).astype(np.float32), jax.device_get(want), rtol=2e-2, atol=2e-2)
