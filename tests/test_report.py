"""benchmarks/REPORT.md and the README's table are what the CSV files of record give."""

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


def test_tables():
    shown = markdown.table(["a", "b"], [["1", markdown.percent(-0.0004)], ["2", markdown.percent(0.121)]])
    assert shown == "| a | b |\n|---|---|\n| 1 | 0.0 % |\n| 2 | +12.1 % |\n"
    assert report_tables.overheads({"bare": "200", "kernel": "220", "fused": "230"}) == pytest.approx((0.1, 0.15))


def test_peers():
    times = {"coda_product": [2.0, 1.0], "xla_product": [4.0, 1.0], "torch_product": [3.0, 1.5]}
    assert report_tables.peer_ratios(times, "coda_product") == {"the faster of XLA and torch": [1.5, 1.0]}
