"""A chip is an object: kernels for one that does not exist have all from its `Arch`, and nothing of Hopper's."""

import ast
import dataclasses
import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from benchmarks.lab.tile_losses import Shape
from coda_jax import ffi
from coda_jax.attend import kernel as attention_kernel
from coda_jax.lowering import select
from coda_jax.primitives.accumulate import accumulate
from coda_jax.tiles import arch
from coda_jax.tiles.arch import SM90, Arch, Chip, as_if_attached, current
from coda_jax.tiles.choose import candidates, choose_config, takes_heads
from coda_jax.tiles.config import GemmConfig, TileShape, tile_k
from coda_jax.tiles.constants import CONSTANTS, by_time, constants_for
from coda_jax.tiles.cost_model import GemmShape, cost, may_split, relative_power, split_tiles
from coda_jax.tiles.table import expected_nanoseconds
from coda_jax.tiles.traffic import ElementTraffic, EpilogueTraffic, element_traffic, keeps_tables, shared_bytes
from coda_jax.tools import doctor, tune
from coda_jax.tools.costs import bare_us, pass_us
from coda_jax.tools.devices import gib_of_chip
from tests.test_attention_gradients import launches

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEVICE, H200 = "Imaginary I1", "NVIDIA H200"
TILES = {(96, 128): (False, True), (32, 64): (False,), (96, 64): (True,)}
OTHER = Arch(
    name="Imagined",
    capability="99.0",
    target="sm_990x",
    product_header="mainloop_sm990.cuh",
    attention_headers={"forward": "attention_forward_sm990.cuh", "backward": "attention_backward_sm990.cuh"},
    chips={DEVICE: Chip(500.0, 1.0, 64)},
    default_device=DEVICE,
    sms=60,
    shared_bytes=200_000,
    cached_instructions=3000,
    kept_registers=96,
    row_bytes=64,
    least_row_bytes=16,
    warpgroup=96,
    consumers=1,
    tiles=TILES,
    promoted_tile=(96, 128),
    unpromoted_k=1024,
    promoted_k=256,
    power_limit_tflops=350,
    yield_nanoseconds=2_000_000,
    copy_share=0.5,
    attention_tflops=(50, 43),
)
HOPPER = re.compile(r"sm_?90|Hopper|\bH100|\bH200|\b132\b|\b384\b|\b232448\b")  # in texts of kernels, and of reports
SHAPES = [(16384, 8192, 2048), (4096, 4096, 4096), (1000, 1536, 512), (16, 2048, 2048), (8192, 2048, 256)]


@pytest.fixture(autouse=True)
def other(monkeypatch):
    """The second chip, which is named in the test alone: its constants are an H200's, for its own tiles."""
    kinds = (*TILES, (96, 128, OTHER.consumers))
    by_kind = {
        name: dict.fromkeys(kinds, value)
        for name, value in {"of_block": (1.1, 1.0), "power": 1.0, "alone": 0.85, "with_long_epilogue": 1.0}.items()
    }
    monkeypatch.setitem(CONSTANTS, DEVICE, dataclasses.replace(CONSTANTS[H200], **by_kind))
    monkeypatch.setattr(arch, "ARCHITECTURES", (SM90, OTHER))


def test_it_has_nothing_of_hopper():
    """So that whatever a test finds in a kernel or a choice comes from one of both."""
    equal = [x.name for x in dataclasses.fields(Arch) if getattr(SM90, x.name) == getattr(OTHER, x.name)]
    assert equal == [] and not TILES.keys() & SM90.tiles.keys()


def test_the_device_says_which_one():
    assert current() is SM90
    with as_if_attached(DEVICE):
        assert current() is OTHER
    assert (arch.of(DEVICE), arch.of(H200), arch.of(None), arch.of("a GPU")) == (OTHER, SM90, SM90, SM90)
    assert arch.chip_of(DEVICE).tbytes == 1.0 and gib_of_chip(DEVICE) == 64 and gib_of_chip("a GPU") is None


def problem_of(m, n, k, name="residual_sumsq"):
    return Shape(name, "NT", m, n, k).problem


@pytest.mark.parametrize("name", ["identity", "residual_sumsq", "column_sum", "gated_backward", "qk_norm_rotary_64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_fit_its_limits(shape, name):
    problem = problem_of(*shape, name)
    traffic = EpilogueTraffic.of(problem.program, problem.out_dtypes)
    arguments = problem.shape, problem.program, problem.out_dtypes
    with as_if_attached(DEVICE):
        found = [choose_config(*arguments, None, DEVICE), *candidates(*arguments, DEVICE)]
        for config in found:
            assert config.tile.size in TILES and config.cooperative in TILES[config.tile.size]
            assert shared_bytes(config, problem.program, traffic) <= OTHER.shared_bytes
            assert config.box_n * traffic.widest_bytes <= OTHER.row_bytes
        assert tile_k(jnp.bfloat16) == 32
    assert problem.config(None, H200).tile.size in SM90.tiles


def test_shared_memory_bounds_the_stages(monkeypatch):
    """The same product with a half of the shared memory."""
    problem = problem_of(4096, 4096, 4096)
    stages = []
    for bytes_ in (200_000, 100_000):
        monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(OTHER, shared_bytes=bytes_),))
        stages.append(problem.config(GemmConfig(tile_m=96, tile_n=128, cooperative=False), DEVICE).stages)
    assert stages[0] > stages[1]


def test_shared_memory_is_counted_in_its_rows():
    """Stages of 64 bytes a row, one consumer's rings of four warps in rows of 32 columns, and barriers."""
    problem = problem_of(4096, 4096, 4096, "identity")
    with as_if_attached(DEVICE):
        config = problem.config(GemmConfig(tile_m=96, tile_n=128, cooperative=False, box_n=32), DEVICE)
        found = shared_bytes(config, problem.program, EpilogueTraffic.of(problem.program, problem.out_dtypes))
    rings = -(-4 * config.store_slots * 16 * 32 * 2 // 1024) * 1024
    assert found == config.stages * (96 + 128) * 64 + rings + 16 * config.stages + 16


def test_consumers_share_tiles_by_their_number():
    tile = TileShape(96, 128, 1, False, True)
    with as_if_attached(DEVICE):
        assert tile.kind == (96, 128, 1) and tile.consumer_m == 96


@pytest.mark.parametrize(("registers", "kept"), [(60, False), (200, True)])
def test_registers_keep_tables_of_heads(registers, kept, monkeypatch):
    """And the time of an epilogue with heads is known where its tables are kept."""
    problem = problem_of(4096, 4096, 4096, "rotary_96")
    monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(OTHER, kept_registers=registers),))
    traffic = element_traffic(problem.program, EpilogueTraffic.of(problem.program, problem.out_dtypes))
    assert keeps_tables(problem.program, (96, 64)) is kept and math.isfinite(traffic.arithmetic) is kept


def test_passes_are_of_its_instruction_cache(monkeypatch):
    problem, passes = problem_of(4096, 4096, 4096, "mish"), []
    for instructions in (3000, 12000):
        monkeypatch.setattr(arch, "ARCHITECTURES", (dataclasses.replace(OTHER, cached_instructions=instructions),))
        passes.append(problem.config(GemmConfig(tile_m=96, tile_n=128, cooperative=False), DEVICE).column_passes)
    assert passes[0] > passes[1] == 1


def test_heads_are_whole_in_its_tiles():
    assert takes_heads(96)  # of 192 columns
    with as_if_attached(DEVICE):
        assert not takes_heads(96) and takes_heads(64)


def test_halves_are_whole_rows_of_it():
    """A tile of 64 columns has 32 of each half, 64 bytes."""
    problem = Shape("swiglu", "NN", 4096, 8192, 4096).problem
    arguments = problem.shape, problem.program, problem.out_dtypes
    with as_if_attached(DEVICE):
        assert (32, 64) in {config.tile.size for config in candidates(*arguments, DEVICE)}


MISFITS = {
    "box_n = 64 makes rows of 128 bytes of the 2-byte tiles; TMA's swizzle takes at most 64": {"box_n": 64},
    "of the tiles 96x128, 32x64, 96x64 none has tile_m = 32 tile_n = 128": {"tile_m": 32, "tile_n": 128},
    "do not fit into 200000 bytes of shared memory": {"stages": 12, "load_slots": 16, "store_slots": 16, "box_n": 32},
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_config_that_does_not_fit_is_told_its_limit(message):
    with as_if_attached(DEVICE), pytest.raises(ValueError, match=re.escape(message)):
        problem_of(4096, 4096, 4096).config(GemmConfig(**MISFITS[message]), DEVICE)


def test_a_config_is_one_of_its_tiles():
    with pytest.raises(ValueError, match=r"tile_m = 96; it must be one of .64, 128."):
        GemmConfig(tile_m=96)
    with as_if_attached(DEVICE):
        assert GemmConfig(tile_m=96, tile_n=128, cooperative=True).tile_m == 96
        with pytest.raises(ValueError, match=r"tile_m = 128; it must be one of .32, 96."):
            GemmConfig(tile_m=128)
        with pytest.raises(ValueError, match=r"of 96x64 are always cooperative, of 96x128 by choice, others never"):
            GemmConfig(tile_m=32, tile_n=64, cooperative=True)
        with pytest.raises(ValueError, match="one of 96x128, 32x64, not cooperative"):
            GemmConfig(tile_m=96, tile_n=64, split_k=True)
        assert GemmConfig(promote=192).promote == 192  # three rows of 64 bytes


def test_the_cost_model_counts_its_multiprocessors():
    """One tile more than there are multiprocessors is a second wave; half as many are split along k."""
    whole, plain = TileShape(96, 128, 1, False, False), ElementTraffic(0, 2, 0, False, 0, False)
    constants = by_time(CONSTANTS[DEVICE])

    def time(tiles):
        return cost(GemmShape(96 * tiles, 128, 8192), whole, plain, constants)

    with as_if_attached(DEVICE):
        assert time(61) > 1.5 * time(60) and time(120) < 1.1 * time(61)
        split = TileShape(96, 128, 1, True, False)
        assert split_tiles(GemmShape(96 * 30, 128, 8192), split) == (30, 2)
        assert GemmShape(1, 1, 64).k_blocks == 2
        many, few = GemmShape(96 * 750, 128, 8192), GemmShape(96 * 690, 128, 8192)
        assert may_split(few, split) and not may_split(many, split)  # in 11.5 and in 12.5 waves
        twice = dataclasses.replace(constants, power=dict.fromkeys(constants.power, 2.0))
        assert relative_power(GemmShape(96 * 30, 128, 8192), whole, twice) == 1.5
        long = GemmShape(128 * 300, 128, 8192)  # 5 waves of 128 x 128, as its last wave's power counts
        assert cost(long, whole, plain, dataclasses.replace(constants, idle=0.5)) < cost(long, whole, plain, constants)
    assert constants_for(f"{DEVICE} PCIe") is CONSTANTS[DEVICE]
    assert OTHER.unit_nanoseconds == 60 * 2 * 128 * 128 * 32 / 350e3


def test_expected_times_are_of_its_figures():
    shape = GemmShape(4096, 4096, 4096)
    assert bare_us(shape, jnp.bfloat16, jnp.bfloat16, DEVICE) > 1.5 * bare_us(shape, jnp.bfloat16, jnp.bfloat16, H200)
    assert pass_us(10**9, DEVICE) == pytest.approx(1e9 / (0.5 * 1.0) / 1e6)
    problem = problem_of(*SHAPES[0])
    with as_if_attached(DEVICE):
        config = problem.config(None, DEVICE)
        traffic = element_traffic(problem.program, EpilogueTraffic.of(problem.program, problem.out_dtypes))
        units = cost(problem.shape, config.tile, traffic, by_time(CONSTANTS[DEVICE]))
    assert problem.config(None, DEVICE) == config
    assert expected_nanoseconds(problem, config, DEVICE) == round(units * OTHER.unit_nanoseconds)


def scaled(x, w, scale):
    """A product whose row sums are the last result."""
    return coda.gemm(x, w, scale, epilogue=lambda acc, scale: (acc * scale, (acc * acc).sum(-1)))


TYPES = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 2048), (2048, 4096), (4096,))]


@pytest.fixture
def requests(monkeypatch):
    """The requests to compile: (source, name, architecture). Nothing is compiled."""
    found = []
    monkeypatch.setattr(ffi, "compile_async", lambda *request: found.append(request))
    return found


def lowered(function, *types):
    """The text of a program for a GPU. The function is a new one, of which nothing is known."""
    return jax.jit(lambda *x: function(*x)).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


def check_requests(requests, text, headers):
    """Asserts that each request, and each custom call of the program, is of the other architecture."""
    for source, _, target in requests:
        assert target == OTHER.target and not HOPPER.search(source)
        assert f'key = "{ffi.kernel_key(source, target)}"' in text
    assert {source.splitlines()[0] for source, *_ in requests} == {f'#include "{header}"' for header in headers}
    assert set(re.findall(r'arch = "(\w+)"', text)) == {OTHER.target} and not HOPPER.search(text)


def test_a_product_is_compiled_for_it(requests):
    with as_if_attached(DEVICE):
        text = lowered(scaled, *TYPES)
    ((source, *_),) = requests
    check_requests(requests, text, [OTHER.product_header])
    assert "threads = 192 : i32" in text and "__launch_bounds__(192, 1)" in source
    assert "multiprocessors = 60;" in source and "tile_k = 32;" in source
    requests.clear()
    text = lowered(scaled, *TYPES)
    assert [target for *_, target in requests] == ["sm_90a"] and 'arch = "sm_90a"' in text
    assert '#include "mainloop_sm90.cuh"' in requests[0][0] and "multiprocessors = 132;" in requests[0][0]


def test_products_of_several_devices_yield_and_split_by_its_figures(requests, monkeypatch):
    from coda_jax.lowering import cuda

    monkeypatch.setattr(cuda, "is_of_several", lambda ctx: True)
    with as_if_attached(DEVICE):
        text = lowered(scaled, *TYPES)
        config = problem_of(4096, 4096, 2048).config(GemmConfig(split_k=True), DEVICE)
        split = lowered(lambda x, w: coda.gemm(x, w, config=GemmConfig(**dataclasses.asdict(config))), *TYPES[:2])
    (k_blocks,) = map(int, re.findall(r"yield_k_blocks = (\d+)", text))
    tile_m, tile_n = (int(re.search(rf"{name} = (\d+)", text)[1]) for name in ("tile_m", "tile_n"))
    per_block = 2 * tile_m * tile_n * 32 / (350e12 / 60)  # seconds
    assert k_blocks * per_block == pytest.approx(2e-3, rel=0.01)
    assert f"tensor<60x{config.tile_m}x{config.tile_n}xf32>" in split


def test_boxes_and_words_of_a_launch_are_of_its_figures(requests):
    def function(acc):
        return acc, acc.T, jnp.max(acc)

    with as_if_attached(DEVICE):
        text = lowered(lambda x, w: coda.gemm(x, w, epilogue=function, config=GemmConfig(split_k=False)), *TYPES[:2])
    (numbers,) = re.findall(r"maps = dense<\[([\d, ]+)\]>", text)
    numbers = [int(number) for number in numbers.split(", ")]
    maps = [numbers[i : i + 6] for i in range(0, len(numbers), 6)]
    assert [(columns, swizzle) for *_, columns, _, swizzle in maps[:2]] == [(32, 64)] * 2
    assert [columns for *_, columns, _, swizzle in maps[2:] if swizzle == 64] == [32, 32]
    assert f"tensor<{60 * OTHER.consumers * 4}xf32>" in text


def test_factors_of_8_bits_are_promoted_by_its_rule(requests):
    types = [jax.ShapeDtypeStruct((2048, 2048), jnp.float8_e4m3fn)] * 2
    with as_if_attached(DEVICE):
        lowered(lambda a, b: coda.gemm(a, b, transpose_b=True, out_dtype=jnp.bfloat16), *types)
    ((source, *_),) = requests
    assert "promote_blocks = 4;" in source and "tile_m = 96, tile_n = 128, tile_k = 64;" in source


@pytest.mark.parametrize("k", [1024, 2048])
def test_xla_sums_factors_of_8_bits_by_its_rule(k):
    types = [jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in ((64, k), (k, 64))]
    options = {"transpose_a": False, "transpose_b": False, "out_sharding": None, "in_8_bits": True}
    with as_if_attached(DEVICE):
        (dot,) = jax.make_jaxpr(functools.partial(accumulate, **options))(*types).eqns
    assert (dot.params["precision"] is None) is (k == 1024)


def test_boxes_of_8_bits_are_at_least_its_narrowest():
    """Half a head of 32 columns has 16 bytes."""

    def function(acc):
        heads = acc.reshape(acc.shape[0], -1, 32)
        return (heads * jnp.max(jnp.abs(heads), axis=-1, keepdims=True)).reshape(acc.shape).astype(jnp.float8_e4m3fn)

    there, here = (
        next(iter(coda.explain(lambda x, w: coda.gemm(x, w, epilogue=function), *TYPES[:2], device=device).products))
        for device in ("Imaginary", "H200")
    )
    assert there.reason is None and "half a head is less than a box of 32 bytes" in here.reason


def attend(q, k, v):
    return coda.attention(q, k, v, is_causal=True)


def heads(width):
    return [jax.ShapeDtypeStruct((2, 256, 4, width), jnp.bfloat16)] * 3


def test_attention_is_compiled_for_it(requests):
    gradient = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))
    with as_if_attached(DEVICE):
        text = lowered(gradient, *heads(64))
    check_requests(requests, text, [*OTHER.attention_headers.values(), "attention_passes.cuh"])
    bounds = {source.splitlines()[0]: re.search(r"__launch_bounds__\((\d+)", source)[1] for source, *_ in requests}
    assert bounds['#include "attention_backward_sm990.cuh"'] == "192"  # a producer's and a consumer's warpgroup
    assert bounds['#include "attention_forward_sm990.cuh"'] == "288"  # and of two consumers


def test_maps_of_gradients_are_compiled_for_it(monkeypatch):
    with as_if_attached(DEVICE):
        calls, _ = launches(monkeypatch, "turned_in_8_bits", 2, 2176, 16, 8, 64)
    assert [call.arch for call, _ in calls] == [OTHER.target] * 3 and calls[1][0].threads == 192


def test_heads_of_queries_are_divided_by_its_multiprocessors():
    """64 blocks with 4 heads of queries each become 2 for each multiprocessor, or as many as there can be."""
    assert attention_kernel._splits(4, 16, 2, 2) == 4
    with as_if_attached(DEVICE):
        assert attention_kernel._splits(4, 16, 2, 2) == 2


def test_heads_whose_tiles_do_not_fit_take_the_xla_form():
    with (
        as_if_attached(DEVICE),
        pytest.raises(NotImplementedError, match=r"need 218360 bytes of shared memory, of 200000"),
    ):
        lowered(lambda *x: coda.attention(*x, implementation="cuda"), *heads(256))


def test_an_explanation_is_of_it():
    found = coda.explain(scaled, *TYPES, device="Imaginary", source=True)
    ((product, _),) = found.products.items()
    assert "Imagined kernel, " in str(found) and not HOPPER.search(str(found))
    assert f'#include "{OTHER.product_header}"' in product.source
    assert product.cost.roofline_us == pytest.approx(2 * 4096 * 4096 * 2048 / 500e12 * 1e6)
    attention, ours = (coda.explain(attend, *heads(64), device=device) for device in ("Imaginary", "H200"))
    assert "Imagined kernels" in str(attention) and not HOPPER.search(str(attention))
    assert attention.totals.attention_ms == pytest.approx(10 * ours.totals.attention_ms, rel=0.01)


def test_advice_is_by_its_times():
    """At 14 us a launch is less than half of it, which on an H200 it would not be."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 1024), (1024, 1024))]
    found = coda.explain(lambda x, w: coda.gemm(x, w), *types, device="Imaginary")
    assert 12 < next(iter(found.products)).cost.us < 16
    assert [str(one) for one in found.advice if "too small" in str(one)] == []


CALLS = {"gemm": (lambda x, w: coda.gemm(x, w, implementation="cuda"), TYPES[:2])}
CALLS["attention"] = (
    lambda *x: coda.attention(*x, implementation="cuda"),
    [jax.ShapeDtypeStruct((1, 8, 1, 64), "bfloat16")] * 3,
)


@pytest.mark.parametrize("name", CALLS)
def test_where_there_is_no_gpu_its_name_is_told(name):
    function, types = CALLS[name]
    with as_if_attached(DEVICE), pytest.raises(NotImplementedError, match="on NVIDIA Imagined GPUs"):
        jax.jit(lambda *x: function(*x)).trace(*types).lower(lowering_platforms=("cpu",))


def test_tools_need_its_gpus(monkeypatch):
    monkeypatch.setattr(arch, "ARCHITECTURES", (OTHER,))
    monkeypatch.setattr(ffi, "unavailable_reason", lambda: None)
    with pytest.raises(RuntimeError, match="it measures on a Imagined GPU; JAX runs on cpu"):
        coda.tune(scaled, *TYPES)
    here = doctor.Machine(13000, (("NVIDIA Stand-in", "9.0"),))
    (gpu,) = [one for one in doctor.check_gpus(here) if one.text.startswith("NVIDIA Stand-in")]
    assert "the kernels need 99.0 (Imagined)" in gpu.text and gpu.mend.startswith("use a Imagined GPU")
    compiled = []

    def compile(source, name, target):
        compiled.append((source.splitlines()[0], target))
        return ffi.Compiled(b"", "", 1.0, False)

    monkeypatch.setattr(ffi, "compile", compile)
    *found, last = doctor.check_kernel(here)
    assert compiled == [(f'#include "{OTHER.product_header}"', OTHER.target)] * 2
    assert all("compiled for sm_990x" in one.text for one in found) and last.text == "not run: no Imagined GPU here"
    assert "lowered to the Imagined kernel" in str(tune.Tuning(pathlib.Path("x"), DEVICE, ()))


def test_another_gpu_is_told_what_the_kernels_need(monkeypatch):
    class Device:
        compute_capability = "9.0"

    monkeypatch.setattr(jax, "devices", lambda platform=None: [Device()])
    monkeypatch.setattr(arch, "ARCHITECTURES", (OTHER,))
    assert select.machine_reason() == "the GPU has compute capability 9.0; the kernel needs 99.0 (Imagined)"


def texts(path):
    """Strings in a file's code, and numbers, but for docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node.lineno, str(node.value)


def test_hopper_is_named_in_its_own_file_alone():
    """Beside it in the constants that were measured on its chips."""
    own = {ROOT / "coda_jax" / "tiles" / name for name in ("arch.py", "constants.py")}
    paths = [path for path in sorted((ROOT / "coda_jax").rglob("*.py")) if path not in own]
    found = {f"{path}:{line}": text for path in paths for line, text in texts(path) if HOPPER.search(text)}
    assert found == {} and len(paths) > 200
    assert all(any(HOPPER.search(text) for _, text in texts(path)) for path in own)
