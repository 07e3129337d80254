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
FUSED, EPILOGUE, MODEL, PARALLEL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def arrays(**shapes):
    normal = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    return {name: x.astype(jnp.bfloat16) for name, x in normal.items()}


def test_fused():
    """It has plain JAX's gradients, and all its products are kernels, forward and backward."""
    names = {}
    exec(FUSED, names)
    w = arrays(up=(32, 64), bias=(64,), down=(64, 32))
    x = arrays(x=(2, 8, 32))["x"]
    for found, expected in zip(
        *(jax.tree.leaves(f(w, x)) for f in (names["gradients"], jax.grad(names["loss"]))), strict=True
    ):
        found, expected = (a.astype(jnp.float32) for a in (found, expected))
        assert jnp.linalg.norm(found - expected) < 0.02 * jnp.linalg.norm(expected)
    explained = coda.explain(names["gradients"], w, x, platform="cuda")
    assert (explained.kernels, explained.others) == (5, 0)


def test_epilogue():
    names = {"coda": coda, "jax": jax, "jnp": jnp} | arrays(x=(32, 64), w=(64, 128), bias=(128,))
    exec(EPILOGUE, names)
    expected = jax.nn.gelu(jnp.dot(names["x"], names["w"], preferred_element_type=jnp.float32) + names["bias"])
    assert jnp.allclose(names["y"].astype(jnp.float32), expected, rtol=0.01, atol=0.01)
    assert jnp.allclose(names["largest"], expected.max(axis=1), rtol=1e-3)


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
