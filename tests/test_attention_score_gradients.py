"""Gradients of what a score reads, from attention's backward kernel on the host: values against float64, and bits."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Fault, Kernel, Mask, Schedule, bits, check_case, common_headers, run, scored
from attention_scores import documents, ids, learned, normal, positions, t5_bias, t5_buckets

LATE_COPIES, AT_RANDOM = Schedule(1, -1, 0, 1, 0), Schedule(3, 7, 0, 0, 1)
HEADS, QUERIES, KEYS = 4, 140, 150
SIZES = {"queries": QUERIES, "keys": KEYS, "heads": HEADS, "groups": 2, "batch": 2}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return common_headers(tmp_path_factory.mktemp("attention"))


CASES = learned(2, HEADS, QUERIES, KEYS)
MADE = {name: len(operands) for name, (_, operands) in CASES.items()}


def differentiated(name, kernel, mask, **sizes):
    """The case of a name, of which the kernel makes all gradients."""
    score, operands = CASES[name]
    one = scored(kernel, mask, score, operands, differentiated=True, **SIZES | sizes)
    assert len(one.gradients) == MADE[name]
    return one


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_kinds(folder, name, head):
    check_case(differentiated(name, Kernel(head, head), Mask(70, 20)), folder, schedule=LATE_COPIES)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["slopes of heads", "tables", "everything"])
def test_splits(folder, name, dtype):
    """Heads of queries that share a head of keys, in two blocks."""
    one = differentiated(name, Kernel(dtype=dtype, split=True), Mask(right=0), groups=4, splits=2)
    check_case(one, folder, schedule=AT_RANDOM)


@pytest.mark.parametrize("name", ["slopes of heads", "cap", "rows and keys", "tables", "everything"])
def test_in_any_order(folder, name):
    check_case(differentiated(name, Kernel(deterministic=False), Mask()), folder, schedule=AT_RANDOM)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", ["slopes of heads", "gate", "tables", "table of factors", "everything"])
def test_beside_dropout_and_sinks(folder, name, head):
    kernel = Kernel(head, head, sinks=True, dropout_rate=0.3)
    check_case(differentiated(name, kernel, Mask(90, 0)), folder, schedule=LATE_COPIES)


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("name", ["slopes of heads", "tables", "everything"])
def test_documents(folder, name, head):
    """Lists of tiles; some keys are seen by none, and some rows see nothing."""
    of = np.repeat(np.arange(4), (30, 3, 77, 30))
    intervals = np.stack([np.searchsorted(of, of), np.minimum(np.arange(QUERIES), 120)])[None]
    intervals[:, :, 30:33] = np.array([KEYS, -1])[:, None]
    mask = Mask(intervals=np.broadcast_to(intervals, (2, 2, QUERIES)), exactly=False)
    one = differentiated(name, Kernel(head, head, arrays=True), mask)
    assert not one.seen.any(2).all() and not one.seen.any(3).all()
    check_case(one, folder, schedule=AT_RANDOM)


def test_beside_a_bias_and_ids(folder):
    random = np.random.default_rng(1)
    bias = random.standard_normal((2, 1, QUERIES, KEYS)).astype(np.float32)
    of = {"query_ids": random.integers(0, 3, (2, QUERIES)), "key_ids": random.integers(0, 3, (2, KEYS))}
    intervals = np.broadcast_to(np.array([[0], [KEYS - 1]]), (2, 2, QUERIES))
    kernel, mask = Kernel(arrays=True, ids=True, bias=True), Mask(intervals=intervals, bias=bias, **of)
    for name in ("everything", "tables"):
        check_case(differentiated(name, kernel, mask), folder)


@pytest.mark.parametrize("head", [64, 256])
def test_tables_of_rows_of_a_device(folder, head):
    """Distances come from an array of the rows' positions, in no step of tiles."""

    def shifted(s, table):
        distance = jnp.arange(s.shape[3]) - jnp.arange(37, 37 + s.shape[2])[:, None]
        return s + table[t5_buckets(distance)].transpose(2, 0, 1)[None]

    table = normal(6, 32, HEADS)
    one = scored(Kernel(head, head), Mask(), t5_bias, (table,), differentiated=True, first_row=37, **SIZES)
    check_case(dataclasses.replace(one, score=shifted), folder, schedule=LATE_COPIES)


def nothing_of_a_table(s, table):
    """Keys of which a query reads no entry are most, and so are tiles."""
    row, key = positions(s)
    return s + table.at[row - key].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@pytest.mark.parametrize("head", [64, 128])
def test_a_table_of_few_distances(folder, head):
    one = scored(Kernel(head, head), Mask(), nothing_of_a_table, (normal(7, 3),), differentiated=True, **SIZES)
    assert (one.entries[0][1024:] == -2).any() and (one.entries[0][1024:] == -1).any()
    check_case(one, folder, schedule=AT_RANDOM)


def hiding(of_table=False):
    """A derivative is no number for some pairs that are hidden.

    Args:
      of_table: whether the operand is a table of distances.
    """

    def score(s, of_heads, ids, key_ids, least=-jnp.inf):
        row, key = positions(s)
        root = jnp.sqrt(jnp.maximum((row - key + 1).astype(jnp.float32), least))
        distance = jnp.arange(s.shape[2])[:, None] - jnp.arange(s.shape[3])
        factor = of_heads[:, distance % 9] if of_table else of_heads[:, None, None]
        return documents(s + factor * root, ids, key_ids)

    given = normal(0, HEADS, 9) if of_table else normal(0, HEADS), ids(2, 2, QUERIES), ids(3, 2, KEYS)
    everything = np.broadcast_to(np.array([[0], [KEYS - 1]]), (2, 2, QUERIES))
    kernel, mask = Kernel(arrays=True), Mask(intervals=everything, exactly=False)
    one = scored(kernel, mask, score, given, differentiated=True, **SIZES)
    assert one.gradients and not one.seen.all()
    return dataclasses.replace(one, score=functools.partial(score, least=0))  # of the reference


@pytest.mark.parametrize("of_table", [False, True], ids=["of heads", "of a table"])
def test_a_derivative_that_is_no_number_where_a_key_is_hidden(folder, of_table):
    check_case(hiding(of_table), folder)


@pytest.mark.parametrize("name", ["everything", "tables"])
@pytest.mark.parametrize("head", [64, 256])
def test_no_schedule_changes_a_bit(folder, head, name):
    score, operands = learned(1, HEADS, 260, 260)[name]
    sizes = SIZES | {"queries": 260, "keys": 260, "batch": 1}
    one = scored(Kernel(head, head), Mask(right=0), score, operands, differentiated=True, **sizes)
    first = run(one, folder, schedule=Schedule(1, 0, 0, 0, 1))
    for schedule in (LATE_COPIES, Schedule(3, -1, 0, 1, 0), AT_RANDOM):
        for name, x in run(one, folder, schedule=schedule).items():
            np.testing.assert_array_equal(bits(x), bits(first[name]), err_msg=name)


def test_the_others_keep_their_bits(folder):
    """y, lse, dq, dk and dv with gradients of operands and without."""
    one = differentiated("everything", Kernel(), Mask(right=0))
    plain = scored(Kernel(), Mask(right=0), *CASES["everything"], **SIZES)
    assert one.gradients and not plain.gradients
    of_all = run(one, folder)
    for name, x in run(plain, folder).items():
        np.testing.assert_array_equal(bits(x), bits(of_all[name]), err_msg=name)


PLANTED = {  # a Fault in the sums, or in the kernel; a case that finds it
    "heads_share_a_sum": (
        Fault("scores", "(head * key_tiles + key_tile) * warps + warp", "key_tile * warps + warp"),
        lambda: differentiated("slopes of heads", Kernel(), Mask()),
    ),
    "a_lane_for_all": (
        Fault("scores", "own[0] = combine_lanes<Op::sum, 31>(own[0]);", ""),
        lambda: differentiated("slopes of heads", Kernel(), Mask()),
    ),
    "keys_of_a_lane": (
        Fault("scores", "own[0] = combine_lanes<Op::sum, 1 | 2>(own[0])", "own[0] = own[0]"),
        lambda: differentiated("rows and keys", Kernel(), Mask()),
    ),
    "rows_of_another_lane": (
        Fault("scores", "lane / 4 % 2 * 4 + lane / 8 % 2 * 2", "lane / 4 % 2 * 2 + lane / 8 % 2 * 4"),
        lambda: differentiated("rows", Kernel(), Mask()),
    ),
    "slope_where_nothing_is_seen": (Fault("scores", "else if (ds != 0)", "else"), hiding),
    "both_consumers_add": (
        Fault("scores", "adds && lane == 0", "lane == 0"),
        lambda: differentiated("slopes of heads", Kernel(256, 256), Mask()),
    ),
    "product_of_another_pair": (
        Fault("backward_sm90", "(g.value)][i / 2], c)", "(g.value)][i / 2], 0)"),
        lambda: differentiated("gate", Kernel(), Mask()),
    ),
    "another_key_of_a_diagonal": (
        Fault("scores", "16 * query + 4 * (query / 2)", "16 * query"),
        lambda: differentiated("T5's buckets", Kernel(), Mask()),
    ),
    "one_pair_of_a_diagonal": (
        Fault("scores", "end(j, c, before[c] + value)", "end(j, c, value)"),
        lambda: differentiated("T5's buckets", Kernel(), Mask()),
    ),
    "half_of_a_total": (
        Fault("scores", "total[0] + total[1]", "total[0]"),
        lambda: differentiated("T5's buckets", Kernel(), Mask()),
    ),
    "a_lane_is_added_twice": (
        Fault("scores", "behind &= __ballot_sync(0xFFFFFFFFu, place % 2 == 0);", ""),
        lambda: differentiated("T5's buckets", Kernel(), Mask()),
    ),
    "what_is_filled_is_an_entry": (
        Fault("scores", "own >= 0 && __ffs(of_entry)", "__ffs(of_entry)"),
        lambda: differentiated("tables", Kernel(), Mask()),
    ),
    "another_window": (
        Fault("backward_sm90", "[size + found.first / window_step]", "[size + found.first / window_step + 4]"),
        lambda: differentiated("T5's buckets", Kernel(), Mask()),
    ),
    "heads_share_the_sums_of_a_table": (
        Fault("backward_sm90", "(tile * summing_warps + warp) * entries", "warp * entries"),
        lambda: differentiated("T5's buckets", Kernel(), Mask()),
    ),
    "both_consumers_add_to_a_table": (
        Fault("backward_sm90", "is_wide && consumer > 0", "false"),
        lambda: differentiated("T5's buckets", Kernel(256, 256), Mask()),
    ),
    "slope_of_a_table_where_nothing_is_seen": (
        Fault("backward_sm90", "return ds != 0 ? ds * slopes[g] : 0;", "return ds * slopes[g];"),
        lambda: hiding(of_table=True),
    ),
    "probability_with_its_sign": (
        Fault("backward_sm90", "if constexpr (Config::has_dropout) probability = fabsf(probability);", ""),
        lambda: differentiated("everything", Kernel(dropout_rate=0.3), Mask()),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(folder, name):
    fault, case = PLANTED[name]
    message = r"gradient_\d: .* (wrong|not finite)|something wrote beside gradient|outside of shared memory"
    with pytest.raises(AssertionError, match=message):
        check_case(case(), folder, fault=fault)
