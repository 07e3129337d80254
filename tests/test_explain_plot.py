"""The picture of coda.explain: no text covers another one, and all of it lies inside."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda

plt = pytest.importorskip("matplotlib.pyplot")
Text = pytest.importorskip("matplotlib.text").Text  # an annotation's own extent has its line in it


def of_products(count):
    """So many products of about the same intensity, with long names."""

    def f(x, *weights):
        for i, w in enumerate(weights):

            def epilogue(acc, i=i):
                return acc * (1.0 + i)

            epilogue.__name__ = f"a_function_of_quite_a_long_name_{i}"
            x = x + coda.gemm(x, w, epilogue=epilogue)
        return x

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 4096), *[(4096, 4096)] * count)]
    return coda.explain(f, *types, device="H200")


@pytest.mark.parametrize("count", [1, 6, 24, 30])
@pytest.mark.parametrize("stacked", [False, True])
def test_texts_stand_apart(count, stacked):
    figure, axes = plt.subplots(2, figsize=(10.5, 9)) if stacked else plt.subplots(1, 2, figsize=(15, 10))
    of_products(count).plot(axes)
    figure.tight_layout()
    figure.draw_without_rendering()
    bars, roofline = axes
    texts = [*bars.texts, *bars.get_yticklabels(), bars.xaxis.label, bars.get_legend()]
    labels = [text for text in roofline.texts if "a_function" in text.get_text()]
    assert len(labels) == min(count, 24)
    for among in (texts, labels):
        boxes = [Text.get_window_extent(text) if isinstance(text, Text) else text.get_window_extent() for text in among]
        assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
        for box in boxes:
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0
    plt.close(figure)
