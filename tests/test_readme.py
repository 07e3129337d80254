"""The README's code runs as printed, on smaller arrays; its links, and those of the other documents, lead somewhere."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import coda_jax as coda
from flax_layers.checkpoints import hf_families

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
EPILOGUE, OPERATORS, MODEL, PARALLEL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_epilogue():
    """As it stands: it defines all that it uses."""
    names = {}
    exec(EPILOGUE, names)
    assert names["y"].shape == (512, 1024) and names["largest"].shape == (512,)
    assert jnp.allclose(names["y"], 256) and jnp.allclose(names["largest"], 256)


def test_operators():
    names = {"coda": coda}
    exec(OPERATORS, names)
    x, scale, w_gate_up, w_down = (
        jax.random.normal(jax.random.key(i), shape, jnp.float32)
        for i, shape in enumerate([(4, 8), (8,), (8, 32), (16, 8)])
    )
    gate, up = jnp.split(x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale @ w_gate_up, 2, axis=1)
    expected = x + jax.nn.silu(gate) * up @ w_down
    assert jnp.allclose(names["feed_forward"](x, scale, w_gate_up, w_down), expected, atol=1e-4)


def test_table_of_operators():
    """Every operator that it names is there, in the file that it names."""
    rows = re.findall(r"^\| (`\w+\(.*) \| .* \| (`.*`) \|$", TEXT, re.MULTILINE)
    assert len(rows) > 5
    for operators, files in rows:
        for name in re.findall(r"`(\w+)\(", operators):
            assert hasattr(coda, name)
        for file in re.findall(r"`(.*?)`", files):
            assert (Path(coda.__file__).parent / file).exists(), file


def test_first_screen():
    """Two sentences, the example, a picture, the commands."""
    prose, _, rest = TEXT.partition("```python\n")
    assert len(re.findall(r"[.:]\s", prose)) == 2
    after = rest.partition("```\n")[2].split("\n\n")
    assert [part.strip()[:4] for part in after[:2]] == ["![pr", "make"]
    assert "make train" in after[1] and "make test" in after[1]


def test_few_numbers():
    """The README has the numbers that decide, and no more: in text, tables and code, without names as H100 or GPT-2."""
    read = re.sub(r"\]\([^)]*\)", "]", TEXT)
    assert len(re.findall(r"(?<![\w.])(?<!\w-)\d+(?:\.\d+)*(?:e-\d+)?(?!\w)", read)) <= 40


def test_checkpoints_that_load():
    (row,) = re.findall(r"^\| Hugging Face \| (.*?):", TEXT, re.MULTILINE)
    assert {name.lower().replace("-", "") for name in row.split(", ")} == {
        name.replace("_", "") for name in hf_families.FAMILIES
    }


SMALL = MODEL.replace("512", "32").replace("1408", "48").replace("=8", "=2")


@pytest.mark.smoke
def test_flax_model_trains():
    names = {}
    exec(SMALL, names)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 256)
    losses = [float(names["step"](names["model"], names["optimizer"], tokens)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert_updated_in_place(names["step"], names["model"], names["optimizer"], tokens)


def assert_updated_in_place(step, model, optimizer, *data):
    """The results lie where the donated parameters and states did: a step holds them once."""
    state = sum(x.nbytes for x in jax.tree.leaves([nnx.state(model), nnx.state(optimizer)]))
    memory = step.lower(model, optimizer, *data).compile().memory_analysis()
    assert memory.alias_size_in_bytes == state > 0.9 * memory.output_size_in_bytes


@pytest.mark.slow
def test_parallel_training_is_the_same():
    """Four steps with parameters cut over all devices, and on one."""
    one, several = {}, {}
    for names in (one, several):
        exec(SMALL.replace("jnp.bfloat16", "jnp.float32"), names)
    tokens = jax.random.randint(jax.random.key(0), (2 * jax.device_count(), 9), 0, 256)
    several["tokens"] = tokens
    exec(PARALLEL.replace("jnp.bfloat16", "jnp.float32"), several)
    kernel = several["model"].layers[0].mlp.down.kernel[...]
    assert kernel.addressable_shards[0].data.size * jax.device_count() == kernel.size > 1
    mu = several["optimizer"].opt_state[0].mu["layers"][0]["mlp"]["down"]["kernel"][...]
    assert mu.sharding == kernel.sharding
    assert jnp.allclose(several["loss"], one["step"](one["model"], one["optimizer"], tokens), rtol=1e-5)
    placed = jax.device_put(tokens, several["lie"])
    for _ in range(3):
        expected = one["step"](one["model"], one["optimizer"], tokens)
        with jax.set_mesh(several["mesh"]):
            got = several["step"](several["model"], several["optimizer"], placed)
        assert jnp.allclose(got, expected, rtol=1e-5)


def anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.skipif(not (ROOT / "AGENTS.md").exists(), reason="the documents are not beside these tests")
def test_links():
    """The links of README, AGENTS, the report and docs lead to files and headings that exist."""
    files = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "REPORT.md", *(ROOT / "docs").rglob("*.md")]
    for file in files:
        text = file.read_text()
        links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[.+\]: (\S+)$", text, re.MULTILINE)
        for link in links:
            path, _, heading = link.partition("#")
            if "://" in path:
                continue
            target = file.parent / path if path else file
            assert target.exists(), f"{file.name}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
            assert not heading or heading in map(anchor, headings), f"{file.name}: {link}"


@pytest.mark.skipif(not (ROOT / "AGENTS.md").exists(), reason="the documents are not beside these tests")
@pytest.mark.parametrize("name, most", [("README.md", 150), ("AGENTS.md", 120)])
def test_length(name, most):
    """They are read in one sitting; what is longer belongs into docs."""
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= most
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
