"""Attention's kernels themselves on the host (tests/emulated_sm90), forward and backward, against float64.

Copies and products are early or late, and the threads' turns are in several orders, or some warps have none while
others can go on: what is right in all of these does not hang on who is faster.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    EPILOGUES,
    UNBOUNDED,
    Fault,
    Kernel,
    Mask,
    Schedule,
    bits,
    case,
    check_case,
    check_spoiled,
    common_headers,
    results_of,
    run,
    run_with_results,
)

NAN, INF = float("nan"), float("inf")
CAUSAL = Mask(right=0)
# Copies as late as products are early, and the other way around; one CTA at a time, and three.
LATE_COPIES, LATE_PRODUCTS = Schedule(1, -1, 0, 1, 0), Schedule(1, 0, 0, 0, 1)
TOGETHER, AT_RANDOM = Schedule(3, -1, 0, 1, 0), Schedule(3, 7, 0, 0, 1)
BOTH = pytest.mark.parametrize("schedule", [LATE_COPIES, AT_RANDOM], ids=["late_copies", "late_products"])


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return common_headers(tmp_path_factory.mktemp("attention"))


def documents(*lengths, causal=True):
    """Intervals (1, 2, queries) of documents in a row."""
    ends = np.cumsum(lengths)
    first = np.repeat(ends - lengths, lengths)
    last = np.arange(ends[-1]) if causal else np.repeat(ends - 1, lengths)
    return np.stack([first, last])[None]


def whole(queries, keys, batch=1):
    return np.broadcast_to(np.array([[0], [keys - 1]]), (batch, 2, queries))


@pytest.mark.smoke
def test_no_schedule_changes_a_bit(folder):
    one = case(Kernel(), CAUSAL, queries=320, heads=2)
    check_case(one, folder, schedule=LATE_PRODUCTS)
    first = run(one, folder, schedule=LATE_PRODUCTS)
    for schedule in (LATE_COPIES, TOGETHER, AT_RANDOM):
        for name, x in run(one, folder, schedule=schedule).items():
            np.testing.assert_array_equal(bits(x), bits(first[name]), err_msg=name)


@pytest.mark.parametrize(
    "head, value_head, left, right, queries, keys",
    [
        (64, 64, 70, 0, 330, 330),
        (64, 64, UNBOUNDED, UNBOUNDED, 100, 290),
        (64, 64, 40, 60, 290, 150),
        (64, 64, UNBOUNDED, 150, 140, 290),
        (64, 64, 20, -10, 200, 140),  # the first ten rows, and those after 160, see nothing
        (40, 24, UNBOUNDED, 0, 150, 150),
        (80, 80, 100, 0, 200, 200),
        (128, 128, UNBOUNDED, 0, 270, 270),
        (192, 128, UNBOUNDED, 0, 150, 150),
        (256, 256, 90, 0, 210, 210),
    ],
)
@BOTH
def test_bands(folder, head, value_head, left, right, queries, keys, schedule):
    check_case(case(Kernel(head, value_head), Mask(left, right), 1, queries, keys), folder, schedule=schedule)


@pytest.mark.parametrize("head, lengths", [(64, (30, 3, 267, 100)), (128, (130, 150)), (256, (64, 128, 10))])
@pytest.mark.parametrize("exactly", [True, False], ids=["exactly", "loosely"])
@BOTH
def test_documents(folder, head, lengths, exactly, schedule):
    mask = Mask(intervals=documents(*lengths, causal=False), exactly=exactly)
    check_case(case(Kernel(head, head, arrays=True), mask, queries=sum(lengths)), folder, schedule=schedule)


@BOTH
def test_ids_in_any_order(folder, schedule):
    random = np.random.default_rng(1)
    ids = {"query_ids": random.integers(0, 4, (2, 300)), "key_ids": random.integers(0, 3, (2, 170))}
    kernel, mask = Kernel(arrays=True, ids=True, dtype="f16"), Mask(intervals=whole(300, 170, 2), **ids)
    check_case(case(kernel, mask, 2, 300, 170), folder, schedule=schedule)


@BOTH
def test_second_intervals(folder, schedule):
    """A prefix beside documents, for some rows nothing."""
    intervals = np.concatenate([documents(140, 160), documents(300)], axis=1)
    intervals[:, 2:] = np.array([0, 9])[:, None]
    intervals[:, :, 40:50] = np.array([300, -1, 300, -1])[:, None]
    kernel = Kernel(arrays=True, second=True)
    check_case(case(kernel, Mask(intervals=intervals), queries=300), folder, schedule=schedule)


@pytest.mark.parametrize("keys", [170, 171])  # in pairs, and one by one
@BOTH
def test_dense_mask_and_bias(folder, schedule, keys):
    random = np.random.default_rng(1)
    dense = random.random((1, 2, 200, keys)) < 0.3
    dense[:, :, 40:44] = False
    bias = random.standard_normal((2, 1, 200, keys)).astype(np.float32)
    bias[random.random(bias.shape) < 0.1] = -INF
    kernel, mask = (
        Kernel(arrays=True, dense=True, bias=True, even_rows=keys % 2 == 0),
        Mask(intervals=whole(200, keys, 2), dense=dense, bias=bias),
    )
    check_case(case(kernel, mask, 2, 200, keys, heads=2), folder, schedule=schedule)


@BOTH
def test_one_row_or_column_of_a_mask_is_of_all(folder, schedule):
    random = np.random.default_rng(2)
    dense, bias = random.random((2, 1, 1, 150)) < 0.7, random.standard_normal((1, 2, 140, 1)).astype(np.float32)
    kernel, mask = (
        Kernel(arrays=True, dense=True, bias=True),
        Mask(intervals=whole(140, 150, 2), dense=dense, bias=bias),
    )
    check_case(case(kernel, mask, 2, 140, 150, heads=2), folder, schedule=schedule)


@pytest.mark.parametrize("deterministic", [True, False], ids=["in_order", "in_any_order"])
@BOTH
def test_heads_of_queries_share_keys(folder, deterministic, schedule):
    kernel = Kernel(128, 128, deterministic=deterministic)
    check_case(case(kernel, CAUSAL, 1, 200, heads=4, groups=2), folder, schedule=schedule)


@BOTH
def test_splits(folder, schedule):
    one = case(Kernel(split=True, dtype="f16"), CAUSAL, 2, 150, heads=4, groups=4, splits=2)
    check_case(one, folder, schedule=schedule)


@pytest.mark.parametrize("queries, keys", [(2200, 30), (30, 2200)])
def test_more_tiles_than_a_word_has_bits(folder, queries, keys):
    intervals = whole(queries, keys).copy()
    i = np.arange(queries)
    intervals[0, 0] = np.clip(i * 40, 0, keys - 1) if queries < keys else i % 7
    intervals[0, 1] = np.clip(intervals[0, 0] + 700, 0, keys - 1)
    one = case(Kernel(256, 256, arrays=True), Mask(intervals=intervals), 1, queries, keys)
    check_case(one, folder, schedule=LATE_PRODUCTS)


def low_scores():
    """Scores about -128: exp2 of what is left of a score of 0, that of keys beyond the end, is not finite."""
    one = case(Kernel(), Mask(), 1, 128, 150)
    one.q[...] = one.q * 0.1 + 4
    one.k[...] = one.k * 0.1 - 4
    return one


def test_keys_beyond_the_end(folder):
    check_case(low_scores(), folder)


# ---- values that are not finite

LENGTHS = (60, 3, 80, 50, 70, 37)
SPOILS = {
    "k": [(61, NAN), (150, INF)],
    "v": [(70, NAN), (270, -INF)],
    "q": [(62, INF), (147, NAN)],
    "dy": [(141, NAN), (280, INF)],
    "dlse": [(142, NAN), (290, INF)],
}


@pytest.mark.parametrize("which", ["all", *SPOILS])
@pytest.mark.parametrize("head, causal", [(64, True), (128, False), (256, True)])
def test_nan_and_infinity_stay_in_their_document(folder, head, causal, which):
    mask = Mask(intervals=documents(*LENGTHS, causal=causal))
    one = case(Kernel(head, head, arrays=True), mask, queries=300, heads=2, groups=2)
    check_spoiled(one, folder, SPOILS if which == "all" else {which: SPOILS[which]}, schedule=AT_RANDOM)


@pytest.mark.parametrize("exactly", [True, False], ids=["exactly", "loosely"])
def test_nan_and_infinity_stay_in_documents_in_any_order(folder, exactly):
    order = np.random.default_rng(5).permutation(300)
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None, order]
    spoils = {name: [(int(np.argmax(order == row)), value) for row, value in rows] for name, rows in SPOILS.items()}
    mask = Mask(intervals=whole(300, 300), query_ids=ids, key_ids=ids, exactly=exactly)
    check_spoiled(case(Kernel(arrays=True, ids=True, dtype="f16"), mask, queries=300), folder, spoils)


def in_a_whole_tile():
    """A document with tiles that are seen entirely, beside one that shares a tile of theirs."""
    return case(Kernel(arrays=True), Mask(intervals=documents(20, 420, causal=False)), queries=440)


@pytest.mark.parametrize("name", SPOILS)
def test_whole_tiles_keep_nan_and_infinity_in_their_document(folder, name):
    check_spoiled(in_a_whole_tile(), folder, {name: [(200, NAN), (390, INF)]})


# ---- schedules

CLEANERS, TURNS, PRODUCER = 0b1100, 0b10, 0b1


def one_long_document():
    """A run of tiles that are seen entirely, for which nobody waits for the cleaners."""
    return case(Kernel(arrays=True), Mask(intervals=documents(20, 700, causal=False)), queries=720)


@pytest.mark.parametrize("starved", [CLEANERS, TURNS, PRODUCER, 0x20, 0xF0, 0xF00])
def test_no_warp_is_fast_enough_by_chance(folder, starved):
    check_case(one_long_document(), folder, schedule=Schedule(3, 0, starved, 0, 1))


# ---- results beside y


def as_bytes(x):
    return np.ascontiguousarray(x).view(np.uint8)


def check_results(one, folder, schedule=LATE_PRODUCTS, fault=None):
    """Stores and maxima are bit for bit those of XLA, from y as it is stored, which is given back where it is kept."""
    scalars = [np.float32(x) for x in (37.0, 0.5)[: EPILOGUES[one.kernel.results][1]]]
    y, _, stores, maxima = run_with_results(one, folder, scalars, schedule, fault)
    of_y = run(one.without_results, folder)["y"] if y is None else y
    results = results_of(one.kernel.results, of_y.shape[0] * of_y.shape[1], of_y.shape[2] * of_y.shape[3])
    expected, count = results.by_xla(jnp.asarray(of_y), scalars), len(stores)
    for i, (x, want) in enumerate(zip(stores, expected[:count], strict=True)):
        np.testing.assert_array_equal(as_bytes(x), as_bytes(np.asarray(want)), err_msg=f"store {i}")
    np.testing.assert_array_equal(maxima, np.asarray(expected[count:]), err_msg="maxima")
    return y


def copied(**options):
    return case(Kernel(results="copies_in_8_bits", **options), CAUSAL, batch=2, queries=208, heads=2)


@pytest.mark.smoke
def test_copies_in_8_bits_are_made_with_y_and_without_it(folder):
    y = check_results(copied(), folder)
    np.testing.assert_array_equal(bits(y), bits(run(copied().without_results, folder)["y"]))
    assert check_results(copied(keeps_y=False), folder, AT_RANDOM) is None


@pytest.mark.parametrize(
    "head, value_head, queries, results",
    [
        (64, 64, 400, "in_many_dtypes"),
        (40, 24, 160, "copies_in_8_bits"),
        (128, 128, 272, "copies_in_8_bits"),
        (256, 256, 144, "in_many_dtypes"),
    ],
)
def test_results_of_widths(folder, head, value_head, queries, results):
    kernel = Kernel(head, value_head, results=results, dtype="f16" if value_head == 128 else "bf16")
    check_results(case(kernel, Mask(90, 0), batch=2, queries=queries, heads=2), folder, AT_RANDOM)


def test_results_of_documents_and_of_rows_that_see_nothing(folder):
    """A row that sees nothing has 0, whatever its neighbours have."""
    intervals = documents(70, 130, 200)
    intervals[:, :, 40:50] = np.array([400, -1])[:, None]
    kernel = Kernel(arrays=True, results="copies_in_8_bits")
    y = check_results(case(kernel, Mask(intervals=intervals), queries=400), folder)
    assert not np.asarray(y)[:, 40:50].any()


# ---- planted faults


def windowed():
    return case(Kernel(), Mask(70, 0), queries=320)


def longer():
    return case(Kernel(), Mask(300, 0), queries=520, heads=2)


def wide():
    return case(Kernel(256, 256, arrays=True), Mask(intervals=documents(210, causal=False)), queries=210)


def with_documents():
    return case(Kernel(arrays=True), Mask(intervals=documents(*LENGTHS, causal=False)), queries=300)


def with_a_sink():
    return case(Kernel(sinks=True), CAUSAL, queries=200, heads=3)


def dropping():
    return case(Kernel(dropout_rate=0.3), CAUSAL, queries=320)


def dropping_documents():
    mask = Mask(intervals=documents(*LENGTHS, causal=False))
    return case(Kernel(arrays=True, dropout_rate=0.5), mask, queries=300)


WRONG = r": .* (wrong|not finite)"
PLANTED_IN_RESULTS = {  # a Fault, what it gives
    "columns_of_another_lane": ("from = lane % 4 * 8 + lane / 8;", "from = lane % 4 * 8 + lane / 4;", "store 1"),
    "rows_of_another_quad": ("words[2], words[3], 0x5410)", "words[2], words[3], 0x7632)", "store 0"),
    "a_maximum_of_rows_beyond_the_end": ("< width && row_of(place, r) < place.rows;", "< width;", "maxima"),
    "another_sequence": (
        "head) * width + of_column) * batches + batch",
        "head) * width + of_column) * batches",
        "store 1",
    ),
}


@pytest.mark.parametrize("name", PLANTED_IN_RESULTS)
def test_a_fault_in_results_is_found(folder, name):
    right, wrong, what = PLANTED_IN_RESULTS[name]
    one = copied()
    if what == "maxima":  # rows beyond the end see nothing and have 0, all others have less
        one = case(Kernel(results="in_many_dtypes"), Mask(0, 0), batch=2, queries=208, heads=2)
        one = dataclasses.replace(one, v=-abs(one.v) - 1)
        check_results(one, folder)
    with pytest.raises(AssertionError, match=what):
        check_results(one, folder, fault=Fault("results", right, wrong))


PLANTED = {  # a Fault; the case that finds it, in which schedule, how
    "forward_band": (
        *(
            "forward_sm90",
            "query - p.left, min(query + p.right,",
            "query - p.left, min(query + p.right + 1,",
        ),
        *(windowed, LATE_COPIES, "y" + WRONG),
    ),
    "forward_keys_beyond_the_end": (
        *("forward_sm90", "min(query + p.right, p.keys - 1), 0, 0", "query + p.right, 0, 0"),
        *(low_scores, LATE_COPIES, "y" + WRONG),
    ),
    "forward_values_not_awaited": (
        *("forward_sm90", "        v_ring.wait_full(at);\n        sums(", "        sums("),
        *(longer, LATE_COPIES, "more arrives|ends before its copies"),
    ),
    "forward_values_given_back_early": (
        "forward_sm90",
        "wgmma::wait<0>();\n        wgmma::keep_behind_wait(o);\n        warp_arrive(v_ring.empty(at.slot));",
        "warp_arrive(v_ring.empty(at.slot));\n        wgmma::wait<0>();",
        *(longer, LATE_PRODUCTS, "y" + WRONG),
    ),
    "forward_sums_not_rescaled": (
        *("forward_sm90", "o[i] *= factor[i / 2 % 2]", "o[i] *= factor[0]"),
        *(windowed, LATE_COPIES, "y" + WRONG),
    ),
    "first_whole_tile_of_a_band": (
        *("masks", "(max(0, last_row - before) + size - 1) / size", "max(0, last_row - before) / size"),
        *(longer, LATE_COPIES, "y" + WRONG),
    ),
    "forward_cleaners_left_behind": (
        *("forward_sm90", "4 * consumers + (has_arrays ? 2 : 0)", "4 * consumers"),
        *(one_long_document, Schedule(1, 0, CLEANERS, 0, 1), "nothing goes on"),
    ),
    "forward_marks_of_a_use_before": (
        *("forward_sm90", "v_ring.wait_full(at);  // until the cleaners", "// until the cleaners"),
        *(one_long_document, Schedule(3, 0, CLEANERS, 0, 1), "y" + WRONG),
    ),
    "backward_swizzle": (
        *("backward_sm90", "((j % 8 * 16 + store_column) ^ store_swizzle)", "(j % 8 * 16 + store_column)"),
        *(windowed, LATE_COPIES, "dq" + WRONG),
    ),
    "backward_keys_beyond_the_end": (
        *("backward_sm90", "tiles.is_partial() || key + keys > p.keys", "tiles.is_partial()"),
        *(low_scores, LATE_COPIES, "dq" + WRONG),
    ),
    "backward_expected_bytes": (
        *("backward_sm90", "expect(full, loaded_bytes)", "expect(full, loaded_bytes - vector_bytes)"),
        *(windowed, LATE_PRODUCTS, "more arrives at an mbarrier"),
    ),
    "backward_dp_not_awaited": (
        *("backward_sm90", "wgmma::wait<1>();  // dp^T", "// dp^T"),
        *(windowed, LATE_PRODUCTS, "d." + WRONG),
    ),
    "backward_ds_in_one_buffer": (
        *("backward_sm90", "if constexpr (!is_wide) buffer ^= ds_bytes;", ""),
        *(windowed, Schedule(1, 0, 0xF00, 0, 1), "dq" + WRONG),
    ),
    "backward_wide_ds_overwritten": (
        *("backward_sm90", "if constexpr (is_wide) ptx::named_barrier_sync(ds_ready + consumer, 128);", ""),
        *(wide, Schedule(1, 0, 0x20, 0, 1), "dq" + WRONG),
    ),
    "turns_not_awaited": (
        *("backward_sm90", "ptx::load_acquire(p.turns + turn) != before", "ptx::load_acquire(p.turns + turn) < 0"),
        *(longer, Schedule(3, -1, 0, 0, 1), "turns|dq" + WRONG),
    ),
    "turns_not_passed_on": (
        *("backward_sm90", "now.tile() + 1);", "now.tile());"),
        *(windowed, TOGETHER, "nothing goes on"),
    ),
    "finish_half": (
        *("passes", "(queries == 128 ? 64 * half : 0)", "0"),
        *(windowed, LATE_COPIES, "dq" + WRONG),
    ),
    "cotangent_of_lse": (
        *("passes", "- p.dlse[of_head", "+ p.dlse[of_head"),
        *(windowed, LATE_COPIES, "d." + WRONG),
    ),
    "sinks_of_another_head": (
        *("forward_sm90", "p.mask.sinks[work.batch * p.heads + work.head]", "p.mask.sinks[work.batch * p.heads]"),
        *(with_a_sink, LATE_COPIES, "y" + WRONG),
    ),
    "sums_without_their_sinks_part": (
        *("forward_sm90", "one = factor == 0 ? 0 : one * factor;", "one *= 1;"),
        *(with_a_sink, LATE_COPIES, "y" + WRONG),
    ),
    "forward_columns_of_dropout": (
        *("forward_sm90", "i % 2 == 0 ? column_bits.x : column_bits.y", "column_bits.x"),
        *(dropping, LATE_COPIES, "y" + WRONG),
    ),
    "backward_rows_of_dropout": (
        *("backward_sm90", "(row_bits[i % 2], column_bits[i / 2])", "(row_bits[0], column_bits[i / 2])"),
        *(dropping, LATE_COPIES, "d." + WRONG),
    ),
    "backward_dropped_by_values": (
        *("backward_sm90", "? -delta : fmaf", "? 0 : fmaf"),
        *(dropping, LATE_COPIES, "d." + WRONG),
    ),
    "backward_kept_overwritten": (
        *("backward_sm90", "dw[words], kept[words];", "dw[words], (&kept)[words] = dw;"),
        *(dropping, LATE_PRODUCTS, "dv" + WRONG),
    ),
    "dropped_and_not_seen": (
        *("forward_sm90", "Config::has_dropout ? 0x7FFF : 0xFFFF", "0xFFFF"),
        *(dropping_documents, LATE_COPIES, "another document has changed"),
    ),
    "infinity_is_finite": (
        *("masks", "0x00800080u", "0x00400040u"),
        *(with_documents, LATE_COPIES, "another document has changed"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(folder, name):
    *fault, make, schedule, message = PLANTED[name]
    options = {"schedule": schedule, "fault": Fault(*fault)}
    with pytest.raises(AssertionError, match=message):
        if make in (with_documents, dropping_documents):
            check_spoiled(make(), folder, SPOILS, **options)
        else:
            check_case(make(), folder, **options)


# ---- sinks and dropout

WITH_SINKS = {
    "band": (Kernel(sinks=True), Mask(20, -10), (1, 200, 140)),  # some rows see nothing
    "wide": (Kernel(128, 128, sinks=True, dtype="f16"), CAUSAL, (2, 150, 150)),
    "documents": (Kernel(arrays=True, sinks=True), Mask(intervals=documents(30, 3, 267)), (1, 300, 300)),
}


@pytest.mark.parametrize("name", WITH_SINKS)
@BOTH
def test_sinks(folder, name, schedule):
    kernel, mask, sizes = WITH_SINKS[name]
    one = case(kernel, mask, *sizes, heads=4)
    one.sinks[:, :3] = [-INF, 30, -40]  # of no weight, of nearly all, and of nearly none
    check_case(one, folder, schedule=schedule)


def test_rows_that_see_nothing_have_their_sinks(folder):
    one = case(Kernel(sinks=True), Mask(20, -10), 1, 200, 140, heads=2)
    one.v[...] = NAN
    got = run(one, folder)
    sees = one.seen[0, 0].any(-1)
    assert (~sees).any() and not got["y"][0, ~sees].any()
    np.testing.assert_allclose(got["lse"][0][:, ~sees], np.repeat(one.sinks[0][:, None], (~sees).sum(), 1), rtol=1e-6)


WITH_DROPOUT = {
    "narrow": (Kernel(dropout_rate=0.3), CAUSAL, (1, 330, 330)),
    "wide": (Kernel(128, 128, dropout_rate=0.1, dtype="f16"), Mask(70, 20), (2, 150, 170)),
    "widest": (Kernel(256, 256, dropout_rate=0.5, sinks=True), CAUSAL, (1, 150, 150)),
    "documents": (Kernel(arrays=True, dropout_rate=0.2), Mask(intervals=documents(30, 3, 267)), (2, 300, 300)),
    "a mask and a bias": (
        Kernel(arrays=True, dense=True, bias=True, sinks=True, dropout_rate=0.4),
        Mask(
            intervals=whole(140, 150),
            dense=np.random.default_rng(2).random((1, 1, 140, 150)) < 0.7,
            bias=np.random.default_rng(3).standard_normal((1, 2, 140, 150)),
        ),
        (1, 140, 150),
    ),
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
@BOTH
def test_dropout(folder, name, schedule):
    kernel, mask, sizes = WITH_DROPOUT[name]
    check_case(case(kernel, mask, *sizes, heads=2, groups=2), folder, schedule=schedule)


def test_dropout_in_splits(folder):
    kernel = Kernel(split=True, dropout_rate=0.25, arrays=True, ids=True)
    ids = np.random.default_rng(1).integers(0, 3, (2, 150))
    mask = Mask(intervals=whole(150, 150, 2), query_ids=ids, key_ids=ids)
    check_case(case(kernel, mask, 2, 150, heads=4, groups=4, splits=2), folder)


@pytest.mark.parametrize("which", ["all", *SPOILS])
@pytest.mark.parametrize("head", [64, 128])
def test_dropout_keeps_nan_and_infinity_in_their_document(folder, head, which):
    """It reaches all that see it, dropped or not."""
    mask = Mask(intervals=documents(*LENGTHS, causal=False))
    one = case(Kernel(head, head, arrays=True, sinks=True, dropout_rate=0.5), mask, queries=300, heads=2, groups=2)
    check_spoiled(one, folder, SPOILS if which == "all" else {which: SPOILS[which]}, schedule=AT_RANDOM)
