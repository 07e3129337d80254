"""Products and the loss that XLA partitions: values, what each device computes, and which collectives there are."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import coda_jax as coda
from coda_jax.primitives import plans
from tests import logprob_cases
from tests.gemm_cases import assert_close, total
from tests.partitioned import COLLECTIVES, collectives, mesh_of, partitioned_on_cpus
from tests.requirements import RECORD

P = PartitionSpec
M, K, N = 64, 32, 64
RNG = np.random.default_rng(11)
A, B, X = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((M, K), (K, N), (M, N)))
ROW, COLUMN = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((N,), (M, 1)))


def run(function, arguments, specs, kind=AxisType.Auto, data=2, model=2, **options):
    """Results on a mesh; the parts that a device multiplied, by epilogue; collectives."""
    mesh = mesh_of(kind, data, model)
    with partitioned_on_cpus() as records, jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, P(*spec, *[None] * (x.ndim - len(spec)))))
            for x, spec in zip(arguments, specs, strict=True)
        ]
        compiled = jax.jit(function, **options).lower(*placed).compile()
        results = jax.device_get(compiled(*placed))
    assert records, "no device was asked for its part"
    parts = [(spec.name, *(x.shape for x in types[:2])) for spec, types, _ in records]
    return results, parts, collectives(compiled)


def everything(acc, x, row, column):
    y = jax.nn.silu(acc + row) * column + x
    return y, jnp.sum(y * y, axis=1), coda.logsumexp(y, axis=1), jnp.max(y, axis=0), jnp.min(y, axis=1), jnp.mean(y)


def fused(a, b, x, row, column):
    return coda.gemm(a, b, x, row, column, epilogue=everything)


# Layouts of a, b, x, row, column; the parts of a and b that are multiplied; how often arrays are moved. Scalars and the
# reductions of one call meet in one all-reduce, or two.
LAYOUTS = {
    "data parallel": ((P("data"), P(), P("data"), P(), P("data")), (M // 2, K), (K, N), {}),
    "FSDP, K": ((P("data"), P("data"), P("data"), P(), P("data")), (M // 2, K), (K, N), {"all-gather": 1}),
    "FSDP, N": ((P("data"), P(None, "data"), P("data"), P(), P("data")), (M // 2, K), (K, N), {"all-gather": 1}),
    "columns": (
        (P("data"), P(None, "model"), P("data", "model"), P("model"), P("data")),
        (M // 2, K),
        (K, N // 2),
        {},
    ),
    "K": ((P("data", "model"), P("model"), P("data"), P(), P("data")), (M // 2, K // 2), (K // 2, N), {}),
    "K, scattered": (
        (P("data", "model"), P("model"), P(("data", "model")), P(), P(("data", "model"))),
        (M // 2, K // 2),
        (K // 2, N),
        {"reduce-scatter": 1},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_products(kind, layout):
    specs, part_of_a, part_of_b, moved = LAYOUTS[layout]
    got, parts, found = run(fused, (A, B, X, ROW, COLUMN), specs, kind)
    assert_close(got, fused(A, B, X, ROW, COLUMN), rtol=1e-5)
    assert parts == [("everything", part_of_a, part_of_b)]
    found.pop("all-reduce", None)  # of vectors, and of K's sum
    assert found == moved


def test_types_that_leave_a_product_open():
    """Over explicit axes that cut K a product lies as its first tile; without one JAX's error is that of jnp.matmul."""
    for function in (jnp.matmul, coda.gemm):
        with pytest.raises(Exception, match="out_sharding"):
            run(function, (A, B), (P("data", "model"), P("model")), AxisType.Explicit)


def swiglu(acc):
    gate, up = jnp.split(acc, 2, axis=1)
    return jax.nn.silu(gate) * up


def rotary(acc, table):
    heads = acc.reshape(acc.shape[0], -1, 32)
    a, b = jnp.split(heads, 2, axis=-1)
    table = table[:, None, :]
    return jnp.concatenate([a * table - b, b * table + a], axis=-1).reshape(acc.shape)


def indexed(acc):
    row, column = (jax.lax.broadcasted_iota(jnp.int32, acc.shape, axis) for axis in (0, 1))
    return jnp.where(row >= column, acc, 0.0)


def sliced(acc):
    return tuple(jnp.split(acc, [16, 48], axis=1))


@pytest.mark.parametrize(
    ("epilogue", "operand", "part_of_a", "part_of_b"),
    [
        (swiglu, None, (M // 2, K), (K, N)),  # a part of N has no equal shares of the halves
        (rotary, jnp.cos(X[:, :16]), (M // 2, K), (K, N // 2)),  # whole heads
        (indexed, None, (M, K), (K, N)),  # a part's indices are not those of the whole
        (sliced, None, (M // 2, K), (K, N)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_dimensions_that_may_be_cut(epilogue, operand, part_of_a, part_of_b):
    operands = () if operand is None else (operand,)

    def multiply(a, b, *operands):
        return coda.gemm(a, b, *operands, epilogue=epilogue)

    specs = (P("data"), P(None, "model"), *(P("data") for _ in operands))
    got, parts, _ = run(multiply, (A, B, *operands), specs)
    assert_close(got, multiply(A, B, *operands), rtol=1e-5)
    assert parts == [(epilogue.__name__, part_of_a, part_of_b)]


def test_batches():
    """Of a, of b, and sharded by their batch."""
    a, b = jnp.stack([A, -A, 2 * A, A + 1]), jnp.stack([B, B + 1, -B, B])

    def both(a, b, row):
        f = jax.vmap(
            lambda a, b, row: coda.gemm(a, b, row, epilogue=lambda acc, row: jnp.tanh(acc + row)), (0, 0, None)
        )
        return f(a, b, row)

    got, parts, found = run(both, (a, b, ROW), (P("data"), P("data"), P()))
    assert_close(got, both(a, b, ROW), rtol=1e-5)
    assert [shapes for _, *shapes in parts] == [[(2, M, K), (2, K, N)]] and not found
    shared = jax.vmap(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), (0, None))
    got, parts, _ = run(shared, (a, B), (P(None, "data"), P(None, "model")))
    assert_close(got, shared(a, B), rtol=1e-5)
    assert [shapes for _, *shapes in parts] == [[(4, M // 2, K), (K, N // 2)]]


@pytest.mark.parametrize("residuals", ["preactivation", "recompute"])
def test_gradients(residuals):
    def loss(a, b, x, row, column):
        outputs = coda.gemm(a, b, x, row, column, epilogue=everything, residuals=residuals)
        return total(outputs)

    gradient = jax.grad(loss, range(5))
    specs = (P("data"), P("data", "model"), P("data", "model"), P("model"), P("data"))
    got, parts, _ = run(gradient, (A, B, X, ROW, COLUMN), specs)
    assert_close(got, jax.jit(gradient)(A, B, X, ROW, COLUMN), rtol=1e-4)
    assert len(parts) >= 3


def test_sizes_that_the_devices_do_not_divide():
    """Such a dimension is not cut."""
    a = A[:63]

    def multiply(a, b):
        return coda.gemm(jax.lax.with_sharding_constraint(a, P("data")), b, epilogue=jnp.tanh)

    got, parts, found = run(multiply, (a, B), (P(), P()))
    assert_close(got, jnp.tanh(a @ B), rtol=1e-5)
    assert parts == [("tanh", (63, K), (K, N))] and set(found) == {"all-gather"}  # of a, which the user cuts unevenly
    # What is cut beside it stays so: nothing of full size is gathered.
    got, parts, found = run(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh), (a, B), (P(), P(None, "model")))
    assert parts == [("tanh", (63, K), (K, N // 2))] and not found


def test_a_gradient_where_rows_are_two_axes_that_are_cut():
    """Recomputed, the derivative is an epilogue of each device's part: only the weight's gradient is summed."""

    def loss(a, b, x):
        return jnp.sum(jnp.sin(coda.gemm(a, b, x, epilogue=jnp.multiply, residuals="recompute")))

    arguments = A.reshape(4, -1, K), B, X.reshape(4, -1, N)
    specs = P("data", "model"), P(), P("data", "model")
    mesh = mesh_of(AxisType.Auto)
    gradients = tuple(NamedSharding(mesh, spec) for spec in specs)
    got, parts, found = run(jax.grad(loss, (0, 1, 2)), arguments, specs, out_shardings=gradients)
    assert_close(got, jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments), rtol=1e-4)
    assert {part_of_a for _, part_of_a, _ in parts} <= {(2, M // 8, K), (2, M // 8, N)}
    assert found == {"all-reduce": 1}


def test_what_a_part_cannot_have_is_an_error_where_the_kernel_was_asked_for():
    a, b = A.astype(jnp.bfloat16), B[:, :8].astype(jnp.bfloat16)  # 8 columns, 4 on a device: 8 bytes

    def multiply(a, b):
        return coda.gemm(a, b, epilogue=jnp.tanh, implementation="cuda")

    with pytest.raises(Exception, match="implementation='cuda' was asked for, but b: a row of 4 bfloat16 is 8 bytes"):
        run(multiply, (a, b), (P(), P(None, "model")))


def test_explain_knows_what_was_compiled():
    """Before compilation nobody knows the parts; then each device's: the factors, its tile, or why it is no kernel."""
    mesh = mesh_of(AxisType.Auto)
    x, w, narrow = (x.astype(jnp.bfloat16) for x in (HIDDEN, HEAD, B[:, :8]))

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


def test_plans_on_record_are_bounded():
    for i in range(plans.PRODUCTS + 10):
        for j in range(plans.PARTS + 2):
            plans.record(f"test {i}", plans.Part(str(j), None, None, ""))
    kept = [plans.recorded(f"test {i}") for i in (0, plans.PRODUCTS + 9)]
    assert kept[0] == [] and [part.factors for part in kept[1]] == [str(j + 2) for j in range(plans.PARTS)]
    assert len(plans._found) == plans.PRODUCTS


SHARDINGS = st.sampled_from([(), ("data",), ("model",), ("data", "model"), ("model", "data")])


def _spec(axes):
    """A PartitionSpec that names no axis twice."""
    used, entries = set(), []
    for of_one in axes:
        entries.append(tuple(axis for axis in of_one if axis not in used) or None)
        used |= set(of_one)
    return P(*entries)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=12)
@hypothesis.given(
    st.lists(st.tuples(SHARDINGS, SHARDINGS), min_size=3, max_size=3), SHARDINGS, SHARDINGS, st.booleans()
)
def test_any_sharding_gives_the_same(of_matrices, of_row, of_column, backward):
    specs = (*map(_spec, of_matrices), _spec([of_row]), _spec([of_column, ()]))
    function = jax.grad(lambda *arguments: total(fused(*arguments)), range(5)) if backward else fused
    got, _, _ = run(function, (A, B, X, ROW, COLUMN), specs)
    assert_close(got, jax.jit(function)(A, B, X, ROW, COLUMN), rtol=1e-4)


# ---- the loss

VOCABULARY, WIDTH = 96, 32
HIDDEN = jnp.asarray(RNG.standard_normal((8, 128, WIDTH)), jnp.float32)
HEAD = jnp.asarray(RNG.standard_normal((WIDTH, VOCABULARY)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, VOCABULARY, (8, 128)))


def loss(x, w, labels, reduction="mean"):
    norm = coda.rms_norm(x, jnp.ones(WIDTH))
    value, _ = coda.linear_cross_entropy(norm, w, labels, chunk_bytes=VOCABULARY * 4 * 128, reduction=reduction)
    return jnp.sum(value * jnp.arange(128)) if reduction == "none" else value


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


@pytest.mark.parametrize(
    "kind, data, transpose_w",
    [
        (AxisType.Auto, 1, False),
        (AxisType.Auto, 2, True),
        (AxisType.Explicit, 1, True),
        (AxisType.Explicit, 2, False),
    ],
    ids=str,
)
def test_a_cut_vocabulary(kind, data, transpose_w):
    """Each device has its part of the head and all three products of it; vectors are summed in the loop, dx once."""
    vocabulary, model = 200, 4 // data  # a part of 50 or 100 columns, which 16 bits pad
    head = jnp.asarray(RNG.standard_normal((WIDTH, vocabulary)), jnp.float32)
    labels = jnp.asarray(RNG.integers(0, vocabulary, HIDDEN.shape[:2])).at[0, :5].set(-100)
    head = head.T if transpose_w else head

    def gradient(x, w, labels):
        def loss(x, w):
            options = {"label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 20.0, "transpose_w": transpose_w}
            return coda.linear_cross_entropy(x, w, labels, chunk_bytes=50 * 2 * 128, **options)[0]

        return jax.value_and_grad(loss, (0, 1))(x, w)

    specs = P("data"), P("model") if transpose_w else P(None, "model"), P("data")
    for dtype, rtol in ((jnp.float32, 1e-4), (jnp.bfloat16, 0.05)):
        arguments = HIDDEN.astype(dtype), head.astype(dtype), labels
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
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((HIDDEN, head, labels), specs, strict=True)
        ]
        text = jax.jit(gradient).lower(*placed).compile().as_text()
    in_loop = [line for line in text.splitlines() if "all-reduce(" in line and re.search('op_name="[^"]*while', line)]
    assert in_loop and all(re.search(r"= \(?f32\[\d+\]", line) for line in in_loop)  # vectors


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("candidates", [False, True])
def test_log_probabilities_over_a_cut_vocabulary(candidates, kind):
    """Tokens and vocabulary cut, a mask that leaves one device nothing and another everything, a low-rank delta."""
    arguments = logprob_cases.arguments(jnp.float32, 200, candidates=candidates, lead=(4, 200), width=16)
    mask = arguments[-1].at[0:2].set(False).at[2].set(True)
    arguments[-1] = mask

    def gradient(*arguments):
        def value(*arrays):
            outputs = logprob_cases.logprobs(*arrays, *arguments[6:], soft_cap=5.0)
            return sum(jnp.sum(jnp.sin(y)) for y in outputs), outputs

        return jax.value_and_grad(value, range(6), has_aux=True)(*arguments[:6])

    over_data, over_model = P("data"), P(None, "model")
    specs = [over_data, P(), over_model, P(), over_model, over_data, over_data, over_data]
    got, parts, found = run(gradient, arguments, specs, kind)
    assert_close(got, jax.jit(gradient)(*arguments), rtol=1e-4)
    of_logits = {shape for name, _, shape in parts if name in ("loss_sums", "loss_cotangent")}
    assert of_logits == {(16 + logprob_cases.RANK, 100)}
    assert set(found) == {"all-reduce"}


CACHE = """
import sys, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import coda_jax as coda
from coda_jax.primitives import plans
from tests.partitioned import partitioned_on_cpus
for option, value in (("jax_compilation_cache_dir", sys.argv[1]), ("jax_persistent_cache_min_compile_time_secs", 0),
                      ("jax_persistent_cache_min_entry_size_bytes", -1),
                      ("jax_remove_custom_partitioning_ptr_from_cache_key", True)):
    jax.config.update(option, value)
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
a = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P(("x", "y"))))
def beside_manual(f):
    return jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
with partitioned_on_cpus() as records:
    for region in (lambda f: f, beside_manual):
        for f in (jnp.tanh, jnp.sin):
            out = jax.jit(region(lambda a, b: coda.gemm(a, b, epilogue=lambda acc: f(acc))))(a, jnp.ones((16, 8)))
            print(float(abs(out - f(16.0)).max()) < 1e-6, len(records))
"""


def test_the_persistent_cache_knows_the_epilogue(tmp_path):
    """Its key holds the call's shapes and rule; a digest beside them tells epilogues apart, also of other processes."""
    import subprocess
    import sys

    def lines():
        command = [sys.executable, "-c", CACHE, str(tmp_path)]
        done = subprocess.run(command, cwd=RECORD.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    assert lines() == ["True 1", "True 2", "True 3", "True 4"]
    assert lines() == ["True 0"] * 4  # hits: no callback
