"""Log-probabilities and entropies against the textbook, with every option; chunks, masks, products, transformations."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import coda_jax as coda
from coda_jax.operators.head import loss_head, shifted_heads
from coda_jax.operators.head.shifted_heads import EntropyHead
from tests.gemm_cases import assert_close, jit
from tests.logprob_cases import RANK, arguments, arguments_with_logits, compare, logprobs, plain
from tests.nvrtc import kernels, needs_nvrtc

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X, SCALE, W, A, B, TEMPERATURE, LABELS, MASK = range(8)
# dtype, vocabulary, what is left out, options. Three chunks. 16-bit logits of 131 columns are padded.
CASES = {
    "one label": (BF16, 131, (A, B, TEMPERATURE, MASK), {}),
    "soft cap, tied": (F16, 136, (A, B, TEMPERATURE, MASK), {"soft_cap": 3.0, "transpose_w": True}),
    "temperature": (F32, 131, (A, B, MASK), {"soft_cap": 3.0}),
    "mask": (BF16, 131, (A, B, TEMPERATURE), {"transpose_w": True}),
    "low rank": (F32, 136, (TEMPERATURE, MASK), {"transpose_w": True}),
    "candidates": (F32, 136, (A, B, TEMPERATURE, MASK), {"candidates": True}),
    "everything": (F32, 131, (), {"candidates": True, "soft_cap": 5.0, "transpose_w": True}),
    "everything, bfloat16": (BF16, 131, (), {"candidates": True, "soft_cap": 5.0, "has_norm": False}),
    "everything, one label": (F16, 136, (), {"soft_cap": 5.0}),
}


@pytest.mark.parametrize("dtype, vocabulary, left_out, options", CASES.values(), ids=CASES)
@pytest.mark.slow
def test_against_the_textbook(dtype, vocabulary, left_out, options):
    options = dict(options)
    candidates, transpose_w = options.pop("candidates", False), options.get("transpose_w", False)
    args = arguments(dtype, vocabulary, candidates=candidates, transpose_w=transpose_w)
    args = [None if i in left_out else x for i, x in enumerate(args)]
    compare(functools.partial(logprobs, **options), functools.partial(plain, **options), args)


@pytest.mark.slow
def test_one_number_for_the_temperature():
    """A number, an array () and an array of the tokens; the array receives its gradient."""
    args = arguments(F32, 24, lead=(3, 50), width=8)
    args = [None if i in (A, B, MASK) else x for i, x in enumerate(args)]

    def value(f, temperature):
        given = [temperature if i == TEMPERATURE else x for i, x in enumerate(args)]
        return jnp.sum(jnp.sin(f(*given)[0]) + f(*given)[1])

    everywhere = jnp.full((3, 50), 0.7)
    want, slope = jax.value_and_grad(functools.partial(value, plain))(everywhere)
    assert_close(value(logprobs, 0.7), want)
    got = jax.value_and_grad(functools.partial(value, logprobs))(jnp.float32(0.7))
    assert_close(got, (want, slope.sum()), rtol=1e-4)
    half = jax.grad(functools.partial(value, logprobs))(jnp.asarray(0.7, BF16))
    assert half.dtype == BF16


@pytest.mark.parametrize("dtype, rtol, atol", [(F32, 1e-3, 0), (BF16, 0, 3e-6), (F16, 0, 3e-6)])
def test_large_and_peaked_logits(dtype, rtol, atol):
    """The entropy of a token that is all but certain is small; for 16-bit products as float32 is beside its logit."""
    x, w = jnp.ones((4, 8), dtype), jnp.zeros((8, 131), dtype).at[:, 5].set(3)
    labels = jnp.asarray([5, 5, 5, 7])
    got, entropy = coda.token_logprobs(x, w, labels, entropy=True)
    logp = jax.nn.log_softmax(jnp.zeros(131).at[5].set(24.0))
    np.testing.assert_allclose(got, logp[labels], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(logp) * logp), rtol=rtol, atol=atol)
    assert (entropy >= 0).all()
    x = jnp.stack([jnp.ones(64), jnp.linspace(0, 20, 64)], axis=1).astype(dtype)
    certain = jnp.zeros((2, 131), dtype).at[0].set(-120).at[:, 5].set(jnp.asarray([0, 1], dtype))
    _, entropy = coda.token_logprobs(x, certain, labels[:1].repeat(64), entropy=True)
    assert (entropy >= 0).all() and (entropy < 1e-5).all()  # 0, but for rounding
    far = coda.token_logprobs(jnp.ones((4, 8), dtype), jnp.full((8, 131), -30, dtype), labels, entropy=True)
    np.testing.assert_allclose(far[0], -np.log(131), rtol=1e-4)
    np.testing.assert_allclose(far[1], np.log(131), rtol=1e-4)


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("size, offsets", [(0.1, 0.0), (3, 0.0), (3, 300.0), (3, -300.0), (2, np.linspace(-8, 8, 300))])
def test_entropies_of_sums_are_as_right_as_float32(size, offsets, temperature, soft_cap, monkeypatch):
    """From numbers around the labels' logits and from all logits; sums in range are not made again."""
    x, w, labels = arguments_with_logits(size, offsets=offsets)
    ran = counted(monkeypatch)
    options = {"temperature": temperature, "soft_cap": soft_cap, "chunk_bytes": 1}
    got = jax.block_until_ready(jax.jit(lambda *a: coda.token_logprobs(*a, entropy=True, **options))(x, w, labels))
    jax.effects_barrier()
    assert ran == ["loss_entropy"] * 3
    z = np.float64(x) @ np.float64(w)
    y = (z if soft_cap is None else soft_cap * np.tanh(z / soft_cap)) / temperature
    logp = y - np.logaddexp.reduce(y, axis=1, keepdims=True)
    want = logp[np.arange(300), labels], -np.sum(np.exp(logp) * logp, axis=1)
    # An accumulator is right to 2^-20 of its largest term, and so is a difference of logits.
    largest = max(np.abs(z).max(), np.abs(np.float64(x[:, 0])).max()) / temperature
    for one, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-5, atol=largest * 2.0**-20)


@pytest.mark.smoke
@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("lost", [90.0, 80.0, -50.0, 1e4, -1e4, 1e30])
@pytest.mark.parametrize("is_masked", [False, True])
def test_sums_out_of_range_are_made_again(lost, is_masked, temperature, monkeypatch):
    """One such token: all statistics are bit for bit those of the head that reads logits."""
    offsets = np.zeros(300)
    offsets[201] = lost
    x, w, labels = arguments_with_logits(1, offsets=offsets)
    mask = jnp.arange(300) % 3 < 1 if is_masked else None

    def run():
        options = {"mask": mask, "chunk_bytes": 1} | ({} if temperature is None else {"temperature": temperature})
        return jax.jit(lambda *a: coda.token_logprobs(*a, entropy=True, **options))(x, w, labels)

    ran = counted(monkeypatch)
    got = jax.block_until_ready(run())
    jax.effects_barrier()
    count = 1 if is_masked else 3
    assert ran == ["loss_entropy"] * count + ["loss_sums"] * count
    monkeypatch.setattr(EntropyHead, "of", lambda head, _: head)
    np.testing.assert_array_equal(got, run())


def test_no_tokens_and_as_many_as_are_given():
    """None, and a number that an exported program does not know: fewer and more than are sampled."""
    x, w, labels = arguments_with_logits(1, 200)

    def f(x, w, labels):
        return coda.token_logprobs(x, w, labels, entropy=True)

    assert [y.shape for y in f(x[:0], w, labels[:0])] == [(0,), (0,)]
    masked = lambda x, w: coda.token_logprobs(x, w, labels[:0], mask=labels[:0] > 0)  # noqa: E731
    y, back = jax.vjp(masked, x[:0], w)
    assert y.shape == (0,) and not back(y)[1].any()
    (rows,) = export.symbolic_shape("rows")
    types = [jax.ShapeDtypeStruct((rows, *y.shape[1:]), y.dtype) for y in (x, labels)]
    exported = export.export(jax.jit(f))(types[0], jax.ShapeDtypeStruct(w.shape, w.dtype), types[1])
    for count in (1, 5, 130, 200):
        got, want = exported.call(x[:count], w, labels[:count]), f(x[:count], w, labels[:count])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_tokens_that_are_masked_or_no_numbers_are_not_made_again(monkeypatch):
    """A masked token may hold anything; NaN stays NaN by either way."""
    x, w, labels = arguments_with_logits(1)
    ran = counted(monkeypatch)
    mask = jnp.arange(300) % 2 == 1
    spoilt = jnp.where(mask[:, None], x, 1e30)
    both = jax.jit(lambda x: coda.token_logprobs(x, w, labels, entropy=True, mask=mask))
    np.testing.assert_array_equal(both(spoilt), both(x))
    far, *_ = arguments_with_logits(1, offsets=300.0)  # one of the tokens that say so is no number
    found = jax.jit(lambda x: coda.token_logprobs(x.at[6].set(jnp.nan), w, labels, entropy=True))(far)
    assert np.isnan(found).sum(axis=1).tolist() == [1, 1]
    hot = jnp.ones(300).at[7].set(0.0).at[9].set(jnp.nan)
    found = jax.jit(lambda x: coda.token_logprobs(x.at[5].set(jnp.nan), w, labels, entropy=True, temperature=hot))(x)
    assert np.isnan(found).sum(axis=1).tolist() == [3, 3] and np.isnan(found)[:, [5, 7, 9]].all()
    jax.effects_barrier()
    assert set(ran) == {"loss_entropy"}


@pytest.mark.slow
def test_labels_and_temperatures_out_of_range():
    """NaN of the token, in value and gradient, and of no other; 0 where the label is ignored."""
    x, _, w, *_, labels, _ = arguments(F32, 24, lead=(20,), width=8)
    labels = jnp.where(labels == -100, 7, labels)

    def value_and_gradient(labels, temperature=1.0, **options):
        def f(x):
            return coda.token_logprobs(x, w, labels, temperature=temperature, entropy=True, **options)

        return f(x), jax.grad(lambda x: sum(y.sum() for y in f(x)))(x)

    (right, _), _ = value_and_gradient(labels)
    for wrong, options in ((24, {}), (-1, {}), (-100, {"ignore_index": None})):
        (got, entropy), gradient = jax.jit(functools.partial(value_and_gradient, **options))(labels.at[4].set(wrong))
        assert jnp.isnan(got[4]) and jnp.isnan(gradient[4]).all() and jnp.isfinite(entropy).all()
        assert_close(jnp.delete(got, 4), jnp.delete(right, 4))
        assert jnp.isfinite(jnp.delete(gradient, 4, axis=0)).all()
    (got, entropy), gradient = value_and_gradient(labels.at[4].set(-100))
    assert got[4] == 0 and entropy[4] == 0 and not gradient[4].any()
    for wrong in (0.0, -1.0, jnp.nan):
        temperature = jnp.ones(20).at[4].set(wrong)
        (got, entropy), gradient = jax.jit(value_and_gradient)(labels, temperature)
        assert jnp.isnan(got[4]) and jnp.isnan(entropy[4]) and jnp.isnan(gradient[4]).all()
        assert jnp.isfinite(jnp.delete(got, 4)).all()
        (got, entropy), gradient = jax.jit(value_and_gradient)(
            labels, temperature, mask=jnp.ones(20, bool).at[4].set(False)
        )
        assert all(jnp.isfinite(y).all() for y in (got, entropy, gradient))


def counted(monkeypatch):
    """A list to which every product of the loss head that is run adds its epilogue's name."""
    ran, multiply = [], loss_head.multiply

    def counting(*arrays, **options):
        epilogue = options.get("epilogue")
        jax.debug.callback(lambda: ran.append(getattr(epilogue, "__name__", "product")))
        return multiply(*arrays, **options)

    for module in (loss_head, shifted_heads):
        monkeypatch.setattr(module, "multiply", counting)
    return ran


@pytest.mark.smoke
@pytest.mark.parametrize("kept, chunks", [(0, 0), (1, 1), (128, 1), (129, 2), (500, 4)])
def test_a_mask_compacts(kept, chunks, monkeypatch):
    """As many chunks run as the kept tokens fill, wherever they are; the others may hold anything."""
    x, _, w, *_, labels, _ = arguments(F32, 24, lead=(500,), width=8)
    labels = jnp.where(labels == -100, 7, labels)
    mask = np.zeros(500, bool)
    mask[np.random.default_rng(0).permutation(500)[:kept]] = True
    ran = counted(monkeypatch)

    @jit
    def of_kept(x, w, labels, mask):
        def f(x, w):
            return coda.token_logprobs(x, w, labels, mask=mask, entropy=True, chunk_bytes=1)

        return f(x, w), jax.grad(lambda *a: sum((y * jnp.arange(500)).sum() for y in f(*a)), (0, 1))(x, w)

    spoilt = jnp.where(mask[:, None], x, jnp.nan), w, jnp.where(mask, labels, 1000), mask
    got = jax.block_until_ready(of_kept(*spoilt))
    jax.effects_barrier()
    assert ran.count("loss_sums") in (chunks, 2 * chunks) and ran.count("loss_cotangent") == chunks
    assert len(ran) == ran.count("loss_sums") + 3 * chunks

    def of_all(x, w):
        return [jnp.where(mask, y, 0) for y in coda.token_logprobs(x, w, labels, entropy=True)]

    want = of_all(x, w), jax.grad(lambda *a: sum((y * jnp.arange(500)).sum() for y in of_all(*a)), (0, 1))(x, w)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), rtol=1e-4)


@pytest.mark.slow
def test_transformations():
    """vmap of everything, checkpoint, second derivatives, with a mask and candidates and without."""
    args = arguments(F32, 24, lead=(2, 129), width=8, candidates=True)

    def value(f):
        def run(x, w, b, temperature, labels, mask):
            outputs = f(x, args[SCALE], w, args[A], b, temperature, labels, mask)
            return sum(jnp.sum(jnp.sin(y)) for y in outputs)

        return run

    def mapped(f):
        gradient = jax.value_and_grad(value(f), (0, 1, 2, 3))
        return lambda *a: jax.vmap(gradient, (0, None, None, 0, 0, None if a[-1] is None else 0))(*a)

    def second(f):
        def summed(*a):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(value(f), (0, 1, 3))(*a))

        return jax.grad(summed, (0, 1, 2, 3))

    transforms = {
        "vmap": mapped,
        "checkpoint": lambda f: jax.grad(jax.checkpoint(value(f)), (0, 1, 2, 3)),
        "second derivative": second,
    }
    arrays = [args[i] for i in (X, W, B, TEMPERATURE)]
    for labels, mask in ((args[LABELS], args[MASK]), (args[LABELS][..., 0], None)):
        got, want = (
            jit(lambda *a, f=f, mask=mask: {name: transform(f)(*a, mask) for name, transform in transforms.items()})(
                *arrays, labels
            )
            for f in (logprobs, plain)
        )
        for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3 * float(jnp.abs(w).max()), err_msg=str(path))


def test_a_hessian_beside_a_mask():
    """Pullbacks of a batch of cotangents, whose number of chunks is not static, are differentiated."""
    x, _, w, *_, labels, mask = arguments(F32, 24, lead=(20,), width=8)
    labels = jnp.where(labels == -100, 7, labels)

    def hessian(f):
        value = lambda row: jnp.sum(jnp.sin(f(x.at[:, 0].set(row), w)))  # noqa: E731
        return jax.jit(jax.jacrev(jax.jacrev(value)))(x[:, 0])

    got = hessian(lambda x, w: coda.token_logprobs(x, w, labels, mask=mask))
    logp = lambda x, w: jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1)[:, 0]  # noqa: E731
    want = hessian(lambda x, w: jnp.where(mask, logp(x, w), 0.0))
    assert jnp.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [False, True])
def test_a_traced_soft_cap(candidates):
    """Its gradient beside a temperature's, with a mask, and second derivatives."""
    args = arguments(F32, 24, lead=(2, 70), width=8, candidates=candidates)

    def all_of(f):
        def value(cap, x, temperature):
            given = [x if i == X else temperature if i == TEMPERATURE else y for i, y in enumerate(args)]
            return sum(jnp.sum(jnp.sin(y)) for y in f(*given, soft_cap=cap))

        def summed(*a):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(value, (0, 1, 2))(*a))

        of = F32(3.0), args[X], args[TEMPERATURE]
        return jit(lambda *a: (jax.grad(value, (0, 1, 2))(*a), jax.grad(summed, (0, 1))(*a)))(*of)

    for g, w in zip(jax.tree.leaves(all_of(logprobs)), jax.tree.leaves(all_of(plain)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3 * float(jnp.abs(w).max()))


def test_data_parallel_gradient():
    """Under shard_map each shard brings its own kept tokens together: they may have different numbers of chunks."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    args = arguments(F32, 24, lead=(4, 200), width=8)
    args[MASK] = args[MASK].at[0].set(True).at[1].set(False)
    data = jax.P("data")
    specs = (data, jax.P(), jax.P(), jax.P(), jax.P(), data, data, data)

    def gradient(f):
        def of_shard(x, scale, w, a, b, temperature, labels, mask):
            def total(x, w, b):
                outputs = f(x, scale, w, a, b, temperature, labels, mask)
                return jax.lax.psum(sum(jnp.sum(jnp.sin(y)) for y in outputs), "data")

            return jax.value_and_grad(total, (0, 1, 2))(x, w, b)

        out_specs = (jax.P(), (data, jax.P(), jax.P()))
        return jit(jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=out_specs))

    got, want = (gradient(f)(*args) for f in (logprobs, plain))
    assert_close(got, want, rtol=1e-4)


def test_products():
    """One a chunk forward, and three to go back, with a delta two more of its rank; nothing else is computed twice."""
    args = arguments(BF16, 24, lead=(256,), width=8)
    without = [None if i in (A, B, MASK, TEMPERATURE) else x for i, x in enumerate(args)]

    def count(args, **options):
        def value(x, w):
            given = [x if i == X else w if i == W else y for i, y in enumerate(args)]
            return sum(y.sum() for y in jax.tree.leaves(logprobs(*given, **options)))

        found = (coda.explain(f, args[X], args[W]) for f in (value, jax.value_and_grad(value, (0, 1))))
        return [sum(explanation.products.values()) for explanation in found]

    assert count(without) == [2, 8]
    assert count(without, entropy=False) == [2, 8]
    assert count(args[:TEMPERATURE] + without[TEMPERATURE:]) == [3, 12]


@needs_nvrtc
def test_kernels():
    """A rank that is a multiple of 8 reaches the kernel: x A and logits, for lost sums too; and to go back."""
    args = arguments(BF16, 24, lead=(256,), width=8)

    def value(x, w, b, temperature):
        given = [x, args[SCALE], w, args[A], b, temperature, args[LABELS], None]
        return sum(y.sum() for y in logprobs(*given, chunk_bytes=None))

    assert RANK % 8 == 0
    assert (
        kernels(jax.grad(value, (0, 1, 2, 3)), args[X], args[W], args[B], args[TEMPERATURE]) == 3 + 4 + 1
    )  # logits, dx, dw and db; dx of x A


def test_frozen_weights_cost_no_product():
    """The product of w's gradient is gone from what is compiled where only the delta is trained."""
    args = arguments(F32, 24, lead=(256,), width=16)

    def value(a, b, w):
        given = [*args[:W], w, a, b, None, args[LABELS], None]
        return logprobs(*given)[0].sum()

    def products(of):
        text = jax.jit(jax.grad(value, of)).lower(args[A], args[B], args[W]).compile().as_text()
        return len(re.findall(r"= f32\[16,24\]\S* (?:dot|custom-call)\(", text))

    assert products((0, 1, 2)) > 0 and products((0, 1)) == 0


def test_no_array_of_all_logits():
    """For CUDA and for the CPU the largest array is a chunk's logits, with a mask too."""
    tokens, width, vocabulary = 1024, 32, 1000
    types = [jax.ShapeDtypeStruct((tokens, width), BF16), jax.ShapeDtypeStruct((width, vocabulary), F32)]
    types += [jax.ShapeDtypeStruct((tokens,), dtype) for dtype in (jnp.int32, F32, jnp.bool_)]

    def value(x, w, labels, temperature, mask):
        outputs = coda.token_logprobs(
            x, w, labels, temperature=temperature, mask=mask, entropy=True, chunk_bytes=1, dtype=BF16
        )
        return sum(y.sum() for y in outputs)

    for f, platform in itertools.product((value, jax.value_and_grad(value, (0, 1, 3))), ("cuda", "cpu")):
        lowered = jax.jit(f).trace(*types).lower(lowering_platforms=(platform,))
        shapes = re.findall(r"tensor<((?:\d+x)+)(?:bf16|f32|i32|i1)>", lowered.as_text())
        assert max(math.prod(map(int, shape[:-1].split("x"))) for shape in shapes) <= 128 * vocabulary
    text = lowered.compile().as_text()
    assert not [line for line in text.splitlines() if re.search(rf"= f32\[{width},{vocabulary}\]\S* copy\(", line)]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"labels": jnp.zeros((5,), int)},
            r"labels has shape \(5,\); beside x \(4, 8\) it must be \(4,\), or \(4, 'k'\)",
        ),
        ({"labels": jnp.zeros((4, 0), int)}, r"labels has shape \(4, 0\)"),
        ({"labels": jnp.zeros((4,))}, "labels have dtype float32; they must be integers"),
        ({"labels": [1, 2, 3, 4]}, "labels are list; they must be integers"),
        ({"w": jnp.ones((9, 7))}, r"w has shape \(9, 7\); beside x \(4, 8\) it must be \(8, V\)"),
        ({"transpose_w": True}, r"w has shape \(8, 7\); .* it must be \(V, 8\) with transpose_w"),
        ({"temperature": 0.0}, "temperature = 0.0; it must be a positive number or an array"),
        ({"temperature": float("nan")}, "temperature = nan; it must be a positive number or an array"),
        ({"temperature": jnp.ones(5)}, r"temperature has shape \(5,\); .* it must be \(\) or \(4,\)"),
        ({"temperature": jnp.ones(4, int)}, "temperature has dtype int"),
        ({"temperature": None}, "temperature is NoneType; it must be an array"),
        ({"mask": jnp.ones(4)}, "mask has dtype float32; it must be bool"),
        ({"mask": jnp.ones((4, 1), bool)}, r"mask has shape \(4, 1\); .* it must be \(4,\)"),
        ({"low_rank": jnp.ones((8, 2))}, r"low_rank is \w+; it must be a pair \(A, B\) or None"),
        ({"low_rank": (jnp.ones((7, 2)), jnp.ones((2, 7)))}, r"low_rank\[0\] has shape \(7, 2\); .* must be \(8, r\)"),
        ({"low_rank": (jnp.ones((8, 2)), jnp.ones((3, 7)))}, r"low_rank\[1\] has shape \(3, 7\); .* must be \(2, 7\)"),
        ({"low_rank": (jnp.ones((8, 2), int), jnp.ones((2, 7)))}, r"low_rank\[0\] has dtype int"),
        ({"soft_cap": 0.0}, "soft_cap = 0.0; it must be a positive number or None"),
        ({"chunk_bytes": 0}, "chunk_bytes = 0; it must be positive"),
        ({"dtype": jnp.int8}, "dtype = int8; it must be"),
    ],
)
def test_errors_name_the_value_and_the_rule(change, message):
    given = {"x": jnp.ones((4, 8)), "w": jnp.ones((8, 7)), "labels": jnp.zeros(4, int)} | change
    with pytest.raises((ValueError, TypeError), match=f"token_logprobs: {message}"):
        coda.token_logprobs(**given)
