"""Tables of measured tiles: where they lie, which counts, what is ignored. Times are invented."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import export

import coda_jax as coda
from coda_jax.tiles import table as tile_table
from coda_jax.tools import tune
from tests.nvrtc import needs_nvrtc
from tests.tuned import DEVICE, A, B, cut, cuts, fastest, key_of, own_table, product, write


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    yield from own_table(tmp_path, monkeypatch, lambda: DEVICE)


@needs_nvrtc
def test_precedence(table):
    """config, the user's table, the library's, the cost model; another device's entries and export have none."""
    (default,) = cut(product, A, B)
    write(tile_table.shipped_path(DEVICE), {"tile_m": 64, "tile_n": 128})
    assert cut(product, A, B) == [(64, 128, 2)]
    write(table, {"tile_m": 64, "tile_n": 256, "cluster_m": 1})
    assert cut(product, A, B) == [(64, 256, 1)]
    fixed = coda.GemmConfig(tile_m=128, tile_n=128)
    assert cut(lambda a, b: coda.gemm(a, b, config=fixed), A, B) == [(128, 128, 2)]
    exported = export.export(
        jax.jit(lambda a, b: product(a, b)),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("coda_gemm")],
    )
    assert cuts(exported(A, B).mlir_module()) == [default]
    write(table, {"tile_m": 64, "tile_n": 256}, devices=["NVIDIA H100 80GB HBM3"])
    assert cut(product, A, B) == [(64, 128, 2)]
    tile_table.shipped_path(DEVICE).unlink()
    tile_table._load.cache_clear()
    assert cut(product, A, B) == [default]


def test_default_place(monkeypatch):
    """Beside the compiled kernels; in a job of several processes only a table that the user names."""
    monkeypatch.delenv("CODA_JAX_TUNED")
    monkeypatch.setenv("CODA_JAX_CACHE_DIR", "/somewhere")
    assert str(tile_table.user_path()) == "/somewhere/tuned.json"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert tile_table.user_path() is None
    monkeypatch.setenv("CODA_JAX_TUNED", "/shared/table.json")
    assert str(tile_table.user_path()) == "/shared/table.json"
    monkeypatch.setenv("CODA_JAX_TUNED", "")
    assert tile_table.user_path() is None
    with pytest.raises(ValueError, match="no place for a table"):
        tune.tune_with(fastest((64, 128)), DEVICE, product, A, B)


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 100000, "not JSON"),
        ('{"format": 2, "devices": {}}', '"format": 1'),
        ("[]", '"format": 1'),
        ('{"format": 1, "devices": {"NVIDIA H200": 3}}', "object of objects"),
        (None, "Is a directory"),
    ],
)
def test_damaged_file(table, text, message):
    """One warning, the cost model's tile, and no overwriting."""
    table.parent.mkdir()
    if text is None:
        table.mkdir()
    else:
        table.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match=message) as warned:
        assert len(cut(lambda a, b: coda.gemm(coda.gemm(a, b), b, transpose_b=True), A, B)) == 2
    assert len(warned) == 1
    with pytest.raises((ValueError, OSError), match=message):
        tune.tune_with(fastest((64, 128)), DEVICE, product, A, B)
    assert text is None or table.stat().st_size == len(text)


@needs_nvrtc
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tile_m": 96, "tile_n": 128}, "tile_m = 96"),
        ({"tile_m": 128, "tile_n": 64}, "none has tile_m = 128 tile_n = 64"),
        ({"tile_m": 128, "tile_n": 192, "stages": 8, "load_slots": 16}, "shared memory"),
        ({"tile_m": 128.0}, "the others integers"),
        ({"tile_m": True}, "the others integers"),
        ({"split_k": 1}, "the others integers"),
        ({"tile": 128}, "the others integers"),
        (None, "the others integers"),
    ],
)
def test_damaged_entry(table, config, message):
    (default,) = cut(product, A, B)
    write(table, config)
    with pytest.warns(UserWarning, match=f"is ignored: .*{message}") as warned:
        assert cut(product, A, B) + cut(product, A, B) == [default] * 2
    assert len(warned) == 1


@needs_nvrtc
def test_key():
    """By everything that the kernel or its best tile depends on, and stable."""

    def one(shape=(8, 4096, 1024), dtype=jnp.bfloat16, out_dtype=None, axes=(0, None), b=(1024, 6144), **options):
        types = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(b, dtype)
        return key_of(jax.vmap(lambda a, b: coda.gemm(a, b, out_dtype=out_dtype, **options), axes), *types)

    batched = {"shape": (8, 512, 1024), "axes": (0, 0), "b": (8, 1024, 6144)}
    keys = [
        one(),
        one(dtype=jnp.float16),
        one(out_dtype=jnp.float32),
        one(epilogue=jnp.tanh),
        one(transpose_b=True, b=(6144, 1024)),
        one(**batched),
        one(**{**batched, "shape": (8, 1024, 512), "transpose_a": True}),
    ]
    assert len(set(keys)) == len(keys)
    # A batch that becomes rows is the same launch as those rows.
    rows = jax.ShapeDtypeStruct((8 * 4096, 1024), jnp.bfloat16)
    assert key_of(product, rows, B) == one() == "1x32768x6144x1024 NN bfloat16 27e7d115ed603362"


def test_symbolic_sizes_have_no_key(table):
    (m,) = export.symbolic_shape("m")
    assert tune.products_of(product, jax.ShapeDtypeStruct((m, 1024), jnp.bfloat16), B) == {}
    assert "no product" in str(tune.tune_with(fastest((64, 128)), DEVICE, product, jnp.ones((2, 3)), jnp.ones((3, 2))))
    assert not table.exists()


WRITER = """
import sys, pathlib
from coda_jax.tiles import table as tile_table
print("begin", flush=True)
for i in range(20):
    tile_table.update(pathlib.Path(sys.argv[1]), sys.argv[2], {f"{sys.argv[3]}{i}": {"config": {}}})
"""


@pytest.mark.slow
def test_concurrent_writers(table):
    """Processes and threads merge: nothing is lost, and a reader never sees half a table."""

    def write(name):
        for i in range(20):
            tile_table.update(table, "other" if name == "c" else DEVICE, {f"{name}{i}": {"config": {}}})

    threads = [threading.Thread(target=write, args=(name,)) for name in "bc"]
    command = [sys.executable, "-c", WRITER, str(table), DEVICE, "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()  # it has imported everything, and writes
        for thread in threads:
            thread.start()
        while process.poll() is None:
            tile_table.read(table)
    for thread in threads:
        thread.join()
    assert process.returncode == 0
    devices = tile_table.read(table)
    assert {device: len(entries) for device, entries in devices.items()} == {DEVICE: 40, "other": 20}
    assert {path.name for path in table.parent.iterdir()} == {"table.json", "table.json.lock"}
