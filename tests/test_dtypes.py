"""The table of dtypes: nothing else lists them, CUDA has the same ones, and a factor of one byte has its sizes."""

import ast
import dataclasses
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coda_jax as coda
from coda_jax.epilogue import dtypes
from coda_jax.lowering import addressing, kernel
from coda_jax.lowering.launch import problem_of
from coda_jax.operators.head import row_function
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig, tile_k
from coda_jax.tiles.constants import CONSTANTS
from coda_jax.tiles.cost_model import cost
from coda_jax.tiles.table import expected_nanoseconds
from coda_jax.tiles.traffic import EpilogueTraffic, element_traffic, shared_bytes

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = pathlib.Path(dtypes.__file__).parents[1]  # as it is installed
FP8 = np.dtype("float8_e4m3fn")
NAMES = {*dtypes.TABLE, *(row.cuda for row in dtypes.TABLE.values())}
# Comparisons with a dtype of JAX that mean this one and no class of dtypes.
WITH_ONE_DTYPE = {
    "attend/on_mesh.py": {"bfloat16"},  # whose range is float32's, so that sums are sent in it
    "epilogue/rounding.py": {"bfloat16"},  # how it is rounded
    "epilogue/elementwise.py": {"float32"},  # the type of registers
    "epilogue/flatten.py": {"float32"},
    "epilogue/logsumexp.py": {"float32"},
    "epilogue/reductions.py": {"int32"},
    "operators/head/shifted_heads.py": {"bfloat16"},  # whose range is float32's
    "operators/stream.py": {"float32"},  # of a sum of squares
    "primitives/gemm.py": {"float32"},  # the arrays that are added to in place
}
COLLECTIONS = (ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.MatchValue, ast.Assign, ast.Subscript)


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != pathlib.Path(dtypes.__file__):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def children(tree, kinds):
    return (child for node in ast.walk(tree) if isinstance(node, kinds) for child in ast.iter_child_nodes(node))


def test_only_the_table_lists_dtypes():
    """No other module compares with a dtype's name or has it in a collection; a node may be made with it."""
    listed = {
        f"{name}:{child.lineno}"
        for name, tree in sources()
        for child in children(tree, COLLECTIONS)
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value in NAMES
    }
    assert listed == set()


def test_comparisons_with_one_dtype():
    compared = {}
    for name, tree in sources():
        for child in children(tree, (ast.Compare, ast.Tuple)):
            if isinstance(child, ast.Attribute) and child.attr in NAMES and isinstance(child.value, ast.Name):
                compared.setdefault(name, set()).add(child.attr)
    assert compared == WITH_ONE_DTYPE


def test_the_columns_of_the_table():
    of_16_bits, of_8_bits = ("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2")
    assert (*of_16_bits, *of_8_bits) == dtypes.FACTORS
    assert (*of_16_bits, "float32") == dtypes.FLOATS
    assert dtypes.TILES[:3] == dtypes.RESULTS[:3] == dtypes.FLOATS
    assert dtypes.VECTORS == dtypes.DTYPES == (*dtypes.FLOATS, "int32", "bool")
    assert tuple(dtypes.TABLE) == (*dtypes.DTYPES, *of_8_bits)
    assert [name for name in dtypes.TABLE if dtypes.is_rounded(name)] == [*dtypes.FACTORS]
    assert not dtypes.is_rounded(jnp.float8_e4m3b11fnuz) and not dtypes.has_narrow_range(np.float64)
    assert dtypes.listed(dtypes.FLOATS) == "bfloat16, float16 or float32" and dtypes.listed(["bool"]) == "bool"


def test_cuda_has_the_same_dtypes(tmp_path):
    lines = ['#include "epilogue_abi.cuh"', f"static_assert(coda::factor_row_bytes == {SM90.row_bytes});"]
    for number, row in enumerate(dtypes.TABLE.values()):
        dtype = f"coda::DType::{row.cuda}"
        lines.append(f"static_assert(int({dtype}) == {number} && coda::bytes_of({dtype}) == {row.bytes});")
        lines += [f"float {row.cuda} = {row.rounding}(1.f);"] * bool(row.rounding)
    (tmp_path / "dtypes.cc").write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'cuda'}", str(tmp_path / "dtypes.cc")]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def product(k, **options):
    """The types of a product of 16-bit factors, and its spec."""
    m, n = 1024, 512
    a = jax.ShapeDtypeStruct((k, m) if options.get("transpose_a") else (m, k), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((n, k) if options.get("transpose_b") else (k, n), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh, **options))(a, b)
    ((types, spec),) = row_function.products_of(jaxpr.jaxpr)
    return types, spec


def with_dtype(types, dtype, times_k):
    return [jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * times_k), dtype) for x in types]


@pytest.mark.parametrize("given", [None, GemmConfig(tile_m=128, tile_n=256), GemmConfig(split_k=True)], ids=str)
@pytest.mark.parametrize("k", [64, 1000, 4096])
def test_one_byte_with_twice_the_k_is_the_same_kernel(given, k):
    """Bytes of shared memory and of boxes, the tile, k blocks and the cost."""
    types, spec = product(k, transpose_b=True)
    short = with_dtype(types, FP8, 2)
    assert addressing.unsupported_reason(short, spec) is None
    problems = [problem_of(each, spec) for each in (types, short)]
    configs = (given, dataclasses.replace(given or GemmConfig(), promote=False))
    config, same_config = (problem.config(one, None) for problem, one in zip(problems, configs, strict=True))
    assert config == same_config and problems[0].shape.k_blocks == problems[1].shape.k_blocks == -(-k // 64)
    traffic = EpilogueTraffic.of(spec.program, spec.store_dtypes)
    operands = config.stages * (config.tile_m + config.tile_n) * tile_k(FP8) * FP8.itemsize
    assert 0 <= shared_bytes(config, spec.program, traffic) - operands < operands

    wide, narrow = (kernel.lower(each, spec, config, yields=True).call for each in (types, short))
    assert wide.smem_bytes == narrow.smem_bytes and wide.yield_k_blocks == narrow.yield_k_blocks
    boxes = [np.reshape(call.maps, (-1, 6)) for call in (wide, narrow)]
    boxes[0][:2, 3] *= 2  # columns of a's and b's boxes, as bytes
    np.testing.assert_array_equal(*boxes)
    assert list(boxes[1][:2, 3]) == [SM90.row_bytes] * 2
    assert "DType::e4m3;" in narrow.source and f"tile_k = {tile_k(FP8)};" in narrow.source


def test_one_byte_costs_half():
    types, spec = product(4096, transpose_b=True)
    problems = [problem_of(with_dtype(types, *of), spec) for of in ((jnp.bfloat16, 1), (FP8, 2), (FP8, 1))]
    config = problems[0].config(None, None)
    nanoseconds = [expected_nanoseconds(problem, config, None) for problem in problems]
    assert nanoseconds[0] == nanoseconds[1] > nanoseconds[2]
    traffic = element_traffic(spec.program, EpilogueTraffic.of(spec.program, spec.store_dtypes))
    for constants in CONSTANTS.values():
        assert cost(problems[0].shape, config.tile, traffic, constants) == pytest.approx(
            cost(dataclasses.replace(problems[2].shape, k=8192), config.tile, traffic, constants)
        )


@pytest.mark.parametrize("options", [{}, {"transpose_a": True, "transpose_b": True}], ids=str)
def test_one_byte_is_read_along_k(options):
    types, spec = product(512, **options)
    short = [jax.ShapeDtypeStruct(x.shape, FP8) for x in types]
    assert addressing.unsupported_reason(types, spec) is None
    assert "factors of 8 bits as (M, K) and (N, K)" in addressing.unsupported_reason(short, spec)


def test_a_dtype_without_a_row_is_refused():
    types, spec = product(512, transpose_b=True)
    short = [jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3b11fnuz) for x in types]
    assert addressing.unsupported_reason(short, spec) == (
        f"a is float8_e4m3b11fnuz; the kernel multiplies {dtypes.listed(dtypes.FACTORS, 'and')}"
    )
