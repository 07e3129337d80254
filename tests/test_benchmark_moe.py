"""The benchmarks of mixtures of experts run from end to end, on a CPU and small sizes."""

import csv
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import grouped, grouped_forms, grouped_timing, moe, moe_step, moe_tables, peers, report_tables, timing
from coda_jax.tiles.config import GemmConfig

CASE = grouped.TINY["tiny"]
OPTIONS = ("--tiny", "--seconds=0.001", "--commit=none", "--peers=")


def rows_in(folder):
    with next(folder.glob("*.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", grouped.CASES)
def test_sizes_of_groups(name):
    """Every row is in a group, some sizes are of no tile, and the ids of experts give each its rows."""
    case = grouped.CASES[name]
    for kind in grouped.KINDS:
        sizes = grouped.sizes_of(kind, case)
        assert sizes.dtype == np.int32 and sizes.shape == (case.experts,) and sizes.sum() == case.rows
        assert (len(set(sizes)) == 1) == (kind == "equal") and (sizes.max() == case.rows // 2) == (kind == "half")
        assert (kind == "equal") != any(sizes % 64)
        assert np.array_equal(np.bincount(grouped.routed(sizes, case).flat, minlength=case.experts), sizes)


def test_tiles_are_counted():
    """Whole tiles, of the last rows of each group too; of a contraction k blocks."""
    rows, contraction = grouped.Work(10, 128, 3), grouped.Work(10, 64, 3)
    sizes = np.array([0, 1, 128, 129])
    assert rows.units(sizes) == 0 + 1 + 1 + 2 and rows.flops(sizes) == 4 * 128 * 10
    assert contraction.units(sizes) == 0 + 1 + 2 + 3
    batch = grouped.Work(10, 128, 3, groups=2)
    assert batch.units(np.array([10, 250])) == 4  # 130 and 130


@pytest.mark.parametrize(("name", "kernels"), [("coda_mlp", 6), ("coda_fused", 6), ("coda_batched", 6), ("xla", 0)])
def test_the_work_of_a_layer_is_that_of_its_kernels(name, kernels):
    """Forward and backward together three times the forward pass's flops, where groups fill their tiles."""
    of_coda = grouped_forms.expert_mlp(), grouped_forms.fused(), grouped_forms.batched()
    forms = {form.name: form for form in (*of_coda, grouped_forms.XLA)}
    case = grouped.CASES["sonic"]
    width, hidden = case.hidden, case.intermediate
    shapes = ((case.rows, width), (case.experts, width, 2, hidden), (case.experts, hidden, width), (case.rows, width))
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    types.append(jax.ShapeDtypeStruct((case.experts,), jnp.int32))
    work = grouped.work_of(grouped_forms.gradients(forms[name]), *types)
    assert len(work) == kernels
    if kernels:
        assert sum(one.flops(grouped.sizes_of("equal", case)) for one in work) == 3 * case.flops
        is_padded = sum(one.flops(grouped.sizes_of("random", case)) for one in work) > 3 * case.flops
        assert is_padded == (name in ("coda_mlp", "coda_fused"))


def test_group_after_group_is_what_numpy_computes():
    """Forward and backward, with empty groups and rows beyond the longest."""
    sizes, chance = np.array([3, 0, 9, 4]), np.random.default_rng(0)
    a, b, dy = (chance.normal(size=shape).astype(np.float32) for shape in ((16, 5), (4, 5, 6), (16, 6)))
    form = grouped_forms.in_turn(9)
    y, pullback = jax.vjp(lambda a, b: form.multiply(a, b, jnp.asarray(sizes)), a, b)
    found = (y, *pullback(dy), form.contract(a, dy, jnp.asarray(sizes)))
    groups = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    of_b = np.stack([a[rows].T @ dy[rows] for rows in groups])
    expected = (
        np.concatenate([a[rows] @ w for rows, w in zip(groups, b, strict=True)]),
        np.concatenate([dy[rows] @ w.T for rows, w in zip(groups, b, strict=True)]),
        of_b,
        of_b,
    )
    for x, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-5)


def test_a_wrong_row_is_found(monkeypatch):
    """One row that its neighbour's group has: what an offset that is wrong by one gives."""
    form = dataclasses.replace(
        grouped_forms.XLA,
        name="coda",
        multiply=lambda a, b, sizes, transpose_b=False: jax.lax.ragged_dot(a, b, sizes.at[0].add(1).at[1].add(-1)),
    )
    (part,) = (part for part in moe.parts_of(CASE, ["products"]) if part.name == "down")
    with pytest.raises(AssertionError, match="tiny, down, random: coda: results differ"):
        list(grouped_timing.measure(CASE, part, [], [form], ["random"], 0.001))


def test_peers_of_grouped_products(quick_to_compile):
    """One that is right is timed, one that is wrong or raises has its reason in the place of a time."""

    def prepare(part, arguments, factor):
        if factor is None:
            raise RuntimeError("no kernel")
        product = lambda: factor * grouped_forms.XLA.multiply(*arguments)  # noqa: E731
        return peers.Prepared(product, lambda y: y) if part == "down" else None

    def peer(name, factor):
        return peers.GroupedPeer(
            name, "1", "all", lambda *arguments: prepare(*arguments, factor), synchronize=lambda: None
        )

    beside = [peer("right", 1), peer("wrong", 1.1), peer("broken", None)]
    for part in moe.parts_of(CASE, ["products"]):
        if part.name in ("up", "down"):
            rows = {row["variant"]: row for row in grouped_timing.measure(CASE, part, beside, [], ["random"], 0.001)}
            assert rows["broken"]["failure"] == "RuntimeError: no kernel" and "ms" not in rows["broken"]
            if part.name == "up":
                assert rows.keys() == {"broken"}
            else:
                assert rows["right"]["ms"] > 0 and rows["right"]["includes"] == "all"
                assert "results differ" in rows["wrong"]["failure"]


def test_peers_that_are_not_here(capsys):
    """Each says what is missing."""
    assert peers.available(peers.GROUPED_MODULES, "load_grouped") == []
    assert capsys.readouterr().out.count(": absent, ") == len(peers.GROUPED_MODULES) == 4


def test_slow_variants_are_timed_apart(monkeypatch):
    """Their time is told at the clock of the reference."""
    walls = {"coda_batched": 1e-3, "xla": 1e-2 + 1e-4, "coda": 2e-3}
    calls = {name: (lambda name=name: name) for name in walls}
    monkeypatch.setattr(grouped_timing, "_wall", lambda call: walls[call()])
    us = {"coda_batched": 100.0, "coda": 200.0}
    monkeypatch.setattr(
        timing, "interleaved", lambda found, seconds: {name: timing.Times(us[name], us[name]) for name in found}
    )
    kernel = {"coda_batched": 120_000, "xla": 2_400_000}  # 120 us where it is 100 in the other run
    monkeypatch.setattr(
        timing,
        "executions",
        lambda found, rounds: {name: [[timing.Kernel(name, "", 0, kernel[name])]] * rounds for name in found},
    )
    assert grouped_timing.times(calls, 0.1) == pytest.approx(us | {"xla": 2000.0})


def test_a_program_that_does_not_fit_has_its_memory(monkeypatch):
    monkeypatch.setattr(grouped_timing, "fits", lambda size: False)
    (part,) = (part for part in moe.parts_of(CASE, ["products"]) if part.name == "down")
    (row,) = grouped_timing.measure(CASE, part, [], [grouped_forms.XLA], ["random"], 0.001)
    assert row["failure"] == "does not fit" and row["temporaries_gib"] >= 0 and "ms" not in row
    assert "does not fit" in moe.shown(row)


def test_arguments_are_parsed_and_bad_ones_refused():
    assert moe.parse(["--config=128,192,2"]).config == GemmConfig(tile_m=128, tile_n=192, cluster_m=2)
    assert moe.parse(["tiles"]).kinds == ["random"] and moe.parse([]).kinds == list(grouped.KINDS)
    for wrong in ("--shapes=tiny", "--kinds=even", "--parts=half", "--config=128,100,1", "--tiles=1x1_1"):
        with pytest.raises(SystemExit):
            moe.parse([wrong])


@pytest.mark.slow
def test_moe_step(tmp_path, capsys, quick_to_compile):
    """Loss and gradients agree; what `explain` says of the fused one is printed."""
    options = ["--tiny", "--layers=1", "--repeats=1", "--variants=coda,xla", f"--out={tmp_path}", "--commit=none"]
    assert moe_step.main(options) == 0
    rows = rows_in(tmp_path)
    steps = {row["variant"]: row for row in rows if row["kind"] == "step"}
    assert steps.keys() == {"coda", "xla"} and all(float(row["ms"]) > 0 for row in steps.values())
    assert (
        0 < float(steps["coda"]["gradient_distance"]) < moe_step.GRADIENT_RTOL
        and float(steps["xla"]["gradient_distance"]) == 0
    )
    assert float(steps["coda"]["loss"]) == pytest.approx(float(steps["xla"]["loss"]), rel=1e-3)
    assert "lowered to" in capsys.readouterr().out
    assert "of 128 experts" in report_tables.training_step(rows)


@pytest.mark.slow
def test_moe_step_that_is_wrong(tmp_path, monkeypatch, capsys, quick_to_compile):
    """A router whose weights are not divided by their sum."""
    config = dataclasses.replace(moe_step.TINY, norm_topk_prob=False)
    right = moe_step.step
    monkeypatch.setattr(
        moe_step, "step", lambda name, variant, found: right(name, variant, found if variant.fused else config)
    )
    options = ["--tiny", "--layers=1", "--repeats=1", "--variants=coda,xla", f"--out={tmp_path}", "--commit=none"]
    assert moe_step.main(options) == 1
    assert "gradients differ" in capsys.readouterr().out


def test_the_table_of_experts():
    """A time, or what XLA would need, or that it failed; the speed of our tiles; what a peer's figure includes."""
    common = {"rows": "64", "experts": "4", "hidden": "32", "intermediate": "48", "kind": "random", "tiles": ""}
    common |= {"includes": "", "failure": "", "tile_speed": "", "ms": ""}
    rows = [
        common | {"part": "experts", "variant": "coda_mlp", "ms": "1.5", "tile_speed": "0.97"},
        common | {"part": "experts", "variant": "xla", "failure": "does not fit", "temporaries_gib": "123.4"},
        common | {"part": "experts", "variant": "other", "failure": "TypeError", "includes": "its products"},
        common | {"part": "down", "variant": "coda", "ms": "0.5", "tiles": "7", "tile_speed": "0.5"},
    ]
    shown = moe_tables.experts(rows)
    assert "| experts | random |  | 0.970 | 1.500 | 123.4 GiB | failed |" in shown
    assert "| down | random | 7 | 0.500 | 0.500 |" in shown and "`other`: its products." in shown
    assert "`other` failed: TypeError" in shown and "`xla` failed" not in shown


def test_the_table_of_steps_where_no_plain_step_fits():
    """It says what the gradients are compared with, and what the plain step would need."""
    common = {"kind": "step", "model": "qwen3_moe", "batch": "4", "length": "64", "layers": "2", "failure": ""}
    common |= {"beyond_ms": "1", "temporaries_gib": "5", "peak_gib": "6", "compile_s": "7", "gradient_distance": "0"}
    ran = common | {"variant": "coda", "ms": "2"}
    plain = common | {"variant": "xla", "ms": "", "temporaries_gib": "388", "failure": "out of memory"}
    shown = report_tables.training_step([ran, plain])
    assert "| flax_layers | 2.0 |  | 1.0 |" in shown and "no plain step ran" in shown
    assert "plain JAX, unrolled: out of memory, not run. XLA would need 388 GiB" in shown
    assert "the unrolled plain step's" in report_tables.training_step([ran, plain | {"ms": "3", "failure": ""}])


@pytest.mark.slow
def test_grouped_products(tmp_path, capsys, quick_to_compile):
    """A row for each part, kind of sizes and variant; what takes groups for equal is timed where they are."""
    assert moe.main([*OPTIONS, f"--out={tmp_path}", "--products=down", "--variants=coda,coda_mlp,xla,xla_batched"]) == 0
    rows = rows_in(tmp_path)
    products = [name for name in grouped.products(CASE) if "down" in name]
    names = [*products, *("experts", "experts, gradients", "layer", "layer, gradients")]
    wanted = set(itertools.product(names, grouped.KINDS, ("coda", "coda_batched", "xla")))
    wanted |= set(itertools.product(names, ("equal",), ("xla_batched",)))
    wanted |= set(itertools.product(names[len(products) :], grouped.KINDS, ("coda_mlp",)))
    assert {(row["part"], row["kind"], row["variant"]) for row in rows} == wanted and len(rows) == len(wanted)
    for row in rows:
        assert float(row["ms"]) > 0 and float(row["tflops"]) > 0 and not row["failure"]
        assert (row["error"] != "") == (row["variant"] != "coda_batched" or row["kind"] == "equal")
        if row["variant"] == "coda_batched":
            assert float(row["tile_speed"]) == 1
        if row["part"] in products and row["variant"] == "coda":
            assert int(row["tiles"]) >= CASE.experts and float(row["tile_work"]) > 1
    assert "random layer, gradients" in capsys.readouterr().out


def test_tiles(tmp_path, capsys, quick_to_compile):
    """The fastest first, each with its tiles; beside each the batched product in the same."""
    options = [*OPTIONS, f"--out={tmp_path}", "--products=down, dgrad", "--tiles=128x128_1,64x256_2", "--batched"]
    assert moe.main(["tiles", *options]) == 0
    rows = rows_in(tmp_path)
    tiles = ("", "_128x128_1", "_64x256_2")
    assert {row["variant"] for row in rows} == {f"{name}{tile}" for name in ("coda", "coda_batched") for tile in tiles}
    ms = [float(row["ms"]) for row in rows]
    assert ms == sorted(ms) and {row["kind"] for row in rows} == {"random"}
    by_name = {row["variant"]: row for row in rows}
    assert by_name["coda_128x128_1"]["tile"] == "128" and by_name["coda_64x256_2"]["tile"] == "64"
