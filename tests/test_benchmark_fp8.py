"""The benchmark of fp8 runs from end to end, on a CPU and small sizes."""

import csv

import pytest

from benchmarks import fp8, fp8_tables


def rows_of(tmp_path, *parts):
    assert (
        fp8.main([f"--parts={','.join(parts)}", "--tiny", "--seconds=0.001", "--commit=none", f"--out={tmp_path}"]) == 0
    )
    with next(tmp_path.glob("*_fp8.csv")).open() as file:
        return list(csv.DictReader(file))


def test_products_and_results(tmp_path):
    rows = rows_of(tmp_path, "products", "results")
    variants = [row["variant"] for row in rows]
    assert variants[:4] == ["coda_bf16", "coda", "xla_bf16", "xla"]  # k is too short for promotion
    assert variants[4:9] == ["coda_bf16", "coda", "coda_unpromoted", "xla_bf16", "xla"]
    assert variants[9:] == ["bare", "quantised", "transposed", "maximum"]
    assert all(float(row["ms"]) > 0 and float(row["tflops"]) > 0 for row in rows)


@pytest.mark.slow
def test_models(tmp_path):
    rows = rows_of(tmp_path, "mlp")
    assert [row["variant"] for row in rows] == ["bf16", "coda", "flax"]


def test_the_tables():
    """Speeds and their means beside bfloat16, what results add to a product, and alone only where that was measured."""

    def row(part, variant, k, ms, tflops):
        return {"part": part, "name": "one", "m": "64", "n": "32", "k": k, "variant": variant, "alone_ms": ""} | {
            "ms": str(ms),
            "tflops": str(tflops),
            "alone_tflops": "",
        }

    shown = fp8_tables.products(
        [row("products", name, k, 1, speed) for k in "12" for name, speed in (("coda_bf16", 700), ("coda", 1400))]
        + [row("products", "coda_unpromoted", "2", 1, 2800)]
        + [row("results", name, "1", ms, 1) for name, ms in (("bare", 0.5), ("maximum", 0.51))]
    )
    assert "| one | 64, 32, 1 | 700 | 1400 |  |" in shown and "| one | 64, 32, 2 | 700 | 1400 | 2800 |" in shown
    assert "`coda` has in the mean, at one clock: 2.000 of `coda_bf16`" in shown and ", alone" not in shown
    assert "`coda_unpromoted` has in the mean, at one clock: 2.828 of" in shown
    assert "| 0.500 ms | +2.0 % |" in shown


def test_unknown_parts():
    with pytest.raises(SystemExit):
        fp8.main(["--parts=other"])
