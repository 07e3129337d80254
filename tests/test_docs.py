"""The builders of the documentation: pages as notebooks, docstrings as reStructuredText, the table of operators."""

import ast
import csv
import fnmatch
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
if not (ROOT / "docs").exists():
    pytest.skip("the documents are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT / "docs"))

from tools import api, device_outputs, docstrings, expected, links, made, operators, pages, worth  # noqa: E402

from tests.test_readme import assert_updated_in_place  # noqa: E402

PAGE = """# A page

<!-- run
hidden = 1
-->

```python
print(hidden)
```

<!-- run: remove-input -->
```python
drawn = 2
```

```py
not_run()
```

[report](../benchmarks/REPORT.md#training-step) <!-- no marker -->

<!-- made: twice x -->
"""


def test_python_blocks_become_cells():
    notebook = pages.to_notebook(PAGE, "page", {"twice": lambda x: x * 2})
    assert notebook.startswith(pages.FRONT)
    cells = re.findall(r"```{code-cell} python\n(:tags: \[(.*?)\])?\n(.*?)```", notebook, re.DOTALL)
    assert [(tags, code) for _, tags, code in cells] == [
        ("remove-cell", "hidden = 1\n"),
        ("", "print(hidden)\n"),
        ("remove-input", "drawn = 2\n"),
    ]
    assert pages.blocks_of(PAGE) == ["hidden = 1\n", "print(hidden)\n", "drawn = 2\n"]
    assert "```py\nnot_run()" in notebook and "\nxx\n" in notebook
    assert "](benchmarks.md#training-step)" in notebook


def test_a_page_without_blocks_is_no_notebook():
    assert pages.to_notebook("# A page\n\n```py\nx\n```\n") == "# A page\n\n```py\nx\n```\n"


def test_text_between_markers_is_made_anew(monkeypatch):
    """A page says the same on a code host and on the site; a marker without an end is for the site alone."""
    monkeypatch.setitem(made.MADE, "twice", lambda x: x * 2)
    old = "<!-- made: twice a -->\n<!-- made: twice b -->\nold\n\nolder\n<!-- end of made -->\nafter\n"
    new = "<!-- made: twice a -->\n<!-- made: twice b -->\n\nbb\n\n<!-- end of made -->\nafter\n"
    assert made.rewritten(old) == made.rewritten(new) == new
    assert pages.to_notebook(new, "page", made.MADE) == "aa\nbb\nafter\n"


def test_made_parts_of_pages_are_up_to_date():
    """Else: `PYTHONPATH=docs python -m tools.made`."""
    assert [path.name for path in made.stale()] == []


def test_a_document_of_another_folder_keeps_its_links():
    text = pages.document("benchmarks/REPORT.md", shift=0)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert len(links) > 10
    assert all((ROOT / "docs" / link).exists() for link in links)


def test_every_page_is_in_the_index_and_has_blocks_that_compile():
    listed = re.findall(r"^(?:[\w -]+<)?([\w/*]+)>?$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    for path in (ROOT / "docs").glob("*.md"):
        is_listed = any(fnmatch.fnmatch(path.stem, pattern) for pattern in ["index", *listed])
        assert is_listed, f"{path.name} is in no toctree"
        for code in pages.blocks_of(path.read_text()):
            compile(code, path.name, "exec")


def test_every_training_step_donates_its_state():
    """Else XLA holds parameters and the optimizer's states twice, and copies what is frozen."""
    texts = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        texts |= {f"{path.name} {i}": code for i, code in enumerate(pages.blocks_of(path.read_text()))}
    jitted = [
        (name, [ast.unparse(one) for one in node.decorator_list], ast.unparse(node))
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    steps = [(name, decorators) for name, decorators, code in jitted if "optimizer.update(model" in code]
    assert len(steps) >= 11
    for name, decorators in steps:
        assert decorators == ["nnx.jit(donate_argnames=('model', 'optimizer'))"], name


@pytest.mark.slow
def test_the_step_with_adapters_updates_its_state_in_place():
    """The step of the page on fine-tuning updates its state in place, with the frozen base in it."""
    names = {}
    training, *_ = pages.blocks_of((ROOT / "docs" / "finetune.md").read_text())
    exec(training, names)
    data = (names["tokens"], names["labels"])
    assert_updated_in_place(names["step"], names["model"], names["optimizer"], *data)


def test_the_index_begins_with_the_example_of_the_readme():
    index, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    assert pages.blocks_of(index) == pages.blocks_of(readme)[:1]


def test_lab_notes_stand_in_no_sidebar_but_their_list_does():
    notes = sorted((ROOT / "docs" / "measurements").glob("*.md"))
    listed = (ROOT / "docs" / "measurements" / "README.md").read_text()
    for path in notes:
        is_list = path.name == "README.md"
        text = pages.to_notebook(path.read_text(), f"measurements/{path.stem}")
        assert text.startswith(pages.ORPHAN) != is_list
        assert is_list or f"({path.name})" in listed
    assert "<measurements/README>" in (ROOT / "docs" / "index.md").read_text()


def test_docstrings_become_rst():
    rst = docstrings.to_rst(
        ["f(x) * y, of `x`s.", "", "    z = x * y", "", "Of `a", "name`.", "", "Args:", "  x: (M, N) * 2.", "    more"]
    )
    assert rst == [
        r"f(x) \* y, of ``x``\ s.", "", "", "::", "", "    z = x * y", "", "Of ``a", "name``.", "", "Args:",
        r"  x: (M, N) \* 2.", "    more",
    ]  # fmt: skip


def test_a_colon_in_a_property_is_no_type():
    """Napoleon takes what is in front of one in the first line for the property's type."""
    lines = {what: ["GiB on a device: parameters."] for what in ("property", "method")}
    for what, of in lines.items():
        docstrings.process(None, what, "name", None, None, of)
    assert lines == {"property": ["GiB on a device\\", ": parameters."], "method": ["GiB on a device: parameters."]}


def test_steps_under_fsdp_stand_beside_the_plain_ones_that_keep_as_much():
    table = worth.sharded()
    cells = [[cell.strip() for cell in row.split("|")[1:5]] for row in table.splitlines() if row.startswith("| 1B")]
    ms = {step: float(of) for _, step, of, _ in cells}
    plain = {False: ms["plain JAX, unrolled"], True: ms["plain JAX, scan with `jax.checkpoint`"]}
    assert len(ms) == 5 and "| 8B |" in table
    for _, step, of, share in cells:
        assert float(share) == pytest.approx(float(of) / plain["remat" in step or "checkpoint" in step], abs=0.006)


def test_the_table_of_operators_has_those_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    named = {name for row in re.findall(r"^\| `.*", readme, re.MULTILINE) for name in re.findall(r"`(\w+)\(", row)}
    assert {operator.name for operator in operators.OPERATORS} <= named
    assert len({operator.name for operator in operators.OPERATORS}) == len(operators.OPERATORS) > 7


def test_bytes_and_residuals_of_a_feed_forward_layer():
    """The table says what the docstring of `coda.mlp` says in words, and what algebra says of its products."""
    (mlp,) = (operator for operator in operators.OPERATORS if operator.name == "gated_mlp")
    assert operators.kept(mlp) == "float32 (M), bfloat16 (M, 2F); 4 M F + 4 M bytes"
    rows = list(operators.product_rows(mlp))
    assert len(rows) == 2 + 6
    assert rows[1] == "|  | `gated_mlp_1` | (M, D, F) | 2 M F + 2 D F + 2 M D | 2 M D + 4 M |"


def test_public_names():
    names = api.public("coda_jax")
    assert {"gemm", "explain", "Stream"} <= set(names)
    assert not any(name.startswith("_") for name in names) and "ffi" not in names
    text = api.names("flax_layers")
    assert ".. autoclass:: Llama\n" in text and ".. autofunction:: generate" in text
    assert ".. autoclass:: Stream" not in text  # documented in coda_jax
    table = api.summaries("coda_jax").splitlines()
    assert len(table) == 2 + len(api.documented("coda_jax"))
    assert all(row.count("|") - row.count("\\|") == 4 for row in table)


@pytest.mark.slow
def test_outputs_of_a_device_have_a_header(tmp_path):
    """On a CPU, the quick one."""
    (path,) = device_outputs.main(["--only", "numerics", "--rows", "64", "--out", str(tmp_path)])
    header, _, body = path.read_text().partition("\n\n")
    assert all(f"{name}: " in header for name in ("device", "driver", "jax", "commit", "command"))
    assert "gated_mlp" in body


def test_missing_device_output_names_the_make_target(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "DEVICE", tmp_path)
    assert "make docs-device" in pages.stored("numerics.txt")
    (tmp_path / "numerics.txt").write_text("device: x\n\nout\n")
    assert pages.stored("numerics.txt") == "```text\ndevice: x\n\nout\n```"


def test_a_page_of_parts_begins_with_its_setup(monkeypatch):
    monkeypatch.setitem(pages.SETUPS, "part", "\nx = 1\n")
    notebook = pages.to_notebook("# Part\n\n```python\nx\n```\n\n```python\ny\n```\n", "part")
    assert notebook.count("x = 1") == 1
    assert notebook.index("# Part") < notebook.index("x = 1") < notebook.index("\nx\n")
    assert ":tags: [remove-cell]\nx = 1" in notebook


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#x">1</a><a href="#top">2</a><img src="c.png">')
    (tmp_path / "b.html").write_text('<a href="a.html#gone">3</a><a href="https://example.org">4</a>')
    broken, inside, outside = links.check(tmp_path)
    assert broken == ["a.html: b.html#x", "a.html: c.png", "b.html: a.html#gone"]
    assert (inside, outside) == (4, 1)


@pytest.mark.parametrize("chip", ["nvidia_h200", "nvidia_h100_80gb_hbm3"])
def test_the_cost_model_expects_what_was_measured_of_a_layer(chip):
    """Within 10 %, on both chips, of Llama-3-1B's and 8B's."""
    with (ROOT / "benchmarks" / "results" / f"{chip}_layer.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["pass"] == "forward, backward" and row["variant"] == "coda"]
    sizes = {"2048": (2048, 8192, 32, 8, 64), "4096": (4096, 14336, 32, 8, 128)}
    assert {row["width"] for row in rows} == sizes.keys()
    for row in rows:
        ms = expected.layer_ms(*sizes[row["width"]], tokens=16384, device=row["device"])
        assert ms == pytest.approx(float(row["ms"]), rel=0.1)
