"""The benchmarks of training steps run from end to end, on a CPU and small sizes."""

import csv
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    beside,
    family_step,
    fused_models,
    hlo,
    library_models,
    loss_curve,
    muon,
    report,
    sharded_step,
    timing,
    train_step,
    unmodified,
)
from benchmarks.lab import joined, schedule
from benchmarks.report_tables import joined as table_of_joined
from benchmarks.report_tables import training_step
from benchmarks.variants import UNROLLED, step


def rows_in(folder):
    (path,) = folder.iterdir()
    return report.rows_of(path)


def steps_in(folder):
    return {row["variant"]: row for row in rows_in(folder) if row["kind"] == "step"}


@pytest.mark.slow
def test_train_step(tmp_path, monkeypatch, capsys, quick_to_compile):
    """Right variants are timed; one with wrong gradients is not, and makes the command fail."""
    monkeypatch.setattr(
        train_step,
        "step",
        lambda name, *rest, **options: (
            halved(step(name, *rest, **options), name) if name == "xla_scan" else step(name, *rest, **options)
        ),
    )
    options = ["--tiny", "--layers=1", "--repeats=1", f"--out={tmp_path}", "--commit=none"]
    counter = lambda: 100 * time.perf_counter()  # noqa: E731
    options += ["--traced-layers=1,2", "--variants=coda_scan,xla,xla_scan"]
    assert train_step.main([*options, "--alone=0.05"], counter) == 1
    steps = steps_in(tmp_path)
    assert steps.keys() == {"coda_scan", "xla", "xla_scan"}
    assert 0 < float(steps["coda_scan"]["gradient_distance"]) < 0.05
    assert float(steps["coda_scan"]["ms"]) > 0 and not steps["coda_scan"]["failure"]
    assert "gradients differ" in steps["xla_scan"]["failure"] and not steps["xla_scan"]["ms"]
    alone = [float(steps["xla"][name]) for name in ("alone_ms", "alone_joules")]
    assert alone[1] == pytest.approx(100 * 1e-3 * alone[0], rel=0.1) and not steps["xla_scan"]["alone_ms"]
    rows = rows_in(tmp_path)
    traced = [row for row in rows if row["kind"] == "tracing"]
    assert [(row["variant"], row["layers"]) for row in traced] == [(v, n) for v in ("coda_scan", "xla") for n in "12"]
    assert all(float(row["trace_s"]) > 0 and float(row["lower_s"]) > 0 for row in traced)
    assert "|  | 1 layers | 2 layers |" in training_step([row for row in rows if row["kind"] != "kernels"])
    shown = capsys.readouterr().out
    assert "coda_scan: milliseconds" in shown and "xla_scan: milliseconds" not in shown


@pytest.mark.slow
def test_packed_step(tmp_path, quick_to_compile):
    """Documents attend to themselves alone in all of them, and to more in rows that are not packed."""
    variants = ("coda", "xla", "coda_packed", "xla_packed", "coda_packed_fp8", "xla_packed_fp8")
    options = [
        "--tiny",
        "--layers=1",
        "--repeats=1",
        f"--out={tmp_path}",
        "--commit=none",
        "--documents=6",
        "--traced-layers=",
    ]
    assert train_step.main([*options, f"--variants={','.join(variants)}"]) == 0
    steps = steps_in(tmp_path)
    assert steps.keys() == set(variants)
    assert [path.name for path in tmp_path.glob("*.csv")] == ["cpu_train_step_packed_fp8.csv"]
    distances = [float(steps[name]["gradient_distance"]) for name in variants]
    assert all(distance < 0.05 for distance in distances[:4]) and all(
        0.05 < distance < 0.2 for distance in distances[4:]
    )
    losses = [float(steps[name]["loss"]) for name in variants]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[2] == pytest.approx(losses[3], rel=1e-3)
    assert losses[4:] == pytest.approx([losses[2]] * 2, rel=1e-3)
    assert abs(losses[2] - losses[0]) > 10 * abs(losses[1] - losses[0])
    shown = training_step(list(rows_in(tmp_path)))
    assert "| flax_layers in fp8, packed rows |" in shown


@pytest.mark.slow
def test_step_in_fp8(tmp_path, quick_to_compile):
    """All variants agree with bfloat16 as far as three bits let them, and none of fp8 is the reference."""
    variants = ("coda", "coda_fp8", "coda_fp8_current", "xla_fp8", "xla_fp8_flax", "xla")
    options = ["--tiny", "--layers=1", "--repeats=1", f"--out={tmp_path}", "--commit=none", "--traced-layers="]
    assert train_step.main([*options, f"--variants={','.join(variants)}"]) == 0
    distances = {name: float(row["gradient_distance"]) for name, row in steps_in(tmp_path).items()}
    assert distances.keys() == set(variants) and distances["xla"] == 0 and distances["coda"] < 0.05
    assert all(0.05 < distances[name] < 0.2 for name in variants if "fp8" in name)
    assert [path.name for path in tmp_path.glob("*.csv")] == ["cpu_train_step_fp8.csv"]


@pytest.mark.slow
def test_sharded_step(tmp_path, quick_to_compile):
    """Variants agree under each scheme; throughput a device is compared with one device's."""
    options = ["--tiny", "--layers=1", "--repeats=1", "--burst=1", f"--out={tmp_path}", "--commit=none"]
    assert sharded_step.main([*options, "--schemes=one,fsdp", "--variants=coda,xla_scan_remat", "--silent"]) == 0
    rows = {(row["scheme"], row["variant"]): row for row in rows_in(tmp_path)}
    assert rows.keys() == {(s, v) for s in ("one", "fsdp") for v in ("coda", "coda silent", "xla_scan_remat")}
    assert all(float(row["efficiency"]) > 0 and float(row["gradient_distance"]) < 0.05 for row in rows.values())
    one, fsdp = rows["one", "coda"], rows["fsdp", "coda"]
    assert "all-gather" in fsdp["collectives"] and "all-gather" not in one["collectives"]
    count = jax.device_count()
    assert int(fsdp["devices"]) == count > 1 and int(fsdp["batch"]) == count * int(one["batch"])


def test_schemes_cut_plain_parameters():
    """As those of the fused model; the axis of stacked layers is not cut."""
    assert [one.name for one in sharded_step.schemes(2)] == ["one", "dp", "fsdp", "tp", "sp"]
    (both,) = (one for one in sharded_step.schemes(4) if one.name == "fsdp_tp")
    cuts = {"q": ("fsdp", "tensor"), "down": (("tensor", "fsdp"), None), "norm": (None, None)}
    for lead in ((), (3,)):
        arrays = {name: jnp.zeros((*lead, 8) if name == "norm" else (*lead, 8, 8)) for name in cuts}
        placed = both.placed({"layers": arrays}, both.mesh())["layers"]
        for name, cut in cuts.items():
            spec = tuple(placed[name].sharding.spec)
            assert spec == ((None,) * len(lead) + cut if name != "norm" else ((None,) * len(spec)))


def test_collectives_are_exposed_where_no_other_kernel_runs():
    ms = 1e6

    def kernel(name, start, end):
        return timing.Kernel(name, "", start * ms, (end - start) * ms)

    of_step = [
        kernel("a", 0, 4),
        kernel("b", 2, 5),
        kernel("b", 8, 10),
        kernel("ncclA(x)", 3, 9),
        kernel("NCCL", 11, 12),
    ]
    assert beside.overlap(of_step) == beside.Overlap(7, 7, 4, 12)
    assert beside.overlap([]) == beside.Overlap(0, 0, 0, 0)
    assert beside.by_class(of_step, lambda kernel: kernel.name) == {
        "ncclA": beside.OfClass(1, 6, 0, 0),
        "b": beside.OfClass(2, 5, 2, 5),
        "a": beside.OfClass(1, 4, 0, 0),
        "NCCL": beside.OfClass(1, 1, 0, 0),
    }


def test_muon(tmp_path, monkeypatch, capsys):
    options = ["--tiny", "--parameters=float32", "--layers=scanned", "--rounds=1", "--calls=1", f"--out={tmp_path}"]
    assert muon.main([*options, "--commit=none"]) == 0
    rows = {(row["program"], row["optimiser"]): row for row in rows_in(tmp_path)}
    assert rows.keys() == {("update", name) for name in ("optax", "coda_jax")} | {
        ("step", name) for name in ("sgd", "optax", "coda_jax")
    }
    assert 1e-4 < float(rows["update", "coda_jax"]["distance"]) < 0.05
    assert all(float(row["ms"]) > 0 and float(row["temporaries_gib"]) > 0 for row in rows.values())
    monkeypatch.setitem(muon.OPTIMISERS, "coda_jax", lambda rate, **given: muon.OPTIMISERS["optax"](-rate, **given))
    assert muon.main([*options, "--programs=update", "--commit=none"]) == 1
    assert "WRONG: coda_jax's update is 2 from optax's" in capsys.readouterr().err


@pytest.mark.slow
def test_loss_curve(tmp_path, capsys, quick_to_compile):
    """Fused in bfloat16 the model learns what plain JAX in float32 learns, and so does plain JAX in bfloat16."""
    assert loss_curve.main(["--tiny", "--steps=12", f"--out={tmp_path}", "--commit=none"]) == 0
    with next(tmp_path.glob("*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    first, last = (float(rows[i]["plain_float32"]) for i in (0, -1))
    assert len(rows) == 12 and last < first - 0.3
    shown = capsys.readouterr().out
    for name in ("fused_bfloat16", "plain_bfloat16"):
        gaps = [float(row[name]) - float(row["plain_float32"]) for row in rows]
        assert gaps == pytest.approx([float(row[f"{name}_gap"]) for row in rows], abs=1e-6)
        assert 0 < max(map(abs, gaps)) < 0.01
        assert float(rows[0][f"{name}_largest_gap"]) == pytest.approx(max(map(abs, gaps)), abs=1e-6)
        assert f"{name} against plain_float32: largest gap" in shown
    assert next(tmp_path.glob("*.png")).stat().st_size > 5000


@pytest.mark.parametrize("model", family_step.MODELS)
def test_family_step(model, tmp_path, quick_to_compile):
    """Every variant is right and timed, alone too."""
    options = ["--tiny", f"--model={model}", "--layers=1", "--repeats=1", "--alone=0.05", f"--out={tmp_path}"]
    assert family_step.main([*options, "--commit=none"], lambda: 100 * time.perf_counter()) == 0
    steps = steps_in(tmp_path)
    assert steps.keys() == UNROLLED.keys() and not any(step["failure"] for step in steps.values())
    assert all(float(step["ms"]) > 0 and float(step["alone_joules"]) > 0 for step in steps.values())


def test_a_wrong_family_step(tmp_path, monkeypatch, quick_to_compile):
    """Gradients that are wrong make the command fail, and are not timed."""
    plain = family_step.plain
    monkeypatch.setattr(
        family_step, "plain", lambda *of: lambda *x: 2 * (f := plain(*of))(*x) - jax.lax.stop_gradient(f(*x))
    )
    options = ["--tiny", "--layers=1", "--repeats=1", "--variants", "coda", "xla", f"--out={tmp_path}"]
    assert family_step.main([*options, "--commit=none"]) == 1
    assert "gradients differ" in steps_in(tmp_path)["coda"]["failure"]


FUSED = ["--tiny", "--layers=1", "--repeats=1", "--commit=none"]


@pytest.mark.parametrize("model", ["llama", "llama_joined", "gpt2", "nnx_blocks"])
def test_fused_models(model, tmp_path, quick_to_compile):
    """Every variant is right, timed and counted."""
    assert fused_models.main([*FUSED, f"--models={model}", f"--out={tmp_path}"]) == 0
    steps = steps_in(tmp_path)
    assert steps.keys() == {"plain", "grad_of_fuse", "fuse_of_grad", *(["flax_layers"] if "llama" in model else [])}
    assert all(float(step["ms"]) > 0 and float(step["ratio"]) > 0 for step in steps.values())
    assert float(steps["grad_of_fuse"]["gradient_distance"]) < 1e-5
    assert steps["plain"]["fused_products"] == "0" < steps["grad_of_fuse"]["fused_products"]


@pytest.mark.slow
def test_all_fused_models(tmp_path, quick_to_compile):
    """A model whose package is not installed is left out."""
    assert fused_models.main([*FUSED, f"--out={tmp_path}"]) == 0
    found = {row["model"] for row in rows_in(tmp_path)}
    assert found == {name for name in fused_models.MODELS if not fused_models.absent(name)}


def test_fused_models_that_are_counted(tmp_path, monkeypatch, capsys):
    """Nothing is allocated, and so the sizes are those of a GPU; products that are left have a reason."""

    def scores(sizes, dtype):
        llama = unmodified.llama(sizes, dtype)
        return llama._replace(apply=lambda w, x: jnp.tanh(jnp.einsum("btd,bsd->bts", x @ w[0]["q"], x)), peer=None)

    monkeypatch.setitem(library_models.PACKAGES, "haiku_blocks", ("no_such.module", "no_such_package"))
    monkeypatch.setitem(fused_models.MODELS, "scores", scores)
    models = ["--models", "llama", "scores", "haiku_blocks"]
    assert fused_models.main(["--explain", "--layers=1", *models, f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "grad_of_fuse" in shown and "left, 1: both factors have batch axes" in shown and not [*tmp_path.iterdir()]
    assert "haiku_blocks        skipped: no_such_package is not installed" in shown


def test_a_wrong_fused_model(tmp_path, monkeypatch, quick_to_compile):
    """Wrong gradients make the command fail, and so does a model that raises; the others are measured all the same."""

    def wrong(loss):
        return lambda *x: jax.tree.map(lambda y: 2 * y - jax.lax.stop_gradient(y), loss(*x))

    def raising(*_):
        raise ValueError("no such sizes")

    monkeypatch.setattr(fused_models.coda, "fuse", wrong)
    monkeypatch.setitem(fused_models.MODELS, "bert", raising)
    assert fused_models.main([*FUSED, "--models", "bert", "gpt2", f"--out={tmp_path}"]) == 1
    failures = [row["failure"] for row in rows_in(tmp_path) if row["kind"] == "step"]
    assert failures[0] == "wrong: ValueError: no such sizes" and not failures[1] and "gradients differ" in failures[2]


def test_joined(tmp_path, monkeypatch, quick_to_compile):
    """Every layout of the weights is right and timed; one with a wrong gradient fails."""
    options = ["--tiny", "--layers=1", "--rounds=2", "--seconds=0", f"--out={tmp_path}", "--commit=none"]
    assert joined.main(options) == 0
    steps = steps_in(tmp_path)
    assert steps.keys() == joined.LAYOUTS.keys()
    assert all(float(step["ms"]) > 0 and float(step["gradient_distance"]) < 1e-5 for step in steps.values())
    assert "| both, copied |" in table_of_joined(rows_in(tmp_path))
    right = unmodified.split_weights

    def wrong(w, sizes):
        return right(w, sizes) | ({"q": w["q"] / 2} if "q" in w else {})

    monkeypatch.setattr(unmodified, "split_weights", wrong)
    with pytest.raises(AssertionError, match="qkv: wrong: gradients differ"):
        joined.main(options)


def test_joined_counts(capsys, tmp_path):
    """Each join takes away products forward, and twice as many backward; copies are passes."""
    assert joined.main(["--explain", "--layers=1", f"--out={tmp_path}"]) == 0 and not [*tmp_path.iterdir()]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert {name: int(count) for name, count, *_ in lines} == {
        "separate": 21,
        "gate_up": 18,
        "qkv": 15,
        "both": 12,
        "both_copied": 12,
    }
    kept, moved = ({line[0]: float(line[i]) for line in lines} for i in (6, 5))
    assert len({kept[name] for name in ("separate", "gate_up", "qkv", "both")}) == 1
    assert moved["both_copied"] > moved["both"] + 200 and abs(moved["gate_up"] - moved["separate"]) < 1


def halved(function, name):
    def with_half_the_gradient(*arguments):
        loss, gradient = function.__wrapped__(*arguments)
        return loss, jax.tree.map(lambda x: x / 2, gradient)

    with_half_the_gradient.__name__ = name
    return jax.jit(with_half_the_gradient)


def test_schedule():
    """Letters in the order of a program's schedule, and what its collectives move with nothing beside."""
    text = """
%body (p: f32[8]) -> f32[8] {
  %c.1 = f32[8]{0} custom-call(%p), custom_call_target="coda_gemm"
}
ENTRY %main (a: bf16[4,8]) -> bf16[8,8] {
  %g.1 = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%a), channel_id=1
  %d.1 = bf16[8,8]{1,0} all-gather-done(%g.1), metadata={}
  %g.2 = ((bf16[4,8]{1,0}, f32[2]{0}), (bf16[8,8]{1,0}, f32[4]{0})) all-gather-start(%a, %b), channel_id=2
  %c.2 = (bf16[8,8]{1,0}, f32[8]{0}) custom-call(%d.1), custom_call_target="coda_gemm"
  %c.3 = bf16[8,8]{1,0} custom-call(%d.1), custom_call_target="__cudnn$fmhaSoftmax"
  %c.4 = bf16[8,8]{1,0} custom-call(%c.3), custom_call_target="coda_launch", backend_config={name = "attention"}
  %c.5 = f32[8]{0} custom-call(%c.4), custom_call_target="coda_launch", backend_config={name = "attention, backward"}
  %d.2 = (bf16[8,8]{1,0}, f32[4]{0}) all-gather-done(%g.2), metadata={}
  %w = (s32[]) while(%t), condition=%cond, body=%body
  ROOT %r = f32[16]{0} reduce-scatter(%x), dimensions={0}
}
"""
    found = schedule.operations(text)
    assert {name: "".join(one.letter for one in those) for name, those in found.items()} == {"main": "GgGPAABgWS"}
    assert hlo.count_ours(text) == 4
    assert schedule.bare_bytes(found["main"]) == (128 + (128 + 16) + 64, 128 + 64)


def test_schedule_wants_the_plugin(monkeypatch):
    def none(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(schedule.topologies, "get_topology_desc", none)
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[cuda13\]' \(topology not implemented for cuda\)"):
        schedule.described_mesh(sharded_step.schemes(2)[1])
