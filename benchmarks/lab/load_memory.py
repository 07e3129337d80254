"""The host memory that it takes to load a Llama of 3 GB onto 8 devices, and to save it: `make lab-load_memory`

Writes a folder of Hugging Face's with such a model, loads it onto eight CPU devices, sharded by FSDP and
tensor parallelism, and saves it from there. Prints the peaks of the host's memory less the parameters, which here are
in the host's memory too. `ARGS=1.5`: of another size, in GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = """
import json, sys, time, jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from flax_layers.checkpoints import load_hf_folder, save_hf_folder

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def sharding_of(path, leaf):
    if leaf.ndim == 1:
        return NamedSharding(mesh, P())
    spec = [None] * leaf.ndim
    by_rows = path[-2] in ("out", "down", "embed")
    first = int(path[0] == "layers" and not isinstance(path[1], int))
    spec[first], spec[-1] = ("tensor", "fsdp") if by_rows else ("fsdp", "tensor")
    return NamedSharding(mesh, P(*spec))

jnp.ones(8).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before, began = status("VmRSS:"), time.monotonic()
model = load_hf_folder(sys.argv[1], shardings=sharding_of, param_dtype=jnp.float32, scan_layers=sys.argv[2] == "scan")
shards = sum(s.data.nbytes for x in jax.tree.leaves(nnx.state(model)) for s in x.addressable_shards)
whole = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
loading, seconds = status("VmHWM:") - before - shards, time.monotonic() - began
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
save_hf_folder(model, sys.argv[1] + "/saved")
saving = status("VmHWM:") - before
print(json.dumps({"loading": loading, "saving": saving, "shards": shards, "whole": whole, "seconds": seconds}))
"""


def write(folder: Path, layers: int) -> None:
    import numpy as np
    import safetensors.numpy

    width, hidden, vocab = 2048, 8192, 32000
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))
    heads = {"q": (width, width), "k": (512, width), "v": (512, width), "o": (width, width)}
    ffn = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    files = {
        "model-rest.safetensors": {
            "model.embed_tokens.weight": (vocab, width),
            "lm_head.weight": (vocab, width),
            "model.norm.weight": (width,),
        }
    }
    for i in range(layers):
        shapes = {f"self_attn.{name}_proj": shape for name, shape in heads.items()}
        shapes |= {f"mlp.{name}_proj": shape for name, shape in ffn.items()}
        shapes |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        files[f"model-{i}.safetensors"] = {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, shapes in files.items():
        arrays = {name: np.full(shape, len(name), np.float32) for name, shape in shapes.items()}
        safetensors.numpy.save_file(arrays, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gb", type=float, nargs="?", default=3.0, help="float32 parameters")
    layers = math.ceil((parser.parse_args().gb * 1e9 / 4 - 2 * 32000 * 2048) / 60.8e6)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), layers)
        for form in ("list", "scan"):
            found = json.loads(
                subprocess.run(
                    [sys.executable, "-c", LOAD, folder, form], check=True, stdout=subprocess.PIPE, env=environment
                ).stdout
            )
            gb = {name: bytes_ / 1e9 for name, bytes_ in found.items()}
            print(
                f"layers as a {form}: parameters {gb['whole']:.2f} GB, on the devices {gb['shards']:.2f} GB; "
                f"beyond them {gb['loading']:.2f} GB to load, in {found['seconds']:.0f} s, "
                f"{gb['saving']:.2f} GB to save",
                flush=True,
            )
            shutil.rmtree(Path(folder) / "saved")


if __name__ == "__main__":
    main()
