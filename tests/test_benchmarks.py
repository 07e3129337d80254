"""The benchmarks run from end to end, on a CPU and small sizes."""

import csv
import functools
import itertools
import time
import types

import jax
import jax.numpy as jnp
import pytest

import benchmarks.__main__ as products
import coda_jax as coda
from benchmarks import (
    cases,
    launch,
    layer,
    loss_head,
    peers,
    plots,
    programs,
    report_tables,
)
from benchmarks.lab import ablation, energy
from benchmarks.peers import cutlass
from benchmarks.programs import PROGRAMS
from benchmarks.variants import TINY, VARIANTS, Parameters, Setting, step
from coda_jax import ffi
from tests.nvrtc import needs_nvrtc


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_dtypes_that_device_tests_ask_for(name):
    program = PROGRAMS[name]
    n = program.columns(144)
    asked = program.out_dtype(129, n)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((129, 72), (n, 72))]
    multiply = functools.partial(coda.gemm, epilogue=program.epilogue, out_dtype=asked, transpose_b=True)
    found = jax.tree.leaves(jax.eval_shape(multiply, *types, *program.operand_types(129, n)))
    wanted = jax.tree.leaves(asked, is_leaf=lambda x: x is None)
    assert [x.dtype for x in found] == [jnp.dtype(dtype or jnp.float32) for dtype in wanted]


@pytest.mark.slow
def test_variants_lower_for_a_gpu():
    """A fused one to kernels: four products a layer forward, eight backward, one again, and three of the head.

    And three by which the head makes rows again whose exponentials leave the range.
    """
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    parameters = Parameters(Setting(TINY, jnp.bfloat16, jnp.bfloat16))
    tokens = jnp.zeros((2, 24), jnp.int32)
    kernels = {}
    for name in ("coda_recompute", "xla_scan_remat"):
        variant = VARIANTS[name]
        traced = step(name, variant, parameters.setting).trace(parameters.of(variant), tokens, tokens)
        kernels[name] = traced.lower(lowering_platforms=("cuda",)).as_text().count("@coda_gemm")
    assert kernels == {"coda_recompute": 32, "xla_scan_remat": 0}


@needs_nvrtc
def test_compile_report(monkeypatch, capsys):
    monkeypatch.setattr(programs, "PROGRAMS", {"identity": PROGRAMS["identity"]})
    products._compile_report()
    name, seconds, registers, spilled = capsys.readouterr().out.splitlines()[-1].split()
    assert name == "identity" and float(seconds) > 0 and int(registers) > 100 and int(spilled) == 0


def test_compile_report_of_a_kernel_that_nvrtc_kept(monkeypatch, capsys):
    monkeypatch.setattr(programs, "PROGRAMS", {"identity": PROGRAMS["identity"]})
    kept = types.SimpleNamespace(
        log="identity.cu(5): warning #177-D: a variable was declared but never referenced", seconds=0.5
    )
    monkeypatch.setattr(products.ffi, "compile", lambda source, name, arch: kept)
    products._compile_report()
    assert capsys.readouterr().out.splitlines()[-1].split() == ["identity", "0.50", "-", "-"]


@pytest.mark.slow
def test_layer(quick_to_compile):
    rows = layer.measure(layer.config_of(*layer.TINY[0]), 1, 24, backward=True, repeats=1)
    assert {row["variant"] for row in rows} == {"coda", "xla", "xla_packed", "products", "coda_products"}
    assert all(row["ms"] > 0 for row in rows)
    assert {row["distance"] for row in rows if row["variant"] == "xla_packed"} == {0.0}


def peer_of(factor):
    """A peer outside of XLA's streams, which multiplies by factor too."""

    def prepare(a, b, transpose_a, transpose_b):
        return lambda: factor * ((a.T if transpose_a else a) @ (b.T if transpose_b else b))

    return peers.Peer("other", "other 1.2", prepare, synchronize=lambda: None)


def test_products(tmp_path, monkeypatch, capsys, quick_to_compile):
    """Every row is timed on rotating arguments; an absent peer is said, a wrong one fails."""
    options = ["--tiny", "--seconds=0.001", f"--out={tmp_path}", "--commit=none"]
    monkeypatch.setattr(peers, "available", lambda modules, load=peers.available: [*load(modules), peer_of(1)])
    assert products.main(options, modules=["quack"]) == 0
    shown = capsys.readouterr().out
    assert "peer quack: absent, " in shown and "other" in shown
    with next(tmp_path.glob("*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["bare", "bare", "epilogue", "epilogue", "epilogue"]
    for row in rows:
        columns = (
            ("xla_product", "coda_product", "coda_by_time_product", "other_product")
            if row["kind"] == "bare"
            else ("bare", "fused", "xla")
        )
        assert all(float(row[column]) > 0 for column in columns)
        assert row["peers"] == "other 1.2" and row["python"] and row["jaxlib"] and row["driver"] == ""
    monkeypatch.setattr(peers, "available", lambda modules: [peer_of(1.1)])
    with pytest.raises(AssertionError, match="other A"):
        products.main(options)


def test_tile_by_time(monkeypatch):
    """128 x 256 takes less energy there, and more time at one clock; by time the library chooses another."""
    layout, *sizes = cases.PRODUCTS[3]
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16384, 4096), (4096, 4096)))
    assert (layout, *sizes) == ("A[M,K] B[N,K]", 16384, 4096, 4096)
    fastest = cases.tile_by_time(layout, *sizes)
    assert (fastest.tile_m, fastest.tile_n, fastest.cluster_m) in ((128, 128, 2), (128, 192, 2))
    for by, tile in ((None, "128 x 256"), ("energy_delay", "128 x 256"), ("time", f"128 x {fastest.tile_n}")):
        if by:
            monkeypatch.setenv("CODA_JAX_TILES_BY", by)
        chosen = coda.explain(functools.partial(coda.gemm, transpose_b=True), a, b, platform="cuda")
        assert f"{tile} (cost model)" in str(chosen)


def test_cutlass(tmp_path, monkeypatch):
    """The headers' folder is checked, and each layout has a custom call of its own with the result's shape."""
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    with pytest.raises(peers.Absent, match="has no include"):
        cutlass.folder()
    (tmp_path / "include/cutlass").mkdir(parents=True)
    defines = (f"#define CUTLASS_{name} {number}" for name, number in (("MAJOR", 4), ("MINOR", 2), ("PATCH", 1)))
    (tmp_path / "include/cutlass/version.h").write_text("\n".join(defines))
    assert cutlass.version(cutlass.folder()) == "CUTLASS 4.2.1"
    a, bs = {False: (16, 32), True: (32, 16)}, {False: (32, 8), True: (8, 32)}
    for transpose_a, transpose_b in cutlass.LAYOUTS:
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (a[transpose_a], bs[transpose_b])]
        traced = cutlass.jitted(cutlass.HANDLERS[0], transpose_a, transpose_b).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert f"@{cutlass.target(cutlass.HANDLERS[0], transpose_a, transpose_b)}(" in text
        assert "@jit_cutlass_pingpong_128x128 " in text and "-> tensor<16x8xbf16>" in text


def test_plots(tmp_path):
    """Three pictures a table: a bar a shape and column, and the chip's lines; other CSVs and gaps are passed over."""
    about = {"device": "NVIDIA H200", "clock": "NVIDIA H200, 1980 MHz"}
    bare = {"kind": "bare", "program": "A[M,K] B[N,K]", "m": 4096, "n": 2048, "k": 2048, "xla_product": 50.0}
    fused = {
        "kind": "epilogue",
        "program": "residual",
        "m": 64,
        "n": 64,
        "k": 32,
        "bare": 4.0,
        "fused": 5.0,
        "xla": 6.0,
    }
    rows = [bare | {"torch_product": 40.0}, bare | {"other_product": 40.0, "torch_product": 50.0}, fused]
    with (tmp_path / "h200.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in [*rows, about] for key in row)))
        writer.writeheader()
        writer.writerows(row | about for row in rows)
    (tmp_path / "h200_layer.csv").write_text("kind,ms\nstep,1.0\n")
    assert plots.main([f"--results={tmp_path}"]) == 0
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"h200_products.png", "h200_fused.png", "h200_roofline.png"}
    read = plots.read(tmp_path / "h200.csv")[:2]
    (axes,) = plots.products(read).axes
    heights = [bar.get_height() for bar in axes.patches]  # columns in turn; other_product lacks a row
    assert heights == pytest.approx([687.2, 687.2, 859.0, 687.2], abs=0.1)
    (axes,) = plots.roofline(read).axes
    assert axes.lines[0].get_xdata() == pytest.approx([819.2, 819.2])
    assert max(axes.lines[-1].get_ydata()) == 989.4 and axes.lines[-1].get_ydata()[0] == pytest.approx(240.0)
    (axes,) = plots.fused(plots.read(tmp_path / "h200.csv")[2:]).axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, 1.25]  # XLA's and ours, over the bare product
    assert plots.main([f"--results={tmp_path / 'empty'}"]) == 1
    plots.plt.close("all")


def test_launch(tmp_path, capsys, monkeypatch, quick_to_compile):
    """A row a program and setting of command buffers, each in a process that XLA's flag is set for."""
    flags, run = [], launch.subprocess.run

    def process(command, env=None, **rest):
        if env is None:  # git's
            return run(command, **rest)
        assert command[1:3] == ["-m", "benchmarks.launch"]
        flags.append(env["XLA_FLAGS"].split())
        assert launch.main(command[3:]) == 0
        return types.SimpleNamespace(stdout=capsys.readouterr().out)

    monkeypatch.setattr(launch.subprocess, "run", process)
    options = ["--tiny", "--calls=3", "--repeats=1", f"--out={tmp_path}", "--commit=none"]
    assert launch.main(options) == 0
    with next(tmp_path.glob("*_launch.csv")).open() as file:
        rows = [(row["command_buffers"], row["program"]) for row in csv.DictReader(file)]
    assert rows == list(itertools.product(("off", "on"), ("coda_product", "xla_product", "reduction")))
    assert ["--xla_gpu_enable_command_buffer=" in of for of in flags] == [True, False]
    assert "kernel(s)" in capsys.readouterr().out


def test_loss_head(tmp_path, quick_to_compile):
    assert loss_head.main(["--tiny", "--rounds=1", f"--out={tmp_path}", "--commit=none"]) == 0
    with next(tmp_path.glob("*_loss_head.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["operator"], row["variant"]) for row in rows] == list(
        itertools.product(("loss", "entropy", "entropy"), ("coda", "xla"))
    )
    shown = report_tables.loss_head(rows)
    assert "256 x 32 x 200" in shown and "`token_logprobs`, entropies" in shown


@pytest.mark.slow
def test_energy(tmp_path, capsys, quick_to_compile):
    """On a device that always takes 100 W, energy is time; the bytes are those of operands and results."""
    options = ["--tiny", "--tiles", "--seconds=0.05", f"--out={tmp_path}", "--commit=none"]
    assert energy.main(options, modules=(), counter=lambda: 100 * time.perf_counter()) == 0
    with next(tmp_path.glob("*_energy.csv")).open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert float(row["joules"]) == pytest.approx(100 * float(row["seconds"]), rel=0.1)
    variants = {(row["kind"], row["program"], row["variant"]) for row in rows}
    assert {("product", "A[K,M] B[K,N]", name) for name in ("coda_product", "coda_64x256", "xla_product")} < variants
    assert {("epilogue", "rotary_qkv", "fused"), ("copy", "", "copy"), ("idle", "", "idle")} < variants
    assert "pJ a byte" in capsys.readouterr().out
    assert energy.main([*options, "--products"], modules=(), counter=lambda: 100 * time.perf_counter()) == 0
    with next(tmp_path.glob("*_energy_products.csv")).open() as file:
        assert {row["kind"] for row in csv.DictReader(file)} == {"idle", "copy", "product"}
    assert energy.extra_bytes(PROGRAMS["residual_sumsq"], 64, 32) == 2 * 64 * 32 + 4 * 64
    assert energy.extra_bytes(PROGRAMS["rotary_qkv"], 32, 192) == 4 * 32 + 2 * 4 * 32 * 32
    assert energy.extra_bytes(PROGRAMS["gated_backward"], 64, 32) == (2 + 2 + 1 - 1) * 2 * 64 * 32 + 2 * 4 * 64


def test_ablation(tmp_path, quick_to_compile):
    """Every part is right; its bytes, and their share of a copy's energy in the product's."""
    assert ablation.main(["--tiny", "--seconds=0.01", f"--out={tmp_path}", "--commit=none"]) == 0
    with next(tmp_path.glob("*_ablation.csv")).open() as file:
        rows = {(row["program"], row["part"]): row for row in csv.DictReader(file)}
    assert rows.keys() == {
        *(("residual_sumsq", part) for part in ("none", "x", "row sums", "all")),
        *(("rotary_qkv", part) for part in ("none", "row scale, q, k, v", "one row's tables", "all")),
    }
    x = rows["residual_sumsq", "x"]
    assert int(x["extra_bytes"]) == 2 * 64 * 32 and int(rows["rotary_qkv", "one row's tables"]["extra_bytes"]) == 384
    assert float(x["copied"]) == pytest.approx(116e-12 * 2 * 64 * 32 / (690 * 1e-6 * float(x["bare"])))
    assert float(x["price"]) == pytest.approx(float(x["kernel"]) / float(x["bare"]) - 1)


@pytest.mark.parametrize("name", ablation.PARTS)
def test_parts_lower_for_a_gpu(name):
    """In the tile that is chosen for the whole program, each of them."""
    m, n, k = 2048, 3072, 1024
    types = (jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((n, k), jnp.bfloat16))
    config = ablation.chosen_tile(name, m, n, k)
    for part in ablation.PARTS[name].values():
        product = functools.partial(coda.gemm, epilogue=part.epilogue, transpose_b=True, config=config)
        assert "Hopper kernel" in str(coda.explain(product, *types, *part.operand_types(m, n), platform="cuda"))


def test_energy_of_a_step(tmp_path, capsys, quick_to_compile):
    """Each product as often as the step has it."""
    options = ["--tiny", "--step", "--seconds=0.05", f"--out={tmp_path}", "--commit=none"]
    assert energy.main(options, counter=lambda: 100 * time.perf_counter()) == 0
    with next(tmp_path.glob("*_energy_step.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "step"]
    assert [(row["program"], row["variant"]) for row in rows] == list(
        itertools.product(("swiglu", "identity"), ("xla_product", "bare", "fused"))
    )
    total = sum(int(row["times"]) * float(row["joules"]) for row in rows if row["variant"] == "fused")
    (shown,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("all"))
    assert float(shown[3]) == pytest.approx(total, abs=2e-3)


def test_energy_whose_counter_fails(tmp_path):
    """Raised where it is waited for, also in the middle of a run."""
    readings = iter(range(20))

    def counter():
        for reading in readings:
            return float(reading)
        raise OSError("NVML: status 15")

    with pytest.raises(OSError, match="status 15"):
        energy.main(["--tiny", "--seconds=0.01", f"--out={tmp_path}"], modules=(), counter=counter)
    assert not list(tmp_path.iterdir())
