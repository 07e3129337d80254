"""Sequences packed into one row: what a segment is, positions, labels, and attention that is given segments."""

import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.jaxprs.walk import equations
from flax_layers.attend import attend
from flax_layers.models.language_model import LanguageModel
from flax_layers.packing import Segments, counted_labels, labels_within_segments, segment_positions, segment_runs
from tests.tiny_models import GPT2, LLAMA

IDS = jnp.array([[4, 4, 4, 7, 7, 0, 0, 4, 4, 4, 4, 4, 1, 1, 1, 1], [2] * 16])
LENGTHS = (3, 2, 2, 5, 4)  # of the first row; its last-but-one segment has the first one's id


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def test_runs_positions_and_labels():
    """An id that comes again is a new segment."""
    for dtype in ("int32", "int8", "uint8", "uint32"):
        assert segment_runs(IDS[0].astype(dtype)).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4]
    assert segment_positions(IDS).tolist() == [[0, 1, 2, 0, 1, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(16)]]
    labels = labels_within_segments(jnp.arange(32).reshape(2, 16), IDS, -100)
    ends = [2, 4, 6, 11]
    assert [i for i in range(16) if labels[0, i] == -100] == ends
    assert labels[1].tolist() == [*range(16, 32)]


def test_segments_of_rows():
    segments = Segments.of(IDS)
    np.testing.assert_array_equal(segments.ids, segment_runs(IDS))
    assert segments.first.tolist() == [[0, 0, 0, 3, 3, 5, 5, 7, 7, 7, 7, 7, 12, 12, 12, 12], [0] * 16]
    assert segments.last.tolist() == [[2, 2, 2, 4, 4, 6, 6, 11, 11, 11, 11, 11, 15, 15, 15, 15], [15] * 16]
    assert Segments.of(segments) is segments and segments.shape == (2, 16)
    shifted = Segments(ids=segments.ids + 3, first=segments.first, last=segments.last)
    arrays = [normal(i, 2, 16, 2, 8) for i in range(3)]
    found, expected = (attend(*arrays, segment_ids=ids)[0] for ids in (shifted, IDS))
    np.testing.assert_array_equal(found, expected)
    assert [x.dtype for x in jax.tree.leaves(segments)] == [jnp.int32] * 3
    for x, y in zip(jax.tree.leaves(Segments.of(IDS[0].astype(jnp.uint8))), jax.tree.leaves(segments), strict=True):
        np.testing.assert_array_equal(x, y[0])
    with pytest.raises(ValueError, match="segment_ids are integers, got float32"):
        Segments.of(jnp.ones(4))


class Bigram(LanguageModel):
    """A head on an embedding: a language model without a layer."""

    max_length = "length"
    config = types.SimpleNamespace(length=16)

    def __init__(self, vocab_size):
        self.embedding = nnx.Param(normal(0, vocab_size, 8))
        self.head = layers.LMHead(8, vocab_size, rngs=nnx.Rngs(0))

    def _features(self, tokens, positions, mask, segment_ids):
        return self.embedding[tokens]

    def _embedding(self):
        return None


# dtype, ignore_index, the label that is then ignored, if there is one, and whether jax_enable_x64 is wanted
LABELS = [
    ("uint8", -100, None, False),
    ("uint16", -100, None, False),
    ("uint32", -100, 2**32 - 100, False),  # -100 as uint32 has it
    ("uint32", 2**32 - 1, 2**32 - 1, False),
    ("uint64", -100, 2**64 - 100, True),
    ("int8", -100, -100, False),
    ("int8", 1000, None, False),
    ("int16", None, None, False),
    ("int32", 2**40, None, False),
    ("int64", 2**40, 2**40, True),
]


def of_dtype(dtype, *shape, ignored=None):
    """Random labels, the first two of which are `ignored`; and as int32, where these are -100."""
    labels = np.random.default_rng(0).integers(0, 64, shape)
    labels.flat[:2] = [7, 8] if ignored is None else -100
    plain, labels = jnp.asarray(labels, jnp.int32), labels.astype(dtype)
    if ignored is not None:
        labels.flat[:2] = ignored
    return labels, plain


@pytest.mark.parametrize("dtype, ignore_index, ignored, is_wide", LABELS)
def test_labels_of_any_integer_dtype(dtype, ignore_index, ignored, is_wide):
    """With segments they are int32; and what the head makes of them is what it makes of int32 ones."""
    x, w = normal(0, 16, 8), normal(1, 8, 64)
    with jax.enable_x64(is_wide):
        labels, plain = of_dtype(dtype, 16, ignored=ignored)
        expected = labels_within_segments(plain, IDS[0], -100)
        for array in (labels, jnp.asarray(labels)):
            counted, sentinel = counted_labels(array, IDS[0], ignore_index)
            assert counted.dtype == jnp.int32
            np.testing.assert_array_equal(jnp.where(counted == sentinel, -100, counted), expected)
        got = coda.token_logprobs(x, w, array, ignore_index=ignore_index)
        np.testing.assert_allclose(got, coda.token_logprobs(x, w, plain), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["uint16", "int8"])
def test_a_model_s_labels_of_any_integer_dtype(dtype):
    model, within = Bigram(64), {"segment_ids": IDS}
    labels, plain = of_dtype(dtype, 2, 16)
    np.testing.assert_allclose(model.loss(IDS, labels, **within), model.loss(IDS, plain, **within), rtol=1e-6)
    labels, plain = of_dtype(dtype, 2, 16, 2)
    got, expected = (model.token_logprobs(IDS, x, **within) for x in (labels, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert not got[0, 4].any() and got[0, 5].all()


@pytest.mark.parametrize(
    "dtype, label", [("uint16", 65436), ("uint32", 2**32 - 1), ("int8", -100), ("int32", -(2**31))]
)
def test_a_label_that_the_vocabulary_does_not_have_is_not_ignored(dtype, label):
    """But where a segment ends, at 4."""
    labels = jnp.zeros(16, dtype).at[4:6].set(np.asarray(label, dtype))
    for ignored in (None, -7):
        counted = counted_labels(labels, IDS[0], ignored)
        logprobs = coda.token_logprobs(normal(0, 16, 8), normal(1, 8, 64), counted[0], ignore_index=counted[1])
        assert np.isnan(logprobs).tolist() == [i == 5 for i in range(16)]


@pytest.mark.parametrize("adapted", [False, True])
def test_accumulated_microbatches_are_the_batch(adapted):
    """The batch's values are sums of packed rows, divided by the sum of their weights.

    The rows have 12 and 16 labels, one of which has weight 0.5.
    """
    model, labels = Bigram(64), jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)))
    weights = jnp.ones((2, 16)).at[1, 3].set(0.5)
    if adapted:
        layers.add_lora(model, 2, targets=["head"], rngs=nnx.Rngs(1))

    def of_rows(rows, **options):
        def loss(model):
            return model.loss(IDS[rows], labels[rows], weights[rows], segment_ids=IDS[rows], **options)

        return nnx.jit(nnx.value_and_grad(loss, has_aux=options.get("weight_sum", False)))(model)

    parts, gradients = zip(*(of_rows(np.array([i]), reduction="sum", weight_sum=True) for i in range(2)), strict=True)
    assert [float(total) for _, total in parts] == [12, 15.5]
    total = sum(total for _, total in parts)
    loss, gradient = of_rows(np.arange(2))
    np.testing.assert_allclose(sum(loss for loss, _ in parts) / total, loss, rtol=1e-5)
    for found, *accumulated in zip(*map(jax.tree.leaves, (gradient, *gradients)), strict=True):
        np.testing.assert_allclose(sum(accumulated) / total, found, rtol=1e-4, atol=1e-6)


def pallas(q, k, v, *, mask, is_causal, local_window_size, segment_ids):
    """A second attention, jax's in Pallas, interpreted."""
    with warnings.catch_warnings():  # it is to be replaced by tokamax's
        warnings.simplefilter("ignore", DeprecationWarning)
        module = pytest.importorskip("jax.experimental.pallas.ops.gpu.attention")
    assert mask is None and local_window_size is None
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    sizes = module.BlockSizes(**dict.fromkeys(("block_q", "block_k"), 16))
    scale = q.shape[-1] ** -0.5
    options = {"causal": is_causal, "block_sizes": sizes, "backward_pass_impl": "xla", "interpret": True}
    return module.mha(q, k, v, segment_ids, scale, **options)


def with_mask(q, k, v, *, mask=None, is_causal=False, local_window_size=None):
    """jax.nn.dot_product_attention's arguments, and no segment_ids."""
    assert mask.shape == (q.shape[0], 1, q.shape[1], q.shape[1])
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal, local_window_size=local_window_size)


@pytest.mark.parametrize("function", [pytest.param(pallas, marks=pytest.mark.slow), with_mask])
def test_another_attention_gives_the_same(function):
    def run(implementation):
        module = layers.Attention(32, 2, num_kv_heads=1, head_dim=16, implementation=implementation, rngs=nnx.Rngs(0))

        def loss(module, x):
            return jnp.sum(jnp.sin(module(x, segment_ids=IDS)))

        return nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(module, normal(1, 2, 16, 32))

    for got, expected in zip(jax.tree.leaves(run(function)), jax.tree.leaves(run(None)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_attention_functions_get_masks_windows_and_segments():
    given = {}

    def attention(q, k, v, *, segment_ids, **options):
        given.update(options, shape=q.shape)
        jax.debug.callback(lambda x: given.update(segment_ids=np.asarray(x)), segment_ids)
        return q

    module = layers.Attention(32, 2, sliding_window=3, implementation=attention, rngs=nnx.Rngs(0))
    module(normal(0, 16, 32), segment_ids=IDS[0], mask=jnp.ones((16, 16), bool))
    jax.effects_barrier()
    assert given["shape"] == (1, 16, 2, 16) and given["mask"].shape == (1, 1, 16, 16)
    assert given["local_window_size"] == (2, 0) and given["is_causal"]
    np.testing.assert_array_equal(given["segment_ids"], segment_runs(IDS[:1]))


def sums(q, k, v, *, mask, is_causal, local_window_size, segment_ids):
    """No attention: of the arguments, without an array (T, T), to see what its caller makes."""
    return q + jnp.cumsum(v * segment_ids[..., None, None].astype(q.dtype), axis=1)


@pytest.mark.filterwarnings("ignore::coda_jax.FallbackWarning")
@pytest.mark.parametrize("scan_layers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_array_of_all_pairs_outside_of_attention(scan_layers):
    """In the text of the step's lowering for a GPU."""
    segment_ids = jnp.arange(2 * 136).reshape(2, 136) // 20
    tokens = jnp.zeros((2, 136), int)

    def pairs(implementation):
        model = layers.Llama(LLAMA, attention_implementation=implementation, scan_layers=scan_layers, rngs=nnx.Rngs(0))

        @nnx.jit
        def step(model):
            return nnx.grad(lambda m: m.loss(tokens, tokens, segment_ids=segment_ids, positions="restart"))(model)

        text = step.trace(model).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"tensor<(?:\d+x)*136x136x", text))

    assert pairs("xla") > 0
    assert pairs(sums) == 0


class Logged(layers.Attention):
    """Attention of a user, with a call of its own."""

    def __call__(self, x, *, segment_ids=None, **arrays):
        assert isinstance(segment_ids, jax.Array) and segment_ids.shape == (2, 16)
        return super().__call__(x, segment_ids=segment_ids, **arrays)


class LoggedBlock(layers.LlamaBlock):
    """A block of a user, with a call of its own."""

    def __call__(self, x, *, segment_ids=None, **arrays):
        assert isinstance(segment_ids, jax.Array) and segment_ids.shape == (2, 16)
        return super().__call__(x, segment_ids=segment_ids, **arrays)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("remat", [None, "full"])
def test_segments_are_found_once_for_all_layers(scan_layers, remat):
    """Before the layers, also where these are scanned or computed again; and no array of all pairs is made."""
    model = layers.Llama(LLAMA, scan_layers=scan_layers, remat=remat, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params):
        return nnx.merge(graphdef, params)(IDS[:, :15], segment_ids=IDS[:, :15]).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    names = [one.primitive.name for one, _ in equations(jaxpr)]
    assert names.count("cummax") == names.count("cummin") == 1 and "coda_attention_backward" in names
    loops = [one for one, _ in equations(jaxpr) if one.primitive.name == "scan"]
    assert bool(loops) == scan_layers
    assert all("cummax" not in str(loop.params["jaxpr"]) for loop in loops)
    assert "15,15]" not in str(jaxpr)


@pytest.mark.parametrize("cls", [Logged, LoggedBlock])
def test_a_layer_with_a_call_of_its_own_is_given_ids(cls):
    model, expected = (layers.Llama(LLAMA, rngs=nnx.Rngs(0)) for _ in range(2))
    for layer in model.layers:
        (layer if cls is LoggedBlock else layer.attention).__class__ = cls
    np.testing.assert_allclose(model(IDS, segment_ids=IDS), expected(IDS, segment_ids=IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: layers.GPT2(GPT2, rngs=nnx.Rngs(0), **options),
        lambda **options: layers.Llama(LLAMA, rngs=nnx.Rngs(0), **options),
    ],
    ids=["gpt2", "llama"],
)
def test_packed_sequences_are_what_they_are_alone(make):
    """Logits, and the loss: the mean over the labels that the sequences alone have."""
    model = make()
    row = jax.random.randint(jax.random.key(0), (16,), 0, 64)
    starts = np.cumsum((0, *LENGTHS[:-1]))
    parts = [row[i : i + n] for i, n in zip(starts, LENGTHS, strict=True)]
    logits = model(row, segment_ids=IDS[0], positions="restart")
    np.testing.assert_allclose(logits, jnp.concatenate([model(part) for part in parts]), rtol=1e-3, atol=1e-4)

    after = jnp.append(row[1:], 5)
    packed = model.loss(row, after, segment_ids=IDS[0], positions="restart")
    alone = [model.loss(part[:-1], part[1:]) * (len(part) - 1) for part in parts]
    alone.append(model.loss(parts[-1], jnp.full(len(parts[-1]), -100).at[-1].set(5)))  # the row's last label counts
    np.testing.assert_allclose(packed, sum(alone) / (16 - 4), rtol=1e-4)
    crossing = model.loss(row, after, segment_ids=IDS[0], positions="restart", across_segments=True)
    every = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), after[:, None], axis=1))
    np.testing.assert_allclose(crossing, every, rtol=1e-4)


def test_an_id_that_comes_again_sees_nothing_of_before():
    module, x = layers.Attention(32, 2, rngs=nnx.Rngs(0)), normal(0, 1, 16, 32)
    y = module(x, segment_ids=IDS[:1])
    changed = module(x.at[:, :3].add(1.0), segment_ids=IDS[:1])
    np.testing.assert_array_equal(changed[:, 3:], y[:, 3:])
    assert np.abs(changed[:, :3] - y[:, :3]).min() > 0


LONG = layers.LongRopeScaling(
    short_factor=(1.0, 1.0), long_factor=(4.0, 3.0), original_max_position_embeddings=8, factor=4.0
)
DYNAMIC = layers.DynamicRopeScaling(factor=4.0, original_max_position_embeddings=8)
YARN = layers.YarnRopeScaling(factor=4.0, original_max_position_embeddings=8)
SCALINGS = pytest.mark.parametrize("scaling", [LONG, DYNAMIC, YARN], ids=["longrope", "dynamic", "yarn"])
LONG_IDS = jnp.array([[3] * 6 + [5] * 7, [1] * 9 + [2] * 4])


def turning(scaling, **options):
    """Attention of four columns a head, and its result for each text alone."""
    module = layers.Attention(8, 2, rope_theta=10.0, rope_scaling=scaling, rngs=nnx.Rngs(0), **options)
    return module, nnx.jit(lambda module, x, **arrays: module(x, **arrays))


def assert_alone(y, x, run, module, row, start, end):
    np.testing.assert_allclose(y[row, start:end], run(module, x[row, start:end]), rtol=0, atol=2e-5)


@SCALINGS
def test_frequencies_are_those_of_each_segment_s_length(scaling):
    """Rows of 13 are longer than the original context, of their texts one alone; by any positions of the segments."""
    (module, run), x = turning(scaling), 2 * normal(0, 2, 13, 8)
    others = [segment_positions(LONG_IDS), jnp.arange(13) + 7, jnp.broadcast_to(jnp.arange(13), (2, 13))]
    for positions in (None, *others):
        y = run(module, x, segment_ids=LONG_IDS, positions=positions)
        for row, start, end in ((0, 0, 6), (0, 6, 13), (1, 0, 9), (1, 9, 13)):
            assert_alone(y, x, run, module, row, start, end)


@SCALINGS
def test_frequencies_are_those_of_a_text_without_its_padding(scaling):
    """Padding is hidden by a mask, after a text or before it, or also one of each head; or it is a segment."""
    (module, run), x = turning(scaling), 2 * normal(0, 2, 13, 8)
    after, before = jnp.arange(13) < jnp.array([[6], [9]]), jnp.arange(13) >= jnp.array([[7], [4]])
    for mask in (after[:, None, None], jnp.broadcast_to(after[:, None, None], (2, 2, 1, 13))):
        y = run(module, x, mask=mask)
        assert_alone(y, x, run, module, 0, 0, 6)
        assert_alone(y, x, run, module, 1, 0, 9)
    y = run(module, x, mask=before[:, None, None])
    assert_alone(y, x, run, module, 0, 7, 13)
    assert_alone(y, x, run, module, 1, 4, 13)
    y = run(module, x, mask=after[:1], segment_ids=LONG_IDS)  # of queries too: segments say which text a token is in
    assert_alone(y, x, run, module, 0, 0, 6)
    y = run(module, x, segment_ids=after.astype(jnp.int32), mask=jnp.tril(jnp.ones((13, 13), bool)))
    assert_alone(y, x, run, module, 0, 0, 6)
    assert_alone(y, x, run, module, 1, 0, 9)


@SCALINGS
def test_frequencies_in_a_fused_function(scaling):
    (module, run), x = turning(scaling), 2 * normal(0, 2, 13, 8)

    @coda.fuse
    def attended(x, positions, segment_ids):
        return module(x, positions=positions, segment_ids=segment_ids)

    y = attended(x, segment_positions(LONG_IDS), LONG_IDS)
    np.testing.assert_allclose(y, run(module, x, segment_ids=LONG_IDS), rtol=0, atol=2e-5)


def test_angles_by_default_are_those_of_each_row():
    rows = jnp.array([jnp.arange(4), jnp.arange(4) + 8])
    for table, short, long in zip(
        layers.rotary_angles(rows, 4, 10.0, LONG),
        layers.rotary_angles(rows[0], 4, 10.0),
        layers.rotary_angles(rows[1], 4, 10.0, LONG, length=jnp.full(4, 9)),
        strict=True,
    ):
        np.testing.assert_allclose(table, jnp.stack([short, long]), atol=1e-6)


X13 = normal(0, 2, 13, 8)


@pytest.mark.parametrize("scaling", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: m(X13, mask=jnp.tril(jnp.ones((13, 13), bool))), r"a mask of shape \(13, 13\) does not say"),
        (lambda m: m(X13, bias=jnp.zeros((2, 1, 1, 13))), r"a bias of shape \(2, 1, 1, 13\) does not say"),
        (lambda m: m(X13[:, :4], cache=m.init_cache(2, 9)), "a cache for 9 tokens would keep keys"),
        (lambda m: m(X13, segment_ids=LONG_IDS[0]), r"segment_ids has shape \(13,\); for queries"),
    ],
)
def test_texts_of_unknown_length_are_refused(call, message, scaling):
    module, _ = turning(scaling)
    with pytest.raises(ValueError, match=message):
        call(module)


def test_parts_of_texts_are_refused_beside_attention_over_devices():
    """On a device the positions of a part do not say how long the text is."""
    module, _ = turning(LONG, implementation=lambda q, k, v, **options: q)
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))

    def call(x, positions):
        return module(x, positions=positions)

    spec = jax.P("sequence")
    with pytest.raises(ValueError, match="positions that differ between devices of a shard_map"):
        jax.shard_map(call, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(X13[0, :12], jnp.arange(12))


def wrong(q, k, v, **options):
    return q[:, :, :1]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0))(IDS, positions="restart"), "give segment_ids"),
        (lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0))(IDS, positions="anew"), "positions='anew' must be"),
        (lambda: segment_positions(jnp.ones(4)), "segment_ids are integers, got float32"),
        (lambda: labels_within_segments(IDS, IDS[0], -100), r"segment_ids has shape \(16,\); beside labels \(2, 16\)"),
        (
            lambda: layers.Attention(32, 2, implementation=wrong, rngs=nnx.Rngs(0))(normal(0, 2, 16, 32)),
            r"attention by wrong is float32\(2, 16, 1, 16\); beside queries float32\(2, 16, 2, 16\)",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
