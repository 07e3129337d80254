"""What coda.explain says that products cost, what is left to XLA between them, and what is kept for going back."""

import csv
import dataclasses
import functools
import json
import pathlib
import statistics

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from benchmarks.programs import PROGRAMS
from benchmarks.variants import LLAMA_3_1B, VARIANTS, step
from flax_layers import Llama

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
DEVICES = {"nvidia_h200": "H200", "nvidia_h100_80gb_hbm3": "H100"}


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def only(found):
    ((one, count),) = found.items()
    return one, count


def test_a_product():
    def f(a, b, bias, x):
        return coda.gemm(a, b, bias, x, epilogue=lambda acc, bias, x: (acc + bias + x, jnp.sum(acc, axis=1)))

    m, n, k = 4096, 2048, 1024
    arguments = array(m, k), array(k, n), array(n, dtype=jnp.float32), array(m, n)
    found = {name: coda.explain(f, *arguments, device=name) for name in ("H200", "NVIDIA H100 80GB HBM3")}
    costs = [only(each.products)[0].cost for each in found.values()]
    for cost in costs:
        assert cost.flops == 2 * m * n * k
        assert cost.bytes_read == 2 * (m * k + k * n + m * n) + 4 * n
        assert cost.bytes_written == 2 * m * n + 4 * m
        assert cost.bound == "compute" and cost.roofline_us == pytest.approx(cost.flops / 989.4e6)
        assert cost.share == cost.roofline_us / cost.us and 0.2 < cost.share < 0.8 and cost.xla_us > cost.us
    assert [each.device for each in found.values()] == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    assert costs[0].us != costs[1].us
    few = only(coda.explain(coda.gemm, array(16, 4096), array(4096, 4096), device="H200").products)[0].cost
    assert few.bound == "memory" and few.roofline_us == pytest.approx(few.bytes / 4.8e6)


def test_devices():
    a, b = array(64, 64), array(64, 64)
    with pytest.raises(ValueError, match="device='A100'; it must be, or be a part of, one of 'NVIDIA H200'"):
        coda.explain(coda.gemm, a, b, device="A100")
    with pytest.raises(ValueError, match="one of 'NVIDIA H200', 'NVIDIA H100 80GB HBM3'"):
        coda.explain(coda.gemm, a, b, device="NVIDIA H")
    with pytest.raises(ValueError, match="platform='cpu' with device='H200'"):
        coda.explain(coda.gemm, a, b, platform="cpu", device="H200")
    here = coda.explain(coda.gemm, a, b)  # a CPU
    cost = only(here.products)[0].cost
    assert here.device is None and (cost.flops, cost.us, cost.xla_us) == (2 * 64**3, None, None)


@pytest.mark.parametrize("name", DEVICES)
def test_times_of_record(name):
    """Of epilogues that were measured: most within 6 %, long ones and many instructions are underestimated."""
    with (RESULTS / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "epilogue"]
    ratios, xla = [], []
    for row in rows:
        m, n, k = (int(row[size]) for size in "mnk")
        case = PROGRAMS[row["program"]]
        options = {"epilogue": case.epilogue, "out_dtype": case.out_dtype(m, n)}
        operands = case.operand_types(m, n)
        found = coda.explain(
            lambda a, b, *xs, options=options: coda.gemm(a, b, *xs, **options),
            *(array(m, k), array(k, n), *operands),
            device=DEVICES[name],
        )
        cost = only(found.products)[0].cost
        ratios.append(cost.us / float(row["kernel"]))
        if cost.xla_us is not None:
            xla.append(cost.xla_us / float(row["xla"]))
        else:
            assert row["program"] == "logsumexp_pick"
    assert len(ratios) > 20 and len(xla) > 20
    assert 0.96 < statistics.median(ratios) < 1.04 and min(ratios) > 0.7 and max(ratios) < 1.12, ratios
    assert max(xla) < 1.06, xla  # a lower bound


def llama_step(variant, layers=16):
    config = dataclasses.replace(LLAMA_3_1B, num_hidden_layers=layers)
    kept = VARIANTS[variant]
    options = {"scan_layers": kept.scan, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    params = nnx.state(nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0))), nnx.Param)
    tokens = array(2, 8192, dtype=jnp.int32)
    return step(variant, kept, config, jnp.bfloat16, jnp.bfloat16), params, tokens, tokens


def record_of_step(name):
    with (RESULTS / f"{name}_train_step.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == "coda"]
    products = sum(float(row["ms"]) for row in rows if row["class"].startswith("coda: "))
    (whole,) = (row for row in rows if row["kind"] == "step")
    return products, float(whole["temporaries_gib"]), float(whole["beyond_ms"])


def test_the_step_of_record():
    """Scanned, which is traced in a second: its products and what it keeps are those of the unrolled step."""
    arguments = llama_step("coda_scan")
    for name, device in DEVICES.items():
        found = coda.explain(*arguments, device=device)
        products, temporaries, beyond = record_of_step(name)
        assert found.kernels == 16 * 12 + 8 * 3 and found.totals.untimed == 0
        assert found.totals.products_ms == pytest.approx(products, rel=0.1)
        assert found.totals.kept_bytes / 2**30 == pytest.approx(temporaries, rel=0.05)
        assert 0.65 * beyond < found.totals.passes_ms < 1.1 * beyond
        names = {one.name: one.bytes for one in found.kept if one.name}
        assert names["mlpwi"] == 16 * 2 * 16384 * 2 * 8192 and names["context"] == 16 * 2 * 16384 * 2048
        assert [count for one, count in found.attention.items()] == [16, 16]
        assert {one.is_backward: one.bytes_read for one in found.attention} == {
            False: 2 * 16384 * (2048 + 2 * 512),
            True: 2 * 16384 * (2 * 2048 + 2 * 512),  # q, k, v and the context's cotangent
        }


def test_unrolled_or_scanned_is_the_same():
    unrolled, scanned = (coda.explain(*llama_step(name, layers=2), device="H200") for name in ("coda", "coda_scan"))
    assert unrolled.totals.kept_bytes == scanned.totals.kept_bytes
    assert unrolled.totals.products_ms == pytest.approx(scanned.totals.products_ms)


def test_passes():
    """A softmax between two products: its row maximum, its row sum, and what the next product reads."""
    m, n = 512, 256

    def f(x, w, v):
        scores = coda.gemm(x, w)
        return coda.gemm(jax.nn.softmax(scores.astype(jnp.float32), axis=1).astype(x.dtype), v)

    found = coda.explain(f, array(m, n), array(n, n), array(n, n), device="H200")
    tile, row = 2 * m * n, 4 * m
    moved = {one.operation: (one.bytes_read, one.bytes_written, count) for one, count in found.passes.items()}
    assert moved == {
        "reduce_max": (tile, row, 1),
        "max+sub+exp+reduce_sum": (tile + row, row, 1),
        "max+sub+exp+div": (tile + 2 * row, tile, 1),
    }
    assert found.totals.passes_bytes == 4 * tile + 5 * row
    assert all(one.before == ("gemm",) and one.after == ("gemm",) for one in found.passes)
    fused = coda.explain(lambda x, w: coda.gemm(x, w, epilogue=jax.nn.gelu), array(m, n), array(n, n), device="H200")
    assert fused.passes == {}


def test_arrays_that_are_cheap_to_make_again_are_not_written():
    """A float32 copy of x is no pass; the sum of two arrays, which is read twice, is written, beside x's row sums."""

    def f(x, y, w):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=1, keepdims=True)
        added = x + y
        return coda.gemm((wide - mean).astype(x.dtype), w), coda.gemm(added, w), added

    m, n = 512, 256
    found = coda.explain(f, array(m, n), array(m, n), array(n, n), platform="cpu")
    tile = 2 * m * n
    assert sorted(one.bytes for one in found.passes) == [2 * tile + 4 * m, 3 * tile + 4 * m]


def test_what_is_kept():
    m, n = 512, 256

    def layer(w, x):
        z = checkpoint_name(coda.gemm(x, w), "z")
        return coda.gemm(jnp.sin(z), w)

    def loss(w, x, *, layer=layer):
        return jnp.sum(layer(w, layer(w, x)).astype(jnp.float32))

    types = array(n, n), array(m, n)
    kept = coda.explain(jax.grad(loss), *types, device="H200").kept
    z = {one: count for one, count in kept.items() if one.name == "z"}
    (one, count) = only(z)
    assert (one.bytes, one.array, one.maker, count) == (2 * m * n, "bfloat16[512,256]", "gemm", 2)
    remat = jax.grad(functools.partial(loss, layer=jax.checkpoint(layer)))
    less = coda.explain(remat, *types, device="H200")
    assert sum(one.bytes * count for one, count in less.kept.items()) == 2 * m * n  # what the second layer is given
    assert coda.explain(loss, *types, device="H200").kept == {}


def test_what_stands_alone():
    """A scatter moves its updates, a sort all; a reduction by a function of one's own is a reduction."""

    def f(x, i, w):
        y = coda.gemm(x, w)
        added = jnp.zeros((m, n), jnp.float32).at[i].add(y.astype(jnp.float32))
        either = jax.lax.reduce(y, jnp.bfloat16(1), jax.lax.mul, (1,))
        return added, jnp.sort(y, axis=1), either

    m, n = 512, 256
    found = coda.explain(f, array(m, n), array(m, dtype=jnp.int32), array(n, n), device="H200")
    tile = 2 * m * n
    moved = {one.operation.rpartition("+")[2]: (one.bytes_read, one.bytes_written) for one in found.passes}
    assert moved.pop("broadcast_in_dim") == (0, 2 * tile)  # the zeros
    assert moved["sort"] == (tile, tile) and moved["scatter-add"][1] == 2 * tile
    assert any(name.startswith("reduce") for name in moved)


def test_a_loop_counts_for_each_step():
    def f(x, w):
        return jax.lax.scan(lambda x, _: (coda.gemm(x, w) * jnp.mean(x), None), x, length=7)[0]

    found = coda.explain(f, array(256, 256), array(256, 256), device="H200")
    assert {one.operation: count for one, count in found.passes.items()} == {"reduce_sum": 7, "div+mul": 7}


def test_each_devices_part():
    """Over explicit axes the cost is that of the part; over automatic ones nobody knows it yet."""
    sizes = array(256, 64), array(64, 128)
    for axis_type, flops in ((AxisType.Explicit, 2 * 64 * 64 * 128), (AxisType.Auto, None)):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
        with jax.set_mesh(mesh):
            a, b = (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
                for x, spec in zip(sizes, (P("x"), P()), strict=True)
            )
            product, _ = only(coda.explain(coda.gemm, a, b, device="H200").products)
        assert (product.cost and product.cost.flops) == flops and product.reason is None


def test_several_devices():
    """Passes are of whole arrays; how they are split nobody knows before compilation."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x, w = (
        jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)) for spec in (P("x"), P())
    )
    found = coda.explain(lambda x, w: coda.gemm(jnp.tanh(x), w), x, w, device="H200")
    assert found.num_devices == 4 and found.totals.passes_bytes == 4 * 256 * 256 and found.totals.passes_ms is None
    assert "passes left to XLA, on 4 devices together: 0.262 MB" in str(found)


def test_advice():
    x, w = array(1024, 768), array(768, 50257)
    found = coda.explain(coda.gemm, x, w, device="H200")
    (advice,) = found.advice
    assert advice.change == "Pad n from 50257 to 50264, a multiple of 8, with zeros"
    assert "a row of 50257 bfloat16 is 100514 bytes" in advice.why and str(advice) in str(found)
    assert coda.explain(coda.gemm, x, array(768, 50264), device="H200").advice == ()

    def change(*arguments, **options):
        function = functools.partial(coda.gemm, **options)
        return [one.change for one in coda.explain(function, *arguments, device="H200").advice]

    assert change(x, array(50257, 768), transpose_b=True)[0].startswith("Pad n from 50257 to 50264")
    assert change(array(1024, 100), array(100, 512)) == ["Pad k from 100 to 104, a multiple of 8, with zeros"]
    assert change(array(100, 1028), array(100, 512), transpose_a=True)[0].startswith("Pad m from 1028 to 1032")
    wide = array(1024, 768, dtype=jnp.float32)
    assert change(wide, array(768, 512))[0].startswith("Cast both factors to bfloat16")
    assert change(x, array(768, 512), implementation="xla") == ["Leave out implementation='xla'"]
    assert change(array(4096, 4096), array(4096, 4096)) == []
    (small,) = coda.explain(coda.gemm, array(64, 64), array(64, 64), device="H200").advice
    assert small.why.startswith("too small to gain") and "larger batch" in small.change
    (thin,) = coda.explain(coda.gemm, array(64, 16384), array(16384, 16384), device="H200").advice
    assert thin.why.startswith("bound by memory: 64 flops a byte")
    halves = coda.explain(
        lambda x, w: coda.gemm(x, w, epilogue=coda.gated(jax.nn.silu)), x, array(768, 2 * 1004), device="H200"
    )
    assert halves.advice[0].change == "Pad n from 2008 to 2016, a multiple of 16, with zeros"


def test_advice_on_a_lost_chain():
    def f(x, scale, w, v):
        stream = coda.gated_mlp(coda.rms_norm(x, scale), w, v, residual=x)
        return stream.array()

    found = coda.explain(f, array(1024, 256), array(256), array(256, 2, 512), array(512, 256), device="H200")
    (advice,) = (one for one in found.advice if one.about == "gated_mlp")
    assert advice.change == "Pass residual=True where it is what the norm normalises"


def test_as_a_dict():
    def loss(w, x):
        return jnp.sum(coda.gemm(jnp.tanh(coda.gemm(x, w)), w).astype(jnp.float32))

    found = coda.explain(jax.grad(loss), array(256, 256), array(512, 256), device="H200")
    read = json.loads(json.dumps(found.as_dict()))
    assert read["device"] == "NVIDIA H200" and read["kernels"] == found.kernels
    assert sum(row["count"] for row in read["products"]) == sum(found.products.values())
    first, (product, count) = read["products"][0], next(iter(found.products.items()))
    assert (first["count"], first["cost"]["us"], first["cost"]["tflops"]) == (
        count,
        product.cost.us,
        product.cost.tflops,
    )
    assert read["totals"]["kept_bytes"] == sum(row["count"] * row["bytes"] for row in read["kept"]) > 0
    assert sum(row["count"] * row["us"] for row in read["passes"]) / 1e3 == pytest.approx(found.totals.passes_ms)


def test_picture(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    found = coda.explain(coda.gemm, array(4096, 4096), array(4096, 4096), device="H200")
    found.plot(tmp_path / "explain.png")
    assert plt.imread(tmp_path / "explain.png").shape[0] > 300
    figure, axes = plt.subplots(1, 2)
    assert found.plot(axes) is figure
    (label,) = (text.get_text() for text in axes[0].get_yticklabels())
    assert label == "1  1 × gemm  4096,4096 @ 4096,4096"
    plt.close(figure)
    with pytest.raises(ValueError, match="1 axes are given; it draws on 2"):
        found.plot([axes[0]])
    with pytest.raises(ValueError, match="no product has an expected time"):
        coda.explain(coda.gemm, array(64, 64), array(64, 64)).plot(tmp_path / "none.png")
