"""Everything that decides what a commit's kernels do, recorded from the coda_jax that is installed, without a GPU.

`python -m benchmarks.lab.kernel_records OUT` writes OUT/records.json and the kernels' images. Of each case of
`kernel_cases`, lowered for each device: every custom call in the order of the program, with the types of its operands
and results, what each operand is made by, its attributes, what its kernel was compiled to, and the launch as a stand-in
for the driver sees it; and the tiles that `coda.explain` tells. `kernels_diff` compares two such records.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.extend import core
from jax.extend.mlir import ir

import coda_jax as coda
from benchmarks.lab.host_launch import STAGES, Frame, Host
from benchmarks.lab.kernel_cases import CONFIGS, DEVICES, Case, cases
from benchmarks.lab.machine_code import resource_usage
from coda_jax import ffi

TARGET = "coda_gemm"
_LABELS = ("name", "key", "headers", "source")  # attributes that name a kernel, or are compared as what they compile to
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "i1": "bool"} | {
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
}
_MAP_BYTES, _WORDS_OF_MAP = 128, 6  # of the kernel's parameter block, as ffi/handler.cc fills it


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call as it was lowered.

    Attributes:
      operands, results: types.
      makers: for each operand a digest of how it comes from the program's arguments and from other calls' results.
      aliases: pairs of operand and result that share memory, as text.
      attributes: by name, strings and arrays.
    """

    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    makers: tuple[str, ...]
    aliases: str
    attributes: Mapping[str, Any]


class Module:
    """The custom calls of a StableHLO module, in order; private functions count where they are called.

    Attributes:
      calls: the custom calls.
      returns: digests of what the module returns, as `Call.makers`.
    """

    def __init__(self, module: Any):
        self._functions = {function.attributes["sym_name"].value: function for function in module.body.operations}
        self.calls: list[Call] = []
        block = self._functions["main"].regions[0].blocks[0]
        self.returns = self._block(block, {value: f"argument {i}" for i, value in enumerate(block.arguments)})

    def _block(self, block: Any, made: dict[Any, str]) -> list[str]:
        """Digests of what the block returns; `made` holds those of what it can see."""
        for op in block.operations:
            kind = op.operation.name
            inputs = [made[value] for value in op.operands]
            if kind.endswith(".return"):
                return inputs
            if kind == "func.call":
                body = self._functions[op.attributes["callee"].value].regions[0].blocks[0]
                returned = self._block(body, dict(zip(body.arguments, inputs, strict=True)))
                made.update(zip(op.results, returned, strict=True))
                continue
            if kind == "stablehlo.custom_call" and op.attributes["call_target_name"].value == TARGET:
                name = f"product {len(self.calls)}"
                self.calls.append(_call(op, inputs))
            else:
                bodies = []
                for region in op.regions:
                    for inner in region.blocks:
                        arguments = {value: f"{kind} {i} of {inputs}" for i, value in enumerate(inner.arguments)}
                        bodies.append(self._block(inner, made | arguments))
                attributes = sorted((name, _text(one)) for name, one in _named(op.attributes).items())
                name = _digest([kind, attributes, [str(value.type) for value in op.results], inputs, bodies])
            made.update({value: f"{name}, result {i}" for i, value in enumerate(op.results)})
        return []


def _call(op: Any, makers: Sequence[str]) -> Call:
    operands, results = ([_type(value.type) for value in values] for values in (op.operands, op.results))
    attributes = {name: _value(one) for name, one in _named(op.attributes["mhlo.backend_config"]).items()}
    aliases = str(_named(op.attributes).get("output_operand_aliases", ""))
    return Call(tuple(operands), tuple(results), tuple(makers), aliases, attributes)


def _type(type_: Any) -> jax.ShapeDtypeStruct:
    *sizes, dtype = str(type_).removeprefix("tensor<").removesuffix(">").split("x")
    return jax.ShapeDtypeStruct([int(size) for size in sizes], jax.numpy.dtype(_DTYPES[dtype]))


def _text(attribute: Any) -> str:
    """An attribute of an operation, of other kernels' custom calls without digests of all headers."""
    if not isinstance(attribute, ir.DictAttr):
        return str(attribute)
    return str(sorted((name, str(one)) for name, one in _named(attribute).items() if name not in ("key", "headers")))


def _named(attributes: Any) -> dict[str, Any]:
    """A dictionary of MLIR's as one; what iterating over it gives depends on the version."""
    names = [getattr(item, "name", item) for item in attributes]
    return {name: attributes[name] for name in names}


def _value(attribute: Any) -> Any:
    """A custom call's attribute: a string, or an array."""
    value = getattr(attribute, "value", attribute)
    if isinstance(value, str):
        return value
    return np.bool_(value) if isinstance(value, bool) else np.asarray(value, np.int32)


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def attached(device_kind: str) -> Iterator[None]:
    """As if one GPU of this kind were attached."""
    device = mock.Mock(device_kind=device_kind, compute_capability="9.0", platform="gpu")
    devices = jax.devices
    with mock.patch.object(jax, "devices", lambda platform=None: [device] if platform == "cuda" else devices(platform)):
        yield


def lowered(function: Any, *arguments: Any) -> Module:
    """The custom calls of function(*arguments) for a GPU."""
    return Module(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo"))


def products(function: Any, *arguments: Any) -> list[core.JaxprEqn]:
    """The products of a function, each kind of them once."""
    found: dict[str, core.JaxprEqn] = {}

    def walk(jaxpr: core.Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == TARGET:
                types = [v.aval.str_short() for v in equation.invars]
                found.setdefault(f"{types} {_about(equation.params)}", equation)
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
            ):
                if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.jit(function).trace(*arguments).jaxpr.jaxpr)
    return list(found.values())


def in_every_tile(case: Case) -> dict[str, Module | None]:
    """Each product of a case alone, in each of `CONFIGS`; None where it cannot have that tile.

    A product is named by its types, and by its number among those of the same: others may come and go beside it.
    """
    found: dict[str, Module | None] = {}
    alike: collections.Counter[str] = collections.Counter()
    for equation in products(case.function, *case.arguments):
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        inputs, outputs = (", ".join(v.aval.str_short() for v in of) for of in (equation.invars, equation.outvars))
        signature = f"product of {inputs} to {outputs}"
        alike[signature] += 1
        for config in CONFIGS:
            params = _with_config(equation.params, coda.GemmConfig(**config))

            def product(*arguments: jax.Array, equation: Any = equation, params: Any = params) -> Any:
                return equation.primitive.bind(*arguments, **params)

            tile = ", ".join(f"{key} {value}" for key, value in config.items())
            name = f"{signature}, number {alike[signature]}, in {tile}"
            try:
                found[name] = lowered(product, *types)
            except ValueError:
                found[name] = None
    return found


def _about(params: Mapping[str, Any]) -> list[str]:
    """The primitive's parameters, or the fields of the dataclass that is the only one, but for names."""
    given = vars(params["spec"]) if "spec" in params else params
    return [str(item) for item in sorted(given.items()) if item[0] not in ("name", "site")]


def _with_config(params: Mapping[str, Any], config: coda.GemmConfig) -> dict[str, Any]:
    """The primitive's parameters with another config: one of them, or a field of a dataclass that is one of them."""
    if "config" in params:
        return {**params, "config": config}
    if not any(hasattr(value, "config") for value in params.values()):
        raise RuntimeError("none of the primitive's parameters has a config")
    return {
        name: dataclasses.replace(value, config=config) if hasattr(value, "config") else value
        for name, value in params.items()
    }


def record(small: bool, directory: pathlib.Path) -> dict[str, Any]:
    """All that is compared, of all cases or of the small ones; the kernels' images go to `directory`."""
    chosen = {name: case for name, case in cases().items() if case.is_small or not small}
    programs: dict[str, Module | None] = {}
    explained: dict[str, list[list[Any]]] = {}
    for name, case in chosen.items():
        for device, kind in DEVICES.items():
            with attached(kind), contextlib.suppress(TypeError):  # dtypes that this commit does not take
                programs[f"{name}, {device}"] = lowered(case.function, *case.arguments)
                explained[f"{name}, {device}"] = _explained(case)
        if case.every_tile and f"{name}, H200" in programs:
            with attached(DEVICES["H200"]):
                tiles = in_every_tile(case)
            programs |= {f"{name}, {tile}": program for tile, program in tiles.items()}
        print(f"{name}: lowered", flush=True)

    architectures = {
        call.attributes["source"]: call.attributes["arch"]
        for program in programs.values()
        if program
        for call in program.calls
    }
    print(f"{len(architectures)} kernels to compile", flush=True)
    compiled = _compiled(architectures, directory)
    with tempfile.TemporaryDirectory() as built:
        host = Host(pathlib.Path(built))
        return {
            "cases": {
                name: program
                and {
                    "products": [_product(call, compiled[call.attributes["source"]], host) for call in program.calls],
                    "returns": program.returns,
                }
                for name, program in programs.items()
            },
            "explained": explained,
        }


def _explained(case: Case) -> list[list[Any]]:
    """The products that `coda.explain` reports, without the epilogues' names."""
    found = coda.explain(case.function, *case.arguments, platform="cuda").products
    return [[one.a, one.b, one.tile or "XLA", count] for one, count in found.items()]


def _compiled(architectures: Mapping[str, str], directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """By source: the image's name in `directory`, registers, spilled bytes.

    Args:
      architectures: by source, what it is compiled for.
    """
    takes_architecture = len(inspect.signature(ffi.compile).parameters) > 2  # older commits have one alone

    def compile(source: str) -> dict[str, Any]:
        architecture = [architectures[source]] if takes_architecture else []
        kernel = ffi.compile(source, "kernel", *architecture)
        image = hashlib.sha256(kernel.cubin).hexdigest()[:32]
        (directory / f"{image}.cubin").write_bytes(kernel.cubin)
        return {"image": image} | dataclasses.asdict(resource_usage(kernel.log))

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        in_order = sorted(architectures)
        return dict(zip(in_order, pool.map(compile, in_order), strict=True))


def _product(call: Call, kernel: Mapping[str, Any], host: Host) -> dict[str, Any]:
    return {
        "operands": [f"{x.dtype.name}{list(x.shape)}" for x in call.operands],
        "results": [f"{x.dtype.name}{list(x.shape)}" for x in call.results],
        "makers": call.makers,
        "aliases": call.aliases,
        "attributes": {name: _plain(value) for name, value in call.attributes.items() if name not in _LABELS},
        "kernel": kernel,
        "launch": _launch(call, host),
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else np.asarray(value).tolist()


def _launch(call: Call, host: Host) -> dict[str, Any]:
    """The driver's launch request, with buffer i at address (i + 1) 2^32."""
    maps = np.size(call.attributes["maps"]) // _WORDS_OF_MAP
    used = _MAP_BYTES * maps + 8 * max(1, np.size(call.attributes["pointers"])) + 16
    host.library.driver_set_parameter_bytes(used)
    addresses = [(i + 1) << 32 for i in range(len(call.operands) + len(call.results))]
    frame = Frame(host, call.operands, call.results, call.attributes, addresses)
    for stage in STAGES:
        frame.call(stage)
    fields = ("grid", "block", "shared_bytes", "cluster", "begins_early", "zeroed_address", "zeroed_words")
    launch = {name: getattr(host.record, name) for name in fields}
    if int(call.attributes["flags"]) < 0:  # the last launch that had any
        launch |= {"zeroed_address": 0, "zeroed_words": 0}
    return launch | {"parameters": bytes(host.record.parameters[:used]).hex()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--small", action="store_true", help="the subset that CI compares")
    arguments = parser.parse_args()
    images = arguments.out / "images"
    images.mkdir(parents=True, exist_ok=True)
    records = record(arguments.small, images)
    part = arguments.out / "records.json.part"
    part.write_text(json.dumps(records, indent=1))
    part.replace(arguments.out / "records.json")


if __name__ == "__main__":
    main()
