"""Checkpoints straight onto a mesh: each device's part is read by itself; and from a mesh."""

import dataclasses
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_layers import GPT2, Llama, LlamaConfig, add_lora
from flax_layers.checkpoints import (
    from_maxtext,
    load_hf_folder,
    load_maxtext_folder,
    load_peft_folder,
    save_hf_folder,
    save_peft_folder,
    to_maxtext,
    to_peft,
)
from flax_layers.checkpoints.safetensors_files import Stored
from tests.tiny_models import GPT2 as GPT2_CONFIG

P = PartitionSpec
CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # of which a device has half, where 4 cut 2 heads
    attention_bias=True,
)
QWEN3 = dataclasses.replace(CONFIG, qk_norm=True, tie_word_embeddings=True, attention_bias=False)
MODELS = {
    "list": lambda: Llama(CONFIG, rngs=nnx.Rngs(0)),
    "stacked": lambda: Llama(CONFIG, scan_layers=True, rngs=nnx.Rngs(0)),
    "separate qwen3": lambda: Llama(QWEN3, separate_qkv=True, rngs=nnx.Rngs(0)),
    "gpt2": lambda: GPT2(GPT2_CONFIG, rngs=nnx.Rngs(0)),
}
OPTIONS = {"stacked": {"scan_layers": True}, "separate qwen3": {"separate_qkv": True}}


def randomized(model):
    """With scales and biases that differ from each other too."""
    rng = np.random.default_rng(0)
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), nnx.state(model)))
    return model


def mesh_of(rows, columns, kind=AxisType.Auto):
    return jax.make_mesh((rows, columns), ("rows", "columns"), axis_types=(kind,) * 2)


def cut(mesh):
    """Columns and rows of each layer's parameters, and halves of gate and up, where the mesh divides them."""

    def sharding_of(path, leaf):
        first = int(path[0] == "layers" and not isinstance(path[1], int))  # the axis of stacked layers is whole
        spec = [None] * leaf.ndim
        for axis, name in ((first, "rows"), (leaf.ndim - 1, "columns")):
            if leaf.shape[axis] % mesh.shape[name] == 0 and (axis > first or name == "rows"):
                spec[axis] = name
        return NamedSharding(mesh, P(*spec))

    return sharding_of


def params_of(model):
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def check(model, expected, sharding_of):
    got, want = params_of(model), params_of(expected)
    assert got.keys() == want.keys()
    for path, x in got.items():
        assert x[...].sharding == sharding_of(path, x[...]), path
        np.testing.assert_array_equal(x[...], want[path][...], err_msg=str(path))


@pytest.fixture
def read(monkeypatch):
    """Sizes of what was read, by name."""
    sizes, of = {}, Stored.__getitem__

    def record(self, index):
        block = of(self, index)
        sizes.setdefault(self.name, []).append(block.size)
        return block

    monkeypatch.setattr(Stored, "__getitem__", record)
    return sizes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows, columns", [(1, 4), (2, 2)])
def test_a_hugging_face_folder_there_and_back(name, rows, columns, tmp_path, read):
    save_hf_folder(expected := randomized(MODELS[name]()), tmp_path / "a")
    sharding_of = cut(mesh_of(rows, columns))
    model = load_hf_folder(tmp_path / "a", shardings=sharding_of, **OPTIONS.get(name, {}))
    check(model, expected, sharding_of)
    # Each device's part was read, once if several devices have it, and nothing more.
    embedding = next(sizes for name, sizes in read.items() if "embed_tokens" in name or "wte" in name)
    assert len(embedding) == rows * columns
    assert sum(map(sum, read.values())) == sum(x[...].size for x in params_of(expected).values())
    save_hf_folder(model, tmp_path / "b")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


def test_forms_of_shardings(tmp_path):
    """A State, nested dictionaries, one for all, and a replica on each device; axes that types show."""
    save_hf_folder(expected := MODELS["list"](), tmp_path)
    sharding_of = cut(mesh_of(2, 2, AxisType.Explicit))
    state = nnx.state(nnx.eval_shape(MODELS["list"]), nnx.Param)
    flat = nnx.to_flat_state(state)
    tree = nnx.from_flat_state([(path, x.replace(sharding_of(path, x))) for path, x in flat])
    for shardings in (tree, nnx.to_pure_dict(tree)):
        check(load_hf_folder(tmp_path, shardings=shardings), expected, sharding_of)
    everywhere = NamedSharding(mesh_of(2, 2), P())
    check(load_hf_folder(tmp_path, shardings=everywhere), expected, lambda path, x: everywhere)
    one = SingleDeviceSharding(jax.devices()[1])
    check(load_hf_folder(tmp_path, shardings=one), expected, lambda path, x: one)


def test_shardings_that_cannot_be(tmp_path, read):
    save_hf_folder(MODELS["list"](), tmp_path)
    mesh = mesh_of(4, 1)
    pure = nnx.to_pure_dict(nnx.state(nnx.eval_shape(MODELS["list"]), nnx.Param))
    rows = NamedSharding(mesh, P("rows"))
    tree = jax.tree.map(lambda x: rows, pure)
    del tree["norm"]["scale"]
    cases = [
        (NamedSharding(mesh, P(None, None, "rows")), ValueError, r"embed\.embedding \(48, 32\) cannot be cut so"),
        (tree, ValueError, r"no sharding norm\.scale"),
        (tree | {"norm": {"scale": rows, "bias": rows}}, ValueError, r"no parameter norm\.bias"),
        (lambda path, leaf: P("rows"), TypeError, r"embed\.embedding is not a jax\.sharding\.Sharding"),
    ]
    for shardings, error, message in cases:
        with pytest.raises(error, match=message):
            load_hf_folder(tmp_path, shardings=shardings)
    indivisible = jax.make_mesh((3,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match=r"embedding \(48, 32\) cannot be cut so: .*partitioned 3 times"):
        load_hf_folder(tmp_path, shardings=NamedSharding(indivisible, P(None, "rows")))
    assert not read  # all that before anything is read


@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
@pytest.mark.parametrize("stacked_there", [True, False])
@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["llama", "qwen3"])
def test_maxtext_arrays_there_and_back(rotary, stacked_there, config):
    """Also from arrays that lie on another mesh."""
    options = {"scan_layers": not stacked_there}
    expected = randomized(Llama(config, **options, rngs=nnx.Rngs(0)))
    params = to_maxtext(expected, config, rotary=rotary, scan_layers=stacked_there)
    other = NamedSharding(jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,)), P("x"))
    on_devices = jax.tree.map(lambda x: jax.device_put(x, other) if x.shape[0] % 4 == 0 else x, params)
    for mesh in (mesh_of(1, 4), mesh_of(2, 2)):
        for arrays in (params, on_devices):
            model = from_maxtext(arrays, config, rotary=rotary, shardings=cut(mesh), **options)
            check(model, expected, cut(mesh))
    back = flatten_dict(to_maxtext(model, config, rotary=rotary, scan_layers=stacked_there))
    for name, array in flatten_dict(params).items():
        np.testing.assert_array_equal(back[name], array, err_msg=str(name))


@pytest.mark.parametrize("is_database", [True, False])
def test_a_maxtext_folder(is_database, tmp_path):
    """As training writes it, with an optimizer's state, from a mesh of its own."""
    expected = randomized(Llama(CONFIG, rngs=nnx.Rngs(0)))
    rows = NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
    params = jax.tree.map(lambda x: jax.device_put(x, rows), to_maxtext(expected, CONFIG))
    state = {"params": {"params": params}, "opt_state": {"mu": {"params": params}}, "step": np.int32(3)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=is_database)) as checkpointer:
        checkpointer.save(tmp_path / "items", args=ocp.args.PyTreeSave(state))
        checkpointer.save(tmp_path / "other", args=ocp.args.PyTreeSave({"params": {"encoder": params}}))
    sharding_of = cut(mesh_of(2, 2))
    check(load_maxtext_folder(tmp_path / "items", CONFIG, shardings=sharding_of), expected, sharding_of)
    with pytest.raises(FileNotFoundError, match="has no _METADATA"):
        load_maxtext_folder(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="has no params with decoder or token_embedder"):
        load_maxtext_folder(tmp_path / "other", CONFIG)
    metadata = tmp_path / "items" / "_METADATA"
    metadata.write_text(metadata.read_text().replace('"embedding"', '"../../embedding"'))
    with pytest.raises(ValueError, match=r"names an array .*embedding': it must be the bare name"):
        load_maxtext_folder(tmp_path / "items", CONFIG)


@pytest.mark.slow
def test_a_peft_folder(tmp_path):
    """From adapters on a mesh into a model on another one."""
    save_hf_folder(model := MODELS["stacked"](), tmp_path / "base")
    add_lora(model, 4, rngs=nnx.Rngs(1))
    for path, x in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        x[...] = jax.random.normal(jax.random.key(x[...].size + len(path)), x.shape)
    on_mesh = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh_of(1, 4), P(None, "columns"))), nnx.state(model, nnx.LoRAParam)
    )
    nnx.update(model, on_mesh)
    save_peft_folder(model, tmp_path / "adapters")
    read = load_hf_folder(tmp_path / "base", shardings=cut(mesh_of(2, 2)), scan_layers=True)
    load_peft_folder(read, tmp_path / "adapters")
    (_, got), (_, want) = to_peft(read), to_peft(model)
    assert len(want) == 2 * 2 * 7  # A and B of seven projections in each layer
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


PROCESS = """
import sys, jax, numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from flax_layers.checkpoints import load_hf_folder, save_hf_folder

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
for scan, axis in ((False, 0), (True, 0), (True, 1)):  # stacked layers are cut too
    def sharding_of(path, leaf):
        fits = leaf.ndim > axis and leaf.shape[axis] % 4 == 0
        return NamedSharding(mesh, P(*[None] * axis, "x") if fits else P())
    model = load_hf_folder(sys.argv[3], scan_layers=scan, shardings=sharding_of)
    save_hf_folder(model, f"{sys.argv[3]}.{scan}{axis}")
"""


@pytest.mark.slow
def test_two_processes_read_and_write(tmp_path):
    """Each reads what its devices hold; the first writes."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    save_hf_folder(Llama(config, rngs=nnx.Rngs(0)), tmp_path / "model")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), str(tmp_path / "model")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    expected = (tmp_path / "model" / "model.safetensors").read_bytes()
    for name in ("False0", "True0", "True1"):
        assert (tmp_path / f"model.{name}" / "model.safetensors").read_bytes() == expected
    assert len(list(tmp_path.iterdir())) == 4
