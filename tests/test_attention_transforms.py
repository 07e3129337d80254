"""coda.attention under JAX's transformations: batches, loops, checkpoints, second derivatives, exports, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding

import coda_jax as coda
from coda_jax.attend import blocks
from coda_jax.extend import CONTEXT_NAME
from coda_jax.jaxprs.walk import equations_of
from tests.test_attention import H, K, N, arrays, normal

pytestmark = pytest.mark.usefixtures("quick_to_compile")
P = jax.P
B, T = 4, 38
Q, KEY, V, DY, DLSE = arrays(T, T, batch=B)
IDS = np.random.default_rng(5).integers(0, 3, (B, T)).astype(np.int32)
BIAS = normal(6, 1, N, T, T)


def loss(q, k, v, bias=BIAS, ids=IDS, offset=0, dy=DY, **options):
    y, lse = coda.attention(
        q, k, v, bias, is_causal=True, segment_ids=ids, query_offset=offset, return_residual=True, **options
    )
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    return jnp.sum(y * dy) + jnp.sum(lse * lse)


def plain_loss(q, k, v, bias=BIAS, ids=IDS, **_):
    """The same by plain JAX, for causal attention at offset 0."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 + bias
    s = jnp.where(np.tri(T, dtype=bool) & (ids[:, None, :, None] == ids[:, None, None]), s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    return jnp.sum(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v) * DY) + jnp.sum(lse * lse)


def assert_equal(got, expected, limit=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit * np.max(np.abs(b), initial=1))


def counts(f, *args):
    """How often the two primitives run."""
    found = {"coda_attention": 0, "coda_attention_backward": 0}
    for equation, number in equations_of(f, *args)[0]:
        if equation.primitive.name in found:
            found[equation.primitive.name] += number
    return tuple(found.values())


@functools.cache
def gradients():
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(Q, KEY, V, BIAS)


@pytest.mark.smoke
def test_outside_jit():
    assert_equal(jax.value_and_grad(loss, (0, 1, 2, 3))(Q, KEY, V, BIAS), gradients())


# For each argument (q, k, v, bias, ids, offset) the axis of its batch.
BATCHES = [
    (0, 0, 0, 0, 0, 0),
    (2, None, None, None, None, None),
    (None, 1, None, None, None, None),
    (None, None, None, 4, None, None),
    (None, None, None, None, 0, None),
    (None, None, None, None, None, 0),
    (1, 3, 0, None, 1, None),
]


@pytest.mark.parametrize("axes", BATCHES, ids=str)
def test_batches(axes):
    given = Q, KEY, V, BIAS, IDS, np.arange(B, dtype=np.int32)

    def several(i, x, axis):
        if axis is None:
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return normal(10 + i, *x.shape[:axis], 3, *x.shape[axis:])
        return jnp.stack([np.roll(x, n, axis=0) for n in range(3)], axis)

    batch = [several(i, x, axis) for i, (x, axis) in enumerate(zip(given, axes, strict=True))]

    def total(f):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(f(*x, *batch[4:])), (0, 1, 2, 3)))(*batch[:4])

    def one_by_one(*x):
        each = (
            [a if axis is None else jnp.take(a, n, axis) for a, axis in zip(x, axes, strict=True)] for n in range(3)
        )
        return jnp.stack([loss(*one) for one in each])

    assert_equal(total(jax.vmap(loss, axes)), total(one_by_one))


def test_a_batch_of_gradients():
    ids = np.stack([IDS, IDS[::-1], IDS * 0])
    got = jax.jit(jax.vmap(lambda ids: jax.grad(loss, (0, 1, 3))(Q, KEY, V, BIAS, ids)))(ids)
    expected = [jax.grad(loss, (0, 1, 3))(Q, KEY, V, BIAS, one) for one in ids]
    assert_equal(got, jax.tree.map(lambda *x: jnp.stack(x), *expected))


def test_a_batch_of_intervals():
    first, last = np.random.default_rng(7).integers(0, T, (2, 3, T)).astype(np.int32)
    masks = coda.Intervals(jnp.array(first), jnp.array(last))
    got = jax.jit(jax.vmap(lambda mask: coda.attention(Q, KEY, V, mask=mask)))(masks)
    seen = (first[:, :, None] <= np.arange(T)) & (np.arange(T) <= last[:, :, None])
    assert_equal(got, jnp.stack([coda.attention(Q, KEY, V, mask=mask) for mask in seen]))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_shares_what_sequences_share(batch):
    """A bias and a mask for all sequences are not repeated."""
    q, mask = normal(1, 3, batch, T, N, H), np.tri(T, dtype=bool)
    f = jax.vmap(lambda q: coda.attention(q, KEY[:batch], V[:batch], BIAS, mask=mask))
    (attention,) = (x for x, _ in equations_of(f, q)[0] if x.primitive.name == "coda_attention")
    assert [x.aval.shape for x in attention.invars[3:]] == [(1, 1, T, T), (1, N, T, T)]


def test_a_batch_of_batches():
    q = normal(10, 3, 2, *Q.shape)
    got = jax.jit(jax.vmap(jax.vmap(lambda q: coda.attention(q, KEY, V, BIAS, mask=np.tri(T, dtype=bool)))))(q)
    each = [[coda.attention(x, KEY, V, BIAS, is_causal=True) for x in row] for row in q]
    assert_equal(got, jnp.stack([jnp.stack(row) for row in each]))


def test_a_loop():
    def in_loop(q, k, v):
        def step(x, scale):
            return x + coda.attention(x * scale, k, v[..., :H], is_causal=True), None

        return jnp.sum(jax.lax.scan(step, q, jnp.array([1.0, 0.5, 2.0]))[0] ** 2)

    def unrolled(q, k, v):
        for scale in (1.0, 0.5, 2.0):
            q = q + coda.attention(q * scale, k, v[..., :H], is_causal=True)
        return jnp.sum(q**2)

    given = normal(1, 1, 9, N, H), normal(2, 1, 9, K, H), normal(3, 1, 9, K, H)
    assert_equal(*(jax.jit(jax.grad(f, (0, 1, 2)))(*given) for f in (in_loop, unrolled)))


@pytest.mark.parametrize("names,runs", [((), 2), ((CONTEXT_NAME,), 1)], ids=["nothing", "the context"])
def test_checkpoints(names, runs):
    """The forward pass runs again, but where its result and log-sum-exp are kept."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    f = jax.value_and_grad(lambda *x: jax.checkpoint(loss, policy=policy)(*map(jnp.sin, x)), (0, 1, 2))
    assert counts(f, Q, KEY, V) == (runs, 1)
    assert_equal(
        jax.jit(f)(Q, KEY, V), jax.jit(jax.value_and_grad(lambda *x: loss(*map(jnp.sin, x)), (0, 1, 2)))(Q, KEY, V)
    )


@pytest.mark.smoke
@pytest.mark.parametrize("places", [(0, 1, 2, 3)])
def test_second_derivatives(places):
    """The gradient of a function of all gradients, those of the bias and the log-sum-exp included."""

    def second(f):
        def norm(*x):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(f, places)(*x))

        return jax.jit(jax.grad(norm, places))(Q, KEY, V, BIAS)

    assert_equal(second(loss), second(plain_loss))


def test_third_derivatives_and_rows_that_see_nothing():
    given = normal(1, 1, 9, 1, 4), normal(2, 1, 7, 1, 4), normal(3, 1, 7, 1, 4)
    seen = np.tri(9, 7, -3, dtype=bool)

    def own(q, k, v):
        return jnp.sum(jnp.sin(coda.attention(q, k, v, mask=seen)))

    def plain(q, k, v):
        s = jnp.where(seen, jnp.einsum("btnh,bsnh->bnts", q, k) / 2, -1e30)
        return jnp.sum(
            jnp.sin(jnp.where(np.any(seen, 1)[:, None, None], jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v), 0))
        )

    def third(f):
        for _ in range(3):
            f = functools.partial(lambda f, *x: sum(jnp.sum(jnp.cos(g)) for g in jax.grad(f, (0, 1, 2))(*x)), f)
        return jax.jit(lambda: f(*given))()

    assert_equal(third(own), third(plain))


def test_second_derivatives_in_blocks(monkeypatch):
    for name, value in (("_MOST_CPU_BYTES", 4), ("_LEAST_ROWS", 4), ("_LEAST_SPAN", 16)):
        monkeypatch.setattr(blocks, name, value)
    jax.clear_caches()
    test_second_derivatives((0, 1, 2, 3))
    jax.clear_caches()


def test_no_array_of_all_scores():
    """Neither derivative of 2 heads of 4096 queries, whose scores would take 128 MiB, nor that of ids and intervals."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.float32)

    def first(*x):
        ids, lengths = jnp.arange(4096) // 100, jnp.array([4000])
        attend = functools.partial(coda.attention, segment_ids=ids, is_causal=True, key_value_seq_lengths=lengths)
        return jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2))(*x)

    def second(*x):
        return jax.grad(lambda *x: sum(jnp.sum(g**2) for g in first(*x)), (0, 1, 2))(*x)

    for f in (first, second):
        assert jax.jit(f).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes < 64 << 20


def test_the_gradient_of_the_bias_is_computed_where_it_is_asked_for():
    def products(*places):
        f = jax.grad(lambda q, bias: jnp.sum(coda.attention(q, KEY, V, bias) ** 2), places)
        return sum(
            number for equation, number in equations_of(f, Q, BIAS)[0] if equation.primitive.name == "dot_general"
        )

    assert (products(0), products(0, 1)) == (0, 2)


@pytest.mark.parametrize("f", [jax.jacfwd, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_forward_mode_is_refused_by_name(f):
    with pytest.raises(NotImplementedError, match="attention has no forward mode"):
        f(lambda q: coda.attention(q, KEY, V))(Q)


def test_the_kernel_is_refused_where_it_cannot_run():
    with pytest.raises(NotImplementedError, match="implementation='cuda' was asked for on platform cpu"):
        coda.attention(Q, KEY, V, implementation="cuda", config=coda.AttentionConfig(deterministic=False))
    jax.jit(lambda *x: coda.attention(*x, implementation="cuda")).trace(Q, KEY, V)


def test_equal_calls_are_one_function():
    def three(q):
        for _ in range(3):
            q = coda.attention(q, KEY, V[..., :H])
        return q

    text = jax.jit(three).lower(Q).as_text()
    assert text.count("dot_general") == 2


@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": 3, "query_offset": 2}], ids=str)
def test_symbolic_sizes(options):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    b, t, s = export.symbolic_shape("b, t, s")
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, t, N, H), (b, s, K, H), (b, s, K, H))]
    types += [jax.ShapeDtypeStruct((b, t), jnp.int32), jax.ShapeDtypeStruct((b, s), jnp.int32)]
    types += [jax.ShapeDtypeStruct((b,), jnp.int32), jax.ShapeDtypeStruct((1, N, t, s), jnp.float32)]

    def run(q, k, v, ids, key_ids, lengths, bias):
        def attend(q, k, v, bias):
            return coda.attention(
                q,
                k,
                v,
                bias,
                segment_ids=ids,
                key_value_segment_ids=key_ids,
                **options,
                **({"key_value_seq_lengths": lengths} if "is_causal" in options else {}),
            )

        y, pullback = jax.vjp(attend, q, k, v, bias)
        return y, *pullback(y)

    exported = export.export(jax.jit(run))(*types)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    q, k, v, *_ = arrays(11, 7, batch=3)
    random = np.random.default_rng(0)
    ids, key_ids = (random.integers(0, 2, (3, n)).astype(np.int32) for n in (11, 7))
    given = q, k, v[..., :H], ids, key_ids, np.array([3, 7, 0], np.int32), normal(5, 1, N, 11, 7)
    assert_equal(jax.jit(loaded.call)(*given), jax.jit(run)(*given))


def test_a_symbolic_batch_is_computed_in_blocks():
    (b,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 8192, 1, 8), jnp.float32)
    text = str(export.export(jax.jit(lambda x: coda.attention(x, x, x)))(x).mlir_module())
    assert "stablehlo.while" in text


MESHES = {
    "heads": (P("data", None, "tensor"), P("data", None, "tensor")),
    "one key head a device and more": (P("data", None, "tensor"), P("data")),
    "rows": (P(None, "data"), P()),
    "keys": (P("data"), P(None, "tensor")),
}


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize("name", MESHES)
def test_explicit_meshes(name):
    """Results have q's sharding of the batch, of rows and of heads, and gradients those of their arguments."""
    q_spec, k_spec = MESHES[name]
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        q, dy = (jax.device_put(x, NamedSharding(mesh, q_spec)) for x in (Q, DY))
        k, v = (jax.device_put(x, NamedSharding(mesh, k_spec)) for x in (KEY, V))
        y, lse = jax.eval_shape(lambda *x: coda.attention(*x, return_residual=True), q, k, v)
        assert y.sharding.spec == P(*[*q_spec, None, None, None][:4])
        assert lse.sharding.spec == P(*[*q_spec, None, None][:3])
        got = jax.jit(jax.value_and_grad(lambda *x: loss(*x, dy=dy), (0, 1, 2, 3)))(q, k, v, BIAS)
        for x, gradient in zip((q, k, v), got[1], strict=False):
            assert jax.typeof(x).sharding == jax.typeof(gradient).sharding
        assert_equal(jax.device_get(got), gradients())

        def second(q, k):
            return jnp.sum(jax.grad(lambda q: loss(q, k, v, dy=dy))(q) ** 2)

        second_gradients = jax.device_get(jax.jit(jax.grad(second, (0, 1)))(q, k))
    expected = jax.grad(lambda q, k: jnp.sum(jax.grad(lambda q: loss(q, k, V))(q) ** 2), (0, 1))
    assert_equal(second_gradients, jax.jit(expected)(Q, KEY))


@pytest.mark.parametrize("axis", [0, None])
def test_a_batch_over_an_explicit_mesh(axis):
    def total(f):
        return jax.grad(lambda q, k: jnp.sum(f(q, k) ** 2), (0, 1))

    def one(q, k):
        return coda.attention(q, k, k, is_causal=True, segment_ids=IDS)

    q, k = normal(1, 4, *Q.shape), normal(2, 4, *KEY.shape) if axis == 0 else KEY
    expected = jax.jit(total(lambda q, k: jnp.stack([one(x, k if axis is None else k[i]) for i, x in enumerate(q)])))(
        q, k
    )
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        given = jax.device_put(q, P("data", None, None, "tensor")), jax.device_put(k, P("data" if axis == 0 else None))
        got = jax.device_get(jax.jit(total(jax.vmap(one, (0, axis))))(*given))
    assert_equal(got, expected)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma):
    spec = P("data", None, "tensor")
    specs = spec, spec, spec, P(None, "tensor"), P("data"), spec

    @functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P(), check_vma=check_vma)
    def total(q, k, v, bias, ids, dy):
        return jax.lax.psum(loss(q, k, v, bias, ids, dy=dy), ("data", "tensor"))

    got = jax.jit(jax.value_and_grad(lambda *x: total(*x, IDS, DY), (0, 1, 2, 3)))(Q, KEY, V, BIAS)
    assert_equal(got, gradients())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_shard_map_over_one_axis(kind):
    """The other axis shards heads, and is left to JAX or to XLA."""
    spec, over_data = P("data", None, "tensor"), P("data")
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        q, k, v, dy = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (Q, KEY, V, DY))

        @functools.partial(
            jax.shard_map, in_specs=(*[over_data] * 3, P(), *[over_data] * 2), out_specs=P(), axis_names={"data"}
        )
        def total(q, k, v, bias, ids, dy):
            return jax.lax.psum(loss(q, k, v, bias, ids, dy=dy), "data")

        got = jax.jit(jax.value_and_grad(lambda *x: total(*x, IDS, dy), (0, 1, 2, 3)))(q, k, v, BIAS)
        assert_equal(jax.device_get(got), gradients())


def test_automatic_meshes():
    sharding = NamedSharding(mesh_of(AxisType.Auto), P("data", None, "tensor"))
    given = (jax.device_put(x, sharding) for x in (Q, KEY, V))
    assert_equal(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*given, BIAS), gradients())


def decay(s, slopes, of_rows):
    row, key = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (2, 3))
    return s - slopes[:, None, None] * jnp.abs(row - key) + of_rows[..., None] * jnp.cos(key / 3)


def decayed(q, k, v, dy, *operands):
    return jnp.sum(coda.attention(q, k, v, is_causal=True, score=decay, operands=operands) * dy)


@pytest.mark.parametrize("kind", ["checked", "unchecked", "explicit"])
def test_operands_of_a_score_over_a_mesh(kind):
    """Operands that devices share have the sum of their gradients; the axis of vmap may be over one of the mesh."""
    slopes, of_rows = normal(1, N), normal(2, B, N, T)
    given = Q, KEY, V, DY, slopes, of_rows
    expected = jax.jit(jax.grad(decayed, (0, 1, 4, 5)))(*given)
    spec = P("data", None, "tensor")
    specs = spec, spec, spec, spec, P("tensor"), P("data", "tensor")
    if kind == "explicit":
        with jax.set_mesh(mesh_of(AxisType.Explicit)):
            placed = [jax.device_put(x, of) for x, of in zip(given, specs, strict=True)]
            got = jax.device_get(jax.jit(jax.grad(decayed, (0, 1, 4, 5)))(*placed))
            each = [jax.device_put(x[:, None], of) for x, of in zip(given[:4], [P("data")] * 4, strict=True)]
            each.append(jax.device_put(of_rows[:, None], P("data")))

            def total(q, k, v, dy, of_rows, slopes):
                axes = (0, 0, 0, 0, None, 0)
                return jnp.sum(jax.vmap(decayed, axes)(q, k, v, dy, slopes, of_rows))

            by_vmap = jax.device_get(jax.jit(jax.grad(total, (0, 1, 5, 4)))(*each, slopes))
        assert_equal([x if x.ndim == 1 else x[:, 0] for x in by_vmap], expected)
    else:
        over = functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P())
        total = over(lambda *x: jax.lax.psum(decayed(*x), ("data", "tensor")), check_vma=kind == "checked")
        got = jax.jit(jax.grad(total, (0, 1, 4, 5)))(*given)
    assert_equal(got, expected)
