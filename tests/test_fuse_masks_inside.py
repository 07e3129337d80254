"""Masks that a model makes once, in front of loops and checkpoints: attention inside of these knows what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.attend.primitive import FORMS
from coda_jax.jaxprs.walk import equations
from coda_jax.tools.attention import in_words
from tests.attention_scores import t5_buckets
from tests.attention_spellings import normal
from tests.test_fuse import largest_error

pytestmark = pytest.mark.filterwarnings("ignore:gemm:coda_jax.FallbackWarning")
B, T, N, D, LAYERS = 2, 64, 4, 8, 3
W = N * D
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (B, T)), axis=1))
WEIGHTS = {name: normal(i, LAYERS, W, W) / W**0.5 for i, name in enumerate("qkvo")}
X = normal(9, B, T, W)


def in_layers(run, how, x, weights):
    """x behind all layers, each run(x, weights of one): in a loop, under a checkpoint, or as they are."""
    one = jax.checkpoint(run) if "checkpoint" in how else run
    if "loop" in how:
        return jax.lax.scan(lambda x, w: (one(x, w), None), x, weights)[0]
    for i in range(LAYERS):
        x = one(x, {name: w[i] for name, w in weights.items()})
    return x


def of_documents(ids):
    return (ids[:, :, None] == ids[:, None]) & jnp.tril(jnp.ones((T, T), bool))


def layer(x, w, mask, is_added, squares):
    q, k, v = ((x.reshape(B * T, W) @ w[name]).reshape(B, T, N, D) for name in "qkv")
    s = jnp.einsum("bthd,bshd->bhts", q, k)
    s = s + mask if is_added else jnp.where(mask, s, -1e9)
    p = jax.nn.softmax(s, axis=-1)
    y = jnp.einsum("bhts,bshd->bthd", jnp.square(p) if squares else p, v)
    return x + (y.reshape(B * T, W) @ w["o"]).reshape(x.shape)


def model(how, is_added=False, mask_of=of_documents, squares=False):
    """A loss of x, weights and ids."""

    def loss(x, weights, ids):
        mask = mask_of(ids)[:, None]
        mask = jnp.where(mask, 0.0, -1e9) if is_added else mask

        def run(x, w):
            return layer(x, w, mask, is_added, squares)

        return jnp.sum(jnp.sin(in_layers(run, how, x, weights)))

    return loss


def masks_in(function, *args):
    every = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return {in_words(e.params["spec"].mask) for e, _ in every if e.primitive in FORMS}


def doors(loss, count=2):
    arguments = tuple(range(count))
    return {
        "of the fused": jax.value_and_grad(coda.fuse(loss), arguments),
        "fused": coda.fuse(jax.value_and_grad(loss, arguments)),
    }


HOWS = "checkpoint", "loop", "loop of checkpoints"


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_mask_is_known_inside(how, is_added):
    loss = model(how, is_added)
    for name, door in doors(loss).items():
        if (how, name) != ("loop", "fused"):  # whose attention stands in two loops
            assert masks_in(door, X, WEIGHTS, IDS) == {"causal, ids"}


@pytest.mark.parametrize("how", HOWS)
def test_values_and_gradients(how):
    loss = model(how)
    exact = jax.value_and_grad(loss, (0, 1))(X, WEIGHTS, IDS)
    for door in doors(loss).values():
        assert largest_error(jax.jit(door)(X, WEIGHTS, IDS), exact) < 1e-5


def of_roots(ids):
    """A mask that costs something."""
    return jnp.cbrt(ids[:, :, None] * ids[:, None].astype(jnp.float32)) < 1.9


@pytest.mark.parametrize("how", HOWS)
def test_a_mask_that_costs_something_is_made_once(how):
    fused = coda.fuse(model(how, mask_of=of_roots))
    assert masks_in(fused, X, WEIGHTS, IDS) == {"a dense mask"}
    counts = [
        times for e, times in equations(jax.make_jaxpr(fused)(X, WEIGHTS, IDS).jaxpr) if e.primitive.name == "cbrt"
    ]
    assert counts == [1]


@pytest.mark.parametrize("how", HOWS)
def test_no_more_is_kept_where_attention_stays(how):
    """Squares of probabilities are no attention: the mask is an array, and no loop stacks it."""
    loss = model(how, squares=True)
    plain = coda.explain(jax.grad(loss, 1), X, WEIGHTS, IDS, platform="cuda").totals.kept_bytes
    fused = coda.explain(jax.grad(coda.fuse(loss), 1), X, WEIGHTS, IDS, platform="cuda").totals.kept_bytes
    assert masks_in(coda.fuse(loss), X, WEIGHTS, IDS) == set() and fused <= 1.01 * plain + 2**16


def test_a_loop_without_attention_makes_nothing_again():
    """Steps of a recurrence, in which a mask costs more than the rest."""

    def loss(x, w, ids):
        mask = of_documents(ids)

        def step(h, x):
            return jnp.exp(-jnp.square(x + h @ w)), jnp.sum(mask * h[:, :1, None])

        h, sums = jax.lax.scan(step, x[:, 0], x.swapaxes(0, 1))
        return jnp.sum(h) + jnp.sum(sums)

    fused = jax.make_jaxpr(coda.fuse(loss))(X, WEIGHTS["q"][0], IDS)
    compared = [times for e, times in equations(fused.jaxpr) if e.primitive.name == "eq"]
    assert compared == [1]


TABLE = normal(12, 32, N)


def t5(how, is_decoder):
    """A loss of x, weights and a table: layers of T5's, whose biases and masks are made once, as transformers does."""

    def loss(x, weights, table):
        buckets = t5_buckets(jnp.arange(T)[None] - jnp.arange(T)[:, None], not is_decoder)
        bias = jnp.take(table, buckets, axis=0).transpose(2, 0, 1)[None]
        if is_decoder:
            seen = jnp.tril(jnp.ones((B, 1, T, T), bool))
            bias = bias + jax.lax.select(seen, jnp.full(seen.shape, 0.0), jnp.full(seen.shape, -1e10))

        def run(x, w):
            q, k, v = ((x.reshape(B * T, W) @ w[name]).reshape(B, T, N, D) for name in "qkv")
            p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
            return x + (jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(B * T, W) @ w["o"]).reshape(x.shape)

        return jnp.sum(jnp.sin(in_layers(run, how, x, weights)))

    return loss


def tables_in(function, *args):
    """The numbers of tables of scores by which attention is called."""
    every = [e for e, _ in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    specs = [e.params["spec"] for e in every if e.primitive in FORMS]
    return {0 if spec.score is None else len(spec.score.tables) for spec in specs}


@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("how", ["layers", *HOWS])
def test_t5s_bias_is_a_table_inside(how, is_decoder):
    """But for layers that are differentiated already: they have the gradient of one array in common, and stay."""
    loss = t5(how, is_decoder)
    plain = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(X, WEIGHTS, TABLE)
    fused = jax.make_jaxpr(coda.fuse(loss))(X, WEIGHTS, TABLE)
    assert "exp" not in {e.primitive.name for e, _ in equations(fused.jaxpr)}
    for name, door in doors(loss, 3).items():
        if name != "fused" or "checkpoint" in how:
            assert tables_in(door, X, WEIGHTS, TABLE) == {1}, name
        assert largest_error(jax.jit(door)(X, WEIGHTS, TABLE), plain) < 2e-5, name
