"""generate against rollouts by whole forward passes, and its sampling against numpy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
import flax_layers as layers
from coda_jax.jaxprs.hoist import hoist
from flax_layers import sharding
from flax_layers.decoding.generate import candidates

CONFIG = layers.LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=24,
    initializer_range=0.5,
)
PROMPTS = np.array([[5, 1, 7, 2, 30, 8], [9, 9, 4, 0, 0, 0], [3, 0, 0, 0, 0, 0], [11, 12, 13, 14, 15, 0]])
LENGTHS = np.array([6, 3, 1, 5])
NEW = 9


@functools.cache
def llama(**options):
    return nnx.jit(lambda: layers.Llama(dataclasses.replace(CONFIG, **options), rngs=nnx.Rngs(0)))()


@functools.cache
def rollout(sliding_window=None):
    """Greedy continuations (4, NEW) of the ragged prompts, a whole forward pass a token."""
    model = llama(sliding_window=sliding_window)
    forward = nnx.jit(lambda m, tokens: m(tokens))
    rows, tokens = np.arange(len(LENGTHS)), np.zeros((len(LENGTHS), 6 + NEW), int)
    tokens[:, :6] = PROMPTS
    for i in range(NEW):  # what stands after a row's end is not seen
        logits = forward(model, jnp.asarray(tokens))
        tokens[rows, LENGTHS + i] = np.argmax(logits[rows, LENGTHS + i - 1], axis=1)
    return np.stack([row[n : n + NEW] for row, n in zip(tokens, LENGTHS, strict=True)])


@pytest.mark.smoke
@pytest.mark.parametrize("options, wrap", [({}, nnx.jit), ({"sliding_window": 4}, lambda f: f)], ids=["jit", "window"])
def test_greedy_is_the_rollout_by_whole_forward_passes(options, wrap):
    expected = rollout(**options)
    assert len(np.unique(expected)) > 5
    run = wrap(functools.partial(layers.generate, max_new_tokens=NEW))
    tokens, lengths = run(llama(**options), PROMPTS, lengths=jnp.asarray(LENGTHS))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(lengths, NEW)
    assert tokens.dtype == lengths.dtype == jnp.int32


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.slow
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    model = nnx.clone(llama())
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    prompts, lengths = jnp.asarray(PROMPTS), jnp.asarray(LENGTHS)

    def generate(model, prompts, lengths):
        return layers.generate(model, prompts, lengths=lengths, max_new_tokens=NEW).tokens

    np.testing.assert_array_equal(generate(model, prompts, lengths), rollout())
    arguments = jax.device_put((prompts, lengths), NamedSharding(mesh, P("data")))
    on_shards = nnx.shard_map(generate, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
    np.testing.assert_array_equal(nnx.jit(on_shards)(model, *arguments), rollout())
    tokens = generate(model, *arguments)
    np.testing.assert_array_equal(tokens, rollout())
    assert tokens.sharding == NamedSharding(mesh, P("data"))
    if kind is AxisType.Explicit:
        with pytest.raises(ValueError, match=r"sharded, .* over explicit mesh axes"):
            nnx.jit(generate)(model, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        pytest.param(sharding.FSDP_TENSOR, {"fsdp": 2, "tensor": 2}, id="fsdp and tensor"),
        pytest.param(sharding.FSDP, {"fsdp": 4}, id="fsdp"),
        pytest.param(sharding.SEQUENCE, {"data": 2, "tensor": 2}, id="sequence"),
    ],
)
def test_sharded_parameters_and_prompts(rules, sizes, kind):
    """The tokens of one device, greedy and drawn."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    drawn = {"temperature": 1.0, "top_k": 8, "key": jax.random.key(3)}
    with jax.set_mesh(mesh):
        model = sharding.create(lambda: layers.Llama(CONFIG, rules=rules, separate_qkv=True, rngs=nnx.Rngs(0)))
        prompts = jax.device_put(jnp.asarray(PROMPTS), sharding.array_sharding(mesh, rules, "batch", None))
        lengths = jax.device_put(jnp.asarray(LENGTHS), sharding.array_sharding(mesh, rules, "batch"))
        found = [layers.generate(model, prompts, lengths=lengths, max_new_tokens=3, **x).tokens for x in ({}, drawn)]
    one = layers.Llama(CONFIG, separate_qkv=True, rngs=nnx.Rngs(0))
    for tokens, options in zip(found, ({}, drawn), strict=True):
        expected = layers.generate(one, PROMPTS, lengths=LENGTHS, max_new_tokens=3, **options).tokens
        np.testing.assert_array_equal(tokens, expected)
        assert tokens.sharding.mesh == mesh


class Sharded(layers.Llama):
    """Half of the logits is each device's own computation."""

    mesh: jax.sharding.Mesh

    def decode(self, tokens, cache, *, lengths=None):
        logits, cache = super().decode(tokens, cache, lengths=lengths)
        scale = jnp.cos(self.norm.scale[...] * 0)  # 1, of parameters alone

        def halves(logits, scale):
            return jax.lax.psum(logits * scale[0] / 2, "data")

        halves = jax.shard_map(halves, mesh=self.mesh, in_specs=(P(), P()), out_specs=P())
        return halves(logits, scale), cache


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_decoder_with_a_shard_map_inside(kind):
    Sharded.mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    model = nnx.jit(lambda: Sharded(CONFIG, rngs=nnx.Rngs(0)))()
    tokens = layers.generate(model, PROMPTS, lengths=LENGTHS, max_new_tokens=NEW).tokens
    np.testing.assert_array_equal(tokens, rollout())


LENGTH_SCALINGS = {
    "longrope": layers.LongRopeScaling(
        short_factor=(1.0,) * 4, long_factor=(4.0, 3.0, 2.0, 8.0), original_max_position_embeddings=8, factor=4.0
    ),
    "dynamic": layers.DynamicRopeScaling(factor=4.0, original_max_position_embeddings=8),
    "yarn": layers.YarnRopeScaling(factor=4.0, original_max_position_embeddings=8),
}


def scaled(name):
    """A model whose rotary frequencies are scaled, and its logits after the first `lengths` tokens of each row."""
    model = llama(rope_scaling=LENGTH_SCALINGS[name], rope_theta=100.0)

    @nnx.jit
    def whole(model, tokens, lengths):
        logits = model(tokens, mask=(jnp.arange(tokens.shape[1]) < lengths[:, None])[:, None, None])
        return jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]

    return model, lambda tokens, lengths: whole(model, jnp.asarray(tokens), jnp.asarray(lengths))


@pytest.mark.parametrize("name", LENGTH_SCALINGS)
def test_texts_that_grow_beyond_the_original_context(name):
    """Frequencies, and with them all keys, are those of each row's length, as in whole passes over the texts."""
    model, whole = scaled(name)
    rows, tokens = np.arange(4), np.zeros((4, 6 + NEW), int)
    tokens[:, :6] = PROMPTS
    for i in range(NEW):
        tokens[rows, LENGTHS + i] = np.argmax(whole(tokens, LENGTHS + i), axis=1)
    expected = np.stack([row[n : n + NEW] for row, n in zip(tokens, LENGTHS, strict=True)])
    found = layers.generate(model, PROMPTS, lengths=LENGTHS, max_new_tokens=NEW).tokens
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", LENGTH_SCALINGS)
def test_turns_that_continue_a_cache(name):
    """Turns of several tokens, of another number in each row, of one, and after tokens that are forgotten."""
    model, whole = scaled(name)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 14))
    decode = nnx.jit(lambda model, *args, **options: model.decode(*args, **options))

    def at(start, count):
        return jnp.stack([row[i : i + count] for row, i in zip(tokens, start, strict=True)])

    def assert_whole(logits, lengths):
        np.testing.assert_allclose(logits, whole(tokens, np.array(lengths)), rtol=0, atol=1e-4)

    logits, cache = decode(model, at((0, 0), 6), model.init_cache(2, 14), lengths=jnp.array([6, 3]))
    assert_whole(logits, [6, 3])
    logits, cache = decode(model, at((6, 3), 4), cache, lengths=jnp.array([4, 2]))
    assert_whole(logits, [10, 5])
    logits, cache = decode(model, at((10, 5), 4), cache)
    assert_whole(logits, [14, 9])
    caches = cache.layers if isinstance(cache, layers.TextCache) else cache
    caches = [dataclasses.replace(one, length=jnp.array([6, 8])) for one in caches]
    cache = dataclasses.replace(cache, layers=caches) if isinstance(cache, layers.TextCache) else caches
    for run in (decode, lambda model, *args: model.decode(*args)):
        logits, _ = run(model, at((6, 8), 1), cache)
        assert_whole(logits, [7, 9])


def test_where_the_length_decides_nothing_the_cache_is_that_of_the_layers():
    """Other scalings, and texts that cannot exceed the original context, have no passes over entire texts."""
    for name in LENGTH_SCALINGS:
        model = llama(rope_scaling=LENGTH_SCALINGS[name], rope_theta=100.0)
        for capacity, is_text in ((8, False), (9, name != "yarn")):
            assert isinstance(model.init_cache(2, capacity), layers.TextCache if is_text else list)
        program = jax.make_jaxpr(functools.partial(layers.generate, max_new_tokens=3))(model, jnp.asarray(PROMPTS))
        assert " cond[" not in str(program)


def test_a_cache_of_a_layer_whose_texts_have_a_known_length():
    """Keys of a layer that is called by itself are those of the length that its cache is given."""
    module = layers.Attention(16, 2, rope_theta=10.0, rope_scaling=LENGTH_SCALINGS["longrope"], rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 12, 16))
    cache = dataclasses.replace(module.init_cache(1, 12), text_length=jnp.array([12]))
    first, cache = module(x[:, :5], cache=cache)
    second, _ = module(x[:, 5:], cache=cache)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), module(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_gpt2():
    """Learned positions go on from the cache."""
    config = layers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5)
    model = nnx.jit(lambda: layers.GPT2(config, rngs=nnx.Rngs(0)))()
    forward = nnx.jit(lambda m, tokens: m(tokens))
    model.position_embed.embedding[...] *= 3
    tokens = np.zeros((2, 10), int)
    tokens[:, :6], lengths = PROMPTS[:2], LENGTHS[:2]
    for i in range(4):
        logits = forward(model, jnp.asarray(tokens))
        tokens[[0, 1], lengths + i] = np.argmax(logits[[0, 1], lengths + i - 1], axis=1)
    got, _ = layers.generate(model, PROMPTS[:2], lengths=lengths, max_new_tokens=4)
    for row, out, length in zip(tokens, np.asarray(got), lengths, strict=True):
        np.testing.assert_array_equal(out, row[length : length + 4])
    with pytest.raises(ValueError, match="tokens exceed"):
        layers.generate(model, PROMPTS, lengths=LENGTHS, max_new_tokens=12)


def test_rows_end_at_an_end_token():
    expected = rollout()
    ends = [int(expected[0, 2]), int(expected[1, 4])]
    tokens, lengths = layers.generate(llama(), PROMPTS, lengths=LENGTHS, max_new_tokens=NEW, eos_token=ends)
    for row, got, length in zip(expected, np.asarray(tokens), np.asarray(lengths), strict=True):
        first = np.flatnonzero(np.isin(row, ends))
        assert length == (first[0] + 1 if len(first) else NEW)
        np.testing.assert_array_equal(got[:length], row[:length])
        np.testing.assert_array_equal(got[length:], got[length - 1])
    assert lengths.min() < NEW


class Counted(layers.Llama):
    """Notes the shape of the tokens of every pass: as it is traced, and as it runs."""

    traced: list = []  # noqa: RUF012
    ran: list = []  # noqa: RUF012

    def decode(self, tokens, cache, *, lengths=None):
        self.traced.append(tokens.shape)
        jax.debug.callback(lambda: self.ran.append(tokens.shape))
        return super().decode(tokens, cache, lengths=lengths)


@pytest.mark.slow
def test_one_program_that_stops_when_all_rows_have_ended():
    """Neither another model of the same structure nor another temperature traces it again."""
    for seed in range(2):
        model = Counted(dataclasses.replace(CONFIG, num_hidden_layers=1), rngs=nnx.Rngs(seed))
        run = functools.partial(layers.generate, model, PROMPTS[:1], max_new_tokens=NEW, key=jax.random.key(0))
        run(temperature=0.5, top_p=0.1)
        sample = run(temperature=2.0, top_p=0.9).tokens
    assert Counted.traced == [(1, 6), (1, 1)]
    jax.effects_barrier()
    assert sorted(Counted.ran) == [(1, 1)] * 4 * (NEW - 1) + [(1, 6)] * 4
    np.testing.assert_array_equal(sample, run(temperature=2.0, top_p=0.9).tokens)
    assert (sample != run(temperature=2.0, top_p=0.9, key=jax.random.key(1)).tokens).any()
    Counted.ran.clear()
    row = np.asarray(run().tokens[0])
    jax.effects_barrier()
    assert Counted.ran == [(1, 6)] + [(1, 1)] * (NEW - 1)
    Counted.ran.clear()
    changed = int(np.flatnonzero(row != row[0])[0])
    assert run(eos_token=row[changed]).lengths == changed + 1
    jax.effects_barrier()
    assert Counted.ran == [(1, 6)] + [(1, 1)] * changed


@pytest.mark.slow
def test_a_traced_temperature_and_top_p():
    """As numbers, in one program under jit and vmap; where one is out of its range there is no token."""
    key, model = jax.random.key(0), llama(num_hidden_layers=1)

    def run(temperature, top_p):
        return layers.generate(
            model, PROMPTS[:2], max_new_tokens=3, temperature=temperature, top_p=top_p, key=key
        ).tokens

    numbers = [(0.0, 0.9), (1.5, 0.9), (0.7, 1.0)]
    unfit = [(-1.0, 0.9), (jnp.nan, 0.9), (jnp.inf, 0.9), (1.0, 0.0), (1.0, 2.0)]
    found = jax.jit(jax.vmap(run))(*jnp.array(numbers + unfit).T)
    np.testing.assert_array_equal(found[:3], [run(*numbers[0]), run(*numbers[1]), run(*map(jnp.float32, numbers[2]))])
    assert (found[3:] == -1).all()


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 4, "key": jax.random.key(0)}], ids=["", "drawn"])
@pytest.mark.slow
def test_logits_that_give_no_token(options, value):
    """The row ends with -1, and outside of jit it is an error; the other row goes on."""

    class Spoilt(layers.Llama):
        def decode(self, tokens, cache, *, lengths=None):
            logits, cache = super().decode(tokens, cache, lengths=lengths)
            is_spoilt = (jnp.arange(2) == 1)[:, None] & (tokens.shape[1] == 1)  # from the second token on
            return jnp.where(is_spoilt, value, logits), cache

    model = Spoilt(dataclasses.replace(CONFIG, num_hidden_layers=1), rngs=nnx.Rngs(0))
    options = {"eos_token": 39, **options} if value == -jnp.inf else options
    run = functools.partial(layers.generate, max_new_tokens=4, **options)
    with pytest.raises(ValueError, match=r"logits of row 1 are NaN.*parameters.*bfloat16"):
        run(model, PROMPTS[:2])
    tokens, lengths = nnx.jit(run)(model, PROMPTS[:2])
    assert lengths.tolist() == [4, 2] and tokens[1, 1:].tolist() == [-1] * 3 and tokens[1, 0] >= 0
    assert (tokens[0] >= 0).all()


def reference_probabilities(logits, top_k, top_p):
    """The probabilities of one row, token by token, in float64."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp(logits[order] - logits.max())
    probabilities, kept, total = weights / weights.sum(), [], 0.0
    for token, p in zip(order, probabilities, strict=True):
        kept.append((token, p))
        total += p
        if top_p is not None and total >= top_p:
            break
    out = np.zeros(len(logits))
    for token, p in kept:
        out[token] = p / total
    return out


@pytest.mark.parametrize("top_k, top_p", [(5, None), (None, 0.7), (8, 0.5), (100, 1e-6), (1, 0.9)])
def test_the_tokens_that_may_be_drawn(top_k, top_p):
    logits = np.random.default_rng(0).normal(0, 2, (3, 40)).astype(np.float32)
    kept, tokens = candidates(jnp.asarray(logits), top_k, top_p)
    got = np.zeros(logits.shape)
    np.put_along_axis(got, np.asarray(tokens), np.asarray(jax.nn.softmax(kept, axis=-1)), axis=1)
    expected = np.stack([reference_probabilities(row.astype(np.float64), top_k, top_p) for row in logits])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.6}], ids=str)
@pytest.mark.slow
def test_first_tokens_have_the_model_s_distribution(options):
    """Each token's share of 4000 draws at temperature 2 is within five standard deviations of its probability."""
    model, count, temperature = llama(num_hidden_layers=1), 4000, 2.0
    logits = np.asarray(model(jnp.asarray(PROMPTS[:1, :2])), np.float64)[0, -1] / temperature
    p = reference_probabilities(logits, options.get("top_k"), options.get("top_p"))
    prompts = np.repeat(PROMPTS[:1, :2], count, axis=0)
    key = jax.random.key(1)
    tokens, _ = layers.generate(model, prompts, max_new_tokens=1, temperature=temperature, key=key, **options)
    share = np.bincount(tokens[:, 0], minlength=40) / count
    assert (np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / count)).all()


def test_a_prompt_in_parts_and_a_token_taken_back():
    """Any number of tokens may follow a cache; one of a smaller length has forgotten its last tokens."""
    model, tokens = llama(sliding_window=4, num_hidden_layers=1), jnp.asarray(PROMPTS[:, ::-1])
    decode = nnx.jit(lambda m, tokens, cache: m.decode(tokens, cache))
    expected, whole = decode(model, tokens, model.init_cache(4, 8))
    _, cache = decode(model, tokens[:, :2], model.init_cache(4, 8))
    _, cache = decode(model, tokens[:, 1:3], cache)
    cache = [dataclasses.replace(layer, length=layer.length - 2) for layer in cache]
    logits, cache = decode(model, tokens[:, 2:], cache)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_padding_needs_no_room():
    model = llama()
    _, cache = model.decode(jnp.asarray(PROMPTS), model.init_cache(4, 7), lengths=jnp.asarray(LENGTHS))
    logits, cache = model.decode(jnp.asarray(PROMPTS), cache, lengths=jnp.ones(4, jnp.int32))
    assert bool(jnp.isfinite(logits).all()) and cache[0].length.tolist() == (LENGTHS + 1).tolist()


def test_step_products_are_kernels_where_rows_align():
    """The prompt's and, once, a step's, with one row a prompt; a row of 40 logits is a kernel's, one of 41 is not."""
    tokens = jax.ShapeDtypeStruct(PROMPTS.shape, jnp.int32)
    for vocab, reason in ((40, None), (41, "a row of 41 bfloat16 is 82 bytes")):
        model = layers.Llama(dataclasses.replace(CONFIG, vocab_size=vocab), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        found = coda.explain(lambda m, t: layers.generate(m, t, max_new_tokens=NEW), model, tokens, platform="cuda")
        assert sum(found.products.values()) == 2 * (4 * CONFIG.num_hidden_layers + 1)
        rows = {(p.epilogue, p.a) for p in found.products}
        assert {("LlamaBlock_2", "bfloat16[24,32]"), ("LlamaBlock_2", "bfloat16[4,32]")} <= rows
        heads = [p for p in found.products if p.b == f"bfloat16[32,{vocab}]"]
        assert [p.a for p in heads] == ["bfloat16[4,32]"]  # the prompt's and the step's are the same product
        assert (heads[0].reason is None) == (reason is None) and (reason or "") in (heads[0].reason or "")


def outputs(jaxpr):
    """Types of the results of all equations, those of nested jaxprs too."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from outputs(inner)


def as_matrix(x):
    """The shape of an array as a matrix, with the first axis as rows; gate and up are read as one kernel."""
    return (x.shape[0], math.prod(x.shape[1:])) if getattr(x, "ndim", 0) > 1 else ()


@pytest.mark.parametrize("name", [None, "longrope"])
def test_no_weight_is_cast_in_the_loop(name):
    """Casts and products with a norm's scale are made before it: a step only reads the weights.

    It takes rows of the embedding and casts these. A pass over the entire text, which few steps have, casts weights.
    """
    config = dataclasses.replace(CONFIG, rope_scaling=LENGTH_SCALINGS.get(name))
    model = layers.Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    kernels = {as_matrix(x) for x in jax.tree.leaves(nnx.state(model)) if x.ndim > 1}
    whole = jax.make_jaxpr(lambda m, t: layers.generate(m, t, max_new_tokens=NEW))(model, PROMPTS).jaxpr
    (inner,) = (e.params["jaxpr"].jaxpr for e in whole.eqns if e.params.get("name") == "_generate")
    (loop,) = (e for e in inner.eqns if e.primitive.name == "while")
    assert kernels - {model.embed.embedding.shape} <= {as_matrix(x) for x in outputs(inner)}
    body = loop.params["body_jaxpr"].jaxpr
    steps = [e for e in body.eqns if e.primitive.name != "cond"]
    assert len(body.eqns) - len(steps) == (name is not None)
    assert not kernels & {as_matrix(x) for x in outputs(body.replace(eqns=steps))}


def test_hoist_takes_all_that_reads_invariants_alone():
    """All that reads the invariant and nothing that varies is hoisted, seen through jit and custom rules.

    Effects stay.
    """
    ran = []

    def step(weights, x):
        scale = jax.nn.relu(weights["w"]) * jnp.arange(3.0)
        jax.debug.callback(lambda: ran.append(1))
        return {"y": jax.nn.silu(x) + jnp.sum(scale) + jnp.arange(3.0), "w": weights["w"]}

    weights, x = {"w": jnp.array([-1.0, 2.0, 3.0])}, jnp.ones(3)
    kept, rest = hoist(step, weights, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert ran == [] and sorted(k.shape for k in kept) == [(), (3,)]
    for _ in range(2):
        got = rest(kept, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, step(weights, x))
    jax.effects_barrier()
    assert len(ran) == 4
    assert "max" not in str(jax.make_jaxpr(rest)(kept, x))


generate_all = functools.partial(layers.generate, max_new_tokens=2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: layers.generate(m, PROMPTS, max_new_tokens=20), "25 tokens exceed .*max_position_embeddings=24"),
        (lambda m: layers.generate(m, PROMPTS, max_new_tokens=0), "max_new_tokens=0 must be an integer, at least 1"),
        (lambda m: layers.generate(m, PROMPTS, max_new_tokens=2.5), "max_new_tokens=2.5 must be an integer"),
        (lambda m: generate_all(m, PROMPTS[:, :0]), r"got int64\(4, 0\)|got int32\(4, 0\)"),
        (lambda m: generate_all(m, PROMPTS[0]), r"prompts are integers \(B, T\).*\(6,\)"),
        (lambda m: generate_all(m, PROMPTS / 1.0), "prompts are integers .* float32"),
        (lambda m: generate_all(m, PROMPTS, lengths=[6, 0, 1, 5]), r"1 to 6, got \[6, 0, 1, 5\]"),
        (lambda m: generate_all(m, PROMPTS, lengths=[6, 7, 1, 5]), "lengths must be 1 to 6"),
        (lambda m: generate_all(m, PROMPTS, lengths=[6, 3]), r"integers \(4,\) here, got int64\(2,\)"),
        (lambda m: generate_all(m, PROMPTS, lengths=LENGTHS / 1.0), "float64"),
        (lambda m: generate_all(m, PROMPTS, temperature=-1.0), "temperature=-1.0 must be 0 or"),
        (lambda m: generate_all(m, PROMPTS, temperature=float("nan")), "temperature=nan"),
        (lambda m: generate_all(m, PROMPTS, temperature=1.0), "temperature=1.0 needs a key"),
        (lambda m: generate_all(m, PROMPTS, top_k=0), "top_k=0 must be at least 1"),
        (lambda m: generate_all(m, PROMPTS, top_k=3.0), "top_k=3.0 must be an integer, at least 1: give 3"),
        (lambda m: generate_all(m, PROMPTS, top_k="3"), "top_k='3' must be an integer, at least 1"),
        (lambda m: generate_all(m, PROMPTS, top_k=True), "top_k=True must be an integer"),
        (lambda m: jax.jit(lambda k: generate_all(m, PROMPTS, top_k=k))(3), "top_k is traced: .* static_argnames"),
        (lambda m: jax.jit(lambda e: generate_all(m, PROMPTS, eos_token=[1, e]))(3), "eos_token is traced"),
        (lambda m: generate_all(m, PROMPTS, eos_token=2**40), "eos_token=1099511627776 must fit int32"),
        (lambda m: generate_all(m, PROMPTS, temperature="1"), "temperature is '1'; it must be one number"),
        (lambda m: generate_all(m, PROMPTS, temperature=jnp.ones(4)), r"temperature is float32\(4,\); it must be one"),
        (
            lambda m: jax.jit(lambda t: generate_all(m, PROMPTS, temperature=t))(1.0),
            "a traced temperature, .* needs a key",
        ),
        (lambda m: generate_all(m, PROMPTS, temperature=1.0, key=0), r"key=0 is a seed: give key=jax.random.key\(0\)"),
        (
            lambda m: generate_all(m, PROMPTS, temperature=1.0, key=jax.random.split(jax.random.key(0), 4)),
            r"key is key<fry>\(4,\); it must be one key",
        ),
        (lambda m: generate_all(m, PROMPTS, temperature=1.0, key=nnx.Rngs(0)), "key is Rngs; it must be one key"),
        (lambda m: generate_all(m, PROMPTS, top_p=0.0), "top_p=0.0 must be above 0"),
        (lambda m: generate_all(m, PROMPTS, eos_token="</s>"), "eos_token='</s>' must be an integer or a sequence"),
        (lambda m: m.init_cache(0, 4), "batch_size=0 and capacity=4"),
        (lambda m: m.decode(PROMPTS, m.init_cache(4, 5)), "6 tokens exceed the cache's capacity of 5"),
        (
            lambda m: m.decode(PROMPTS[:, :2], m.decode(PROMPTS, m.init_cache(4, 7))[1]),
            "8 tokens exceed the cache's capacity of 7",
        ),
        (
            lambda m: m.decode(PROMPTS, m.init_cache(3, 8)),
            r"float32\(4, 6, 2, 8\) do not fit a cache of float32\(3, 8, 2, 8\)",
        ),
        (
            lambda m: m.layers[0](jnp.ones((3, 2, 32)), cache=m.init_cache(3, 8)[0], mask=jnp.ones((2, 2), bool)),
            "without mask, bias and segment_ids",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(llama())
