"""The rooms of the house: imports only go down, and no function or tangle of branches is too large to read."""

import ast
import pathlib

import pytest

from coda_jax.epilogue import operand, operand_kinds

ROOT = pathlib.Path(__file__).resolve().parents[1]
# From the ground up; each imports those below it.
FLOORS = ("jaxprs", "epilogue", "tiles", "primitives", "lowering", "attend", "graph", "operators", "fusion", "tools")
MOST_FUNCTION_LINES, MOST_COMPLEXITY = 100, 25


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path):
    """Names of the modules that a file imports, by absolute imports, which are the only ones here."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms(path):
    """The folders of coda_jax that a file imports."""
    parts = (name.split(".") for name in imported(path))
    return {name[1] for name in parts if name[0] == "coda_jax" and len(name) > 1} & {*FLOORS, "ffi"}


@pytest.mark.parametrize("room", FLOORS)
def test_imports_only_go_down(room):
    below = {*FLOORS[: FLOORS.index(room) + 1], "ffi"} - ({"ffi"} if room in ("jaxprs", "epilogue") else set())
    assert {str(path): up for path in files(f"coda_jax/{room}") if (up := rooms(path) - below)} == {}


def test_the_handler_knows_no_room():
    assert {str(path): up for path in files("coda_jax/ffi") if (up := rooms(path) - {"ffi"})} == {}


def test_layers_import_what_is_public():
    """The top level of coda_jax, and coda_jax.extend."""
    inner = {
        str(path.relative_to(ROOT)): names
        for path in files("flax_layers")
        if (names := {n for n in imported(path) if n.startswith("coda_jax.") and n.split(".")[1] in {*FLOORS, "ffi"}})
    }
    assert inner == {}


def names(path):
    """All names, attributes and imported names in a file, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_a_kind_of_operand_is_named_in_its_own_file_alone():
    """So that a new kind is a class there: all others ask it."""
    own = pathlib.Path(operand_kinds.__file__)
    kinds = {name for name, x in vars(operand_kinds).items() if isinstance(x, operand.OperandKind)}
    kinds |= {type(kind).__name__ for kind in operand_kinds.KINDS}
    assert len(kinds) == 2 * len(operand_kinds.KINDS)
    assert {name for _, name in names(own)} >= kinds
    others = [path for path in files("coda_jax", "flax_layers") if path != own]
    matched = {f"{path}:{line}": name for path in others for line, name in names(path) if name in kinds}
    assert matched == {}


def without_subjects(source):
    """First lines of docstrings that do not start with a subject."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    words = ("Of", "That", "Those", "What", "Where", "Which")
    return [text.splitlines()[0] for text in texts if text.split(" ")[0] in words]


def test_docstrings_start_with_their_subjects():
    folders = "coda_jax", "flax_layers", "benchmarks", "docs", "examples", "tests"
    assert {path: found for path in files(*folders) if (found := without_subjects(path.read_text()))} == {}


def test_a_docstring_without_a_subject_is_found():
    assert without_subjects('"""Modules."""\n\n\ndef f():\n    """Of a module.\n\n    More."""\n') == ["Of a module."]


def functions(room):
    for path in files(room):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def length(function):
    """Lines, without those of the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def complexity(function):
    """Cyclomatic, with the branches inside expressions: and, or, conditional expressions, comprehensions."""
    branches = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.match_case)
    count = 1
    for node in ast.walk(function):
        if isinstance(node, branches):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


@pytest.mark.parametrize("room", [*(f"coda_jax/{room}" for room in (*FLOORS, "ffi")), "flax_layers"])
def test_no_function_is_long_or_tangled(room):
    measured = {name: (length(function), complexity(function)) for name, function in functions(room)}
    most = MOST_FUNCTION_LINES, MOST_COMPLEXITY
    assert {name: found for name, found in measured.items() if found[0] > most[0] or found[1] > most[1]} == {}
