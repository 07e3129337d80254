"""Launches on a stand-in for the driver: what reaches it, call after call. In a process whose libcuda.so.1 that is."""

import functools
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.host_launch import Host, product
from tests.nvrtc import needs_nvrtc

M, N, K = 256, 192, 64
PARAMETER_BYTES = 3 * 128 + 8 + 16
MIB = 1 << 20


def make(host, addresses=(MIB, 2 * MIB, 3 * MIB, 4 * MIB), m=M, dtype=jnp.bfloat16, **options):
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, K), (N, K), (N,))]
    frame = host.frame(functools.partial(product, **options), types, addresses)
    for stage in ("instantiate", "initialize"):
        frame.call(stage)
    return frame


def execute(host, frame):
    """Encodings of a call, and its kernel's parameters: words of the three maps, the pointer, the four sizes."""
    before = host.record.encodings
    frame.call("execute")
    parameters = bytes(host.record.parameters[:PARAMETER_BYTES])
    maps = np.frombuffer(parameters[:384], np.uint64).reshape(3, 16)
    return host.record.encodings - before, (maps, *np.frombuffer(parameters[384:392], np.uint64).tolist())


def check_parameters(host):
    encodings, (maps, pointer) = execute(host, make(host))
    assert encodings == 3
    assert maps[:, 0].tolist() == [MIB, 2 * MIB, 4 * MIB]  # the stand-in writes address, sizes, strides
    assert maps[:, 1:5].tolist() == [[K, 1, M, 1], [K, 1, N, 1], [N, 1, M, 1]]
    assert pointer == 3 * MIB
    assert np.frombuffer(bytes(host.record.parameters[392:408]), np.int32).tolist() == [M, N, K, 1]
    assert (host.record.grid, host.record.block, host.record.shared_bytes, host.record.cluster) == (2, 384, 200_000, 2)
    assert host.record.begins_early


def check_maps_are_encoded_once(host):
    frame = make(host, (5 * MIB, 6 * MIB, 7 * MIB, 8 * MIB))
    first = execute(host, frame)
    again = execute(host, frame)
    assert (first[0], again[0]) == (3, 0)
    np.testing.assert_array_equal(first[1][0], again[1][0])


def check_whatever_a_map_depends_on_is_seen(host):
    addresses = (9 * MIB, 10 * MIB, 11 * MIB, 12 * MIB)
    execute(host, make(host, addresses))
    frame = make(host, addresses)
    frame.move(0, 13 * MIB)
    encodings, (maps, _) = execute(host, frame)
    assert (encodings, maps[0, 0]) == (1, 13 * MIB)
    encodings, (maps, _) = execute(host, make(host, addresses, m=128))
    assert (encodings, maps[0, 3], maps[2, 3]) == (2, 128, 128)  # a and the result are shorter, b is not
    encodings, (maps, _) = execute(host, make(host, addresses, box_rows=64))
    assert (encodings, maps[0, 9] & 0xFFFFFFFF) == (1, 64)
    encodings, (maps, _) = execute(host, make(host, addresses, dtype=jnp.float16))
    assert (encodings, maps[:, 10].astype(np.uint32).tolist()) == (2, [6, 6, 9])
    encodings, (maps, pointer) = execute(host, make(host, addresses, pointers=(0,)))
    assert (encodings, pointer) == (0, 9 * MIB)


def check_more_maps_than_are_kept(host):
    frame = make(host)
    addresses = [MIB * (i + 20) for i in range(5000)]
    for address in addresses + addresses[:200]:
        frame.move(0, address)
        frame.call("execute")
        assert int.from_bytes(host.record.parameters[:8], "little") == address


def check_devices_at_once(host):
    """Each thread on a device of its own, 132 and 100 multiprocessors, with a product that fills either."""

    def run(device, found):
        host.library.driver_set_device(device)
        frame = make(host, m=128 * 1000)
        frame.call("execute")
        found.append(host.record.grid)

    grids = []
    for device in (0, 1, 0):
        thread = threading.Thread(target=run, args=(device, grids))
        thread.start()
        thread.join()
    assert grids == [132, 100, 132]
    frame = make(host)
    queries = host.record.device_queries
    frame.call("initialize")
    frame.call("execute")
    assert host.record.device_queries == queries

    def repeat(frame):
        for _ in range(2000):
            frame.call("execute")

    threads = [threading.Thread(target=repeat, args=(make(host, (i * MIB,) * 4),)) for i in range(30, 34)]
    launches = host.record.launches
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.record.launches > launches


def check_split_k(host):
    """Every flag is zeroed before the kernel begins, and there are no more blocks than have some."""
    addresses = (MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB)
    make(host, addresses, m=128 * 1000, flags=132).call("execute")
    assert (host.record.zeroed_address, host.record.zeroed_words, host.record.grid) == (5 * MIB, 528, 132)
    make(host, addresses, m=128 * 1000, flags=100).call("execute")
    assert (host.record.zeroed_words, host.record.grid) == (400, 100)
    assert not host.record.begins_early


def check_errors(host):
    with pytest.raises(RuntimeError, match=r"gemm\[launch\] \(bf16\[256,64\], bf16\[192,64\], bf16\[192\] -> bf16\["):
        make(host, (8, MIB, MIB, MIB)).call("execute")
    with pytest.raises(RuntimeError, match="there is no buffer 4"):
        make(host, pointers=(4,)).call("execute")
    frame = make(host)
    frame.set_attribute("ways", "2")
    with pytest.raises(RuntimeError, match=r"Wrong.*type"):
        frame.call("execute")
    frame = make(host)
    frame.set_attribute("colour", np.int32(1))
    with pytest.raises(RuntimeError, match="there is no attribute flags"):
        frame.call("execute")
    frame = make(host)
    frame.set_attribute("zeal", np.int32(1))
    with pytest.raises(RuntimeError, match="more attributes"):
        frame.call("execute")


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


@needs_nvrtc
def test_launches(tmp_path):
    root = pathlib.Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(pathlib.Path(__file__)), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == list(CHECKS)


if __name__ == "__main__":
    stand_in = Host(pathlib.Path(sys.argv[1]))
    stand_in.library.driver_set_parameter_bytes(PARAMETER_BYTES)
    for name, check in CHECKS.items():
        check(stand_in)
        print(name)
