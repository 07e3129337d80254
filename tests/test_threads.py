"""Threads that trace, lower, compile and run at one time: the same as one after the other, and each thing said once."""

import concurrent.futures
import functools
import importlib
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coda_jax as coda
import flax_layers as layers
from coda_jax.epilogue.call_site import CallSite
from coda_jax.fusion.modules import changes_shared
from coda_jax.primitives import fallbacks
from coda_jax.tiles import table
from flax_layers.checkpoints import load_hf_folder, save_hf_folder
from tests.tiny_models import LLAMA

THREADS = 8
FUSE = importlib.import_module("coda_jax.fusion.fuse")  # the package has the function by this name


def at_one_time(*tasks):
    """Results of functions without arguments, which begin together, each in a thread of its own."""
    begin, before = threading.Barrier(len(tasks)), sys.getswitchinterval()

    def run(task):
        begin.wait()
        return task()

    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
            return list(pool.map(run, tasks))
    finally:
        sys.setswitchinterval(before)


A, B = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))


def products(scale):
    """Values and gradients of products, and their form for a GPU; all functions are new."""

    def loss(a, b):
        gated = coda.gemm(a, jnp.stack([b, b], 1), epilogue=lambda acc: jax.nn.silu(acc) * scale)
        tiles, sums = coda.gemm(a, b, gated[:, 0], epilogue=lambda acc, r: (acc + r, jnp.sum(acc * acc, axis=1)))
        return jnp.sum(tiles * scale) + jnp.sum(sums)

    values = jax.jit(jax.value_and_grad(loss, (0, 1)))(A, B)
    half = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)] * 2
    function = functools.partial(coda.gemm, epilogue=lambda acc: jnp.tanh(acc * (1 + scale % 2)))
    text = jax.jit(function).trace(*half).lower(lowering_platforms=("cuda",)).as_text()
    return jax.tree.leaves(values), text


@pytest.mark.slow
def test_products_are_those_of_one_thread():
    """The products of several threads, of equal and of different functions, are those of one thread."""
    want = [products(scale) for scale in range(4)]
    for i, (values, text) in enumerate(at_one_time(*[functools.partial(products, i % 4) for i in range(THREADS)])):
        assert text == want[i % 4][1]
        for x, y in zip(values, want[i % 4][0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_call_runs_unfused_for_its_own_reason(monkeypatch):
    """A call of another thread at the same time has another one."""
    ran = []

    def f(a, b, asks):
        ran.append(asks)
        return a @ b if asks and a[0, 0] == 0 else jnp.tanh(a @ b)

    fused = coda.fuse(f)
    want = fused(A, B, False)

    def meanwhile(*arguments):
        monkeypatch.undo()
        at_one_time(functools.partial(fused, A, B, True))
        assert fused.reason == "it asks for the value of an array"
        return changes_shared(*arguments)

    monkeypatch.setattr(FUSE, "changes_shared", meanwhile)
    ran.clear()
    np.testing.assert_array_equal(fused(A, B, False), want)
    assert ran == [True, True]  # traced, and run as it is


def test_signatures_that_several_threads_call_at_one_time(monkeypatch):
    """With more signatures than are kept some are traced again."""
    monkeypatch.setattr(FUSE, "_SIGNATURES", 2)
    fused = coda.fuse(lambda a, scale: jnp.tanh(a) * scale)
    tasks = [functools.partial(lambda i: [fused(A, i % 4) for _ in range(40)], i) for i in range(THREADS)]
    for i, found in enumerate(at_one_time(*tasks)):
        for x in found:
            np.testing.assert_array_equal(x, jnp.tanh(A) * (i % 4))


@pytest.mark.slow
def test_models_generate_and_load(tmp_path):
    model = layers.Llama(LLAMA, rngs=nnx.Rngs(0))
    save_hf_folder(model, tmp_path)
    prompts = np.array([[5, 1, 7], [9, 4, 2]])

    def generated(model=model):
        return np.asarray(layers.generate(model, prompts, max_new_tokens=3)[0])

    def loaded():
        return generated(load_hf_folder(tmp_path))

    for got in at_one_time(generated, generated, loaded, loaded):
        np.testing.assert_array_equal(got, generated())


class Slow(set):
    """Between its answer and what follows other threads go on."""

    def __contains__(self, item):
        found = super().__contains__(item)
        time.sleep(0.05)
        return found


def test_threads_are_warned_once(monkeypatch):
    said = []
    for module in (fallbacks, table):
        monkeypatch.setattr(module, "_reported", Slow())
    monkeypatch.setattr(warnings, "warn_explicit", lambda *arguments: said.append(arguments))
    monkeypatch.setattr(warnings, "warn", lambda *arguments, **_: said.append(arguments))
    at_one_time(*[lambda: fallbacks.warn_once("message", "reason", CallSite("a.py", 1), strict=False)] * THREADS)
    at_one_time(*[lambda: table._warn("message")] * THREADS)
    assert len(said) == 2


def test_filters_of_warnings_are_as_before():
    """Under x64, where tracing changes them: of two threads that overlap the second would have kept the first one's."""
    before = list(warnings.filters)
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def traced(mine, others, acc):
        mine.set()
        others.wait(0.3)
        return acc * 2

    def first():
        trace(functools.partial(traced, first_is_in, second_is_in))

    def second():
        first_is_in.wait()
        trace(functools.partial(traced, second_is_in, threading.Event()))

    def trace(epilogue):
        with jax.enable_x64(True):
            jax.make_jaxpr(functools.partial(coda.gemm, epilogue=epilogue))(A, B)

    at_one_time(first, second)
    assert list(warnings.filters) == before


@pytest.mark.parametrize("enabled", [True, False])
def test_strict_mode_is_a_thread_s_own(enabled):
    begin = threading.Barrier(2)

    def other():
        begin.wait()
        found = fallbacks.is_strict()
        begin.wait()
        return found

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        with coda.strict(enabled):
            begin.wait()
            begin.wait()
            assert fallbacks.is_strict() == enabled
        assert found.result() is False
