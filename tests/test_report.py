"""benchmarks/REPORT.md and the README's table are what the CSV files of record give."""

import shutil

import pytest

from benchmarks import markdown, report, report_tables


@pytest.fixture(scope="module")
def texts():
    return report.texts(report.results.FOLDER)


def test_is_up_to_date(texts):
    """Else: make report."""
    stale = [path.name for path, text in texts.items() if path.read_text() != text]
    assert not stale


def test_every_file_is_shown(texts):
    for path in report.results.FOLDER.glob("*.csv"):
        assert f"](results/{path.name})" in texts[report.REPORT]


def test_a_stale_text_is_found_and_written_again(tmp_path, monkeypatch, capsys, texts):
    new = {}
    for name in ("REPORT", "README"):
        path = getattr(report, name)
        copy = tmp_path / path.name
        copy.write_text(texts[path].replace("NVIDIA", "another"))
        new[copy] = texts[path]
        monkeypatch.setattr(report, name, copy)
    monkeypatch.setattr(report, "texts", lambda folder: new)
    assert report.main(["--check"]) == 1 and "REPORT.md is not" in capsys.readouterr().err
    assert report.main([]) == 0 and report.main(["--check"]) == 0
    assert all(path.read_text() == text for path, text in new.items())


def test_a_record_of_packed_rows_is_in_the_table(tmp_path, texts):
    """Beside the step of whole rows, with its commit; without a record of both variants nothing of it is."""
    for name in ("", "_train_step"):
        shutil.copy(report.results.FOLDER / f"nvidia_h200{name}.csv", tmp_path)
    without = report.headline(tmp_path)
    assert "packed" not in without and report.headline(report.results.FOLDER) in texts[report.README]
    path = tmp_path / "nvidia_h200_train_step_packed.csv"
    lines = ["kind,variant,ms,commit", "step,coda,280,abc", "step,coda_packed,215.4,abc", "kernels,xla_packed,1,abc"]
    path.write_text("\n".join(lines))
    assert report.headline(tmp_path) == without
    path.write_text("\n".join([*lines, "step,xla_packed,358.6,abc"]))
    shown = report.headline(tmp_path)
    assert "\n| training step of packed rows, ms | 215 | 359 |  |\n| product + SwiGLU" in shown
    assert " and abc" in " ".join(shown.split())


def test_tables():
    shown = markdown.table(["a", "b"], [["1", markdown.percent(-0.0004)], ["2", markdown.percent(0.121)]])
    assert shown == "| a | b |\n|---|---|\n| 1 | 0.0 % |\n| 2 | +12.1 % |\n"
    assert report_tables.overheads({"bare": "200", "kernel": "220", "fused": "230"}) == pytest.approx((0.1, 0.15))


def test_peers():
    times = {"coda_product": [2.0, 1.0], "xla_product": [4.0, 1.0], "torch_product": [3.0, 1.5]}
    assert report_tables.peer_ratios(times, "coda_product") == {"the faster of XLA and torch": [1.5, 1.0]}
