"""The members that the kernel asks of a generated Epilogue and Config: one missing or ill-typed is one error."""

import re

import pytest

from benchmarks.programs import PROGRAMS, kernel_source
from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from tests.nvrtc import needs_nvrtc

pytestmark = needs_nvrtc

SOURCE = kernel_source(PROGRAMS["identity"], 256, 256, 64)
# An epilogue that inherits nothing: all that cuda/contracts.cuh asks for.
EPILOGUE = """struct Epilogue {
  static constexpr int halves = 1;
  static constexpr int acc_halves = 1;
  static constexpr int head = 0;
  static constexpr bool interleaved = false;
  static constexpr bool symmetric = false;
  static constexpr coda::Section section[] = {{}};
  static constexpr coda::TileAccess tile_store[][1] = {{{.map = 2, .dtype = coda::DType::bf16}}};
  static constexpr coda::TransposedAccess transposed_store[] = {{}};
  static constexpr coda::TileAccess tile_load[] = {{}};
  static constexpr coda::VectorAccess row_vector[] = {{}};
  static constexpr coda::VectorAccess column_vector[] = {{}};
  static constexpr coda::VectorAccess scalar[] = {{}};
  static constexpr coda::VectorAccess rope_table[] = {{}};
  static constexpr coda::VectorAccess head_vector[] = {{}};
  static constexpr coda::ReductionAccess row_reduction[] = {{}};
  static constexpr coda::ReductionAccess column_reduction[] = {{}};
  static constexpr coda::ReductionAccess whole_reduction[] = {{}};
  static constexpr int head_values = 0;
  static constexpr int head_passes = 0;
  static constexpr coda::Op head_op[] = {coda::Op::sum};
  static constexpr int head_pass[][1] = {{-1}};
  template <int pass> CODA_DEVICE static void evaluate_heads(const auto& in, float* value) {}
  template <int variant> CODA_DEVICE static void evaluate(const auto& in, auto& out) { out.tile[0] = in.acc[0]; }
};
"""
MEMBERS = re.findall(r"(\w+)(?:\[\])?(?:\[\d\])? = ", EPILOGUE.partition("template")[0])
MEMBERS = [name for name in MEMBERS if name not in ("map", "dtype")]


def with_epilogue(text):
    return re.sub(r"struct Epilogue .*?\n};\n", lambda _: text, SOURCE, flags=re.DOTALL)


def errors(source):
    """NVRTC's error messages, each with the line after it left out."""
    with pytest.raises(RuntimeError) as raised:
        ffi.compile(source, "contract", SM90.target)
    return re.findall(r"error: (.*)", str(raised.value))


def without(struct, name):
    """The text of a struct without the declaration of a member."""
    text = re.sub(rf"  static constexpr \S+ {name}(\[.*?\])* = .*;\n", "", struct)
    text = re.sub(rf"  template <\w+ \w+> CODA_DEVICE static void {name}\(.*\n", "", text)
    assert text != struct
    return text


def test_the_whole_contract_compiles():
    assert set(MEMBERS) >= {"halves", "section", "tile_store", "head_pass"}
    ffi.compile(with_epilogue(EPILOGUE), "contract", SM90.target)


@pytest.mark.parametrize("name", [*MEMBERS, "evaluate_heads", "evaluate"])
def test_a_missing_member_is_one_error_that_names_it(name):
    (error,) = errors(with_epilogue(without(EPILOGUE, name)))
    assert re.search(rf"Epilogue must have: .*\b{name}\b", error)


@pytest.mark.parametrize(
    ("good", "bad", "declaration"),
    [
        ("int halves = 1", "float halves = 1", "int halves"),
        ("bool interleaved", "int interleaved", "bool interleaved"),
        ("constexpr int head_values", "inline int head_values", "int head_values"),
        ("coda::VectorAccess scalar[] = {{}}", "coda::VectorAccess scalar = {}", "VectorAccess scalar[]"),
        ("coda::VectorAccess scalar[]", "coda::TileAccess scalar[]", "VectorAccess scalar[]"),
        ("tile_store[][1] = {{{.map = 2, .dtype = coda::DType::bf16}}}", "tile_store[] = {{}}", "tile_store[][]"),
        ("void evaluate(const auto& in, auto& out) { out.tile[0] = in.acc[0]; }", "void evaluate() {}", "evaluate("),
    ],
)
def test_an_ill_typed_member_is_one_error_that_names_it(good, bad, declaration):
    assert good in EPILOGUE
    (error,) = errors(with_epilogue(EPILOGUE.replace(good, bad)))
    assert "Epilogue must have: " in error and declaration in error


def test_a_config_is_checked_too():
    (missing,) = errors(SOURCE.replace("  static constexpr bool split_k = false;\n", ""))
    assert "Config must have: static constexpr bool split_k" in missing
    (ill_typed,) = errors(SOURCE.replace("stages =", "stages[] = {1}, unused ="))
    assert "Config must have: static constexpr int stages" in ill_typed
