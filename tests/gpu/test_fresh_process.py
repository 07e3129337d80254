"""The kernel in processes of its own: command buffers, persistent caches, exported programs."""

import os
import subprocess
import sys

STEP = """
import sys
import jax, jax.numpy as jnp, numpy as np
import coda_jax as coda

def f(acc, x):
    y = acc + x
    return y, jnp.sum(y * y, axis=1)

def step(a, b, x):
    for i in range(4):
        config = coda.GemmConfig(split_k=i % 2 == 1)
        x, s = coda.gemm(a, b, x, epilogue=f, implementation="cuda", config=config)
    return x, s

a = jnp.asarray(np.random.default_rng(0).normal(size=(512, 512)), jnp.bfloat16)
b = jnp.asarray(np.random.default_rng(1).normal(size=(512, 512)), jnp.bfloat16)
x = jnp.zeros((512, 512), jnp.bfloat16)
"""


def _fresh_process(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", STEP + code],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_command_buffers(tmp_path):
    flags = (
        f"--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    )
    code = """
compiled = jax.jit(step).lower(a, b, x).compile()
first = compiled(a, b, x)
for _ in range(5):
    again = compiled(a, b, x)
    moved = compiled(*[jnp.copy(v) for v in (a, b, x)])
for other in (again, moved):
    for u, v in zip(first, other):
        assert (np.asarray(u, np.float32) == np.asarray(v, np.float32)).all()
"""
    _fresh_process(code, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}")
    dumped = [path for path in tmp_path.iterdir() if "jit_step" in path.name and path.is_file()]
    texts = [path.read_text(errors="replace").lower() for path in dumped]
    assert any("command_buffer" in text or "kcommandbuffer" in text for text in texts), dumped


def test_persistent_compilation_cache_and_export_in_a_fresh_process(tmp_path):
    kernels, programs, exported = tmp_path / "kernels", tmp_path / "programs", tmp_path / "step.bin"
    common = """
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
"""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "CODA_JAX_CACHE_DIR": str(kernels),
        "CODA_JAX_QUIET": "0",
    }
    write = f"""
from jax import export
jax.jit(step)(a, b, x)
allowed = [export.DisabledSafetyCheck.custom_call("coda_gemm")]
open({str(exported)!r}, "wb").write(export.export(jax.jit(step), disabled_checks=allowed)(a, b, x).serialize())
"""
    first = _fresh_process(common + write, **environment)
    assert "compiling" in first.stderr
    again = _fresh_process(common + "jax.block_until_ready(jax.jit(step)(a, b, x))", **environment)
    assert "compiling" not in again.stderr
    read = f"""
from jax import export
loaded = export.deserialize(open({str(exported)!r}, "rb").read())
for u, v in zip(loaded.call(a, b, x), jax.jit(step)(a, b, x)):
    assert (np.asarray(u, np.float32) == np.asarray(v, np.float32)).all()
"""
    # The program comes from the caches or the export, the kernel from neither: it compiles when XLA instantiates it.
    cold = _fresh_process(common + read, **{**environment, "CODA_JAX_CACHE_DIR": str(tmp_path / "empty")})
    assert "compiling" in cold.stderr
