"""Hugging Face's folders: read an array at a time, and written whole or not at all."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import flax_layers as layers
from flax_layers.checkpoints import hugging_face, load_hf_folder, save_hf_folder, to_hf
from tests.tiny_models import LLAMA


def llama(seed=0):
    return layers.Llama(LLAMA, rngs=nnx.Rngs(seed))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_same(model, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


def write_shards(model, folder):
    """As save_pretrained writes large models."""
    folder.mkdir()
    arrays = sorted(to_hf(model, LLAMA).items())
    parts = {f"model-0000{i + 1}-of-00002.safetensors": dict(arrays[i::2]) for i in range(2)}
    for name, part in parts.items():
        safetensors.numpy.save_file(part, folder / name)
    index = {"weight_map": {array: name for name, part in parts.items() for array in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 2, "num_attention_heads": 4}))


LOAD = """
import sys, jax.numpy as jnp, jax
from jax.sharding import NamedSharding, PartitionSpec
from flax_layers.checkpoints import load_hf_folder

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

jnp.ones(8).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS:")
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
cut = NamedSharding(mesh, PartitionSpec("x")) if sys.argv[2] == "cut" else None
model = load_hf_folder(sys.argv[1], param_dtype=jnp.bfloat16, shardings=cut, scan_layers=cut is not None)
print(status("VmHWM:") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="measures memory as Linux does")
@pytest.mark.parametrize("placement", ["whole", "cut"])
def test_memory_while_reading(placement, tmp_path):
    """The peak is the model's and that of few arrays, not the file's beside it; nor that of all layers, if stacked."""
    config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1536}
    config |= {"num_hidden_layers": 16, "num_attention_heads": 8}
    kernels = {
        "self_attn.q": (512, 512),
        "self_attn.k": (512, 512),
        "self_attn.v": (512, 512),
        "self_attn.o": (512, 512),
    }
    kernels |= {"mlp.gate": (1536, 512), "mlp.up": (1536, 512), "mlp.down": (512, 1536)}
    shapes = {"model.embed_tokens.weight": (1000, 512), "lm_head.weight": (1000, 512), "model.norm.weight": (512,)}
    for i in range(16):
        shapes |= {f"model.layers.{i}.{name}_proj.weight": shape for name, shape in kernels.items()}
        shapes |= {f"model.layers.{i}.{name}_layernorm.weight": (512,) for name in ("input", "post_attention")}
    safetensors.numpy.save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = (tmp_path / "model.safetensors").stat().st_size
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-c", LOAD, str(tmp_path), placement]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    largest = 2 * 1536 * 512 * 4  # gate and up
    assert int(result.stdout) < size / 2 + 8 * largest < size


def test_there_and_back(tmp_path):
    model = llama()
    save_hf_folder(model, tmp_path / "a" / "b")
    assert sorted(contents(tmp_path / "a" / "b")) == ["config.json", "model.safetensors"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b").stat().st_mode == tmp_path.joinpath("a").stat().st_mode
    check_same(load_hf_folder(tmp_path / "a" / "b"), model)


def test_several_files(tmp_path):
    write_shards(model := llama(), tmp_path / "model")
    check_same(load_hf_folder(tmp_path / "model"), model)
    check_same(
        load_hf_folder(tmp_path / "model", scan_layers=True), layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0))
    )
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no model-00002-of-00002"):
        load_hf_folder(tmp_path / "model")


def test_over_a_model_in_several_files(tmp_path):
    """The former parameters go with their index, which is read first; all else stays."""
    write_shards(llama(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_hf_folder(other := llama(1), tmp_path / "model")
    assert sorted(contents(tmp_path / "model")) == ["config.json", "model.safetensors", "tokenizer.json"]
    check_same(load_hf_folder(tmp_path / "model"), other)


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_a_failure_half_way(tmp_path, monkeypatch, exists):
    folder = tmp_path / "model"
    if exists:
        save_hf_folder(llama(), folder)
        (folder / "tokenizer.json").write_text("{}")
    before = contents(folder) if exists else None

    def fail(path, types, arrays):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(hugging_face, "write", fail)
    with pytest.raises(OSError, match="no space left"):
        save_hf_folder(llama(1), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"] * exists
    assert not exists or contents(folder) == before


KILLED = """
import os, sys
from flax import nnx
import flax_layers as layers
from flax_layers.checkpoints import hugging_face, save_hf_folder
from tests.tiny_models import LLAMA

hugging_face.write = lambda path, types, arrays: (path.write_bytes(b"half"), os._exit(3))
save_hf_folder(layers.Llama(LLAMA, rngs=nnx.Rngs(1)), sys.argv[1])
"""


@pytest.mark.slow
def test_a_process_killed_half_way(tmp_path):
    save_hf_folder(model := llama(), tmp_path / "model")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "model")], env=environment).returncode == 3
    check_same(load_hf_folder(tmp_path / "model"), model)
