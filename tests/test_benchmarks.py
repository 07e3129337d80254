"""The benchmarks of a training step and of a layer run from end to end, on a CPU and small sizes."""

import csv
import functools
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo, layer, loss_curve, timing, train_step
from benchmarks.variants import TINY, VARIANTS, Parameters, step
from coda_jax import ffi


def steps_in(folder):
    (path,) = folder.iterdir()
    with path.open() as file:
        return {row["variant"]: row for row in csv.DictReader(file) if row["kind"] == "step"}


@pytest.fixture
def quick_to_compile(monkeypatch):
    """These run once or twice: optimising them takes longer than running them."""
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0}))


def test_train_step(tmp_path, monkeypatch, capsys, quick_to_compile):
    """Right variants are timed; one with wrong gradients is not, and makes the command fail."""
    monkeypatch.setattr(
        train_step,
        "step",
        lambda name, *rest: halved(step(name, *rest), name) if name == "xla_scan" else step(name, *rest),
    )
    options = ["--tiny", "--layers=1", "--repeats=1", f"--out={tmp_path}", "--commit=none"]
    assert train_step.main([*options, "--variants=coda_scan,xla,xla_scan"]) == 1
    steps = steps_in(tmp_path)
    assert steps.keys() == {"coda_scan", "xla", "xla_scan"}
    assert 0 < float(steps["coda_scan"]["gradient_distance"]) < 0.05
    assert float(steps["coda_scan"]["ms"]) > 0 and not steps["coda_scan"]["failure"]
    assert "gradients differ" in steps["xla_scan"]["failure"] and not steps["xla_scan"]["ms"]
    shown = capsys.readouterr().out
    assert "coda_scan: milliseconds" in shown and "xla_scan: milliseconds" not in shown


def test_loss_curve(tmp_path, capsys, quick_to_compile):
    """Fused in bfloat16 the model learns what plain JAX in float32 learns."""
    assert loss_curve.main(["--tiny", "--steps=12", f"--out={tmp_path}", "--commit=none"]) == 0
    with next(tmp_path.glob("*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    first, last = (float(rows[i]["plain"]) for i in (0, -1))
    assert len(rows) == 12 and last < first - 0.3
    assert max(abs(float(row["fused"]) - float(row["plain"])) for row in rows) < 0.01
    assert "largest gap" in capsys.readouterr().out and next(tmp_path.glob("*.png")).stat().st_size > 5000


def halved(function, name):
    def with_half_the_gradient(*arguments):
        loss, gradient = function.__wrapped__(*arguments)
        return loss, jax.tree.map(lambda x: x / 2, gradient)

    with_half_the_gradient.__name__ = name
    return jax.jit(with_half_the_gradient)


def test_variants_lower_for_a_gpu():
    """A fused one to kernels: four products a layer forward, eight backward, one again, and three of the head."""
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    parameters = Parameters(TINY, jnp.bfloat16, jnp.bfloat16)
    tokens = jnp.zeros((2, 24), jnp.int32)
    kernels = {}
    for name in ("coda_recompute", "xla_scan_remat"):
        variant = VARIANTS[name]
        traced = step(name, variant, TINY, jnp.bfloat16, jnp.bfloat16).trace(parameters.of(variant), tokens, tokens)
        kernels[name] = traced.lower(lowering_platforms=("cuda",)).as_text().count("@coda_gemm")
    assert kernels == {"coda_recompute": 29, "xla_scan_remat": 0}


def test_layer(quick_to_compile):
    rows = layer.measure(layer.config_of(*layer.TINY[0]), 1, 24, backward=True, repeats=1)
    assert {row["variant"] for row in rows} == {"coda", "xla", "xla_packed", "products", "coda_products"}
    assert all(row["ms"] > 0 for row in rows)
    assert {row["distance"] for row in rows if row["variant"] == "xla_packed"} == {0.0}


def kernel(name, instruction="", duration=1000.0):
    return timing.Kernel(name, instruction, 0.0, duration)


def test_classes_of_kernels():
    operations = {
        "custom-call.7": hlo.Operation("custom-call.7", "custom-call", (), (), "gated_backward"),
        "fusion.3": hlo.Operation("fusion.3", "fusion", (), (), "", "jit(coda)/transpose(jvp())/mul"),
        "gemm_fusion_dot.4": hlo.Operation("gemm_fusion_dot.4", "fusion", (), (), "product"),
    }
    classes = {
        ("coda_gemm", "custom-call.7"): "coda: gated_backward",
        ("coda_gemm", ""): "coda: ?",
        ("nvjet_hsh_128x256_64x4_2x1", "custom-call.9"): "product",
        ("gemm_fusion_dot_4", "gemm_fusion_dot.4"): "product",
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", ""): "attention",
        ("loop_multiply_fusion_3", "fusion.3"): "loop_multiply_fusion (mul)",
        ("MemcpyD2D", "copy.2"): "copy or fill",
    }
    for (name, instruction), expected in classes.items():
        assert train_step.kernel_class(kernel(name, instruction), operations) == expected
    profile = {"coda: gated_backward": (5.0, 1), "product": (4.0, 1), "attention": (3.0, 1), "loop": (2.0, 1)}
    assert train_step.beyond(profile) == 2.0


def test_kernels_of_a_trace():
    """By XLA module and in time order; host planes and other lines are left out."""

    def event(name, start, module="jit_f"):
        stats = [("hlo_module", module), ("hlo_op", f"{name}.1")] if module else []
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=10.0, stats=stats)

    def plane(name, **lines):
        lines = [types.SimpleNamespace(name=key.replace("_", " "), events=events) for key, events in lines.items()]
        return types.SimpleNamespace(name=name, lines=lines)

    device = plane(
        "/device:GPU:0",
        Stream_7=[event("b", 20.0), event("a", 10.0)],
        Stream_8=[event("c", 15.0), event("other", 30.0, "jit_g"), event("alone", 31.0, None)],
        XLA_Ops=[event("b", 20.0)],
    )
    found = timing._kernels_by_module(
        types.SimpleNamespace(planes=[device, plane("/host:CPU", Stream_1=[event("h", 1.0)])])
    )
    assert {module: [one.name for one in kernels] for module, kernels in found.items()} == {
        "jit_f": ["a", "c", "b"],
        "jit_g": ["other"],
    }
    assert found["jit_f"][0].instruction == "a.1"
