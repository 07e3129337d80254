"""The benchmarks run from end to end, on a CPU and small sizes."""

import csv
import functools
import itertools
import time
import types
import weakref

import jax
import jax.numpy as jnp
import pytest

import benchmarks.__main__ as products
import coda_jax as coda
from benchmarks import cases, hlo, launch, layer, loss_curve, loss_head, peers, plots, report_tables, timing, train_step
from benchmarks.lab import ablation, energy
from benchmarks.peers import cutlass
from benchmarks.programs import PROGRAMS
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


@pytest.mark.slow
def test_train_step(tmp_path, monkeypatch, capsys, quick_to_compile):
    """Right variants are timed; one with wrong gradients is not, and makes the command fail."""
    monkeypatch.setattr(
        train_step,
        "step",
        lambda name, *rest: halved(step(name, *rest), name) if name == "xla_scan" else step(name, *rest),
    )
    options = ["--tiny", "--layers=1", "--repeats=1", f"--out={tmp_path}", "--commit=none"]
    counter = lambda: 100 * time.perf_counter()  # noqa: E731
    assert train_step.main([*options, "--alone=0.05", "--variants=coda_scan,xla,xla_scan"], counter) == 1
    steps = steps_in(tmp_path)
    assert steps.keys() == {"coda_scan", "xla", "xla_scan"}
    assert 0 < float(steps["coda_scan"]["gradient_distance"]) < 0.05
    assert float(steps["coda_scan"]["ms"]) > 0 and not steps["coda_scan"]["failure"]
    assert "gradients differ" in steps["xla_scan"]["failure"] and not steps["xla_scan"]["ms"]
    alone = [float(steps["xla"][name]) for name in ("alone_ms", "alone_joules")]
    assert alone[1] == pytest.approx(100 * 1e-3 * alone[0], rel=0.1) and not steps["xla_scan"]["alone_ms"]
    shown = capsys.readouterr().out
    assert "coda_scan: milliseconds" in shown and "xla_scan: milliseconds" not in shown


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


@pytest.mark.slow
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


def test_rotation():
    """Sets of arguments are twice the cache together; a result lives for a round, and not longer."""
    a, c = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert [timing.sets_beyond(size, (a, a), c) for size in (10, 256, 257, 513)] == [1, 1, 2, 3]
    alive = weakref.WeakSet()

    class Result:
        def __init__(self, number):
            self.number = number
            alive.add(self)

    call = timing.rotated([functools.partial(Result, number) for number in range(3)])
    assert [call().number for _ in range(5)] == [0, 1, 2, 0, 1]
    assert sorted(one.number for one in alive) == [0, 1, 2]


def test_kernels_outside_of_xla():
    """Those without a module belong to the burst they ran in, even if the clocks are some microseconds apart."""
    windows = [(1000.0, 2000.0), (5000.0, 6000.0)]
    spans = {"early": (900, 200), "in": (1200, 100), "late": (1990, 210), "between": (2000, 3000), "next": (5500, 50)}
    kernels = [timing.Kernel(name, "", float(start), float(duration)) for name, (start, duration) in spans.items()]
    assert [one.name for one in timing.during(windows, kernels)] == ["early", "in", "late", "next"]


def test_bursts_of_a_trace(tmp_path):
    """The host's trace has every burst, in the order in which they ran; with one outside of XLA none meets another."""
    waited = []
    ours = jax.jit(lambda x: x @ x)
    x = jnp.ones((64, 64))
    functions = {"ours": lambda: ours(x), "other": timing.Outside(lambda: x, lambda: waited.append(True))}
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            timing._round(functions, 2)
    (path,) = tmp_path.glob("**/*.xplane.pb")
    bursts = timing._bursts(jax.profiler.ProfileData.from_file(str(path)))
    assert {name: len(of) for name, of in bursts.items()} == {"ours": 3, "other": 3} and len(waited) == 3
    spans = sorted(itertools.chain.from_iterable(bursts.values()))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_kernels_of_a_trace():
    """By XLA module and in time order; host planes and other lines are left out. A kernel that began while another of
    its stream ran counts from that one's end, and for nothing if it was over by then.
    """

    def event(name, start, module="jit_f", duration=10.0):
        stats = [("hlo_module", module), ("hlo_op", f"{name}.1")] if module else []
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats)

    def plane(name, **lines):
        lines = [types.SimpleNamespace(name=key.replace("_", " "), events=events) for key, events in lines.items()]
        return types.SimpleNamespace(name=name, lines=lines)

    device = plane(
        "/device:GPU:0",
        Stream_7=[
            event("b", 20.0),
            event("a", 10.0),
            event("early", 25.0, duration=20.0),
            event("inside", 32.0, duration=3.0),
        ],
        Stream_8=[event("c", 15.0), event("other", 30.0, "jit_g"), event("alone", 41.0, None)],
        XLA_Ops=[event("b", 20.0)],
    )
    found = timing._kernels_by_module(
        types.SimpleNamespace(planes=[device, plane("/host:CPU", Stream_1=[event("h", 1.0)])])
    )
    assert {module: [one.name for one in kernels] for module, kernels in found.items()} == {
        "jit_f": ["a", "c", "b", "early", "inside"],
        "jit_g": ["other"],
        "": ["alone"],
    }
    assert found["jit_f"][0].instruction == "a.1"
    assert [(kernel.start, kernel.duration) for kernel in found["jit_f"][2:]] == [(20, 10), (30, 15), (45, 0)]
