"""The benchmark of fp8 runs from end to end, on a CPU and small sizes."""

import csv

import pytest

from benchmarks import fp8


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


def test_unknown_parts():
    with pytest.raises(SystemExit):
        fp8.main(["--parts=other"])
