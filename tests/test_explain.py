"""coda.explain names every product of a function, what it becomes, and why."""

import functools
import inspect
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import coda_jax as coda
from benchmarks.lab.kernel_records import lowered
from benchmarks.lab.machine_code import disassembly
from coda_jax import ffi
from coda_jax.tiles.arch import SM90
from coda_jax.tools import explain
from tests.nvrtc import needs_nvrtc

A, B = jax.ShapeDtypeStruct((32, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 24), jnp.bfloat16)


def test_on_a_hopper_gpu():
    def f(a, b):
        y = coda.gemm(a, b, epilogue=jnp.tanh)
        odd = coda.gemm(a, b[:, :7])
        return y, odd, coda.gemm(y, b, transpose_b=True, implementation="xla"), y @ b.T

    found = coda.explain(f, A, B, platform="cuda")
    assert found.kernels == 1 and found.others == 1
    reasons = {(p.epilogue, p.b): p.reason for p in found.products}
    assert reasons["tanh", "bfloat16[16,24]"] is None
    assert reasons["gemm", "bfloat16[16,24]^T"] == "implementation='xla'"
    assert "a row of 7 bfloat16 is 14 bytes" in reasons["gemm", "bfloat16[16,7]"]
    line = " ".join(str(found).splitlines()[1].split())
    numbers = r"2.46e-05 0.00333 \d+ \d+% of memory > \d+"
    kernel = rf"1 tanh bfloat16\[32,16\] @ bfloat16\[16,24\] {numbers} Hopper kernel, \d+ x \d+ \(cost model\)"
    assert re.fullmatch(kernel, line)


def test_explain_and_lowering_need_no_nvrtc(tmp_path):
    """In a process that finds none, explain and lowering for CUDA say and make what they do elsewhere, in silence."""
    code = """
import jax, jax.numpy as jnp
from jax import export
import coda_jax as coda
from coda_jax import ffi
from coda_jax.tools import explain

ffi._nvrtc_libraries = lambda: [("", "libnvrtc-of-nowhere.so")]
ffi._configure()
assert "NVRTC was not found" in ffi.unavailable_reason()
types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32, 16), (16, 24))]
print(coda.explain(lambda a, b: (coda.gemm(a, b), coda.gemm(a, b[:, :7])), *types, platform="cuda"))
product = jax.jit(lambda a, b: coda.gemm(a, b, implementation="cuda"))
print(product.trace(*types).lower(lowering_platforms=("cuda",)).as_text().count("@coda_gemm("))
check = [export.DisabledSafetyCheck.custom_call("coda_gemm")]
exported = export.export(product, platforms=["cuda"], disabled_checks=check)(*types)
print(exported.mlir_module().count("@coda_gemm("))
"""
    environment = {**os.environ, "CODA_JAX_QUIET": "0", "CODA_JAX_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    _, kernel, odd, *_, lowered, exported = run.stdout.splitlines()
    assert "Hopper kernel" in kernel and "a row of 7 bfloat16 is 14 bytes" in odd
    assert (lowered, exported) == ("1", "1")


def test_a_config_that_does_not_fit():
    found = coda.explain(
        lambda a, b: coda.gemm(a, b, config=coda.GemmConfig(tile_n=256, stages=8)), A, B, platform="cuda"
    )
    (product,) = found.products
    assert "do not fit into 232448 bytes" in product.reason


def test_elsewhere():
    found = coda.explain(jax.jit(coda.gemm), A, B)
    assert found.kernels == 0
    assert [p.reason for p in found.products] == ["the platform is cpu"]


def test_loops_and_gradients_are_counted():
    def layers(a, b):
        return jax.lax.scan(lambda a, _: (coda.gemm(a, b) * 2, None), a, length=5)[0].sum()

    square = jax.ShapeDtypeStruct((16, 16), jnp.float16)
    assert coda.explain(layers, A.update(dtype=jnp.float16), square, platform="cuda").kernels == 5
    both = coda.explain(jax.grad(layers, (0, 1)), A.update(dtype=jnp.float16), square, platform="cuda")
    assert both.kernels == 15 and len(both.products) == 3


def test_another_platform_is_refused():
    with pytest.raises(ValueError, match="platform='CUDA'; it must be 'cuda', 'gpu', 'cpu' or None"):
        coda.explain(coda.gemm, A, B, platform="CUDA")


def scaled_gate(acc, rstd, *, bias):
    gate, up = jnp.split(acc * rstd + bias, 2, axis=1)
    return jax.nn.silu(gate) * up


def scaled_gate_again(acc, r, bias):
    gate, up = jnp.split(acc * r + bias, 2, axis=1)
    return jax.nn.silu(gate) * up


WIDE = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)


def source_of(epilogue, *operands):
    found = coda.explain(
        functools.partial(coda.gemm, epilogue=epilogue), A, WIDE, *operands, platform="cuda", source=True
    )
    ((product, _),) = found.products.items()
    assert str(found).endswith(f"// {product.epilogue}: {product.a} @ {product.b}\n{product.source.rstrip()}")
    return product.source


RSTD, BIAS = jax.ShapeDtypeStruct((32, 1), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.float32)


def test_sources_have_the_users_names():
    line = inspect.getsourcelines(scaled_gate_again)[1]
    source = source_of(scaled_gate_again, RSTD, BIAS)
    assert f"struct Epilogue : coda::EpilogueDefaults {{  // scaled_gate_again, test_explain.py:{line}\n" in source
    for declaration in ("r = in.column_vector[0].f", "bias_0 = in.row_vector[0].f", "bias_1 = in.row_vector[1].f"):
        assert f"    const float {declaration};\n" in source
    # A partial's function, and an array that it closes over.
    captured = source_of(functools.partial(scaled_gate, bias=jnp.ones(32)), RSTD)
    line = inspect.getsourcelines(scaled_gate)[1]
    assert f"// scaled_gate, test_explain.py:{line}\n" in captured
    assert "const float rstd = in." in captured and "captured_0_1 = in." in captured


def test_names_that_no_variable_can_have():
    def epilogue(acc, out, v3, float):  # what C++ and the generated function have another meaning for
        return acc * out + v3 - float

    source = source_of(epilogue, *[jax.ShapeDtypeStruct((32,), jnp.float32)] * 3)
    names = re.findall(r"const float (\w+) =", source)
    assert names[:4] == ["acc", "row_vector_0", "row_vector_1", "row_vector_2"]
    twice = source_of(lambda x, acc, row: x * acc + row, RSTD, BIAS)
    assert re.findall(r"const float (\w+) =", twice)[:3] == ["acc", "v1", "row"]


@needs_nvrtc
def test_shown_source_compiles_to_the_same_code():
    """And the names are no part of a kernel's key: the same mathematics elsewhere is the same source."""
    functions = scaled_gate_again, lambda acc, s, b: scaled_gate_again(acc, s, b)
    shown = [source_of(f, RSTD, BIAS) for f in functions]
    programs = [lowered(functools.partial(coda.gemm, epilogue=f), A, WIDE, RSTD, BIAS) for f in functions]
    (compiled,) = {call.attributes["source"] for program in programs for call in program.calls}
    assert shown[0] != shown[1] and "scaled_gate_again" not in compiled and ".py" not in compiled
    codes = [disassembly(ffi.compile(source, "shown", SM90.target).cubin) for source in (*shown, compiled)]
    assert codes[0] == codes[1] == codes[2]


def test_no_source_unless_it_is_asked_for():
    found = coda.explain(coda.gemm, A, B, platform="cuda")
    assert [p.source for p in found.products] == [None]
    elsewhere = coda.explain(coda.gemm, A, B, platform="cpu", source=True)
    assert [p.source for p in elsewhere.products] == [None]


def test_equal_products_of_layers_are_looked_at_once(monkeypatch):
    """They differ by their names alone, and each has its own name and the same costs as by itself."""
    looked_at = []
    one = explain._product
    monkeypatch.setattr(explain, "_product", lambda equation, *rest: looked_at.append(equation) or one(equation, *rest))

    def layers(w, x):
        for i in range(4):
            x = jnp.tanh(x @ w) @ w
            x = x[::-1] if i % 2 else x  # or these are calls of one function
        return x

    w = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    found = coda.explain(coda.fuse(layers), w, w, platform="cuda")
    assert found.kernels == 8 and len(found.products) > 2 == len(looked_at)
    assert len({product.epilogue for product in found.products}) == len(found.products)
    single = coda.explain(coda.fuse(lambda w, x: jnp.tanh(x @ w) @ w), w, w, platform="cuda")
    assert {product.cost for product in found.products} == {product.cost for product in single.products}
    assert found.totals.flops == 4 * single.totals.flops
