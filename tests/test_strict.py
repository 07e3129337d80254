"""Strict mode: a product that falls back on a GPU, and a lost chain, is an error, whatever JAX's caches hold."""

import os
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coda_jax as coda
from coda_jax.primitives import fallbacks
from tests.nvrtc import needs_nvrtc
from tests.partitioned import partitioned_on_cpus

pytestmark = pytest.mark.usefixtures("nothing_said_yet")
A, B = jax.ShapeDtypeStruct((32, 16), jnp.float32), jax.ShapeDtypeStruct((16, 24), jnp.float32)
REASON = "takes its XLA form: .*float32"


def lower(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@needs_nvrtc
def test_a_fallback_raises_each_time_and_names_line_and_reason():
    def multiply(a, b):
        return coda.gemm(a, b)

    with pytest.warns(coda.FallbackWarning) as caught:
        lower(multiply, A, B)
    line = f"{__file__}:{multiply.__code__.co_firstlineno + 1}: gemm 'gemm', float32[32, 16] @ float32[16, 24], takes "
    for _ in range(2):  # said already: raised all the same
        with coda.strict(), pytest.raises(coda.FallbackError, match=re.escape(line)) as raised:
            lower(multiply, A, B)
        assert str(caught[0].message) in str(raised.value)
    with coda.strict(), coda.strict(False):
        lower(multiply, A, B)


@needs_nvrtc
def test_each_line_is_told_once():
    """For the same reason a line of another program is told too; what is told already is not told again."""

    def one(a, b):
        return coda.gemm(a, b), coda.gemm(a, b, epilogue=jnp.tanh)

    def other(a, b):
        return coda.gemm(a, b)

    for told, functions in (([one], [one]), ([other], [one, other]), ([], [one, other])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for function in functions:
                lower(function, A, B)
        assert [warning.lineno for warning in caught] == [function.__code__.co_firstlineno + 1 for function in told]
        assert all("coda.explain lists all" in str(warning.message) for warning in caught)


@needs_nvrtc
def test_pieces_of_a_factor_are_told_as_such():
    with pytest.warns(coda.FallbackWarning, match=r"float32\[32, 16\] @ float32\[16, 24\], float32\[16, 24\], takes"):
        lower(lambda a, b: coda.gemm(a, (b, b)), A, B)


@needs_nvrtc
def test_kernels_and_asked_xla_forms_pass_strict_mode():
    with coda.strict():
        kernel = lower(coda.gemm, *(x.update(dtype=jnp.bfloat16) for x in (A, B)))
        asked = lower(lambda a, b: coda.gemm(a, b, implementation="xla"), A, B)
        jax.jit(coda.gemm).lower(A, B)  # for a CPU
    assert kernel.as_text().count("@coda_gemm(") == 1 and "@coda_gemm(" not in asked.as_text()


@needs_nvrtc
def test_backward_passes_are_strict_too():
    def loss(a, b):
        return jnp.sum(coda.gemm(a, b))

    types = [x.update(dtype=jnp.bfloat16) for x in (A, B)]
    a = types[0].update(dtype=jnp.float32)  # da is bfloat16 times float32
    with coda.strict():
        lower(jax.grad(loss, (0, 1)), *types)
        with pytest.raises(coda.FallbackError, match=REASON):
            lower(jax.grad(loss, (0, 1)), a, types[1])


def test_a_lost_chain_raises():
    def function(x):
        return fallbacks.with_fallback_note(x, "here", "a reason").sum()

    with coda.strict():
        jax.jit(function).lower(A)
        with pytest.raises(coda.FallbackError, match=r"test_strict\.py:\d+: here: a reason"):
            lower(jax.value_and_grad(lambda x: jnp.square(function(x))), A)


def test_products_that_fuse_leaves_are_errors():
    """Large ones; a context outside of which the function was traced before counts."""

    def scores(x, w):
        h = x @ w
        return jnp.tanh(jnp.einsum("btd,bsd->bts", h, h))

    def small(x, w):
        return jnp.tanh(x @ w) + jnp.sum(jnp.einsum("bd,bd->b", x[:, 0], x[:, 1]))

    x, w = jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 512), jnp.bfloat16)
    for function in (coda.fuse(scores), jax.value_and_grad(lambda x, w: jnp.sum(coda.fuse(scores)(x, w)))):
        lower(function, x, w)
        message = r"test_strict\.py:\d+: fuse\(scores\): it leaves 1 products to XLA, .*: both factors have batch axes"
        with coda.strict(), pytest.raises(coda.FallbackError, match=message):
            lower(function, x, w)
    with coda.strict():
        lower(coda.fuse(small), x, w)
        jax.jit(coda.fuse(scores)).lower(x, w)


def test_a_function_that_fuse_does_not_trace_is_an_error():
    def grows(arrays):
        arrays["y"] = arrays["x"] @ arrays["x"]
        return arrays["y"]

    def function(x):
        return coda.fuse(grows)({"x": x})

    lower(function, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    with coda.strict(), pytest.raises(coda.FallbackError, match="it runs as it is, for it changes the structure of an"):
        lower(function, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))


def test_a_lost_chain_outside_jit(monkeypatch):
    """On arrays that lie on a GPU."""
    x = jnp.ones(3)
    with coda.strict():
        fallbacks.with_fallback_note(x, "here", "a reason")
    monkeypatch.setattr(type(x), "devices", lambda _: [types.SimpleNamespace(platform="gpu")])
    with pytest.warns(coda.FallbackWarning, match="here: a reason"):
        fallbacks.with_fallback_note(x, "here", "a reason")
    with coda.strict(), pytest.raises(coda.FallbackError):
        fallbacks.with_fallback_note(x, "here", "a reason")


@pytest.fixture
def as_on_a_gpu():
    """Products on CPUs are lowered as for a GPU."""
    with partitioned_on_cpus(), warnings.catch_warnings():
        warnings.simplefilter("ignore", coda.FallbackWarning)
        yield


@needs_nvrtc
def test_jitted_functions_that_ran_before(as_on_a_gpu):
    """The context is in the key of every cache: of the jitted function, of one inside it, of what runs outside jit."""
    a, b = np.ones(A.shape, np.float32), np.ones(B.shape, np.float32)
    inner = jax.jit(coda.gemm)
    for function in (inner, jax.jit(lambda a, b: inner(a, b) + 1), coda.gemm, jax.checkpoint(inner)):
        function(a, b)
        with coda.strict(), pytest.raises(coda.FallbackError):
            function(a, b)
        function(a, b)
        with coda.strict(), pytest.raises(coda.FallbackError):  # and an error is kept in none
            function(a, b)


@needs_nvrtc
def test_ahead_of_time_the_lowering_counts(as_on_a_gpu):
    traced = jax.jit(coda.gemm).trace(A, B)
    lowered = traced.lower()
    with coda.strict():
        lowered.compile()
        with pytest.raises(coda.FallbackError):
            traced.lower()
        inside = jax.jit(coda.gemm).trace(A, B)
    inside.lower()


@needs_nvrtc
def test_products_that_xla_partitions(as_on_a_gpu):
    """XLA calls back when it compiles, on any thread: strict is what was so when the program was lowered."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])
    a, b = jax.device_put(jnp.ones(A.shape), NamedSharding(mesh, P("x"))), jnp.ones(B.shape)
    b = jax.device_put(b, NamedSharding(mesh, P()))
    multiply = jax.jit(lambda a, b: coda.gemm(a, b, epilogue=jnp.tanh))
    multiply(a, b)
    with coda.strict():
        lowered = multiply.lower(a, b)
        with pytest.raises(Exception, match=r"FallbackError.*takes its XLA form"):
            multiply(a, b)
    with pytest.raises(Exception, match=r"FallbackError.*takes its XLA form"):
        lowered.compile()
    plain = multiply.lower(a, b).as_text()
    keys = [re.search(r'coda_gemm = "(\w+)"', text)[1] for text in (plain, lowered.as_text())]
    assert keys[0] != keys[1]  # in the key of JAX's persistent cache


@needs_nvrtc
def test_a_loss_whose_rows_xla_cuts(as_on_a_gpu):
    """Its products are lowered when XLA calls back."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])
    x, w, labels = jnp.ones(A.shape), jnp.ones(B.shape), jnp.zeros(A.shape[:1], jnp.int32)
    specs = P("x"), P(), P("x")
    arguments = [jax.device_put(of, NamedSharding(mesh, s)) for of, s in zip((x, w, labels), specs, strict=True)]
    loss = jax.jit(lambda *arguments: coda.linear_cross_entropy(*arguments)[0])
    loss(*arguments)
    with coda.strict():
        lowered = loss.lower(*arguments)
        with pytest.raises(Exception, match=r"FallbackError.*takes its XLA form"):
            loss(*arguments)
    with pytest.raises(Exception, match=r"FallbackError.*takes its XLA form"):
        lowered.compile()


def test_the_environment_variable(monkeypatch):
    code = """
import jax, coda_jax as coda
from coda_jax.primitives.fallbacks import with_fallback_note
note = lambda x: with_fallback_note(x, "here", "a reason")
lower = lambda: jax.jit(note).trace(1.0).lower(lowering_platforms=("cuda",))
with coda.strict(False):
    lower()
lower()
"""
    environment = {**os.environ, "CODA_JAX_STRICT": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "FallbackError: <string>:4: here: a reason (strict mode" in run.stderr
    for setting in ("", "0"):
        monkeypatch.setenv("CODA_JAX_STRICT", setting)
        assert not fallbacks._strict_by_default()
    monkeypatch.setenv("CODA_JAX_STRICT", "yes")
    with pytest.raises(ValueError, match="CODA_JAX_STRICT='yes'; it must be 0 or 1"):
        fallbacks._strict_by_default()
