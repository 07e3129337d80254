"""coda.compare puts two functions beside each other, and says no more of plain JAX than is known."""

import csv
import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from benchmarks.lab import explained
from coda_jax.tools import compare as tool
from coda_jax.tools.held import Memory

T, D, F = 4096, 2048, 8192


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def plain_loss(params, x):
    y = x.astype(jnp.float32)
    y = (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * params["scale"]).astype(x.dtype)
    y = x + (jax.nn.silu(y @ params["gate"]) * (y @ params["up"])) @ params["down"]
    return jnp.sum(jnp.square(y.astype(jnp.float32)))


def our_loss(params, x):
    y = coda.gated_mlp(coda.rms_norm(x, params["scale"]), params["gate_up"], params["down"], residual=True)
    return jnp.sum(jnp.square(y.array().astype(jnp.float32)))


PLAIN = {"scale": array(D), "gate": array(D, F), "up": array(D, F), "down": array(F, D)}
OURS = {"scale": array(D), "gate_up": array(D, 2, F), "down": array(F, D)}
X = array(T, D)
PLAIN_STEP, OUR_STEP = (jax.value_and_grad(loss, (0, 1)) for loss in (plain_loss, our_loss))


@functools.cache
def compared(device="H100"):
    return coda.compare((PLAIN_STEP, (PLAIN, X)), (OUR_STEP, (OURS, X)), device=device)


def cells(found, row):
    """The two columns of the first row that begins so."""
    lines = str(found).splitlines()
    at = [lines[1].index(name) for name in ("plain", "ours")]
    (line, *_) = [line for line in lines if line.strip().startswith(row)]
    return line[at[0] : at[1]].strip(), line[at[1] :].strip()


def test_columns_are_what_explain_says():
    found = compared()
    assert isinstance(found, coda.Comparison) and found.device == "NVIDIA H100 80GB HBM3"
    assert found.plain == coda.explain(PLAIN_STEP, PLAIN, X, device="H100")
    assert found.ours == coda.explain(OUR_STEP, OURS, X, device="H100")
    plain, ours = found.columns
    flops = 3 * 3 * 2 * T * D * F  # three products, each three times
    assert plain.gflop == pytest.approx(flops / 1e9) and ours.gflop == pytest.approx(flops / 1e9)
    assert (plain.products, plain.kernels) == (9, 0) and ours.kernels == ours.products
    assert plain.products_ms == pytest.approx(ours.products_ms, rel=0.15)
    assert plain.passes_mb > 3 * ours.passes_mb and plain.kept_gib > ours.kept_gib
    assert plain.arguments_gib == (given := 2 * (D + 3 * D * F + T * D)) / 2**30
    assert plain.results_gib == (given + 4) / 2**30  # the gradients and the loss
    for one in (plain, ours):
        assert one.gib == one.arguments_gib + one.results_gib + one.temporaries_gib and one.fits
        assert one.ms == tuple(one.products_ms + ms for ms in one.passes_ms)
        assert one.xla_temporaries_gib is None and one.temporaries_ratio is None


def test_arguments_for_both_or_for_each():
    def with_both(function, params, x):
        return function(params[function is our_loss], x)

    steps = [functools.partial(with_both, function) for function in (plain_loss, our_loss)]
    both = coda.compare(*steps, (PLAIN, OURS), X, device="H100")
    mixed = coda.compare((steps[0], ((PLAIN, OURS), X)), steps[1], (PLAIN, OURS), X, device="H100")
    assert both.columns == mixed.columns and both.ours.kernels == 2
    by_name = coda.compare(lambda a, *, b: a @ b, lambda a, *, b: coda.gemm(a, b), X, b=array(D, F), device="H200")
    assert [one.kernels for one in by_name.columns] == [0, 1] and by_name.gib_of_chip == 141


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"arguments of its own: nobody takes \*args"):
        coda.compare((PLAIN_STEP, (PLAIN, X)), (OUR_STEP, (OURS, X)), X)
    with pytest.raises(TypeError, match="plain is a tuple; it must be a function and a tuple of its arguments"):
        coda.compare((PLAIN_STEP, PLAIN), OUR_STEP, OURS, X)
    with pytest.raises(ValueError, match="device='A100'; it must be"):
        coda.compare(PLAIN_STEP, PLAIN_STEP, PLAIN, X, device="A100")


def test_table_prints_the_counts_of_both():
    found = compared()
    plain, ours = found.columns
    assert cells(found, "products") == ("9", str(ours.products))
    assert cells(found, "kernels of the library's") == ("0", str(ours.kernels))
    assert cells(found, "GFLOP") == (f"{plain.gflop:.0f}", f"{ours.gflop:.0f}")
    assert cells(found, "MB") == (f"{plain.passes_mb:.0f}", f"{ours.passes_mb:.3g}")
    assert cells(found, "attention, calls") == ("0", "0") and cells(found, "no time known") == ("-", "-")
    assert cells(found, "kept for the backward pass") == (f"{plain.kept_gib:.3g}", f"{ours.kept_gib:.3g}")
    assert all(cell.endswith(", fits") for cell in cells(found, "GiB in all, of 80 that the chip has"))


def test_passes_of_plain_jax_are_a_range():
    """One number would be off by more than 1.15; the library's passes are one."""
    plain, ours = compared().columns
    least, most = plain.passes_ms
    expected = compared().plain.totals.passes_ms
    assert (least / expected, most / expected) == pytest.approx(tool.PLAIN_PASSES)
    assert ours.passes_ms == (compared().ours.totals.passes_ms,) * 2
    text = str(compared())
    assert f"{least:.3g} to {most:.3g}" in text and "passes of plain JAX are an estimate" in text
    both_ours = coda.compare(OUR_STEP, OUR_STEP, OURS, X, device="H100")
    assert " to " not in "".join(cells(both_ours, "ms in all")) and "passes of plain JAX" not in str(both_ours)


def test_calls_without_a_known_time_are_counted():
    def attends(q, w):
        return jax.nn.dot_product_attention(q, q, q) @ w

    def ours(q, w):
        return attends(q, w.astype(jnp.float32)).sum() + coda.gemm(q[0, 0], w[:, :7]).sum()

    found = coda.compare(jax.grad(lambda q, w: attends(q, w).sum()), ours, array(2, 64, 4, 64), array(64, 64))
    assert found.device == "NVIDIA H200" and found.gib_of_chip == 141
    assert cells(found, "no time known") == ("2 attention calls", "2 products, 1 attention call")
    assert cells(found, "attention, calls") == ("2", "1")


def test_untimed_products_are_named_and_left_out_of_totals():
    """A product in float32 has none; with that in bfloat16 the other function's total would be of more work."""

    def step(dtype):
        def function(x, w):
            h = jnp.tanh(x @ w)
            return (h.astype(dtype) @ w.astype(dtype)).sum(), h @ w[:, :512]

        return function

    x, w = array(8, 512, 1024), array(1024, 1024)
    found = coda.compare(step(jnp.float32), step(jnp.bfloat16), x, w)
    assert cells(found, "no time known") == ("1 product", "-")
    named = [line for line in str(found).splitlines() if line.startswith("* no time is known")]
    assert len(named) == 1 and "plain: 1 dot_general, float32[8,512,1024] @ float32[1024,1024] in" in named[0]
    assert "test_explain_compare.py:" in named[0]
    plain, ours = found.columns
    like = ours.products_ms - plain.products_ms  # the one in bfloat16
    assert like > 0.005
    (least, _), (ours_least, ours_most) = found._ms_alike
    assert least == plain.ms[0] and (ours_least, ours_most) == pytest.approx([x - like for x in ours.ms])
    assert cells(found, "ms in all that has a time in both")[1] == tool._range(found._ms_alike[1])
    alone = coda.compare(step(jnp.bfloat16), step(jnp.bfloat16), x, w)
    assert alone._ms_alike == tuple(one.ms for one in alone.columns)


def test_attention_counts_where_both_have_a_time_of_it():
    def attends(attention):
        return lambda q, w: attention(q, q, q).reshape(*q.shape[:2], -1) @ w

    q, w = array(2, 512, 16, 64), array(1024, 1024)
    ours = attends(coda.attention)
    found = coda.compare(attends(jax.nn.dot_product_attention), ours, q, w, device="H100")
    _, figures = found.columns
    assert figures.attention_ms > 0 and not figures.untimed_attention
    assert found._ms_alike[1] == pytest.approx([x - figures.attention_ms for x in figures.ms])
    assert "plain: 1 calls of jax.nn.dot_product_attention" in str(found)
    both = coda.compare(ours, ours, q, w, device="H100")
    assert both._ms_alike == tuple(one.ms for one in both.columns)


def test_as_dict():
    found = json.loads(json.dumps(compared().as_dict()))
    assert found["device"] == "NVIDIA H100 80GB HBM3" and found["gib_of_chip"] == 80
    for name, one in zip(("plain", "ours"), compared().columns, strict=True):
        assert found[name]["ms"] == list(one.ms) and found[name]["fits"] is True
        assert found[name]["passes_ms"] == list(one.passes_ms) and found[name]["kernels"] == one.kernels
        assert found[name]["xla_temporaries_gib"] is None


def test_small_numbers_and_several_devices():
    small = coda.compare(lambda a: jnp.sin(a) @ a, lambda a: coda.gemm(jnp.sin(a), a), array(64, 64), device="H100")
    assert cells(small, "arguments") == ("< 0.001", "< 0.001") and cells(small, "kept") == ("0", "0")
    several = dataclasses.replace(compared().ours, num_devices=2)
    found = dataclasses.replace(compared(), ours=several)
    assert found.columns[1].ms is None and cells(found, "ms in all")[1] == "-"
    assert cells(found, "GiB in all")[1].endswith("not known whether it fits")
    assert "are those of 2 devices together" in str(found)


def test_fit_in_memory_is_true_false_or_unknown():
    def fits(gib, of_chip, is_compiled):
        return tool._fits(gib, of_chip, 1, is_compiled)

    assert [fits(gib, 80, False) for gib in (69, 75, 85, 93)] == [True, None, None, False]
    assert [fits(gib, 80, True) for gib in (75, 80, 85)] == [True, True, False]
    assert fits(1, None, True) is None and tool._fits(1, 80, 2, False) is None and tool._fits(1, 80, 2, True)
    held = Memory(0, 2**30, 0, 84 * 2**30)
    given = coda.Explanation(products={}, others=0, device="NVIDIA H100 80GB HBM3", memory=held)
    large = coda.Comparison(given, given, None, dataclasses.replace(held, temporaries=70 * 2**30))
    assert [one.gib for one in large.columns] == [85, 71] and [one.fits for one in large.columns] == [None, True]
    assert cells(large, "GiB in all") == ("85, not known whether it fits", "71, fits")
    assert str(large).count("XLA_PYTHON_CLIENT_MEM_FRACTION") == 1  # 75 % of 80 GiB are 60
    larger = coda.Comparison(given, given, plain_compiled=held, ours_compiled=held)
    assert cells(larger, "GiB in all") == ("85, does not fit", "85, does not fit")
    assert "MEM_FRACTION" not in str(larger) + str(compared())


def test_nothing_is_asked_of_xla_on_a_cpu(monkeypatch):
    def never(*_):
        raise AssertionError("XLA's temporaries for a CPU are not those of a GPU")

    monkeypatch.setattr(tool, "_by_xla", never)
    found = coda.compare(PLAIN_STEP, PLAIN_STEP, PLAIN, X, device="H100")
    assert "GiB, XLA's" not in str(found) and found.plain_compiled is None
    with pytest.raises(ValueError, match="compiled=True: XLA tells the memory of an NVIDIA H100 80GB HBM3 only where"):
        coda.compare(PLAIN_STEP, PLAIN_STEP, PLAIN, X, device="H100", compiled=True)


def test_xlas_figures_where_the_gpu_is_attached(monkeypatch):
    """As on a machine with an H100, compiled for what is here."""
    monkeypatch.setattr(tool, "jax", types.SimpleNamespace(default_backend=lambda: "gpu"))
    monkeypatch.setattr(tool, "attached_device", lambda: "NVIDIA H100 80GB HBM3")
    types_of = array(256, 256, dtype=jnp.float32), array(256, 256, dtype=jnp.float32)
    donating = jax.jit(lambda a, b: jnp.tanh(a @ b) @ b, donate_argnums=0)
    found = coda.compare(donating, lambda a, b: jnp.tanh(a @ b) @ b, *types_of, device="H100")
    plain, ours = found.columns
    assert found.plain_compiled.arguments == 2 * 4 * 256**2 and found.plain_compiled.reused == 4 * 256**2
    assert plain.xla_temporaries_gib == found.plain_compiled.temporaries / 2**30 > 0
    assert plain.temporaries_ratio == plain.temporaries_gib / plain.xla_temporaries_gib
    assert plain.gib == pytest.approx(ours.gib - 4 * 256**2 / 2**30, abs=2 * 4 * 256**2 / 2**30)
    assert f"the estimate is {plain.temporaries_ratio:.2f} of it" in cells(found, "temporaries, GiB, XLA's")[0]
    assert "estimated from the jaxpr" not in str(found) and cells(found, "results, GiB")[0].endswith("arguments")
    estimated = coda.compare(donating, donating, *types_of, device="H100", compiled=False)
    elsewhere = coda.compare(donating, donating, *types_of, device="H200")
    assert estimated.plain_compiled is None and elsewhere.plain_compiled is None


def test_temporaries():
    """Temporaries are what is held from one operation to the next; a pass may write in the place of what it reads."""
    n = 256
    size = 4 * n * n
    a = array(n, n, dtype=jnp.float32)

    def held(f, *args):
        return coda.explain(f, *args, device="H200").memory.temporaries

    assert held(lambda a: a @ a, a) == 0 and held(lambda a: jnp.tanh(a), a) == 0
    assert held(lambda a: (a @ a) @ a, a) == size
    assert held(lambda a: jnp.tanh(a @ a) @ a, a) == size  # in its place
    assert held(lambda a: jnp.tanh(y := a @ a) @ y, a) == 2 * size
    assert held(lambda a: jnp.tanh(a @ a).astype(jnp.bfloat16) @ a.astype(jnp.bfloat16), a) == 3 * size // 2
    loop = held(lambda a: jax.lax.scan(lambda x, _: ((x @ a) @ a, None), a @ a, length=3)[0] @ a, a)
    assert loop == 2 * size  # what is carried, and what the body holds beside its result
    donated = coda.explain(jax.jit(lambda a: a @ a, donate_argnums=0), a, device="H200").memory
    assert donated == Memory(size, size, size, 0) and donated.bytes == size


def steps_of_record():
    """Variant, the function's arguments, and the rows of both devices."""
    rows = {}
    for name in explained.DEVICES:
        with (explained.RESULTS / f"{name}_train_step.csv").open() as file:
            rows[name] = {row["variant"]: row for row in csv.DictReader(file) if row["kind"] == "step"}
    return rows


@functools.cache
def explained_step(variant):
    step, params, *tokens = explained.arguments_of(variant)
    if variant.startswith("xla_scan"):  # one layer of stacked arrays
        stacked = jax.tree.map(lambda *x: array(len(x), *x[0].shape, dtype=x[0].dtype), *params["layers"])
        params = {**params, "layers": stacked}
    return {device: coda.explain(step, params, *tokens, device=device) for device in explained.DEVICES.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["coda", "coda_scan", "coda_recompute", "coda_recompute_3", "xla", "xla_scan", "xla_scan_remat"]
)
def test_temporaries_of_record(variant):
    """XLA's, on an H100 at the record's commit. What is kept is a part of them, which differs between the steps."""
    explanation = explained_step(variant)["NVIDIA H100 80GB HBM3"]
    found, kept = explanation.memory.temporaries / 2**30, explanation.totals.kept_bytes / 2**30
    measured = float(steps_of_record()["nvidia_h100_80gb_hbm3"][variant]["temporaries_gib"])
    assert 0.9 < found / measured < 1.1 < tool.NEAR
    assert 0.385 < kept / measured < 1.015 and kept < found


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["xla", "xla_scan", "xla_scan_remat"])
def test_plain_passes_of_record(variant):
    least, most = tool.PLAIN_PASSES
    for name, device in explained.DEVICES.items():
        ratio = float(steps_of_record()[name][variant]["beyond_ms"]) / explained_step(variant)[device].totals.passes_ms
        assert least < ratio < most, (name, ratio)


@pytest.mark.slow
def test_plain_products_of_record():
    """The library's kernel without an epilogue stands for XLA's product within 1.15."""
    for name, device in explained.DEVICES.items():
        with (explained.RESULTS / f"{name}_train_step.csv").open() as file:
            (row,) = [x for x in csv.DictReader(file) if (x["variant"], x["class"]) == ("xla", "product")]
        others = explained_step("xla")[device].other_products
        assert 1.05 < sum(one.us * count for one, count in others.items()) / 1e3 / float(row["ms"]) < 1.15
