"""`coda.fuse(f, check=True)`: no alarm for roundings, one for each planted fault, by the name of the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.fusion.fuse import Pieces
from coda_jax.fusion.in_float32 import InFloat32
from coda_jax.graph.judged import judged, wrong
from coda_jax.jaxprs.evaluate import without_constants

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
D, HEADS = 32, 2
DTYPES = jnp.float32, jnp.bfloat16, jnp.float16


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


def parameters():
    """In float32, as trainers have them."""
    names = {"q": (D, D), "k": (D, D), "v": (D, D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    w = {name: normal(i, *shape) for i, (name, shape) in enumerate(names.items())}
    return w | {f"bias_{name}": 0.1 * normal(20 + i, D) for i, name in enumerate("qkv")}, normal(30, 2, 8, D) * 1.4


def transformer(dtype):
    """A layer with attention and biases; the gradient of a key's bias is 0, as softmax takes no notice of it."""

    def loss(w, x):
        w = jax.tree.map(lambda a: a.astype(dtype), w)
        h = x.astype(dtype)
        q, k, v = ((h @ w[n] + w[f"bias_{n}"]).reshape(*x.shape[:-1], HEADS, D // HEADS) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / (D // HEADS) ** 0.5
        y = h + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(dtype), v).reshape(h.shape) @ w["out"]
        y = y + jax.nn.gelu(y @ w["up"]) @ w["down"]
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return loss


def run(f, *args):
    jax.block_until_ready(jax.jit(f)(*args))
    jax.effects_barrier()


@pytest.mark.parametrize("door", ["grad(fuse)", "fuse(grad)"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_roundings_to_16_bits_are_no_fault(dtype, door):
    loss = transformer(dtype)
    if door == "grad(fuse)":
        run(jax.value_and_grad(coda.fuse(loss, check=True)), *parameters())
    else:
        run(coda.fuse(jax.value_and_grad(loss), check=True), *parameters())


def with_planted_fault(monkeypatch, plant):
    """Pieces whose functions have plant(the names of the arguments' cotangents) in the place of these."""

    def function(self, closed, name, remats=(), *, kind="body"):
        whole = jax.extend.core.jaxpr_as_fun(without_constants(closed))

        @jax.custom_vjp
        def planted(*arrays):
            return whole(*arrays)

        def forward(*arrays):
            return jax.vjp(lambda *xs: whole(*xs), *arrays)

        planted.defvjp(forward, lambda pullback, cotangents: tuple(plant(list(pullback(list(cotangents))))))
        return planted

    monkeypatch.setattr(Pieces, "function", function)


@pytest.mark.parametrize("name", ["up", "bias_k"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_gradient_is_named(monkeypatch, dtype, name):
    """Each is a tenth too large; that of the key's bias, which is 0, gets a tenth of the query's."""
    w, x = parameters()
    names = sorted(w)

    def plant(cotangents):
        i = names.index(name)
        of = names.index("bias_q") if name == "bias_k" else i
        cotangents[i] = cotangents[i] + 0.1 * cotangents[of] * (10 if name == "bias_k" else 1)
        return cotangents

    with_planted_fault(monkeypatch, plant)
    loss = coda.fuse(transformer(dtype), check=True)
    with pytest.raises(Exception, match=rf"gradient of argument 0\['{name}'\] by") as raised:
        run(jax.grad(loss), w, x)
    assert str(raised.value).count("gradient of") == 1


def test_a_wrong_result_is_named(monkeypatch):
    from coda_jax.fusion.merged import Merged

    def f(w, x):
        return {"hidden": jnp.tanh(x @ w), "mean": x.mean()}

    results = Merged.results

    def planted(merged, equation, inputs, *given):
        factor = 1.1 if equation.primitive.name == "tanh" else 1.0
        return [factor * x for x in results(merged, equation, inputs, *given)]

    args = normal(0, D, D), normal(1, 8, D)
    run(coda.fuse(f, check=True), *args)
    monkeypatch.setattr(Merged, "results", planted)
    with pytest.raises(Exception, match=r"result\['hidden'\] by 1.0e-01"):
        run(coda.fuse(f, check=True), *args)


def test_a_fused_function_inside_is_no_measure_of_itself(monkeypatch):
    """The plain function's gradient is that of plain JAX, where a fused loss in it has a fused one."""
    from coda_jax.fusion.merged import Merged

    def checked_step():
        inner = coda.fuse(lambda w, x: jnp.mean(jnp.square(jnp.tanh(x @ w).astype(jnp.float32))))
        step = jax.value_and_grad(lambda w, x: inner(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)))
        return coda.fuse(step, check=True)

    args = normal(0, D, D), normal(1, 8, D)
    run(checked_step(), *args)
    results = Merged.results

    def planted(merged, equation, inputs, *given):
        factor = 1.1 if equation.primitive.name == "tanh" else 1.0
        return [factor * x for x in results(merged, equation, inputs, *given)]

    monkeypatch.setattr(Merged, "results", planted)
    with pytest.raises(Exception, match=r"result\[1\] by \d.\de-01"):
        run(checked_step(), *args)


@jax.custom_vjp
def by_rule(x, number):
    return x * jnp.sin(x) + number


by_rule.defvjp(lambda x, number: (by_rule(x, number), x), lambda x, d: (d * (jnp.sin(x) + 3 * x), None))


@jax.custom_jvp
def by_tangents(x):
    return jnp.tanh(x)


by_tangents.defjvp(lambda primals, tangents: (by_tangents(*primals), 2 * tangents[0] * primals[0]))


def on_each(w, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P(), jax.P("data")
    return jax.shard_map(lambda w, x: jax.lax.psum(x @ w, "data"), mesh=mesh, in_specs=specs, out_specs=jax.P())(w, x)


FORMS = {
    "scan": lambda w, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3),
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: 2 * x, x),
    "fori_loop": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)(w, x),
    "shard_map": on_each,
    "custom_vjp": lambda w, x: by_rule(x @ w, jnp.arange(D)),
    "custom_jvp": lambda w, x: by_tangents(x @ w),
    "scatter": lambda w, x: (x @ w).at[jnp.array([1, 1])].add(x[:2]),
    "gather": lambda w, x: w[jnp.array([1, 2])] @ w,
    "softmax": lambda w, x: jax.nn.log_softmax(jax.nn.silu(x @ w)),
    "sorted": lambda w, x: jnp.cumsum(jnp.sort(x @ w), axis=1),
    "attention": lambda w, x: jax.nn.dot_product_attention(*[(x @ w).reshape(1, -1, 2, D // 2)] * 3),
}


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("form", FORMS)
def test_a_function_in_float32_is_the_one_that_casts_to_float32(form, dtype):
    w, x = normal(0, D, D), normal(1, 8, D)

    def total(f):
        def sums(*args):
            floats = [y for y in jax.tree.leaves(f(*args)) if jnp.issubdtype(y.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.cos(y.astype(jnp.float32))) for y in floats)

        return jax.value_and_grad(sums, argnums=(0, 1))

    def cast(to):
        return lambda w, x: FORMS[form](w.astype(to), x.astype(to))

    closed = without_constants(jax.make_jaxpr(cast(dtype))(w, x))
    in_float32 = InFloat32(closed)
    consts = jax.make_jaxpr(cast(dtype))(w, x).consts
    found = total(lambda *args: in_float32(*consts, *args))(w, x)
    expected = total(cast(jnp.float32))(w, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    assert not in_float32.narrow


def test_check_runs_library_kernels_in_16_bits():
    """In the dtypes that it was made for; a message says so."""
    w, x = normal(0, D, D), normal(1, 8, D)

    def f(w, x):
        return coda.gemm(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), epilogue=jnp.tanh)

    in_float32 = InFloat32(jax.make_jaxpr(f)(w, x))
    (found,) = in_float32(w, x)
    assert found.dtype == jnp.float32 and "coda_gemm" in in_float32.narrow
    np.testing.assert_array_equal(found, f(w, x).astype(jnp.float32))


def one(found, own, exact, dtype=jnp.bfloat16):
    return judged("x", *(jnp.asarray(x, dtype) for x in (found, own)), jnp.asarray(exact, jnp.float32), [dtype])


def test_infinities_are_compared_where_they_stand():
    inf = np.inf
    assert not wrong([one([1, -inf, np.nan], [1, -inf, np.nan], [1, -inf, np.nan])])
    assert not wrong([one([1, 2], [1, inf], [1, 2])])  # the plain function alone overflows
    assert not wrong([one([1, 2], [1, 2], [1, np.nan])])
    assert not wrong([one([1, inf], [1, 2e38], [1, inf])])
    for found, own, exact in (([1, inf], [1, 2], [1, 2]), ([1, 2], [1, inf], [1, inf]), ([np.nan] * 2, [1, 2], [1, 2])):
        assert wrong([one(found, own, exact)])
