"""Tunix's GRPO before and after the diff of docs/adopting.md: `python -m benchmarks.lab.tunix_logprobs`

Tunix takes log-probabilities by `tunix.rl.common.compute_per_token_logps`, from all logits of a model. The diff gives
that function `coda_jax.token_logprobs` instead. It is applied to a copy of the installed Tunix. Both copies then run
Tunix's own Llama 3, tied and not, in bfloat16: log-probabilities at a temperature, and Tunix's own `grpo_loss_fn` with
clipped ratios and a KL term. Four bounds are checked, and a bound that is missed fails the command:

* The diff changes at most 20 lines.
* Log-probabilities and their entropy are no further from Tunix's in float32 than Tunix's in bfloat16 are.
* The gradients of what the head takes, the features and its kernel, differ from Tunix's by at most 1 %, as Euclidean
  norms. The layers below turn other roundings of one cotangent into 2 %, and in bfloat16 Tunix's own are 3 % off: there
  no parameter's gradient may be further from float32's than Tunix's by 1 %.
* XLA's analysis finds no more temporaries, at the sizes of Llama 3.2 1B. For that programs are only compiled. With
  fewer tokens, as `--rows 1`, the bound for log-probabilities alone is missed: a chunk of logits is then no less than
  all of them.

A CPU is enough. Tunix is no dependency of this library, so it is installed apart. Of what Tunix requires, the second
line has what these functions import:

    python3 -m venv build/tunix
    build/tunix/bin/pip install -e . huggingface_hub humanize jaxtyping 'safetensors<0.8'
    build/tunix/bin/pip install --no-deps google-tunix==0.1.7
    JAX_PLATFORMS=cpu build/tunix/bin/python -m benchmarks.lab.tunix_logprobs
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VERSION = "0.1.7"
PAGE = Path(__file__).parents[2] / "docs" / "adopting.md"
MOST_LINES, MOST_DIFFERENCE = 20, 0.01
PAD, END = 0, 1
FEATURES = "final_norm.zeros"  # see Probed
GRPO = SimpleNamespace(
    beta=0.04,
    epsilon=0.2,
    kl_clamp_value=None,
    kl_loss_mode="low_var_kl",
    loss_agg_mode="sequence-mean-token-mean",
    loss_algo="grpo",
    temperature=0.9,
)
SMALL = {"num_layers": 2, "vocab_size": 4096, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
SMALL |= {"num_kv_heads": 2, "rope_theta": 500_000, "norm_eps": 1e-5}


class Tunix(NamedTuple):
    """Modules of one copy."""

    common: ModuleType
    algo_core: ModuleType
    llama: ModuleType


class Shape(NamedTuple):
    """The shape of the training data: so many rows, each of a prompt and an answer of so many tokens."""

    rows: int
    prompt: int
    answer: int


def diff_of_page() -> str:
    """The diff of Tunix's own files in docs/adopting.md."""
    found = re.search(r"^```diff\n(--- a/tunix/.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE}: no diff that begins with '--- a/tunix/'")
    return found[1]


def changed_lines(diff: str) -> int:
    """How many lines a diff changes: a line replaced is one, and so is one added or removed."""
    signs = (" " if line.startswith(("+++", "---")) else line[:1] for line in diff.splitlines())
    runs = (list(run) for is_change, run in itertools.groupby(signs, lambda sign: sign in ("+", "-")) if is_change)
    return sum(max(run.count("+"), run.count("-")) for run in runs)


def copy_of_tunix(folder: Path, diff: str | None = None) -> Tunix:
    """Copies the installed Tunix into a folder, applies the diff, and imports what is used here."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or spec.origin is None or importlib.metadata.version("google-tunix") != VERSION:
        raise SystemExit(f"google-tunix=={VERSION} is not installed; the module's docstring says how")
    shutil.copytree(Path(spec.origin).parent, folder / "tunix", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tunix" / "__init__.py").write_text("")  # it imports all trainers, and with them all that Tunix requires
    if diff is not None:
        subprocess.run(["patch", "--strip=1", "--fuzz=0", "--silent"], cwd=folder, input=diff, text=True, check=True)
    sys.path.insert(0, str(folder))
    try:
        return Tunix(
            *map(importlib.import_module, ("tunix.rl.common", "tunix.rl.algo_core", "tunix.models.llama3.model"))
        )
    finally:  # the next copy has the same names
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "tunix"]:
            del sys.modules[name]


class Probed(nnx.Module):
    """A norm with zeros added to its result: their gradient is the result's."""

    def __init__(self, norm: nnx.Module, shape: tuple[int, ...]):
        self.norm = norm
        self.zeros = nnx.Param(jnp.zeros(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x) + self.zeros[...]


def abstract_model(tunix: Tunix, config: Any, probed: Shape | None = None) -> tuple[Any, Any]:
    """The graph of a Llama 3 and the shapes of its parameters, bfloat16. Probed, it has zeros added to the features."""

    def make() -> Any:
        model = tunix.llama.Llama3(config, rngs=nnx.Rngs(0))
        if probed is not None:
            model.final_norm = Probed(model.final_norm, (probed.rows, probed.prompt + probed.answer, config.embed_dim))
        return model

    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state)


def name_of(path: Any) -> str:
    """As `layers.0.attn.q_proj.w`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def parameters(state: Any, width: int) -> Any:
    """Normal, of a variance that keeps products of activations near 1. Norms have 1, and the zeros stay zeros."""
    rng = np.random.default_rng(0)

    def array(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if name_of(path) == FEATURES:
            return jnp.zeros(leaf.shape, leaf.dtype)
        is_norm = len(leaf.shape) == 1
        return jnp.asarray(np.ones(leaf.shape) if is_norm else rng.normal(size=leaf.shape) / width**0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(array, state)


def logprobs_of(tunix: Tunix, graph: Any) -> Callable[..., Any]:
    """Log-probabilities of the answers, by Tunix's function."""
    options = {"pad_id": PAD, "eos_id": END, "temperature": GRPO.temperature}
    return lambda state, example: tunix.common.compute_per_token_logps(
        graph, state, example.prompt_ids, example.completion_ids, **options
    )


def gradients_of(tunix: Tunix, graph: Any) -> Callable[..., Any]:
    """Tunix's GRPO: the loss and what it reports beside it, and the gradients of all parameters."""

    def loss(state: Any, example: Any) -> Any:
        return tunix.algo_core.grpo_loss_fn(nnx.merge(graph, state), example, GRPO, PAD, END)

    return jax.value_and_grad(loss, has_aux=True)


def example_of(tunix: Tunix, shape: Shape, vocabulary: int, logprobs: Any = None) -> Any:
    """Prompts padded to the left, answers to the right. Of the old probabilities a quarter makes ratios clip."""
    rng = np.random.default_rng(1)
    rows = np.arange(shape.rows)[:, None]
    prompt = rng.integers(2, vocabulary, (shape.rows, shape.prompt))
    answer = rng.integers(2, vocabulary, (shape.rows, shape.answer))
    prompt[np.arange(shape.prompt) < rows % 4] = PAD
    kept = np.arange(shape.answer) < shape.answer - 3 * (rows % 4)
    logprobs = np.zeros(answer.shape) if logprobs is None else np.asarray(logprobs)
    moved = np.where(rng.random(answer.shape) < 0.25, 0.5, 0.05) * rng.choice([-1, 1], answer.shape)
    return tunix.common.TrainExample(
        prompt_ids=jnp.asarray(prompt),
        prompt_mask=jnp.asarray(prompt != PAD),
        completion_ids=jnp.asarray(np.where(kept, answer, PAD)),
        completion_mask=jnp.asarray(kept, jnp.int32),
        advantages=jnp.asarray(rng.normal(size=shape.rows), jnp.float32),
        ref_per_token_logps=jnp.asarray(logprobs + rng.normal(scale=0.1, size=answer.shape), jnp.float32),
        old_per_token_logps=jnp.asarray(logprobs + moved, jnp.float32),
    )


def difference(a: Any, b: Any) -> float:
    """|a - b| / |b|."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class Table:
    """Prints rows as they come, and remembers whether a bound was missed."""

    def __init__(self) -> None:
        self.missed = False
        print(f"{'':75s}{'ours':>8s}{'bound':>8s}")

    def row(self, name: str, ours: float, bound: float, form: str = ".3%") -> None:
        missed = not ours <= bound
        self.missed |= missed
        print(f"  {name:73s}{ours:8{form}}{bound:8{form}}{'  missed' if missed else ''}", flush=True)


def compare(table: Table, theirs: Tunix, ours: Tunix, tied: bool) -> None:
    """Values and gradients of a small model."""
    config = theirs.llama.ModelConfig(**SMALL, weight_tying=tied)
    shape = Shape(rows=8, prompt=16, answer=48)
    state = parameters(abstract_model(theirs, config, shape)[1], config.embed_dim)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state)
    example = example_of(theirs, shape, config.vocab_size)
    values: dict[str, dict[str, Any]] = {}
    gradients: dict[str, dict[str, Any]] = {}
    for whose, tunix, arrays in (("float32", theirs, exact), ("theirs", theirs, state), ("ours", ours, state)):
        graph, _ = abstract_model(tunix, config, shape)
        logprobs = jax.jit(logprobs_of(tunix, graph))(arrays, example)
        if whose == "float32":
            example = example_of(theirs, shape, config.vocab_size, logprobs)
        (_, reported), found = jax.jit(gradients_of(tunix, graph))(arrays, example)
        values[whose] = {"log-probabilities": logprobs, "mean entropy": reported["entropy"]}
        gradients[whose] = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    clipped = float(reported["pg_clipfrac"])
    print(f"{'a tied head' if tied else 'a head of its own'}; {clipped:.0%} of the ratios are clipped")
    for name in values["float32"]:
        errors = [difference(values[whose][name], values["float32"][name]) for whose in ("ours", "theirs")]
        table.row(f"{name}, from float32; Tunix's", *errors)
    apart, further, off = {}, {}, []
    for name, reference in gradients["float32"].items():
        of_ours, of_theirs = gradients["ours"][name], gradients["theirs"][name]
        apart[name] = difference(of_ours, of_theirs)
        off.append((difference(of_ours, reference), difference(of_theirs, reference)))
        further[name] = off[-1][0] - off[-1][1]
    table.row("gradient of the features, from Tunix's", apart.pop(FEATURES), MOST_DIFFERENCE)
    if not tied:
        table.row("gradient of the head, from Tunix's", apart["lm_head.w"], MOST_DIFFERENCE)
    del further[FEATURES]
    name = max(further, key=lambda name: further[name])
    table.row(f"gradients, further from float32 than Tunix's; {name}", further[name], MOST_DIFFERENCE)
    name = max(apart, key=lambda name: apart[name])
    ours_off, theirs_off = map(max, zip(*off, strict=True))
    print(f"  {len(apart)} gradients, from Tunix's: {min(apart.values()):.2%} to {apart[name]:.2%}, {name}")
    print(f"  from float32, at most: ours {ours_off:.2%}, Tunix's {theirs_off:.2%}")


def temporaries(tunix: Tunix, shape: Shape) -> list[float]:
    """GiB, of log-probabilities and of GRPO with its gradients. Nothing is run."""
    config = tunix.llama.ModelConfig.llama3p2_1b()
    config = dataclasses.replace(config, remat_config=tunix.llama.RematConfig.DECODER)
    graph, state = abstract_model(tunix, config)
    example = jax.eval_shape(lambda: example_of(tunix, shape, config.vocab_size))
    sizes = []
    for program in (logprobs_of(tunix, graph), gradients_of(tunix, graph)):
        analysis: Any = jax.jit(program).lower(state, example).compile().memory_analysis()
        sizes.append(analysis.temp_size_in_bytes / 2**30)
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2, help="for the temporaries")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt there")
    parser.add_argument("--answer", type=int, default=1536, help="tokens of each answer there")
    shape = Shape(**vars(parser.parse_args()))
    diff = diff_of_page()
    with tempfile.TemporaryDirectory() as folder:
        theirs = copy_of_tunix(Path(folder) / "theirs")
        ours = copy_of_tunix(Path(folder) / "ours", diff)
    print(f"google-tunix {VERSION}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    table = Table()
    table.row("lines the diff changes", changed_lines(diff), MOST_LINES, "d")
    for tied in (False, True):
        compare(table, theirs, ours, tied)
    sizes = [temporaries(tunix, shape) for tunix in (theirs, ours)]
    print(f"Llama 3.2 1B, {shape.rows} x ({shape.prompt} + {shape.answer}) tokens")
    for name, of_theirs, of_ours in zip(("log-probabilities", "GRPO with its gradients"), *sizes, strict=True):
        table.row(f"{name}: temporaries in GiB; Tunix's", of_ours, of_theirs, ".2f")
    return int(table.missed)


if __name__ == "__main__":
    sys.exit(main())
