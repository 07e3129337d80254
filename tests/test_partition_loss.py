"""The loss and log-probabilities that XLA partitions: values, what each device computes, what is moved, explain."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from tests import logprob_cases
from tests.gemm_cases import assert_close
from tests.partitioned import COLLECTIVES, mesh_of, moves, partitioned_on_cpus, run

P = PartitionSpec
RNG = np.random.default_rng(11)
VOCABULARY, WIDTH = 96, 32
HIDDEN = jnp.asarray(RNG.standard_normal((8, 128, WIDTH)), jnp.float32)
HEAD = jnp.asarray(RNG.standard_normal((WIDTH, VOCABULARY)), jnp.float32)
NARROW = jnp.asarray(RNG.standard_normal((WIDTH, 8)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, VOCABULARY, (8, 128)))


def loss(x, w, labels, reduction="mean"):
    norm = coda.rms_norm(x, jnp.ones(WIDTH))
    value, _ = coda.linear_cross_entropy(norm, w, labels, chunk_bytes=VOCABULARY * 4 * 128, reduction=reduction)
    return jnp.sum(value * jnp.arange(128)) if reduction == "none" else value


@pytest.mark.smoke
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("of_x", "of_w", "moved"),
    [
        (P("data"), P(), {}),
        (P("data"), P("data"), {"all-gather": 1, "reduce-scatter": 1}),
        (P("data"), P(None, "data"), {"all-gather": 1, "reduce-scatter": 1}),
    ],
    ids=["data parallel", "FSDP, D", "FSDP, V"],
)
def test_loss_is_split_as_a_whole(of_x, of_w, moved, reduction):
    """No collective in the loop over chunks of tokens; the head is gathered once, its gradient scattered once."""

    def gradient(x, w, labels):
        return jax.value_and_grad(lambda x, w: loss(x, w, labels, reduction), (0, 1))(x, w)

    mesh = mesh_of(AxisType.Auto, 4, 1)
    gradients = NamedSharding(mesh, of_x), NamedSharding(mesh, of_w)
    specs, options = (of_x, of_w, P("data")), {"data": 4, "model": 1, "out_shardings": (None, gradients)}
    got, parts, found = run(gradient, (HIDDEN, HEAD, LABELS), specs, **options)
    assert_close(got, jax.jit(gradient)(HIDDEN, HEAD, LABELS), rtol=1e-4)
    assert {part_of_a[0] for name, part_of_a, _ in parts if name == "loss_sums"} == {128}  # two chunks of 256 tokens
    found.pop("all-reduce")
    if reduction == "mean":
        assert found == moved


def test_loss_has_no_collective_in_its_loop():
    mesh = mesh_of(AxisType.Auto, 4, 1)
    with partitioned_on_cpus(), jax.set_mesh(mesh):
        arguments = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (HIDDEN, HEAD, LABELS)]
        text = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", line)]
    assert lines and not [line for line in lines if re.search('op_name="[^"]*while', line)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("of_w", "kind"), [(P(), "all-reduce"), (P("data"), "reduce-scatter")], ids=["replicated", "cut"]
)
def test_the_gradient_of_a_bfloat16_head_moves_as_such(dtype, of_w, kind, tmp_path):
    mesh = mesh_of(AxisType.Auto, 4, 1)
    with partitioned_on_cpus(), jax.set_mesh(mesh):
        x, labels = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (HIDDEN.astype(jnp.bfloat16), LABELS))
        w = jax.device_put(HEAD.astype(dtype), NamedSharding(mesh, of_w))
        gradient = jax.jit(jax.grad(loss, 1), out_shardings=w.sharding)
        _, calls, *_ = moves(gradient.lower(x, w, labels), mesh, tmp_path)
        assert_close(gradient(x, w, labels), jax.grad(loss, 1)(x, HEAD.astype(dtype), LABELS), rtol=0.02)
    sizes = {move.dtype: move.size_bytes for move in calls if move.kind == kind and move.size_bytes >= 2 * HEAD.size}
    assert sizes == ({"bf16": 2 * HEAD.size} if dtype == jnp.bfloat16 else {"f32": 4 * HEAD.size})


@pytest.mark.parametrize(
    "kind, data, transpose_w, traced",
    [
        (AxisType.Auto, 1, False, False),
        (AxisType.Auto, 2, True, True),
        (AxisType.Explicit, 1, True, False),
        (AxisType.Explicit, 2, False, True),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_cut_vocabulary(kind, data, transpose_w, traced):
    """Each device has its part of the head and all three products of it; vectors are summed in the loop, dx once.

    Traced coefficients, whose gradients are sums over all devices, are whole on each.
    """
    vocabulary, model = 200, 4 // data  # a part of 50 or 100 columns, which 16 bits pad
    head = jnp.asarray(RNG.standard_normal((WIDTH, vocabulary)), jnp.float32)
    labels = jnp.asarray(RNG.integers(0, vocabulary, HIDDEN.shape[:2])).at[0, :5].set(-100)
    head = head.T if transpose_w else head

    numbers = 0.1, 1e-3, 20.0
    arrays = tuple(map(jnp.float32, numbers)) if traced else ()

    def gradient(x, w, labels, *arrays):
        def loss(x, w, *arrays):
            options = dict(zip(("label_smoothing", "z_loss", "soft_cap"), arrays or numbers, strict=True))
            options |= {"transpose_w": transpose_w, "chunk_bytes": 50 * 2 * 128}
            return coda.linear_cross_entropy(x, w, labels, **options)[0]

        return jax.value_and_grad(loss, range(2 + len(arrays)))(x, w, *arrays)

    specs = P("data"), P("model") if transpose_w else P(None, "model"), P("data"), *(P() for _ in arrays)
    for dtype, rtol in ((jnp.float32, 1e-4), (jnp.bfloat16, 0.05)):
        arguments = HIDDEN.astype(dtype), head.astype(dtype), labels, *arrays
        got, parts, found = run(gradient, arguments, specs, kind, data=data, model=model)
        assert_close(got, jax.jit(gradient)(*arguments), rtol=rtol)
        assert {part_of_b for name, _, part_of_b in parts if name == "loss_sums"} <= {
            (vocabulary // model, WIDTH),
            (WIDTH, vocabulary // model),
            (128, WIDTH),
            (WIDTH, 128),
        }
        assert not {"all-gather", "all-to-all", "collective-permute"} & set(found)

    mesh = mesh_of(kind, data, model)
    with partitioned_on_cpus(), jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((HIDDEN, head, labels, *arrays), specs, strict=True)
        ]
        text = jax.jit(gradient).lower(*placed).compile().as_text()
    in_loop = [line for line in text.splitlines() if "all-reduce(" in line and re.search('op_name="[^"]*while', line)]
    assert in_loop and all(re.search(r"= \(?f32\[\d+\]", line) for line in in_loop)  # vectors


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow
@pytest.mark.parametrize("candidates", [False, True])
def test_log_probabilities_over_a_cut_vocabulary(candidates, kind):
    """Tokens and vocabulary cut, a mask that leaves one device nothing and another everything, a low-rank delta."""
    arguments = logprob_cases.arguments(jnp.float32, 200, candidates=candidates, lead=(4, 200), width=16)
    mask = arguments[-1].at[0:2].set(False).at[2].set(True)
    arguments[-1] = mask
    arguments.append(jnp.float32(5.0))  # soft_cap

    def gradient(*arguments):
        def value(*arrays):
            outputs = logprob_cases.logprobs(*arrays[:-1], *arguments[6:-1], soft_cap=arrays[-1])
            return sum(jnp.sum(jnp.sin(y)) for y in outputs), outputs

        return jax.value_and_grad(value, range(7), has_aux=True)(*arguments[:6], arguments[-1])

    over_data, over_model = P("data"), P(None, "model")
    specs = [over_data, P(), over_model, P(), over_model, over_data, over_data, over_data, P()]
    got, parts, found = run(gradient, arguments, specs, kind)
    assert_close(got, jax.jit(gradient)(*arguments), rtol=1e-4)
    of_logits = {shape for name, _, shape in parts if name in ("loss_sums", "loss_cotangent")}
    assert of_logits == {(16 + logprob_cases.RANK, 100)}
    assert set(found) == {"all-reduce"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("is_lost", [False, True])
def test_entropies_of_sums_over_a_cut_vocabulary(is_lost, kind):
    """Sums are finished over the devices; where one has too large ones, all that have its tokens make theirs again."""
    x, w = (x.astype(jnp.bfloat16) for x in (HIDDEN, HEAD))
    x = x.at[5, 3].multiply(50) if is_lost else x
    mask = jnp.asarray(RNG.random(LABELS.shape) < 0.4).at[5, 3].set(True)

    def found(x, w, labels, mask):
        options = {"entropy": True, "mask": mask, "chunk_bytes": 1}
        return coda.token_logprobs(x, w, labels, temperature=4.0, **options)

    got, parts, moved = run(found, (x, w, LABELS, mask), [P("data"), P(None, "model"), P("data"), P("data")], kind)
    assert_close(got, jax.jit(found)(x, w, LABELS, mask), rtol=1e-4)
    assert {shape for name, _, shape in parts if name == "loss_entropy"} == {(WIDTH, VOCABULARY // 2)}
    assert set(moved) == {"all-reduce"}


ROWS = [P(), P("data"), P(None, "data"), P(None, None, "data"), P("data", "model"), P("data", None, "model")]
KERNELS = [P(), P("model"), P(None, "model"), P("data", "model"), P(("data", "model"))]


def gradients_of_a_head(x, w, labels, temperature, low_rank=(), transpose_w=False, reduction="mean"):
    """Values and gradients of both operators of a norm, by all that is differentiated."""
    options = {"transpose_w": transpose_w, "chunk_bytes": 1}

    def total(x, w, temperature, *low_rank):
        given = options | ({"low_rank": low_rank} if low_rank else {})
        norm = coda.rms_norm(x, jnp.ones(x.shape[-1]))
        value, _ = coda.linear_cross_entropy(norm, w, labels, reduction=reduction, **given)
        found = coda.token_logprobs(norm, w, labels, entropy=True, temperature=temperature, mask=labels > 3, **given)
        assert found[0].shape == labels.shape
        return jnp.sum(value) + sum(jnp.sum(jnp.sin(y)) for y in found)

    return jax.value_and_grad(total, range(3 + len(low_rank)))(x, w, temperature, *low_rank)


def arguments_of_a_head(mesh, of_x, of_w, of_labels, *, transposed):
    rng = np.random.default_rng(5)

    def array(shape, spec):
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), jnp.float32), NamedSharding(mesh, spec))

    labels = jnp.asarray(rng.integers(0, 32, (4, 8)))
    return (
        array((4, 8, 16), of_x),
        array((32, 16) if transposed else (16, 32), of_w),
        jax.device_put(labels, NamedSharding(mesh, of_labels)),
        jnp.exp(array((4, 8), of_labels)),
        (array((16, 8), P("model")), array((8, 32), P(None, "data"))) if transposed else (),
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed, low rank"])
@pytest.mark.parametrize("of_x", ROWS, ids=str)
def test_types_of_a_head_over_explicit_axes(of_x, transposed):
    """However tokens and kernels lie, D cut among them, neither value nor gradient is refused."""
    mesh = mesh_of(AxisType.Explicit)
    options = {"transpose_w": transposed, "reduction": "none" if transposed else "mean"}
    lie = (P(), P("model"), P("data"), P(None, "model"), P("data", "model"))  # labels and temperatures
    with jax.set_mesh(mesh):
        for of_w, of_labels in zip(KERNELS, lie, strict=True):
            arguments = arguments_of_a_head(mesh, of_x, of_w, of_labels, transposed=transposed)
            jax.jit(lambda *x: gradients_of_a_head(*x, **options)).trace(*arguments)


@pytest.mark.parametrize(
    ("of_x", "of_w", "transposed"),
    [(P(), P("model"), False), (P(), P(None, "model"), True), (P(None, "data"), P("data", "model"), False)],
    ids=str,
)
@pytest.mark.slow
def test_values_of_a_head_over_explicit_axes(of_x, of_w, transposed):
    mesh = mesh_of(AxisType.Explicit)
    step = jax.jit(lambda *x: gradients_of_a_head(*x, transpose_w=transposed))
    with jax.set_mesh(mesh):
        arguments = arguments_of_a_head(mesh, of_x, of_w, P(None, "data"), transposed=transposed)
        got = jax.device_get(step(*arguments))
    assert_close(got, step(*jax.device_get(arguments)), rtol=1e-4)


def test_explain_knows_what_was_compiled():
    """Before compilation nobody knows the parts; then each device's: the factors, its tile, or why it is no kernel."""
    mesh = mesh_of(AxisType.Auto)
    x, w, narrow = (x.astype(jnp.bfloat16) for x in (HIDDEN, HEAD, NARROW))

    def step(x, w, narrow, labels):
        value = coda.linear_cross_entropy(x @ w[:, :WIDTH], w, labels, chunk_bytes=VOCABULARY * 2 * 128)[0]
        return value, coda.gemm(x.reshape(-1, WIDTH), narrow, epilogue=jnp.tanh)

    def explained():
        return {x.epilogue: x for x in coda.explain(step, *placed, platform="cuda").products}

    with partitioned_on_cpus(), jax.set_mesh(mesh):
        specs = (P("data"), P(None, "model"), P(None, "model"), P("data"))
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((x, w, narrow, LABELS), specs, strict=True)
        ]
        before = explained()
        jax.jit(step).lower(*placed).compile()
        after = explained()
    assert {product.reason for product in before.values()} == {None}
    assert all(product.tile.endswith("on each device's part over data, model") for product in before.values())
    part = "on each device's part bfloat16[256,32] @ bfloat16[32,48] over data, model"  # a chunk of its tokens
    assert after["loss_sums"].reason is None and after["loss_sums"].tile.endswith(part)
    part = "on a device's part, bfloat16[512,32] @ bfloat16[32,4], b: a row of 4 bfloat16 is 8 bytes"
    assert after["tanh"].reason.startswith(part)
