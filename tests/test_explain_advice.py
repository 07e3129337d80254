"""Advice of coda.explain on blocks of several orders: of the library, of its layers one by one, and in plain flax."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers

D, F, HEADS = 1024, 4096, 8
ORDERS = ("post", "sandwich", "parallel", "pre")
X = jax.ShapeDtypeStruct((2, 4096, D), jnp.bfloat16)


class _Ordered(nnx.Module):
    """The orders, of `attention`, `mlp` and four norms that a subclass has."""

    def __call__(self, x):
        if self.order == "post":
            x = self.norms[0](x + self.attention(x))
            return self.norms[1](x + self.mlp(x))
        if self.order == "sandwich":
            x = x + self.norms[1](self.attention(self.norms[0](x)))
            return x + self.norms[3](self.mlp(self.norms[2](x)))
        if self.order == "parallel":
            h = self.norms[0](x)
            return x + self.attention(h) + self.mlp(h)
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class OneByOne(_Ordered):
    def __init__(self, order, dtype, rngs):
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.order = order
        self.attention = layers.Attention(D, HEADS, **kwargs)
        self.mlp = layers.GatedMLP(D, F, **kwargs)
        self.norms = nnx.List([layers.RMSNorm(D, param_dtype=dtype, rngs=rngs) for _ in range(4)])


class Plain(_Ordered):
    def __init__(self, order, dtype, rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.order = order
        self.query, self.key, self.value, self.out = (linear(D, D) for _ in range(4))
        self.gate, self.up, self.down = linear(D, F), linear(D, F), linear(F, D)
        self.norms = nnx.List([nnx.RMSNorm(D, param_dtype=dtype, rngs=rngs) for _ in range(4)])

    def attention(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], HEADS, -1) for layer in (self.query, self.key, self.value))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))

    def mlp(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def of_library(order, dtype, rngs):
    kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
    attention, mlp = layers.Attention(D, HEADS, **kwargs), layers.GatedMLP(D, F, **kwargs)
    norms = [layers.RMSNorm(D, param_dtype=dtype, rngs=rngs) for _ in range(4)]
    if order == "post":
        return layers.PostNormBlock(attention=attention, attention_norm=norms[0], mlp=mlp, mlp_norm=norms[1])
    if order == "sandwich":
        names = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        return layers.SandwichNormBlock(attention=attention, mlp=mlp, **dict(zip(names, norms, strict=True)))
    if order == "parallel":
        return layers.ParallelBlock(norm=norms[0], attention=attention, mlp=mlp)
    return layers.TransformerBlock(attention_norm=norms[0], attention=attention, mlp_norm=norms[1], mlp=mlp)


def explained(make, order, *, dtype=jnp.bfloat16, x=X, **options):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(order, dtype, nnx.Rngs(0))))

    def loss(state, x):
        return jnp.sum(jnp.square(nnx.merge(graphdef, state)(x).astype(jnp.float32)))

    return coda.explain(jax.grad(loss, argnums=(0, 1)), state, x, **{"device": "H100", **options})


def of_passes(found):
    return [one for one in found.advice if "of XLA's between" in one.about]


@pytest.mark.parametrize("order", ORDERS)
def test_layers_one_by_one(order):
    """The passes between two blocks are told with their lines; a block of that order leaves less, and no advice."""
    apart, together = explained(OneByOne, order), explained(of_library, order)
    (advice,) = of_passes(apart)
    assert "GatedMLP_0" in advice.about and "in one function under coda.fuse" in advice.change
    assert "flax_layers/norm.py:" in advice.why and "from test_explain_advice.py:" in advice.why
    assert (" in test_explain_advice.py:" in advice.why) == (order != "parallel")  # there it is the last line
    assert together.advice == () and together.totals.passes_bytes < 0.9 * apart.totals.passes_bytes
    assert str(advice) in str(apart)


@pytest.mark.parametrize("order", ORDERS)
def test_plain_flax(order):
    (advice,) = explained(Plain, order).advice
    assert "between dot_general, forward" in advice.about and "coda.gemm" in advice.change
    assert "logistic+mul in test_explain_advice.py:" in advice.why
    assert "flax/nnx/nn/normalization.py:" in advice.why


def test_nothing_is_told_where_there_are_no_kernels():
    assert explained(Plain, "pre", dtype=jnp.float32, x=X.update(dtype=jnp.float32)).advice == ()
    assert explained(OneByOne, "pre", device=None, platform="cpu").advice == ()


@pytest.mark.parametrize("order", ORDERS)
def test_small_blocks(order):
    """A block's products are not the program's to join, nor are their operands and outputs."""
    found = explained(of_library, order, x=X.update(shape=(1, 512, D)))
    assert found.advice and all("too small to gain" in one.why or "weight" in one.change for one in found.advice)
    assert not any("join" in one.change or "narrower" in one.change for one in found.advice)


def test_models_of_the_library():
    """The passes between a layer and the head, and between experts, are the library's own, and no advice is given."""
    dense = layers.LlamaConfig(
        vocab_size=8192,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    experts = layers.MoEConfig(
        vocab_size=8192,
        hidden_size=D,
        intermediate_size=F // 4,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_experts=4,
        num_experts_per_tok=2,
    )
    for config in (dense, experts):
        model = nnx.eval_shape(lambda config=config: layers.Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        graphdef, params, others = nnx.split(model, nnx.Param, ...)

        def loss(params, others, tokens, graphdef=graphdef):
            found = nnx.merge(graphdef, params, others).loss(tokens, tokens)
            return jax.tree.leaves(found)[0].sum()

        tokens = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
        assert of_passes(coda.explain(jax.grad(loss), params, others, tokens, device="H100")) == []


def test_products_bound_by_memory():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def change(f, *types):
        (advice,) = coda.explain(f, *types, device="H100").advice
        assert "bound by memory" in advice.why or "too small" in advice.why
        return advice.change

    few_rows = change(coda.gemm, array(64, 8192), array(8192, 8192))
    assert "more rows would" in few_rows
    short = change(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), array(65536, 128), array(128, 4096))
    assert short == "No tile and no larger batch helps; narrower outputs or fewer tile operands would"
    gradient = change(lambda a, b: coda.gemm(a, b, transpose_a=True), array(128, 8192), array(128, 8192))
    assert "more rows would" in gradient and "narrower" not in gradient
    joined = change(lambda x, v, w: (coda.gemm(x, v), coda.gemm(x, w)), array(64, 64), array(64, 64), array(64, 128))
    assert "join those that read the same array" in joined
    apart = change(lambda x, y, v: (coda.gemm(x, v), coda.gemm(y, v)), array(64, 64), array(128, 64), array(64, 64))
    assert "join" not in apart
    jitted = jax.jit(coda.gemm)
    again = change(lambda x, y, v: (jitted(x, v), jitted(y, v)), array(64, 64), array(64, 64), array(64, 64))
    assert "join" not in again


@pytest.mark.parametrize("door", ["a block", "a fused function"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_layer_norm_that_is_a_pass_in_a_block_has_advice(norm, door):
    """An RMSNorm there has none: it is no pass, or its plan says why."""

    def in_a_block(x, p):
        for _ in range(2):
            h = coda.layer_norm(x, p["scale"], p["shift"]) if norm == "layer_norm" else coda.rms_norm(x, p["scale"])
            x = x + (h @ p["up"]).map(jax.nn.gelu) @ p["down"]
        return x

    def in_plain_jax(x, p):
        for _ in range(2):
            wide = x.astype(jnp.float32)
            if norm == "layer_norm":
                wide = wide - wide.mean(axis=-1, keepdims=True)
            rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
            h = (wide * rstd * p["scale"] + (p["shift"] if norm == "layer_norm" else 0)).astype(x.dtype)
            x = x + jax.nn.gelu(h @ p["up"]) @ p["down"]
        return x

    f = coda.block(in_a_block) if door == "a block" else coda.fuse(in_plain_jax)
    sizes = {"up": (D, F), "down": (F, D), "scale": (D,), "shift": (D,)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in sizes.items()}
    step = jax.grad(lambda x, p: jnp.mean(jnp.square(f(x, p).astype(jnp.float32))))
    found = [one for one in coda.explain(step, X, p, platform="cuda").advice if "for LayerNorms" in one.about]
    if norm == "rms_norm":
        assert not found
    else:
        (one,) = found
        assert one.about.startswith("2 passes of XLA's") and "test_explain_advice.py:" in one.why
        assert "An RMSNorm that products alone read is applied behind them" in one.change


def copies(f, *types, **options):
    """The copy and the change, of each advice on a transposed factor."""
    found = coda.explain(f, *types, **{"device": "H100", **options}).advice
    return [(one.why.split(",")[0], one.change.split(",")[0]) for one in found if "transposed copy" in one.why]


def test_transposed_copies_of_factors():
    """The advice is about those that a flag of the product would read as they lie."""
    x, w = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    b = f"its b is a transposed copy of {2 * 8192 * 2048} bytes"
    a = f"its a is a transposed copy of {2 * 4096 * 2048} bytes"
    assert copies(lambda x, w: coda.gemm(x, w.T), x, w) == [(b, "Pass transpose_b=True")]
    assert copies(lambda x, w: coda.gemm(x, jnp.swapaxes(w, 0, 1), epilogue=jnp.tanh), x, w) == [
        (b, "Pass transpose_b=True")
    ]
    assert copies(jax.jit(lambda x: coda.gemm(x.T, x)), x) == [(a, "Pass transpose_a=True")]
    gram = copies(lambda x: coda.symmetric_gemm(x, x.T), x)
    assert gram == [(a.replace("its a", "its b"), "Pass transpose_b=True")]
    turned = jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16)
    assert copies(lambda x, w: coda.gemm(x, w.T, transpose_b=True), x, turned) == [(b, "Leave out transpose_b")]
    batch = jax.ShapeDtypeStruct((4, 4096, 2048), jnp.bfloat16)
    of_batch = copies(jax.vmap(lambda x: coda.gemm(x, x.T)), batch)
    assert of_batch == [(f"its b is a transposed copy of {4 * 2 * 4096 * 2048} bytes", "Pass transpose_b=True")]


def test_copies_that_no_flag_avoids_have_no_advice():
    """None is transposed; another transpose; XLA's form, which reads them as they lie; the library's own copies."""
    x, w = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    cube = jax.ShapeDtypeStruct((64, 2048, 128), jnp.bfloat16)
    for f, types in (
        (lambda x, w: coda.gemm(x, w, transpose_b=True), (x, w)),
        (lambda x, w: coda.gemm(x, w.transpose(1, 0, 2).reshape(2048, -1)), (x, cube)),
        (lambda x, w: coda.gemm(x, w.T, implementation="xla"), (x, w)),
        (coda.fuse(lambda x, y: jnp.tanh(x.T @ y)), (x, x)),
    ):
        assert not copies(f, *types)
    assert not copies(lambda x, w: coda.gemm(x, w.T), x, w, device=None, platform="cpu")


def test_a_gradient_has_the_advice_of_its_forward_product_alone():
    x, w = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)

    def loss(x, w):
        return jnp.sum(coda.gemm(x, w.T, epilogue=jnp.tanh).astype(jnp.float32))

    assert [change for _, change in copies(jax.grad(loss, (0, 1)), x, w)] == ["Pass transpose_b=True"]
