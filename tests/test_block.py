"""coda.block: values and gradients of blocks of all forms, under transforms; what their authors may write, and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coda_jax as coda
from coda_jax.graph.values import Map
from tests.block_cases import BATCH, FORMS, LENGTH, arguments, in_block, in_jax, loss, swiglu
from tests.gemm_cases import assert_close

pytestmark = pytest.mark.usefixtures("quick_to_compile")
M, D, F = 12, 8, 16


def random(i, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(i), shape).astype(dtype)


def compared(f, in_plain, *args, argnums=None):
    """Values and gradients of a block beside those of plain JAX."""
    argnums = argnums or tuple(i for i, x in enumerate(args) if hasattr(x, "dtype"))
    assert_close(*(jax.jit(one)(*args) for one in (f, in_plain)), 1e-5)
    assert_close(*(jax.jit(jax.grad(loss(one), argnums))(*args) for one in (f, in_plain)), 1e-4)


def graph_of(block):
    (traced,) = block._graphs.values()
    return traced.graph


@pytest.mark.smoke
@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    x, p = arguments()
    block, plain = in_block(name), in_jax(name)
    assert_close(jax.jit(block)(x, p), plain(x, p), 1e-5)
    found, want = (jax.jit(jax.grad(loss(one), (0, 1)))(x, p) for one in (block, plain))
    assert_close(found, want, 1e-4)
    graph = graph_of(block)
    plans = graph.derivative().forward_plan, graph.derivative().backward().plan
    _, products, passes = FORMS[name]
    assert tuple(len(plan.steps) for plan in plans) == products
    rows = x.shape[0] * x.shape[1]
    by_xla = [[v.shape for v in plan.by_xla if isinstance(v, Map) and v.is_tile] for plan in plans]
    of_rows = [[n for m, n in shapes if m == rows and n >= x.shape[-1]] for shapes in by_xla]  # no gradients of tables
    assert tuple(map(len, of_rows)) == passes


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow
def test_the_authors_lines_as_plain_jax(name):
    x, p = arguments()
    block, plain = in_block(name, implementation="xla"), in_jax(name)
    assert_close(jax.jit(block)(x, p), plain(x, p), 1e-5)
    assert_close(*(jax.jit(jax.grad(loss(one), (0, 1)))(x, p) for one in (block, plain)), 1e-4)
    jax.jvp(block, (x, p), (x, p))  # it has a forward mode


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow
def test_bfloat16(name):
    """Gradients are at least as good as those of the author's lines in bfloat16."""
    x, p = arguments(jnp.bfloat16)
    exact = jax.grad(loss(in_jax(name)), (0, 1))(x.astype(jnp.float32), p)

    def error(f, *args):
        found = jax.tree.leaves(jax.jit(jax.grad(loss(f), (0, 1)))(*args))
        of = [
            float(jnp.linalg.norm(a - b)) / (float(jnp.linalg.norm(b)) or 1)
            for a, b in zip(found, jax.tree.leaves(exact), strict=True)
        ]
        return np.array(of)

    block, plain = in_block(name), in_jax(name)
    narrow = lambda x, p: plain(x, jax.tree.map(lambda w: w.astype(jnp.bfloat16), p))  # noqa: E731
    assert block(x, p).dtype == jnp.bfloat16
    assert np.all(error(block, x, p) <= 1.5 * error(narrow, x, p).max() + 1e-6)


@pytest.mark.parametrize("name", ["llama", "post-norm"])
@pytest.mark.slow
def test_second_derivatives(name):
    x, p = arguments()

    def of(one):
        squares = lambda x: jnp.sum(jnp.square(jax.grad(loss(one))(x, p)))  # noqa: E731
        return jax.jit(jax.grad(squares))(x)

    assert_close(of(in_block(name)), of(in_jax(name)), 1e-3)


def test_transforms():
    """vmap with shared weights, a loop, checkpoints by name."""
    x, p = arguments()
    many = jnp.stack([x, 2 * x, -x])
    policy = jax.checkpoint_policies.save_only_these_names("z")

    def feed_forward(x, p):
        return x + ((coda.rms_norm(x, p["s1"]) @ p["up"]).map(swiglu)).named("z") @ p["down"]

    def plain(x, p):
        y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * p["s1"]
        gate, up = jnp.split(y @ p["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    def batch(one):
        return lambda x, p: jax.vmap(one, in_axes=(0, None))(x, p)

    def loop(one):
        step = jax.checkpoint(lambda x, p: (one(x, p), None), policy=policy)
        return lambda x, p: lax.scan(lambda x, _: step(x, p), x, length=3)[0]

    block = coda.block(feed_forward)
    for transform, arrays in ((batch, many), (loop, 0.1 * x)):
        of = [transform(one) for one in (block, plain)]
        assert_close(*(jax.jit(one)(arrays, p) for one in of), 1e-5)
        assert_close(*(jax.jit(jax.grad(loss(one), (0, 1)))(arrays, p) for one in of), 1e-4)
    saved = jax.ad_checkpoint.saved_residuals if hasattr(jax.ad_checkpoint, "saved_residuals") else None
    if saved is not None:
        kept = [
            text for _, text in saved(jax.checkpoint(lambda x: loss(block)(x, p), policy=policy), x) if "named" in text
        ]
        assert len(kept) == 1 and "'z'" in kept[0]


def test_a_block_in_a_block():
    """Its values join the caller's graph: one product more than a feed-forward."""

    @coda.block
    def inner(x, up, down):
        return x + (x @ up).map(swiglu) @ down

    @coda.block
    def outer(x, up, down, w):
        return inner(inner(x, up, down), up, down) @ w

    args = random(0, 2, 3, D), random(1, D, 2 * F) / 3, random(2, F, D) / 4, random(3, D, F)
    plain = lambda x, up, down: x + swiglu((x @ up).reshape(-1, 2 * F)).reshape(2, 3, F) @ down  # noqa: E731
    compared(outer, lambda x, up, down, w: plain(plain(x, up, down), up, down) @ w, *args)
    assert len(graph_of(outer).derivative().forward_plan.steps) == 5


def test_arguments_of_all_kinds():
    """Pytrees, keywords, None, numbers, strings; integers and booleans among the arrays."""

    @coda.block(rows="stream")
    def block(params, *, stream, mask, rows, bias=None, kind="tanh", times=2.0):
        z = (stream @ params["w"]).map(lambda z, m, r: jnp.where(m, z, 0.0) * r, mask, rows)
        z = z if bias is None else z + bias
        return {"y": times * z.map(getattr(jnp, kind)), "z": (z, None)}

    def plain(params, *, stream, mask, rows, bias=None, kind="tanh", times=2.0):
        z = jnp.where(mask, stream @ params["w"], 0.0) * rows
        z = z if bias is None else z + bias
        return {"y": times * getattr(jnp, kind)(z), "z": (z, None)}

    x, w = random(0, 2, 3, D), random(1, D, F)
    mask, rows = random(2, 2, 3, 1) > 0, jnp.arange(6).reshape(2, 3, 1)
    for options in ({}, {"bias": random(3, F), "kind": "sin"}, {"times": 3}):
        found, want = (f({"w": w}, stream=x, mask=mask, rows=rows, **options) for f in (block, plain))
        assert jax.tree.structure(found) == jax.tree.structure(want)
        assert_close(found, want, 1e-5)
    given = {"stream": x, "mask": mask, "rows": rows}
    assert_close(*(jax.grad(loss(lambda w, f=f: f({"w": w}, **given)))(w) for f in (block, plain)), 1e-5)
    assert len(block._graphs) == 3
    with pytest.raises(TypeError, match="neither an array nor hashable"):
        block({"w": w}, stream=x, mask=mask, rows=rows, kind={1})


def test_arrays_that_it_captures_have_gradients():
    """In its lines, in a map, and in an opaque function."""
    x, w, b, s = random(0, M, D), random(1, D, F), random(2, F), random(3, F)

    def of_block(w, b, s):
        @coda.block
        def f(x):
            z = (x @ w).map(lambda z: jnp.tanh(z + b))
            return coda.opaque(lambda z: jnp.sort(z, axis=1) * s, z)

        return f(x)

    compared(of_block, lambda w, b, s: jnp.sort(jnp.tanh(x @ w + b), axis=1) * s, w, b, s)


def test_one_weight_twice_and_transposed():
    f = coda.block(lambda x, w: (x @ w).map(jnp.tanh) @ w.T)
    compared(f, lambda x, w: jnp.tanh(x @ w) @ w.T, random(0, M, D), random(1, D, F))


def test_arithmetic():
    def f(x, w, b):
        z = x @ w
        return 1 - (2 * z + b) / (3.0 + z * z) - b + (-z) * 0.5

    compared(coda.block(f), f, random(0, 2, 3, D), random(1, D, F), random(2, F))
    g = lambda x, w, t: np.float32(2) * (t - x @ w) + t / 2  # noqa: E731
    compared(coda.block(g), g, random(0, 2, 3, D), random(1, D, F), random(2, 2, 3, F))


def test_weights_of_several_axes():
    compared(
        coda.block(lambda x, w, v: (x @ w).map(swiglu) @ v),
        lambda x, w, v: swiglu(jnp.einsum("md,dhf->mhf", x, w).reshape(M, 2 * F)) @ v,
        random(0, M, D),
        random(1, D, 2, F),
        random(2, F, D),
    )
    y = coda.block(lambda x, w: x @ w)(random(0, 2, 3, D), random(1, D, 4, 5))
    assert y.shape == (2, 3, 4, 5)


def test_kept_weights():
    """In the products' dtype, or in its place the scale of a norm in it; values and gradients are the same."""
    x, scale = random(0, M, D).astype(jnp.bfloat16), 1 + random(3, D)
    up, down = random(1, D, 2 * F), random(2, F, D)

    def f(keep, x, scale, up, down):
        up, down = (w.kept() if keep else w for w in (up, down))
        return (coda.rms_norm(x, scale) @ up).map(swiglu) @ down

    found = []
    for keep in (True, False):
        block = coda.block(functools.partial(f, keep), name="keeping")
        y, back = jax.vjp(block, x, scale, up, down)
        found.append((y, back(jnp.ones_like(y))))
        kept = [x for x in jax.tree.leaves(back) if x.dtype == jnp.bfloat16]
        for w in ((scale[:, None] * up).astype(jnp.bfloat16), down.astype(jnp.bfloat16)):
            assert any(x.shape == w.shape and bool(jnp.all(x == w)) for x in kept) == keep
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_experts():
    """Rows sorted by expert."""
    sizes = jnp.array([5, 0, 4, 3], jnp.int32)
    compared(
        coda.block(lambda x, w, v: x.ragged_dot(w, sizes).map(swiglu).ragged_dot(v, sizes)),
        lambda x, w, v: lax.ragged_dot(swiglu(lax.ragged_dot(x, w, sizes)), v, sizes),
        random(0, M, D),
        random(1, 4, D, 2 * F),
        random(2, 4, F, D),
    )


@pytest.mark.smoke
def test_streams():
    """A stream that a block returns with its statistic needs no pass in the next block."""
    x, p = arguments()

    @coda.block
    def layer(x, p):
        return (x + (coda.rms_norm(x, p["s1"]) @ p["up"]).map(swiglu) @ p["down"]).with_statistic()

    def two(x, p):
        return layer(layer(coda.Stream.of(x).with_statistic(), p), p)

    def plain(x, p):
        for _ in range(2):
            y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * p["s1"]
            gate, up = jnp.split(y @ p["up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ p["down"]
        return x

    found = two(x, p)
    assert_close(found.x, plain(x, p), 1e-5)
    assert_close(found.sumsq, jnp.sum(jnp.square(plain(x, p)), axis=-1), 1e-5)
    of = [jax.grad(loss(f), (0, 1)) for f in (lambda x, p: two(x, p).x, plain)]
    assert_close(*(g(x, p) for g in of), 1e-4)
    assert not [
        v for v in graph_of(layer).derivative().forward_plan.by_xla if v.is_tile and v.shape[0] == LENGTH * BATCH
    ]


def test_a_float32_stream_stays_one():
    """Also between the sub-layers of one block; the products are in bfloat16."""
    x, p = arguments()
    block = in_block("llama", dtype=jnp.bfloat16)
    assert block(x, p).dtype == jnp.float32
    exact = in_jax("llama")(x, p)
    narrow = in_block("llama")(x.astype(jnp.bfloat16), p)
    errors = [float(jnp.max(jnp.abs(y - exact))) for y in (block(x, p), narrow)]
    assert errors[0] < 0.7 * errors[1]


def test_float16():
    """A norm is applied in a pass, so that no product of large rows overflows."""
    x, p = arguments(jnp.float16)
    x = 300 * x
    found = jax.grad(loss(in_block("adapter")), 1)(x, p)
    want = jax.grad(loss(in_jax("adapter")), 1)(x.astype(jnp.float32), p)
    for name in ("s1", "up", "down", "a"):
        error = float(jnp.linalg.norm(found[name] - want[name]) / jnp.linalg.norm(want[name]))
        assert error < 0.05, name


def test_random_keys():
    """In opaque functions, given and captured; and arrays of dtypes that no map takes."""
    x, w, key = random(0, M, D), random(1, D, F), jax.random.key(7)

    def dropped(z, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, z.shape), z, 0.0)

    def f(x, w, key, kept):
        @coda.block
        def block(x, w, key, kept):
            z = coda.opaque(dropped, x @ w, key)
            return coda.opaque(lambda z, kept: dropped(z, captured) * kept, z, kept)

        captured = jax.random.fold_in(key, 1)
        return block(x, w, key, kept)

    def plain(x, w, key, kept):
        return dropped(dropped(x @ w, key), jax.random.fold_in(key, 1)) * kept

    kept = jnp.arange(F).astype(jnp.uint8)
    for g in (lambda f: f, lambda f: jax.grad(loss(f), (0, 1))):
        assert_close(*(jax.jit(g(one))(x, w, key, kept) for one in (f, plain)), 1e-5)


def test_effects_in_opaque_functions(capfd):
    def shown(z):
        jax.debug.print("largest {}", jnp.max(z))
        return z * 2

    @coda.block
    def f(x, w):
        return coda.opaque(shown, x @ w)

    x, w = random(0, M, D), random(1, D, F)
    assert_close(jax.jit(f)(x, w), 2 * x @ w, 1e-5)
    jax.grad(loss(f))(x, w)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") >= 2


def test_graphs_are_traced_once_a_signature():
    count = 0

    @coda.block
    def f(x, w):
        nonlocal count
        count += 1
        return (x @ w).map(jnp.tanh)

    x, w = random(0, M, D), random(1, D, F)
    for _ in range(2):
        f(x, w)
        jax.jit(jax.grad(loss(f)))(x, w)
    assert count == 1
    f(x[:6], w)
    assert count == 2


def test_stated_pullbacks():
    """In terms of the result, which is kept in the place of the product."""

    def f(x, w):
        return (x @ w).map(jnp.tanh, pullback=lambda y, z, dy: [dy * (1 - y * y)])

    block = coda.block(f)
    args = random(0, M, D), random(1, D, F)
    compared(block, lambda x, w: jnp.tanh(x @ w), *args)
    assert [type(v) for v in graph_of(block).derivative().kept] == [Map]


# --- refusals


def lines(f, *args, **options):
    return coda.block(**options)(f)(*args)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda x, w: jnp.tanh(x @ w), ValueError, r"is no array; a function of arrays is applied to it by \.map"),
        (lambda x, w: np.tanh(x @ w), TypeError, "does not support ufuncs"),
        (lambda x, w: lax.stop_gradient(x @ w) + 1, ValueError, "is no array; a function of arrays"),
        (lambda x, w: x @ w if x @ w else x, ValueError, "nothing of it is computed yet"),
        (lambda x, w: [*(x @ w)], ValueError, "take it apart in .map"),
        (lambda x, w: (x @ w)[0], ValueError, "take it apart in .map"),
        (lambda x, w: w @ x, ValueError, r"\(8, 16\) @ \(12, 8\); they must be \(\.\.\., K\) and \(K, \.\.\.\)"),
        (lambda x, w: x @ "w", TypeError, "got str for an array"),
        (lambda x, w: (x @ w).map(lambda z: z + jnp.ones(3)), ValueError, "Incompatible shapes for broadcasting"),
        (lambda x, w: (x @ w).map(lambda z: jnp.split(z, 2, 1), inverse=lambda a, b: a), ValueError, "inverse: gives"),
        (lambda x, w: (x @ w).map(lambda z: (z, z), pullback=lambda *_: [None]), TypeError, "a pullback is of one"),
        (lambda x, w: (x @ w).constrained(jax.P(None, None, "x")), ValueError, "has 3 entries"),
        (lambda x, w: coda.rms_norm(x, w), ValueError, r"scale has shape \(8, 16\); beside x \(12, 8\)"),
        (lambda x, w: 3, TypeError, "got int for an array or a value"),
    ],
)
def test_refusals(f, error, message):
    with pytest.raises(error, match=message):
        lines(f, random(0, M, D), random(1, D, F))


def test_refusals_of_calls():
    x, w = random(0, M, D), random(1, D, F)
    f = lambda x, w: x @ w  # noqa: E731
    with pytest.raises(ValueError, match=r"has shape \(8,\); it must be \(\.\.\., D\) with rows"):
        lines(f, x[0], w)
    with pytest.raises(TypeError, match="dtype = int32; it must be"):
        lines(f, x.astype(jnp.int32), w)
    with pytest.raises(TypeError, match="the first argument that is an array is missing"):
        lines(lambda p: p["x"] @ p["w"], {"x": x, "w": w})
    with pytest.raises(ValueError, match=r"the first has not the block's rows.*rows= names another"):
        lines(lambda w, x: x @ w, w, x.reshape(2, 6, D))
    with pytest.raises(ValueError, match="rows = 'y'; it must be the name of an argument"):
        lines(f, x, w, rows="y")
    with pytest.raises(ValueError, match="implementation"):
        lines(f, x, w, implementation="fast")
    np.testing.assert_array_equal(coda.opaque(jnp.tanh, x), jnp.tanh(x))  # of an array as it is
    with pytest.raises(NotImplementedError, match="f has no forward mode"):
        jax.jvp(coda.block(name="f")(f), (x, w), (x, w))
    kept = []
    lines(lambda x, w: kept.append(x) or x @ w, x, w)
    with pytest.raises(ValueError, match="a value of block"):
        lines(lambda x, w: kept[0] @ w, x, w)


# --- compared with the author's lines


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_check(dtype):
    x, p = arguments(dtype)
    errors = coda.check(in_block("llama"), x, p)
    assert {"output", "gradient of argument 0", "gradient of argument 1['up']"} <= set(errors)
    assert errors["the inverse of map 'rotary'"] < 1e-6
    assert max(errors.values()) < (1e-5 if dtype == jnp.float32 else 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pullback": lambda y, z, dy: [dy * (1 + y * y)]}, "the pullback of map 'tanh', cotangent 0 is off by"),
        ({"pullback": lambda y, z, dy: [None]}, "gradient of argument 1 is off by 1.0e"),
        ({"inverse": lambda y: 0.5 * y}, "the inverse of map 'tanh' is off by"),
    ],
)
def test_check_finds_what_is_wrong(options, message):
    block = coda.block(lambda x, w: (x @ w).map(jnp.tanh, **options))
    with pytest.raises(AssertionError, match=message):
        coda.check(block, random(0, M, D), random(1, D, F))


def test_check_takes_a_block():
    with pytest.raises(TypeError, match=r"block is function; it must be what coda\.block returns"):
        coda.check(lambda x: x, random(0, M, D))


@pytest.mark.parametrize("wrong", ["", "b", "w"])
def test_check_of_a_gradient_that_is_0_in_truth(wrong):
    """A LayerNorm takes no notice of a number that is added to a row; its gradient has no relative error."""

    def f(x, p):
        factor = 1.1 if wrong == "w" else 1.0
        h = (x @ p["w"]).map(lambda y: 1.0 * y, pullback=lambda out, y, dy: (factor * dy,))
        add = {} if wrong != "b" else {"pullback": lambda out, y, b, dy: (dy, jnp.sum(dy[:, :1]).reshape(1, 1))}
        return coda.layer_norm(h.map(jnp.add, p["b"], **add), p["scale"]) @ p["v"]

    p = {"w": random(1, D, D), "v": random(2, D, D), "scale": jnp.ones(D), "b": jnp.ones((1, 1))}
    x, p = jax.tree.map(lambda y: y.astype(jnp.bfloat16), (8.0 * random(0, 4 * M, D), p))
    if not wrong:
        coda.check(coda.block(f), x, p)
    else:
        with pytest.raises(AssertionError, match=rf"gradient of argument 1\['{wrong}'\] is off"):
            coda.check(coda.block(f), x, p)


# --- as coda.explain tells it


def plans_of(f, *args):
    return list(coda.explain(f, *args, platform="cuda", device="H100").blocks)


def test_explain_tells_where_maps_go():
    x, p = arguments(jnp.bfloat16)
    block = in_block("norm before the sum")
    forward, backward = plans_of(jax.grad(loss(block), (0, 1)), x, p)
    lines = forward.splitlines()
    assert lines[0] == "block 'norm_before_the_sum', forward" and len(lines) == 8
    assert lines[3] == "norm_before_the_sum_2  (24, 64) @ (64, 80): swiglu; stores 2 tiles, 0 vectors"
    assert lines[5:] == [
        "XLA  'attention'",
        *["XLA  add (24, 64): it reads what is summed over whole rows or columns"] * 2,
    ]
    assert "swiglu backward" in backward and "XLA  the derivative of 'attention'" in backward
    text = str(coda.explain(block, x, p, platform="cuda", device="H100"))
    assert "\nblock 'norm_before_the_sum', forward\n  norm_before_the_sum_0  (24, 64)" in text


def test_epilogues_have_a_limit():
    """The first maps of a long chain are in the epilogue; a pass makes the others."""

    @coda.block
    def block(x, w):
        z = x @ w
        for _ in range(24):
            z = z.map(jnp.tanh)
        return z

    x, w = random(0, M, D), random(1, D, F)
    plain = x @ w
    for _ in range(24):
        plain = jnp.tanh(plain)
    assert_close(block(x, w), plain, 1e-5)
    (forward,) = plans_of(block, x, w)
    assert forward.endswith("XLA  tanh (12, 16): with it an epilogue would have more than 256 instructions")
    (product,) = coda.explain(block, x, w, platform="cuda", device="H100").products
    assert "XLA" not in str(product.reason)


def test_a_map_that_no_epilogue_can_make_is_told():
    """And is an error in strict mode, at the author's line; what is said to be opaque is not."""
    x, w, v = random(0, 64, 32, dtype=jnp.bfloat16), random(1, 32, 64), random(2, 64, 32)

    def soft(z):
        return jax.nn.softmax(z, axis=1)

    by_map = coda.block(lambda x, w, v: (x @ w).map(soft) @ v)
    opaque = coda.block(lambda x, w, v: coda.opaque(soft, x @ w) @ v)
    (note,) = coda.explain(by_map, x, w, v, platform="cuda", device="H100").notes
    assert note.startswith("block 'lambda': map 'soft' is a pass of XLA's: 'sub' at ") and "test_block.py" in note
    assert not coda.explain(opaque, x, w, v, platform="cuda", device="H100").notes
    for block, is_refused in ((by_map, True), (opaque, False)):
        lowered = jax.jit(block).trace(x, w, v)
        with coda.strict():
            if is_refused:
                with pytest.raises(coda.FallbackError, match="map 'soft' is a pass of XLA's"):
                    lowered.lower(lowering_platforms=("cuda",))
            else:
                lowered.lower(lowering_platforms=("cuda",))


def test_a_plan_is_told_though_the_value_is_not_needed():
    """A sum's derivative needs none of the block's values, but the products of its forward pass."""
    block = coda.block(lambda x, w, v: (x @ w).map(jnp.tanh) @ v)
    arrays = jnp.ones((24, 16)), jnp.ones((16, 16)), jnp.ones((16, 16))
    found = coda.explain(jax.grad(lambda *args: jnp.sum(block(*args)), 1), *arrays, platform="cuda", device="H100")
    first_lines = [plan.partition("\n")[0] for plan in found.blocks]
    assert first_lines == ["block 'lambda', forward", "block 'lambda', backward"]


def test_how_often_a_plan_runs():
    plan = "block 'b', forward\nb_0  (2, 3) @ (3, 4): tanh; stores 1 tile, 0 vectors"
    found = coda.Explanation({}, 0, blocks={plan: 3})
    assert str(found).endswith("block 'b', forward, 3 times\n  b_0  (2, 3) @ (3, 4): tanh; stores 1 tile, 0 vectors")
    assert found.as_dict()["blocks"][0]["count"] == 3
