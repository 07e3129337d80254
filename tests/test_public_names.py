"""Public names and keywords: what a user has written goes on working.

tests/public_names.json is the record, first recorded at 4436c51; what became public since is in it too. A module has
names, and a name is one of

    {parameter: "kind = default"}   a function or a method; C.__init__ is what C takes, where flax does not say it
    "class", "attribute", "value"   the last one of a module
    ["entry", ...]                  a collection of strings, which users give as arguments
    "module.name"                   the same as there

A default that is no literal is recorded by its name, or as "...". `python -m tests.test_public_names` adds to the
record what is public and not in it, and takes nothing away. What is removed or renamed, or gets another default, is
edited there by hand and told in CHANGELOG.md; a name that goes is served for a release by a module's __getattr__, with
a DeprecationWarning.
"""

import ast
import collections
import dataclasses
import functools
import importlib
import inspect
import json
import pathlib
import re
import types
import typing
import warnings

import jax
import pytest

import flax_layers
from coda_jax import extend

RECORD = pathlib.Path(__file__).with_name("public_names.json")
ROOT = RECORD.parents[1]
LAYERS = pathlib.Path(flax_layers.__file__).parent
PACKAGES = ("coda_jax", "flax_layers")
MODULES = (  # what documents tell users to import
    "coda_jax",
    "coda_jax.costs",
    "coda_jax.doctor",
    "coda_jax.extend",
    "coda_jax.fp8",
    "flax_layers",
    "flax_layers.checkpoints",
    "flax_layers.decoding",
    "flax_layers.layer_stack",
    "flax_layers.linen",
    "flax_layers.lora",
    "flax_layers.models",
    "flax_layers.muon",
    "flax_layers.plan",
    "flax_layers.fp8",
    "flax_layers.remat",
    "flax_layers.sharding",
)
ONLY = {"flax_layers.lora": ["PROJECTIONS"]}  # what else is in these modules is not public


def public(module):
    """Names of a module: those of `__all__`; else what it defines, and what it imports `as` the same name."""
    if listed := ONLY.get(module.__name__) or getattr(module, "__all__", None):
        return listed
    names = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.name == alias.asname]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    names = [name for name in names if is_public(name) or name == "__version__"]
    return [name for name in names if not isinstance(getattr(module, name), typing.TypeVar)]


def is_public(name):
    return not name.startswith("_")


def is_ours(x):
    return (getattr(x, "__module__", None) or "").split(".")[0] in PACKAGES


def parameters(function, *, skip=0):
    found = {}
    for name, parameter in [*inspect.signature(function).parameters.items()][skip:]:
        if is_public(name):
            default = "" if parameter.default is parameter.empty else f" = {described(parameter.default)}"
            name = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, name)
            found[name] = parameter.kind.description + default
    return found


def described(default):
    each = default if isinstance(default, tuple) else (default,)
    is_literal = all(isinstance(x, None | bool | int | float | str) for x in each)
    return repr(default) if is_literal else getattr(default, "__name__", "...")


def members(cls):
    """The members of a class and of those of its bases that are ours: constructor, methods, attributes."""
    ours, others = ([base for base in cls.__mro__ if is_ours(base) == flag] for flag in (True, False))
    inherited = {name for base in others for name in [*vars(base), *inspect.get_annotations(base)]}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name in sorted({name for base in ours for name in vars(base)} | fields):
        member = inspect.getattr_static(cls, name, None)
        if not is_public(name) and name not in ("__init__", "__call__"):
            continue
        if isinstance(member, classmethod | staticmethod):
            yield name, parameters(getattr(cls, name))
        elif name in fields or not callable(member):
            if name not in inherited:
                yield name, "attribute"
        elif is_ours(inspect.unwrap(member)):
            yield name, parameters(member, skip=1)
    if issubclass(cls, tuple):
        yield "__init__", parameters(cls)


def served(module, name):
    """Returns what the module's __getattr__ gives, if it warns; None of a name that is there, but public no more."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = getattr(module, name, None)
    return value if any(issubclass(one.category, DeprecationWarning) for one in caught) else None


def names_of(module, recorded, places):
    """Name -> what it is, of all that is public, and of what is on record and is served for a release."""
    found, names = {}, public(module)
    for name in sorted({*names, *recorded}):
        value = getattr(module, name, None) if name in names else served(module, name)
        is_class = isinstance(value, type)
        is_function = callable(value) and not is_class and typing.get_origin(value) is None
        if isinstance(value, types.ModuleType):
            found[name] = value.__name__
        elif (is_class or is_function) and value in places:
            found[name] = places[value]
        elif is_class or is_function:
            places[value] = f"{module.__name__}.{name}"
            found[name] = "class" if is_class else parameters(value)
            found |= {f"{name}.{member}": what for member, what in members(value)} if is_class else {}
        elif isinstance(value, dict | tuple | frozenset) and all(isinstance(x, str) for x in value):
            found[name] = sorted(value)
        elif value is not None:
            found[name] = "value"
    return found


def today(record):
    """Returns what is public, as it is recorded."""
    places, found = {}, {}
    for module in sorted({*MODULES, *record}):
        recorded = [name for name in record.get(module, ()) if "." not in name]
        found[module] = names_of(importlib.import_module(module), recorded, places)
    return found


def problems(recorded, now):
    """In words, why what was written for a name as it is recorded does not go on working."""
    if isinstance(recorded, list) and isinstance(now, list):
        return [f"{entry!r} is gone" for entry in recorded if entry not in now]
    if not isinstance(recorded, dict) or not isinstance(now, dict):
        return [] if recorded == now else [f"{recorded}, now {now or 'gone'}"]
    found = [f"{name}: {was}, now {now.get(name, 'gone')}" for name, was in recorded.items() if now.get(name) != was]
    old, new = ([name for name, what in each.items() if what.startswith("positional")] for each in (recorded, now))
    count = None if "*" in recorded else len(old)
    if new[:count] != old:
        found.append(f"by position {', '.join(old)}, now {', '.join(new)}")
    required = [name for name, what in now.items() if "*" not in name and " = " not in what]
    return found + [f"{name}: new, without a default" for name in required if name not in recorded]


def additions(recorded, now):
    """Lists what is not on record of a name."""
    if recorded is None:
        return ["the name"]
    return [entry for entry in now if entry not in recorded] if isinstance(now, dict | list) else []


def compared(judge):
    """module.name -> what judge(recorded, now) finds, where it finds something; None for what is not there."""
    record, found = json.loads(RECORD.read_text()), {}
    for module, names in today(record).items():
        for name in sorted({*record.get(module, ()), *names}):
            found[f"{module}.{name}"] = judge(record.get(module, {}).get(name), names.get(name))
    return {name: what for name, what in found.items() if what}


def told(found):
    return "\n".join(f"{name}: {'; '.join(of_one)}" for name, of_one in found.items())


def test_recorded_names_and_keywords_still_work():
    found = compared(lambda recorded, now: [] if recorded is None else problems(recorded, now))
    assert not found, told(found)


def test_public_names_are_on_record():
    missing = compared(lambda recorded, now: [] if now is None else additions(recorded, now))
    assert not missing, told(missing) + "\n`python -m tests.test_public_names` adds it"


def test_names_imported_by_documents_are_on_record():
    record = json.loads(RECORD.read_text())
    unknown = []
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]:
        for module, names in re.findall(r"from ((?:coda_jax|flax_layers)[\w.]*) import ([\w, ]+)", path.read_text()):
            for name in (name.split(" as ")[0].strip() for name in names.split(",")):
                if name not in record.get(module, ()) and f"{module}.{name}" not in record:
                    unknown.append(f"{path.name}: {module}.{name}")
    assert unknown == []


def recorded_function(a, /, b, c=1, *more, d, e=("x",), g=jax.nn.silu): ...


@pytest.mark.parametrize(
    "now, found",
    [
        (lambda a, /, b, c=1, *others, d, e=("x",), g=jax.nn.silu, h=2, **options: None, []),
        (lambda a, /, b, c=1, *, d, e=("x",), g=jax.nn.silu: None, ["*: variadic positional, now gone"]),
        (lambda a, /, b, c=1, *more, d, f=("x",), g=jax.nn.silu: None, ["e: keyword-only = ('x',), now gone"]),
        (lambda a, /, b, c=1, *more, e=("x",), g=jax.nn.silu: None, ["d: keyword-only, now gone"]),
        (
            lambda a, /, b, c=1, *more, d, e=("x",), g=jax.nn.relu: None,
            ["g: keyword-only = silu, now keyword-only = relu"],
        ),
        (
            lambda a, /, b, c=2, *more, d, e=("x",), g=jax.nn.silu: None,
            ["c: positional or keyword = 1, now positional or keyword = 2"],
        ),
        (lambda a, /, b, c=1, h=2, *more, d, e=("x",), g=jax.nn.silu: None, ["by position a, b, c, now a, b, c, h"]),
        (
            lambda a, /, c=1, b=2, *more, d, e=("x",), g=jax.nn.silu: None,
            ["b: positional or keyword, now positional or keyword = 2", "by position a, b, c, now a, c, b"],
        ),
        (lambda a, /, b, c=1, *more, d, e=("x",), g=jax.nn.silu, h: None, ["h: new, without a default"]),
    ],
)
def test_changes_are_found(now, found):
    assert problems(parameters(recorded_function), parameters(now)) == found


def test_a_name_that_goes_is_served_with_a_warning():
    module = types.ModuleType("module")
    exec("import warnings\ndef __getattr__(name):\n    warnings.warn(name, kind)\n    return 1", vars(module))
    module.kind = DeprecationWarning
    assert served(module, "old") == 1
    module.kind = UserWarning
    assert served(module, "old") is None
    assert served(module, "warnings") is None


@functools.cache
def calls(folder):
    """Name of what is called -> how many arguments by position and the names of others, of each call in a folder.

    Of what is called by its bare name that which the file imports from the packages. `**NAME` gives the keywords of the
    file's NAME = {"keyword": ...}.
    """
    found = collections.defaultdict(list)
    for path in (path for path in folder.rglob("*.py") if "gpu" not in path.parts):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module.startswith(PACKAGES)]
        imported = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
        dicts = {node.targets[0].id: {key.value for key in node.value.keys} for node in nodes if is_dict(node)}
        for node in nodes:
            if isinstance(node, ast.Call):
                function, given = node.func, node.args
                if given and getattr(function, "id", getattr(function, "attr", None)) == "partial":
                    function, *given = given
                name = imported.get(function.id) if isinstance(function, ast.Name) else getattr(function, "attr", None)
                starred = (i for i, x in enumerate(given) if isinstance(x, ast.Starred))
                found[name].append((next(starred, len(given)), keywords_of(node, dicts)))
    return found


def is_dict(node):
    """Whether it is NAME = {"keyword": ...}."""
    is_named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    keys = node.value.keys if is_named and isinstance(node.value, ast.Dict) else [None]
    return all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys)


def keywords_of(call, dicts):
    """The names of a call's keywords; of `**NAME` those of dicts[NAME]."""
    unpacked = (dicts.get(getattr(one.value, "id", None), ()) for one in call.keywords if one.arg is None)
    return {one.arg for one in call.keywords}.union(*unpacked)


def not_given(name, what, *folders):
    """Parameters of a function that no call in these folders gives, literally."""
    owner, _, last = name.rpartition(".")
    callee = owner if last == "__init__" else last
    uses = [use for folder in folders for use in calls(folder)[callee]]
    if last == "__call__":  # of a module, by whatever name
        uses = [(1, keywords) for folder in folders for of_one in calls(folder).values() for _, keywords in of_one]
    positional = [name for name, kind in what.items() if kind.startswith("positional")]
    given = {name for count, keywords in uses for name in (*positional[:count], *keywords)}
    return [name for name in what if "*" not in name and name not in given] if uses else ["a call"]


def test_every_function_is_called_with_every_keyword():
    """In tests; those of coda_jax also in flax_layers, which tests of models run. Documents need not be here."""
    missing = {}
    for module, names in json.loads(RECORD.read_text()).items():
        folders = [RECORD.parent, *([LAYERS] if module.startswith("coda_jax") else [])]
        for name, what in names.items():
            if isinstance(what, dict) and (absent := not_given(name, what, *folders)):
                missing[f"{module}.{name}"] = absent
    assert not missing, told(missing)


def merged(record):
    """The record with what is public now; what does not work any more stays as it is recorded."""
    found = today(record)
    for module, names in record.items():
        for name, recorded in names.items():
            if problems(recorded, found[module].get(name)):
                found[module][name] = recorded
    return {module: {name: found[module][name] for name in sorted(found[module])} for module in found}


def test_old_names_of_extend_say_the_new_ones():
    for old, new in extend._RENAMED.items():
        with pytest.warns(DeprecationWarning, match=rf"coda_jax\.extend\.{old} is {new} now"):
            assert getattr(extend, old) is getattr(extend, new)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = extend.nothing


if __name__ == "__main__":
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(merged(record), indent=1) + "\n")
