"""Maps of matrices on arrays that have several axes in the place of rows, or halves in the place of columns."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax.graph.pieces import Pieces, in_pieces, whole
from coda_jax.graph.unflattened import Unflattened, flat
from coda_jax.jaxprs.bind import bind
from tests.gemm_cases import assert_close

pytestmark = pytest.mark.usefixtures("quick_to_compile")
P = PartitionSpec
ROWS = (2, 3)


def of_heads(x):
    heads = x.reshape(x.shape[0], 2, 4)
    return (heads / (1 + jnp.max(heads, axis=-1, keepdims=True))).reshape(x.shape)


def slices_gradient(x, dy, heads=0):
    """The cotangent of x (6, 8), or of its heads, from those of three slices of its columns, or two of its heads."""

    def slices(x):
        if heads:
            z = x.reshape(6, 4, 2)
            return z[:, :heads], z[:, heads:]
        return x[:, :3], x[:, 3:4], x[:, 4:]

    ys, pullback = jax.vjp(slices, x)
    ends, sizes = 0, []
    for y in ys:
        sizes.append((ends, ends := ends + y.size // 6))
    return pullback(tuple(dy[:, slice(*size)].reshape(y.shape) for y, size in zip(ys, sizes, strict=True)))[0]


MAPS = {
    "elementwise": lambda x, r, c: jnp.tanh(x) * r + c,
    "sums": lambda x, r, c: (jnp.sum(x * c, axis=1), jnp.mean(x, axis=1, keepdims=True), jnp.sum(x * r, axis=0)),
    "the whole": lambda x, r, c: (jnp.max(x), jnp.argmax(x * r, axis=1), jnp.argmin(x, axis=0)),
    "halves": lambda x, r, c: jnp.concatenate([-jnp.split(x, 2, axis=1)[1], x[:, :4] * r], axis=1),
    "heads": lambda x, r, c: of_heads(x),
    "rows": lambda x, r, c: x[1:] + jnp.cumsum(x, axis=0)[:-1] + x[::-1][1:] * r[1:],
    "transposed": lambda x, r, c: x.T @ (x * c),
    "of the axis of rows": lambda x, r, c: jnp.squeeze(r, 1)[:, None, None] * x.reshape(6, 4, 2),
    "derivative of slices": lambda x, r, c: slices_gradient(jnp.tanh(x), jnp.sin(x) * r),
    "derivative of heads": lambda x, r, c: slices_gradient(jnp.tanh(x), jnp.sin(x) * r, heads=2),
    "zeros": lambda x, r, c: (jnp.zeros((6, 8)) + x, jnp.exp(jnp.zeros((6, 8))) * r, jnp.pad(x, ((0, 0), (0, 3))).T),
    "pads of rows": lambda x, r, c: (jnp.pad(x, ((1, 0), (2, 0))), jnp.pad(x, ((0, 0), (1, 1)), constant_values=3.0)),
    "constants": lambda x, r, c: jnp.where(jnp.arange(6)[:, None] > jnp.arange(8)[None, :], x, jnp.zeros_like(x)),
}


@pytest.mark.parametrize("name", list(MAPS))
def test_of_several_axes_of_rows(name):
    x, r, c = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(6, 8), (6, 1), (1, 8)]))
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.tree.leaves(MAPS[name](*arrays)))(x, r, c)
    found = in_pieces(jaxpr, [Unflattened(x.reshape(2, 3, 8), ROWS), Unflattened(r.reshape(2, 3, 1), ROWS), c], bind)
    assert_close([flat(whole(y)) for y in found], jax.tree.leaves(MAPS[name](x, r, c)), 1e-6)


@pytest.mark.parametrize("name, kept", [("sums", [True, True, False]), ("heads", [True]), ("halves", [True])])
def test_which_results_keep_the_axes(name, kept):
    x, r, c = jnp.ones((6, 8)), jnp.ones((6, 1)), jnp.ones((1, 8))
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.tree.leaves(MAPS[name](*arrays)))(x, r, c)
    found = in_pieces(jaxpr, [Unflattened(x.reshape(2, 3, 8), ROWS), Unflattened(r.reshape(2, 3, 1), ROWS), c], bind)
    assert [isinstance(whole(y), Unflattened) for y in found] == kept


@pytest.mark.parametrize("name", ["elementwise", "sums", "the whole", "halves", "heads"])
def test_of_columns_that_are_halves(name):
    x, r, c = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(6, 8), (6, 1), (1, 8)]))
    jaxpr = jax.make_jaxpr(lambda *arrays: jax.tree.leaves(MAPS[name](*arrays)))(x, r, c)
    found = in_pieces(jaxpr, [Unflattened(x.reshape(6, 2, 4), (6,), halves=True), r, c], bind)
    assert_close([flat(whole(y)) for y in found], jax.tree.leaves(MAPS[name](x, r, c)), 1e-6)


@pytest.mark.parametrize("unflattened", [False, True])
@pytest.mark.parametrize("heads, widths", [(0, [3, 1, 4]), (2, [4, 4])])
def test_a_sum_of_slices_derivatives_is_a_concatenation(heads, widths, unflattened):
    x, dy = (jax.random.normal(jax.random.key(i), (6, 8)) for i in (0, 1))
    jaxpr = jax.make_jaxpr(lambda *arrays: [slices_gradient(*arrays, heads)])(x, dy)
    inputs = [Unflattened(y.reshape(2, 3, 8), ROWS) if unflattened else y for y in (x, dy)]
    names = []

    def counted(primitive, arrays, params):
        names.append(primitive.name)
        return bind(primitive, arrays, params)

    (found,) = in_pieces(jaxpr, inputs, counted)
    assert isinstance(found, Pieces) and found.widths == widths and not any(found.zeros)
    assert not {"add", "add_any", "pad", "concatenate"} & {*names}
    assert_close(flat(whole(found)), slices_gradient(x, dy, heads), 1e-6)


@pytest.mark.parametrize("spec", [P(None, "y", None), P("x", "y", None), P("x", None, None)], ids=str)
def test_rows_that_explicit_axes_cut(spec):
    """A map that no epilogue makes, which XLA applies to the axes that are there."""

    @coda.block
    def block(x, scale, w):
        shrunk = (coda.rms_norm(x, scale) @ w).map(lambda z: z / (1 + jnp.sum(jnp.abs(z), axis=1, keepdims=True)))
        return x + shrunk

    def plain(x, scale, w):
        z = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale @ w
        return x + z / (1 + jnp.sum(jnp.abs(z), axis=-1, keepdims=True))

    def gradients(f, *arrays):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(f(*arrays))), (0, 1, 2)))(*arrays)

    x, scale, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 8, 16), (16,), (16, 16)]))
    want = gradients(plain, x, scale, w)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        moved = jax.sharding.reshard(x, NamedSharding(mesh, spec))
        found = gradients(lambda *arrays: block(*arrays), moved, scale, w)
        assert jax.typeof(found[0]).sharding.spec == spec
    assert_close([jax.device_get(y) for y in found], want, 1e-4)
