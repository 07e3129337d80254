"""`coda.fuse.report`: what stays XLA's, why, and at which line of the program."""

import dataclasses
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import coda_jax as coda
from tests.plain_models import layer_norm, rms_norm

B, T, D, F, VOCABULARY, HEADS = 4, 256, 256, 512, 2048, 4
DOORS = {
    "grad(fuse)": lambda loss: loss,  # whose gradient the report takes
    "fuse(grad)": jax.value_and_grad,
}


def typed(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {"up": typed(D, F), "down": typed(F, D), "scale": typed(D), "table": typed(VOCABULARY, D)}
X, IDS, KEY = typed(B, T, D), typed(B, T, dtype=jnp.int32), jax.eval_shape(lambda: jax.random.key(0))


def feed_forward(w, h):
    return jnp.tanh(h @ w["up"]) @ w["down"]


def attention(w, x, ids, key):
    q = feed_forward(w, x).reshape(B, T, HEADS, D // HEADS)
    scores = jnp.einsum("bthd,bshd->bhts", q, q)
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores) ** 2, q).reshape(x.shape)  # line of attention
    return feed_forward(w, y)


def norm(w, x, ids, key):
    h = layer_norm(x + feed_forward(w, x), w["scale"], w["scale"])  # line of norm
    return feed_forward(w, h)


def dropout(w, x, ids, key):
    h = feed_forward(w, x)
    return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)  # line of dropout


def embedding(w, x, ids, key):
    return feed_forward(w, w["table"][ids])  # line of embedding


def ranked(w, x, ids, key):
    h = feed_forward(w, x)
    return h + jnp.sort(h, axis=-1)  # line of ranked


REASONS = {
    attention: "between products that are left: both factors have batch axes, as in attention, or experts with a "
    "capacity",
    norm: "norms, which need sums of whole rows first",
    dropout: "random numbers are drawn",
    embedding: "rows or slices are gathered or scattered",
    ranked: "sorts, ranks and running sums along an axis",
}


def line_of(f):
    """The line of this file that says so."""
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# line of {f.__name__}"))


def report_of(f, door):
    def loss(w, x, ids, key):
        return jnp.mean(jnp.square(f(w, x, ids, key).astype(jnp.float32)))

    return coda.fuse.report(DOORS[door](loss), WEIGHTS, X, IDS, KEY)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("f", REASONS, ids=lambda f: f.__name__)
def test_passes_have_a_reason_their_bytes_and_line(f, door):
    report = report_of(f, door)
    assert sum(count for count, _ in report.left.values()) == report.fused.totals.passes_bytes > 0
    counts = [count for count, _ in report.left.values()]
    assert counts == sorted(counts, reverse=True)
    count, lines = report.left[REASONS[f]]
    assert count >= 2 * X.size  # it reads the activation, or writes it
    file = "plain_models.py" if f is norm else f"test_fuse_report.py:{line_of(f)}"
    assert any(file in line for line in lines), lines


def test_the_last_lines_are_what_stays_xlas_with_the_largest_first():
    report = report_of(attention, "grad(fuse)")
    _, found, text = str(report).rpartition("\nstays XLA's: ")
    assert found
    total, *rows = text.splitlines()
    size, _, rest = total.partition(" ")
    assert rest == "MB between products, for"
    assert float(size) == pytest.approx(report.fused.totals.passes_bytes / 1e6, rel=0.02)
    assert f"{REASONS[attention]} (test_fuse_report.py:{line_of(attention)}" in rows[0]
    sizes = [float(row.split(" MB ")[0]) for row in rows]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == pytest.approx(
        report.fused.totals.passes_bytes / 1e6, abs=1
    )


def test_passes_of_a_graph_have_the_users_lines_and_profiles_show_them():
    """XLA's passes between kernels, whose equations the library makes."""

    def f(w, x):
        h = x + feed_forward(w, x)
        mean = jnp.mean(h, axis=-1, keepdims=True)
        return feed_forward(w, h - mean)  # line of f

    found = coda.fuse.report(lambda w, x: jnp.mean(jnp.square(f(w, x).astype(jnp.float32))), WEIGHTS, X).passes_left
    assert {one.source.partition(":")[0] for one in found} == {"test_fuse_report.py"}
    assert any(one.source == f"test_fuse_report.py:{line_of(f)}" for one in found)
    text = jax.jit(coda.fuse(f)).lower(WEIGHTS, X).as_text(debug_info=True)
    assert f"line test_fuse_report.py:{line_of(f)}" in text


def test_a_cast_of_a_product_has_the_products_line():
    """JAX has traced the library's function that casts for another line before."""

    def f(w, x):
        h = feed_forward(w, x)
        z = (h @ w["up"]).astype(jnp.float32)  # line of f_cast
        return jnp.mean(jax.nn.logsumexp(z, axis=-1)) + jnp.mean(jax.lax.top_k(z, 3)[0])

    report = coda.fuse.report(f, WEIGHTS, X)
    copied = {one.source for one in report.passes_left if one.kernel == "f_2"}
    with open(__file__) as file:
        line = next(i for i, line in enumerate(file, 1) if line.rstrip().endswith("# line of f_cast"))
    assert copied == {f"test_fuse_report.py:{line}"}
    assert sum(count for count, _ in report.left.values()) == report.fused.totals.passes_bytes


def test_a_function_that_stays_as_it_is_has_its_reason():
    """A piece that is left: its products' reason is that of the passes between them."""

    def f(w, x, ids, key):
        kernel = jnp.ones((9, 9, D, D), x.dtype)
        image = jax.lax.conv_general_dilated(
            x.reshape(B, 16, 16, D), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return feed_forward(w, jnp.tanh(image).reshape(x.shape))

    report = report_of(f, "grad(fuse)")
    why = "between products that are left: its convolutions have ten times the operations of its products"
    assert report.left[why][0] > 0 and why in str(report)


def with_mask(h, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)


def rotated(h):
    h = h.reshape(B, T, HEADS, D // HEADS)
    angles = jnp.arange(T, dtype=jnp.float32)[:, None, None] * jnp.linspace(1, 0, D // HEADS // 2)
    a, b = jnp.split(h, 2, axis=-1)
    c, s = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(h.dtype).reshape(B, T, D)


# The last product of each has these words; the arguments are x, two products of it, a vector and a key.
WORDS = {
    "bias": lambda x, p, q, v, key: p + v,
    "gelu": lambda x, p, q, v, key: jax.nn.gelu(p),
    "bias, gelu": lambda x, p, q, v, key: jax.nn.gelu(p + v, approximate=False),
    "relu": lambda x, p, q, v, key: jax.nn.relu(p),
    "bias, relu, square": lambda x, p, q, v, key: jnp.square(jnp.maximum(p + v, 0)),
    "silu, gate": lambda x, p, q, v, key: jax.nn.silu(p) * q,
    "sigmoid, gate": lambda x, p, q, v, key: jax.nn.sigmoid(p) * q,
    "gelu, gate": lambda x, p, q, v, key: jax.nn.gelu(p, approximate=True) * q,
    "residual": lambda x, p, q, v, key: x + p,
    "bias, dropout, residual": lambda x, p, q, v, key: x + with_mask(p + v, key),
    "dropout": lambda x, p, q, v, key: coda.dropout(key, p, 0.1),
    "residual, rms sum": lambda x, p, q, v, key: rms_norm(x + p, v),
    "tanh": lambda x, p, q, v, key: jnp.tanh(p),
    "scale": lambda x, p, q, v, key: p * v,
    "mask": lambda x, p, q, v, key: jnp.where(jnp.arange(T)[:, None] > jnp.arange(D), p, 0),
    "rotation of heads": lambda x, p, q, v, key: rotated(p),
}


@pytest.mark.parametrize("words", WORDS)
def test_an_epilogue_has_the_words_of_what_is_in_it(words):
    def f(w, x, ids, key):
        uses_q = "gate" in words
        q = x @ w["q"] if uses_q else None
        h = WORDS[words](x, x @ w["p"], q, w["scale"], key)
        return h @ w["p"], h

    weights = {"p": typed(D, D), "q": typed(D, D), "scale": typed(D)}
    report = coda.fuse.report(f, weights, X, IDS, KEY)
    (epilogue,) = {one.epilogue for one in report.products if one.epilogue}
    assert epilogue == tuple(words.split(", "))
    assert ", ".join(epilogue) in str(report)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("f", REASONS, ids=lambda f: f.__name__)
def test_a_plan_is_in_words(f, door):
    """No line of it has the name of one of JAX's primitives that happened to be the last."""
    plans = "\n".join([*report_of(f, door).backward, *report_of(f, door).fused.blocks])
    lines = [line.strip() for line in plans.splitlines() if line.strip().startswith("XLA  ")]
    assert lines
    assert not any("'" in line or line.endswith(("_in_dim", " lt", "_type", "_n")) for line in lines)
    called = {attention: "attention", dropout: "random numbers", embedding: "gather", ranked: "ranks along an axis"}
    assert f not in called or any(called[f] in line for line in lines)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fast", [True, False])
def test_a_layer_norm_of_flax_is_named_in_the_plan(door, fast):
    """Its statistics have lost the axis of columns, and its scale comes with rstd."""
    norm = nnx.LayerNorm(D, dtype=jnp.bfloat16, use_fast_variance=fast, rngs=nnx.Rngs(0))

    def f(w, x, ids, key):
        return norm(x) @ w["up"]

    plans = "\n".join(report_of(f, door).backward)
    assert "layer norm" in plans and "rms norm" not in plans


@dataclasses.dataclass
class Module:
    """A pytree whose leaves are arrays, Python's numbers and functions, as Equinox has them."""

    up: Any
    down: Any
    factor: float
    activation: Any

    def __call__(self, x):
        factor = self.factor if self.factor > 1 else 1.0  # asks for its value
        return x + factor * (self.activation(x @ self.up) @ self.down)  # line of Module


jax.tree_util.register_dataclass(Module, ["up", "down", "factor", "activation"], [])


def squares(module, x):
    return jnp.mean(jnp.square(module(x).astype(jnp.float32)))


def with_arrays(f):
    """The function, differentiated as by eqx.filter_value_and_grad: by its module's arrays alone."""

    def function(module, x):
        def of_arrays(up, down):
            return f(dataclasses.replace(module, up=up, down=down), x)

        return jax.value_and_grad(of_arrays, argnums=(0, 1))(module.up, module.down)

    return function


def test_modules_with_numbers_and_functions_are_explained(monkeypatch):
    """Numbers in modules of Equinox stay numbers, and functions are no arrays."""
    monkeypatch.setitem(sys.modules, "equinox", types.SimpleNamespace(Module=Module))
    module = Module(typed(D, F), typed(F, D), 2.0, jax.nn.gelu)
    report = coda.fuse.report(squares, module, X)
    assert [one.epilogue for one in report.products] == [("gelu",), ("residual",)] and not report.reason
    explained = coda.explain(with_arrays(coda.fuse(squares)), module, X, platform="cuda")
    assert (explained.kernels, explained.others) == (report.fused.kernels - 1, 0)  # without the gradient of x
    both = coda.compare(with_arrays(squares), with_arrays(coda.fuse(squares)), module, X)
    assert [one.products for one in both.columns] == [5, 5] and both.columns[1].kernels == 5


def test_a_report_leaves_numbers_as_the_function_has_them():
    """A fused function takes Python's numbers as they are, with or without Equinox."""

    def f(w, x, is_deep, factor):
        return factor * feed_forward(w, feed_forward(w, x) if is_deep else x)

    report = coda.fuse.report(f, WEIGHTS, X, True, factor=2.0)
    assert len(report.products) == 4 and not report.reason
    assert coda.explain(coda.fuse(f), WEIGHTS, X, False, factor=2.0, platform="cuda").kernels == 2


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(F, name="up", dtype=jnp.bfloat16)(x))  # line of Net
        return x + nn.Dense(D, name="down", dtype=jnp.bfloat16)(h)


@pytest.mark.parametrize("door", DOORS)
def test_a_row_has_the_users_line_and_the_modules_path(door):
    net = Net()
    parameters = jax.eval_shape(net.init, jax.random.key(0), X)
    report = coda.fuse.report(DOORS[door](lambda p, x: jnp.mean(jnp.square(net.apply(p, x)))), parameters, X)
    up = [one for one in report.products if one.line.endswith(", Net/up")]
    assert up[0].line == f"test_fuse_report.py:{line_of(Net)} (Net.__call__), Net/up"
    assert {one.line.rpartition(", ")[2] for one in report.products} == {"Net/up", "Net/down"}
    assert all(line.startswith("test_fuse_report.py:") for _, lines in report.left.values() for line in lines)


def test_a_model_of_equinox_is_reported_explained_and_compared():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP
        drop: eqx.nn.Dropout
        factor: float

        def __call__(self, x, key):
            h = jax.vmap(self.mlp)(jax.vmap(self.norm)(x))  # line of Block
            return x + self.factor * self.drop(h, key=key) if self.factor > 0 else x

    model = Block(
        eqx.nn.LayerNorm(D), eqx.nn.MLP(D, D, F, 1, jax.nn.gelu, key=jax.random.key(0)), eqx.nn.Dropout(0.1), 2.0
    )
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)

    def loss(model, x, key):
        return jnp.mean(jnp.square(jax.vmap(model)(x, jax.random.split(key, B)).astype(jnp.float32)))

    report = coda.fuse.report(loss, model, X, KEY)
    assert [one.epilogue for one in report.products] == [("bias", "gelu"), ("bias", "dropout", "residual")]
    path = f"test_fuse_report.py:{line_of(Block)} (Block.__call__), eqx.nn.MLP/eqx.nn.Linear"
    assert {one.line for one in report.products} == {path}
    step = eqx.filter_jit(eqx.filter_value_and_grad(coda.fuse(loss)))
    assert coda.explain(step, model, X, KEY, platform="cuda").kernels == 6
    both = coda.compare(eqx.filter_value_and_grad(loss), step, model, X, KEY)
    assert [one.products for one in both.columns] == [6, 6]
