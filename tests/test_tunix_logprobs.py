"""The diff of docs/adopting.md by which Tunix takes log-probabilities and entropies from coda_jax.token_logprobs.

It is applied to a copy of Tunix from the package index. Both copies run Tunix's own Llama 3, its own
`compute_per_token_logps` and its own `grpo_loss_fn`, with clipped ratios and a KL term.
"""

import importlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.adopting import program

ROOT = Path(__file__).parents[1]
PAD, END, ROWS, PROMPT, ANSWER = 0, 1, 8, 16, 48
SIZES = {"num_layers": 2, "vocab_size": 4096, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
SIZES |= {"num_kv_heads": 2, "rope_theta": 500_000, "norm_eps": 1e-5}
GRPO = SimpleNamespace(
    beta=0.04,
    epsilon=0.2,
    kl_clamp_value=None,
    kl_loss_mode="low_var_kl",
    loss_agg_mode="sequence-mean-token-mean",
    loss_algo="grpo",
    temperature=0.9,
)
MODULES = {"common": "tunix.rl.common", "algo_core": "tunix.rl.algo_core", "llama": "tunix.models.llama3.model"}


def diff_of_page():
    page = (ROOT / "docs" / "adopting.md").read_text()
    return re.search(r"^```diff\n(--- a/tunix/.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]


def tunix():
    """A package as `fetch` and `load` of examples/adopting/run.py take it; the result has the modules used here."""
    return SimpleNamespace(**{name: importlib.import_module(module) for name, module in MODULES.items()})


tunix.requirements = ("google-tunix==0.1.7", "jaxtyping==0.3.11")
tunix.folder, tunix.emptied = "tunix", ("tunix", "tunix/rl", "tunix/models/llama3")
tunix.not_called = ("humanize", "huggingface_hub", "kagglehub", "grain", "qwix", "orbax", "tqdm", "metrax")


@pytest.fixture(scope="module")
def run():
    return program()


def test_the_diff_is_small(run):
    diff = diff_of_page()
    assert "coda.token_logprobs(" in diff and 0 < run["changed_lines"](diff) <= run["MOST_LINES"]


@pytest.fixture(scope="module")
def copies(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tunix")
    try:
        run["fetch"](tunix, diff_of_page(), folder)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        if "patch" in str(error.cmd if isinstance(error, subprocess.CalledProcessError) else error.filename):
            raise
        pytest.skip("no package index")
    return [run["load"](tunix, folder / name) for name in ("theirs", "ours")]


def example(tunix, logprobs=None):
    """Prompts padded to the left, answers to the right. Of the old probabilities a quarter makes ratios clip."""
    rng = np.random.default_rng(1)
    rows = np.arange(ROWS)[:, None]
    prompt, answer = (rng.integers(2, SIZES["vocab_size"], (ROWS, length)) for length in (PROMPT, ANSWER))
    prompt[np.arange(PROMPT) < rows % 4] = PAD
    kept = np.arange(ANSWER) < ANSWER - 3 * (rows % 4)
    logprobs = np.zeros(answer.shape) if logprobs is None else np.asarray(logprobs)
    moved = np.where(rng.random(answer.shape) < 0.25, 0.5, 0.05) * rng.choice([-1, 1], answer.shape)
    return tunix.common.TrainExample(
        prompt_ids=jnp.asarray(prompt),
        prompt_mask=jnp.asarray(prompt != PAD),
        completion_ids=jnp.asarray(np.where(kept, answer, PAD)),
        completion_mask=jnp.asarray(kept, jnp.int32),
        advantages=jnp.asarray(rng.normal(size=ROWS), jnp.float32),
        ref_per_token_logps=jnp.asarray(logprobs + rng.normal(scale=0.1, size=answer.shape), jnp.float32),
        old_per_token_logps=jnp.asarray(logprobs + moved, jnp.float32),
    )


def results(tunix, tied, dtype, logprobs=None):
    """Log-probabilities, the mean entropy, the clipped fraction, and GRPO's gradients, in this dtype."""
    rng = np.random.default_rng(0)

    def array(leaf):
        x = np.ones(leaf.shape) if len(leaf.shape) == 1 else rng.normal(size=leaf.shape) / SIZES["embed_dim"] ** 0.5
        return jnp.asarray(x, jnp.bfloat16).astype(dtype)

    config = tunix.llama.ModelConfig(**SIZES, weight_tying=tied)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: tunix.llama.Llama3(config, rngs=nnx.Rngs(0))))
    state, given = jax.tree.map(array, shapes), example(tunix, logprobs)

    def of_answers(state):
        arguments = (graph, state, given.prompt_ids, given.completion_ids)
        return tunix.common.compute_per_token_logps(*arguments, pad_id=PAD, eos_id=END, temperature=GRPO.temperature)

    def loss(state):
        return tunix.algo_core.grpo_loss_fn(nnx.merge(graph, state), given, GRPO, PAD, END)

    (_, reported), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    flat = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(gradients)}
    return {"log-probabilities": jax.jit(of_answers)(state), **reported}, flat


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_values_and_gradients(run, copies, tied):
    """No value is further from float32's than Tunix's, no gradient by 1 %; the head's is within 1 % of Tunix's."""
    theirs, ours = copies
    distance = lambda a, b: run["distance"](np.asarray(a, np.float64), np.asarray(b, np.float64))  # noqa: E731
    logprobs = results(theirs, tied, jnp.float32)[0]["log-probabilities"]
    exact, one, other = (
        results(tunix, tied, dtype, logprobs)
        for tunix, dtype in ((theirs, jnp.float32), (theirs, jnp.bfloat16), (ours, jnp.bfloat16))
    )
    assert 0.05 < float(exact[0]["pg_clipfrac"]) < 0.5
    for name in ("log-probabilities", "entropy"):
        assert distance(other[0][name], exact[0][name]) <= distance(one[0][name], exact[0][name])
    assert one[1].keys() == other[1].keys() and len(one[1]) > 10
    for name, gradient in exact[1].items():
        assert distance(other[1][name], gradient) <= distance(one[1][name], gradient) + 0.01, name
    if not tied:
        (head,) = (name for name in exact[1] if "lm_head" in name)
        assert distance(other[1][head], one[1][head]) <= 0.01
