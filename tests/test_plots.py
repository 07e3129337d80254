"""Pictures of what was measured: nothing is clipped, and bars have the records' values."""

import pytest

from benchmarks import plots, results

CHIPS = ("nvidia_h200", "nvidia_h100_80gb_hbm3")


@pytest.fixture(autouse=True)
def closed():
    yield
    plots.plt.close("all")


def drawn(suffix, draw, chip):
    rows = plots.rows_of(results.FOLDER / f"{chip}{suffix}.csv")
    return rows, draw(rows if suffix else [row for row in rows if row["kind"] == "epilogue"])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("suffix, draw", [("", plots.fused), ("_train_step", plots.memory)])
def test_all_text_lies_inside_the_picture(tmp_path, suffix, draw, chip):
    _, figure = drawn(suffix, draw, chip)
    plots._saved(figure, tmp_path / "picture.png")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [figure._suptitle, axes.title, axes.xaxis.label, *axes.texts, *axes.get_yticklabels()]
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, text.get_text()


@pytest.mark.parametrize("chip", CHIPS)
def test_memory_of_a_step(chip):
    """Two bars a form, which end at its peak; the temporaries are the second."""
    rows, figure = drawn("_train_step", plots.memory, chip)
    of = {row["variant"]: row for row in rows if row["kind"] == "step"}
    (axes,) = figure.axes
    below, above = (axes.containers[i].patches for i in (0, 1))
    assert len(below) == len(above) == len(plots.STEPS)
    for variant, bar in zip(plots.STEPS, above, strict=True):
        assert bar.get_x() + bar.get_width() == pytest.approx(float(of[variant]["peak_gib"]))
        assert bar.get_width() == pytest.approx(float(of[variant]["temporaries_gib"]))
