"""The examples, at sizes that take seconds: each does what its docstring says."""

import ast
import collections
import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SHORT = (
    *("custom_epilogue", "finetune", "fsdp", "fuse_your_model", "grpo", "lora", "new_architecture", "packing"),
    "profile_step",
)
MODELS = ("bert", "vit")
OPTIONAL = ("matplotlib", "optax", "orbax", "rich", "safetensors")


def example(name):
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / f"{name}.py"))
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("name", [*SHORT, *MODELS])
def test_it_is_short_and_says_how_to_run_it(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= (185 if name in MODELS else 100)
    assert f"python examples/{name}.py" in text.split('"""')[1]


def optional_packages(path):
    """The optional packages of this program and of the files that it imports.

    Folders of Hugging Face and of PEFT need safetensors.
    """
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in froms}
    found = {name.partition(".")[0] for name in modules} & {*OPTIONAL}
    if any(re.fullmatch("(load|save)_(hf|peft)_folder", alias.name) for node in froms for alias in node.names):
        found.add("safetensors")
    beside = [FOLDER / f"{name}.py" for name in modules]
    return found.union(*(optional_packages(other) for other in beside if other.exists()))


@pytest.mark.parametrize("name", [*SHORT, *MODELS, "train_lm"])
def test_missing_packages_are_named_before_imports(name, monkeypatch):
    """Before any import that takes a while; the page names the same packages."""
    path, page = FOLDER / f"{name}.py", FOLDER.parent / "docs" / "examples.md"
    packages = optional_packages(path)
    if page.exists():
        (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| [{name}.py]"))
        assert set(row.split("|")[3].strip().split(", ")) == (packages or {"nothing"})
    monkeypatch.setitem(sys.modules, "jax", None)  # to import it is an error
    for package in packages:
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(SystemExit, match=rf"^{name}.py needs {package}: .*pip install \"\.\[train,hf\]\""):
                runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("name", [*SHORT, *MODELS, "train_lm"])
def test_help_runs_nothing(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py [-h]")


@pytest.mark.slow
def test_custom_epilogue(capsys):
    example("custom_epilogue")["main"]()
    assert "this ran" in capsys.readouterr().out


@pytest.mark.slow
def test_finetune(tmp_path):
    """From a folder that it made; the trained folder is read again and answers."""
    assert example("finetune")["main"](None, tmp_path, 200) > 0.9
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "trained").iterdir()}


@pytest.mark.slow
def test_fsdp():
    losses, alone = example("fsdp")["main"](4)
    assert jax.device_count() > 1
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_fuse_your_model():
    """The fused steps are the plain ones, and all products are kernels: attention's are those of `coda.attention`."""
    plain, fused, report = example("fuse_your_model")["main"](20)
    np.testing.assert_allclose(fused, plain, rtol=0.02)
    assert fused[-1] < 0.5 * fused[0]
    assert not [one for one in report.products if one.reason]
    assert report.fused.totals.passes_bytes < 0.6 * report.plain.totals.passes_bytes


@pytest.mark.slow
def test_grpo():
    means = example("grpo")["main"](12)
    assert means[0] < 0.7 and means[-1] > 0.9


@pytest.mark.slow
def test_new_architecture():
    losses, explanation = example("new_architecture")["main"](30)
    assert losses[-1] < losses[0] / 2
    assert explanation.kernels == sum(explanation.products.values()) > 20  # all of them


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "factor"), [("bert", 60, 0.9), ("vit", 40, 0.8)])
def test_models_that_look_both_ways(name, steps, factor):
    """XLA has a layer's two norms, forward and backward, and the sums over rows of q's, k's and v's cotangents."""
    losses, found = example(name)["main"](steps)
    assert sum(losses[-5:]) < factor * sum(losses[:5])
    assert found.kernels == sum(found.products.values()) > 24 and not found.notes  # all of them, 12 a layer
    rows = {"bert": 32 * 32, "vit": 32 * 17}[name]
    left = {"forward": collections.Counter(), "backward": collections.Counter()}
    for plan, count in found.blocks.items():
        for one in re.findall(rf"^ *XLA +(.*?) \({rows}, .*$", plan, re.M):
            left[plan.splitlines()[0].rpartition(" ")[2]][one] += count
    if name == "bert":  # its embeddings have a norm too, and its last layer's is one of the tokens that the loss reads
        assert left["forward"] == {"bias+residual": 1, "layer norm+bias": 4}
    else:
        assert left["forward"] == {"layer norm+bias": 4}
    left["backward"].pop("layer norm+bias", None)  # made again
    assert left["backward"] == {"add": 4, "bias backward": 6}  # a layer: 2 of norms, 3 of q, k and v


@pytest.mark.slow
def test_packing():
    packed, padded = example("packing")["main"]()
    np.testing.assert_allclose(packed, padded, rtol=1e-5)


def test_packing_puts_each_document_into_a_row():
    pack = example("packing")["pack"]
    documents = [np.full(n, n, np.int32) for n in (2, 3, 5, 6, 9, 2)]
    tokens, segment_ids = pack(documents, 9)
    assert tokens.shape == segment_ids.shape == (3, 10)  # 27 tokens in 30 places
    for document in documents:
        assert (tokens == len(document)).sum() == sum(len(d) for d in documents if len(d) == len(document))
    with pytest.raises(ValueError, match="a document of 11 tokens; rows take 2 to 10"):
        pack([np.zeros(11, np.int32)], 9)


@pytest.mark.slow
def test_profile_step(tmp_path):
    written = example("profile_step")["main"](tmp_path, width=64, layers=1, tokens=64, steps=2)
    assert any(path.name.endswith(".xplane.pb") for path in written)
