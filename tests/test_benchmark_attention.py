"""The benchmark of attention: what masks need, the lengths of documents, forms, runs on small sizes, the table."""

import csv
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from benchmarks import alone, attention, attention_cases, attention_forms, attention_tables, peers, timing
from benchmarks.attention_cases import Case
from benchmarks.peers import torch_attention

OPTIONS = ("--tiny", "--seconds=0.001", "--commit=none")
MASKS = [
    Case("causal", 37, 4, 2, 8),
    Case("full", 37, 4, 2, 8, is_causal=False),
    Case("window", 37, 4, 2, 8, window=5),
    Case("window_beyond_the_row", 37, 4, 2, 8, window=50),
    Case("documents", 37, 4, 2, 8, mean=9, seed=2),
    Case("documents_full", 37, 4, 2, 8, mean=9, seed=2, is_causal=False),
    Case("window_documents", 37, 4, 2, 8, window=5, mean=9, seed=2, value_width=4),
]


def seen(case, row):
    """Whether a query of a row sees a key, pair by pair."""
    document = [number for number, length in enumerate(case.documents[row]) for _ in range(length)]

    def sees(i, j):
        is_near = (not case.is_causal or j <= i) and (case.window is None or i - j < case.window)
        return is_near and document[i] == document[j]

    return np.array([[sees(i, j) for j in range(case.length)] for i in range(case.length)])


@pytest.mark.smoke
@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.name)
def test_needed_flops(case):
    """Counted in closed form as pair by pair; and no mask of a case has a row in which a query sees nothing."""
    masks = [seen(case, row) for row in range(case.batch)]
    for row, mask in enumerate(masks):
        np.testing.assert_array_equal(case.visible(row), mask)
        assert mask.any(axis=1).all()
    pairs = sum(int(mask.sum()) for mask in masks)
    assert case.pairs == pairs
    assert case.share == pytest.approx(pairs / (case.batch * np.tril(np.ones((case.length, case.length))).sum()))
    width, value_width = case.width, case.value_width or case.width
    scores, values = 2 * case.heads * pairs * width, 2 * case.heads * pairs * value_width
    assert case.flops(False) == scores + values  # q k^T, p v
    assert case.flops(True) == case.flops(False) + 3 * scores + 2 * values  # q k^T, ds k, ds^T q; dy v^T, p^T dy


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.name)
def test_the_mask_for_flex_attention(case):
    query, key = np.ogrid[: case.length, : case.length]
    visible = torch_attention.visible_of(case, case.segment_ids())
    for row in range(case.batch):
        found = np.broadcast_to(visible(row, 0, query, key), (case.length, case.length))
        np.testing.assert_array_equal(found, case.visible(row))


def test_lengths_of_documents():
    """Rows are filled, the same for all cases of a mean, and need what rows of such documents need in the mean."""
    drawn = {}
    for case in attention_cases.CASES:
        assert all(sum(row) == case.length and min(row) > 0 for row in case.documents)
        assert case.segment_ids().shape == (case.batch, case.length)
        if case.mean is None:
            assert {len(row) for row in case.documents} == {1}
            continue
        assert drawn.setdefault(case.mean, case.documents) == case.documents
        if case.window is None:
            low, high = {1000: (0.20, 0.23), 300: (0.08, 0.09)}[case.mean]
            assert low < case.share < high
    assert drawn.keys() == {300, 1000}
    many = attention_cases.lengths(1, 10**6, 300, 0)[0]
    assert np.mean(many) == pytest.approx(300, rel=0.1) and np.std(np.log(many)) == pytest.approx(1, rel=0.1)


def test_names_of_cases():
    """Each is of one kind, which is a file and a section of the report; and no name is there twice."""
    names = [case.name for case in attention_cases.CASES]
    assert len(set(names)) == len(names)
    assert {case.kind for case in attention_cases.CASES} == set(attention_cases.KINDS) == set(attention_tables.KINDS)
    assert all(case.batch * case.length == 16384 for case in attention_cases.CASES if case.kind == "length")


def test_a_window_without_a_causal_mask():
    with pytest.raises(ValueError, match="a window of 5 without a causal mask"):
        Case("window", 37, 4, 2, 8, window=5, is_causal=False)


def test_documents_in_the_packed_layout():
    case = MASKS[4]
    lengths, starts = attention_forms.packed().extras(case)
    most = max(map(len, case.documents))
    assert lengths.shape == (case.batch, most) and starts.shape == (case.batch, most + 1)
    for row, found, begins in zip(case.documents, lengths.tolist(), starts.tolist(), strict=True):
        missing = [-1] * (most - len(row))
        assert found == [*row, *missing]
        assert begins == [sum(row[:i]) for i in range(len(row))] + missing + [-1]


def test_documents_as_intervals():
    """Without a band they are all that a query sees of its document."""
    case = MASKS[5]
    first, last = attention_forms.ours(documents="intervals").extras(case)
    keys = np.arange(case.length)
    for row in range(case.batch):
        found = (first[row][:, None] <= keys) & (keys <= last[row][:, None])
        np.testing.assert_array_equal(found, case.visible(row))


@pytest.mark.parametrize("case", [MASKS[1], MASKS[6]], ids=lambda case: case.name)
def test_the_reference(case):
    """It is that of the last row's last key head, forward and backward, as plain JAX has all of them."""
    q, k, v, dy = (x.astype(jnp.float32) for x in attention.arrays_of(case, 3))
    form = attention_forms.public("xla")
    with jax.default_matmul_precision("highest"):
        expected = attention_forms.with_gradients(form.function(case))(q, k, v, dy, *form.extras(case))
    arrays = attention_forms.reference_arguments(case, q, k, v, dy)
    assert [x.shape for x in arrays] == [x.shape for x in attention_forms.reference_types(case)]
    found = attention_forms.reference(*arrays)
    wanted = attention_forms.last_heads(case, expected)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class Intervals(NamedTuple):
    first: jax.Array
    last: jax.Array


def plain(query, key, value, mask=None, *, is_causal, local_window_size, implementation, segment_ids=None, factor=1.0):
    """A function like coda_jax.attention, of jax.nn's."""
    seen, keys = None, jnp.arange(key.shape[1])
    if segment_ids is not None:
        seen = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if isinstance(mask, jax.Array):
        seen = mask
    elif mask is not None:
        seen = ((mask.first[..., None] <= keys) & (keys <= mask.last[..., None]))[:, None]
    pad = key.shape[-1] - value.shape[-1]
    padded = jnp.pad(value, ((0, 0),) * 3 + ((0, pad),))
    options = {"is_causal": is_causal, "local_window_size": local_window_size}
    y = jax.nn.dot_product_attention(query, key, padded, mask=seen, **options)
    return factor * y[..., : value.shape[-1]]


def peer_of(factor):
    """A peer outside of XLA, of cases with documents, whose gradients are wrong by a factor."""

    def prepare(case, arrays):
        if case.mean is None:
            return None
        form = attention_forms.public("xla")
        attend = form.function(case)
        run = jax.jit(attention_forms.with_gradients(attend) if len(arrays) == 4 else lambda *of: (attend(*of),))

        def call():
            y, *gradients = run(*arrays, *form.extras(case))
            return (y, *(factor * x for x in gradients))

        return peers.PreparedAttention(call, lambda results: results, 2**20)

    return peers.AttentionPeer("other", "other 1.2", "its mask", prepare, lambda: None)


def rows_in(folder, kind):
    with (folder / f"cpu_attention_{kind}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run of the command with these peers and this function in the place of coda_jax.attention."""

    def main(*options, beside=(), function=plain):
        monkeypatch.setattr(coda, "attention", function, raising=False)
        monkeypatch.setattr(coda, "Intervals", Intervals, raising=False)
        monkeypatch.setattr(peers, "available", lambda modules, load: list(beside))
        return attention.main([*OPTIONS, f"--out={tmp_path}", *options])

    return main


def test_a_run(run, tmp_path, capsys):
    """Every variant is compared with float32 in both passes; a wrong peer is told and not timed."""
    assert run("--cases=^documents", beside=[peer_of(1.5)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cpu_attention_documents.csv"}
    rows = rows_in(tmp_path, "documents")
    assert [(row["pass"], row["variant"]) for row in rows] == [
        (which, name)
        for which in ("forward", "both")
        for name in ("coda", "coda_intervals", "coda_mask", "xla", "other")
    ]
    case = attention_cases.TINY[1]
    for row in rows:
        assert row["case"] == case.name and row["text"] == case.text and int(row["pairs"]) == case.pairs
        is_wrong = (row["pass"], row["variant"]) == ("both", "other")
        assert bool(row["failure"]) == is_wrong and bool(row["ms"]) != is_wrong
        if not is_wrong:
            assert float(row["tflops"]) == pytest.approx(
                case.flops(row["pass"] == "both") / float(row["ms"]) / 1e9, rel=1e-6
            )
        assert 0 < float(row["y"]) < attention.TOLERANCE and bool(row["dq"]) == (row["pass"] == "both")
    wrong = rows[-1]
    assert wrong["failure"].startswith("wrong: dq differs by 0.5") and float(wrong["temporaries_mib"]) == 1
    assert "wrong: dq differs by 0.5" in capsys.readouterr().out


def test_ours_is_wrong(run, tmp_path):
    """The run goes on, says so by its status, and times the others."""
    assert run("--cases=^causal", function=functools.partial(plain, factor=1.1)) == 1
    found = {(row["pass"], row["variant"]): row for row in rows_in(tmp_path, "causal")}
    for which in ("forward", "both"):
        assert "wrong: y differs by 0.1" in found[which, "coda"]["failure"] and not found[which, "coda"]["ms"]
        assert float(found[which, "xla"]["ms"]) > 0


def test_ours_cannot_be_compiled(run, tmp_path):
    def raising(*_, **__):
        raise NotImplementedError("heads of 16")

    assert run("--cases=^causal", function=raising) == 1
    found = {row["variant"]: row for row in rows_in(tmp_path, "causal")}
    assert found["coda"]["failure"] == "NotImplementedError: heads of 16" and float(found["xla"]["ms"]) > 0


def test_alone(run, tmp_path, monkeypatch):
    """With a counter of joules each variant also has a time by itself."""

    def in_turn(calls, counter, seconds):
        return {name: alone.Execution(2.0, seconds) for name in calls}

    monkeypatch.setattr(alone, "in_turn", in_turn)
    monkeypatch.setattr(alone, "device_counter", lambda: lambda: 0.0)
    assert run("--cases=^length", "--variants=coda", "--alone=0.5") == 0
    rows = rows_in(tmp_path, "length")
    assert [(row["variant"], row["alone_ms"], row["alone_joules"]) for row in rows] == [("coda", "500.0", "2.0")] * 2


def test_kernels_that_the_trace_does_not_tell_apart(run, tmp_path, monkeypatch):
    """A library outside of XLA whose kernels cannot be counted is told; the others are timed without it."""
    interleaved = timing.interleaved

    def miscounted(calls, seconds):
        if any(isinstance(call, timing.Outside) for call in calls.values()):
            raise RuntimeError("other: 7 kernels in the trace for 4 executions")
        return interleaved(calls, seconds=seconds)

    monkeypatch.setattr(timing, "interleaved", miscounted)
    assert run("--cases=^documents", "--variants=coda,other", beside=[peer_of(1.0)]) == 0
    found = {(row["pass"], row["variant"]): row for row in rows_in(tmp_path, "documents")}
    for which in ("forward", "both"):
        assert float(found[which, "coda"]["ms"]) > 0 and not found[which, "coda"]["failure"]
        assert "7 kernels in the trace" in found[which, "other"]["failure"] and not found[which, "other"]["ms"]


def test_the_library_itself(tmp_path):
    """Every small case by coda_jax.attention as it is."""
    if not hasattr(coda, "attention"):
        pytest.skip("coda_jax has no attention")
    assert attention.main([*OPTIONS, f"--out={tmp_path}", "--peers="]) == 0
    for case in attention_cases.TINY:
        rows = [row for row in rows_in(tmp_path, case.kind) if row["case"] == case.name]
        ours = {"coda", "coda_intervals", "coda_mask"} if case.mean else {"coda"}
        assert {row["variant"] for row in rows} == ours | {"xla"} and all(float(row["ms"]) > 0 for row in rows)


def test_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.available(peers.ATTENTION_MODULES, "load_attention") == []
    assert "peer torch_attention: absent, torch is not installed" in capsys.readouterr().out


def test_explain(run, tmp_path, capsys):
    assert run("--explain") == 0 and not list(tmp_path.iterdir())
    shown = capsys.readouterr().out
    case = attention_cases.TINY[1]
    assert f"{case.name}: {case.text}" in shown and f"{case.share:.4f} of the causal pairs" in shown
    assert f"row 1: documents of {', '.join(map(str, case.documents[1]))}" in shown


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--cases=nothing", "--cases: no name has it; the cases are causal_tiny"),
        ("--cases=[", "'\\[' is no regular expression"),
        ("--variants=flash", "--variants: flash is none of coda, coda_intervals, coda_mask, xla"),
        ("--alone=-1", "--alone must not be negative"),
        ("--seconds=0", "--seconds must be positive: 0.0, 0.0"),
    ],
)
def test_options(run, capsys, option, message):
    with pytest.raises(SystemExit) as raised:
        run(option)
    assert message.replace("\\", "") in f"{raised.value} {capsys.readouterr().err}"


def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        attention.main([])
    assert "the kernels run on NVIDIA Hopper GPUs, and JAX has none" in capsys.readouterr().err


def test_the_table():
    def row(variant, which, ms, **more):
        sizes = {"case": "documents_d64", "text": "2 x 8192, causal", "share": "0.21087"}
        about = {"pass": which, "variant": variant, "ms": ms, "tflops": "", "alone_ms": "", "temporaries_mib": "0.25"}
        errors = {"y": "0.0021", "dq": "0.0034", "dk": "0.0029", "dv": ""} if which == "both" else {"y": "0.0020"}
        return sizes | about | {"failure": "", "includes": ""} | errors | more

    rows = [
        row("cudnn", "forward", "2.5", tflops="46.2"),
        row("coda", "forward", "0.361", tflops="319.9"),
        row("torch_flex", "forward", "", failure="RuntimeError: no compiler", temporaries_mib=""),
        row("cudnn", "both", "8.6", tflops="47.1", includes="documents as a mask"),
        row("coda", "both", "1.49", tflops="271.6"),
    ]
    shown = attention_tables.attention(rows).splitlines()
    head, _, *lines = [line for line in shown if line.startswith("|")]
    assert "| forward, ms | forward, TFLOP/s | with gradients, ms | with gradients, TFLOP/s |" in head
    assert lines == [
        "| 2 x 8192, causal | 0.211 | `coda_jax.attention` | 0.361 | 320 | 1.490 | 272 | 0 | 0.0034 |",
        "|  |  | cuDNN by `jax.nn.dot_product_attention` | 2.500 | 46 | 8.600 | 47 | 0 | 0.0034 |",
        "|  |  | torch, FlexAttention | failed |  |  |  |  |  |",
    ]
    assert "2 x 8192, causal, torch, FlexAttention failed: RuntimeError: no compiler" in shown
    assert "cuDNN by `jax.nn.dot_product_attention`: documents as a mask." in shown
    by_itself = attention_tables.attention([one | {"alone_ms": "0.7"} if one["ms"] else one for one in rows])
    assert (
        "| 0.361 | 320 | 0.700 | 1.490 | 272 | 0.700 | 0 |" in by_itself
        and "| failed |  |  |  |  |  |  |  |" in by_itself
    )
