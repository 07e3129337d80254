"""Score functions in attention's kernels on the host: values and gradients against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Fault, Kernel, Mask, Schedule, check_case, check_spoiled, common_headers, scored
from attention_scores import (
    alibi_of_slopes,
    causal,
    documents,
    gate,
    ids,
    normal,
    of_ids,
    positions,
    soft_cap,
    t5_bias,
)

LATE_COPIES, AT_RANDOM = Schedule(1, -1, 0, 1, 0), Schedule(3, 7, 0, 0, 1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return common_headers(tmp_path_factory.mktemp("attention"))


def of_rows_keys_and_pairs(s, of_rows, of_keys, of_pairs):
    return s * jnp.tanh(of_rows) + of_keys + of_pairs


def rooted(s):
    """Its derivative is infinite at 0, where keys beyond the end are."""
    return jnp.sqrt(jnp.abs(s))


SIZES = {"queries": 140, "keys": 150, "heads": 2, "batch": 2}
SCORES = {
    "soft cap": (soft_cap, ()),
    "ALiBi": (alibi_of_slopes, (np.array([0.1, 0.02], np.float32),)),
    "causal": (causal, ()),
    "rows, keys and pairs": (
        of_rows_keys_and_pairs,
        (normal(0, 2, 2, 140, 1), normal(1, 2, 1, 150).astype(jnp.bfloat16), normal(2, 140, 150)),
    ),
    "rooted": (rooted, ()),
    "T5's buckets": (t5_bias, (normal(6, 32, 2),)),
    "table of ids, filled": (of_ids, (normal(7, 2, 14), ids(8, 2, 140), ids(9, 2, 150))),
}


def everything(batch=2):
    return np.broadcast_to(np.array([[0], [SIZES["keys"] - 1]]), (batch, 2, SIZES["queries"]))


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("name", SCORES)
def test_scores(folder, name, head):
    score, operands = SCORES[name]
    check_case(scored(Kernel(head, head), Mask(), score, operands, **SIZES), folder, schedule=LATE_COPIES)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", ["soft cap", "ALiBi", "causal", "rows, keys and pairs"])
def test_a_score_beside_dropout_and_sinks(folder, name, head):
    """Slopes are 1, or of either sign."""
    score, operands = SCORES[name]
    kernel = Kernel(head, head, sinks=True, dropout_rate=0.3)
    check_case(scored(kernel, Mask(), score, operands, **SIZES), folder, schedule=LATE_COPIES)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_score_beside_a_band_and_groups_of_heads(folder, dtype):
    kernel = Kernel(dtype=dtype, split=True)
    sizes = SIZES | {"heads": 4, "groups": 4, "splits": 2}
    one = scored(kernel, Mask(70, 0), gate, (normal(3, 4),), **sizes)
    check_case(one, folder, schedule=AT_RANDOM)


@pytest.mark.parametrize("name", ["soft cap", "ALiBi"])
def test_a_score_beside_a_bias_and_ids(folder, name):
    score, operands = SCORES[name]
    random = np.random.default_rng(1)
    bias = random.standard_normal((2, 1, 140, 150)).astype(np.float32)
    bias[random.random(bias.shape) < 0.1] = -np.inf
    of = {"query_ids": random.integers(0, 3, (2, 140)), "key_ids": random.integers(0, 3, (2, 150))}
    mask = Mask(intervals=everything(), bias=bias, **of)
    check_case(scored(Kernel(arrays=True, ids=True, bias=True), mask, score, operands, **SIZES), folder)


@pytest.mark.parametrize("exactly", [True, False], ids=["exactly", "loosely"])
@pytest.mark.parametrize("head", [64, 128])
def test_a_score_that_hides(folder, head, exactly):
    """Tiles are listed; some rows see nothing."""
    given = ids(2, 2, 140), ids(3, 2, 150)
    mask = Mask(intervals=everything(), exactly=exactly)
    one = scored(Kernel(head, head, arrays=True), mask, documents, given, **SIZES)
    assert not one.seen.any(-1).all()
    check_case(one, folder, schedule=AT_RANDOM)


def test_a_score_that_hides_by_a_low_number(folder):
    """Rows with nothing but such scores have seen nothing."""

    def low(s):
        row, key = positions(s)
        return jnp.where((row > 70) & (row - key < 90), 2 * s, -1e30)

    check_case(scored(Kernel(), Mask(), low, (), **SIZES), folder)


@pytest.mark.parametrize("score", [documents, lambda s, *x: documents(soft_cap(s), *x)], ids=["itself", "capped"])
def test_documents_by_score_confine_nan_and_infinity(folder, score):
    """Documents by the score, and nothing else that hides."""
    of = np.repeat(np.arange(6), (30, 3, 40, 25, 35, 17))[None].astype(np.int32)
    mask = Mask(intervals=np.broadcast_to(np.array([[0], [149]]), (1, 2, 150)))
    one = scored(Kernel(arrays=True), mask, score, (of, of), queries=150, keys=150, heads=2)
    spoils = {"k": [(31, np.nan)], "v": [(40, np.nan), (140, -np.inf)], "q": [(32, np.inf)], "dy": [(100, np.nan)]}
    check_spoiled(one, folder, spoils, schedule=AT_RANDOM)


WRONG = r": .* (wrong|not finite)"
PLANTED = {  # a Fault; the case that finds it
    "score_of_unscaled": (
        *("forward_sm90", "s[4 * j + i] * p.scale, row, key, words);", "s[4 * j + i], row, key, words);"),
        *("soft cap", "y" + WRONG),
    ),
    "slope_left_out": (
        *("backward_sm90", "probability[c] * slope;", "probability[c];"),
        *("soft cap", "dq" + WRONG),
    ),
    "slope_where_nothing_is_seen": (
        *("backward_sm90", "Score::unit_slope || probability[c] == 0 ?", "Score::unit_slope ?"),
        *("rooted", "d." + WRONG),
    ),
    "operand_of_another_row": (
        *("scores", "min(query, p.queries - 1)", "min(query + 1, p.queries - 1)"),
        *("rows, keys and pairs", "y" + WRONG),
    ),
    "table_of_another_head": (
        *("scores", "if constexpr (of.heads) before = before * p.heads + head;", ""),
        *("T5's buckets", "y" + WRONG),
    ),
    "entry_beyond_the_table": (
        *("scores", "min(max(index, 0), of.entries - 1)", "min(max(index, 0), of.entries - 2)"),
        *("table of ids, filled", "y" + WRONG),
    ),
    "hidden_product_has_a_score": (
        *("backward_sm90", "!Score::keeps_hidden &&", "false &&"),
        *("rooted", "d." + WRONG),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(folder, name):
    *fault, which, message = PLANTED[name]
    score, operands = SCORES[which]
    with pytest.raises(AssertionError, match=message):
        check_case(scored(Kernel(), Mask(70, 20), score, operands, **SIZES), folder, fault=Fault(*fault))
