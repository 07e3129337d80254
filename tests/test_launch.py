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

from benchmarks.lab.host_launch import Host, product
from tests.nvrtc import needs_nvrtc

M, N, K = 256, 192, 64
PARAMETER_BYTES = 3 * 128 + 8 + 16
MIB = 1 << 20
TYPES = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (N, K), (N,))]


def make(host, addresses=(MIB, 2 * MIB, 3 * MIB, 4 * MIB), m=M, dtype=jnp.bfloat16, a=None, **options):
    a = a or (m, K)
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in (a, (N, a[-1]), (N,))]
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
    encodings, (maps, _) = execute(host, make(host, addresses, dtype=jnp.float16))
    assert (encodings, maps[:, 10].astype(np.uint32).tolist()) == (2, [6, 6, 9])
    encodings, (maps, pointer) = execute(host, make(host, addresses, pointers=(0,)))
    assert (encodings, pointer) == (0, 9 * MIB)


def check_every_part_of_a_request_for_a_map_is_seen(host):
    """Every part of a's request is seen: halves, split_rows, box_columns, box_rows, swizzle_bytes.

    The stand-in's map says what the words are.
    """
    addresses = (14 * MIB, 15 * MIB, 16 * MIB, 17 * MIB)
    requests = {
        (1, 0, 64, 128, 128): ([K, 1, M, 1], [64, 1, 128, 1], 3),
        (2, 0, 64, 128, 128): ([K // 2, 2, M, 1], [64, 1, 128, 1], 3),
        (2, 1, 64, 128, 128): ([K, 2, M // 2, 1], [64, 1, 128, 1], 3),
        (1, 0, 32, 128, 128): ([K, 1, M, 1], [32, 1, 128, 1], 3),
        (1, 0, 64, 64, 128): ([K, 1, M, 1], [64, 1, 64, 1], 3),
        (1, 0, 64, 128, 64): ([K, 1, M, 1], [64, 1, 128, 1], 2),
    }
    frames = [make(host, addresses, map_of_a=request) for request in requests]
    for new in (3, 1, 1, 1, 1, 1), (0,) * 6:
        for frame, expected, count in zip(frames, requests.values(), new, strict=True):
            encodings, (maps, _) = execute(host, frame)
            box, swizzle = maps[0, 8:10].view(np.uint32).tolist(), maps[0, 10] >> np.uint64(32)
            assert (maps[0, 1:5].tolist(), box, swizzle) == expected
            assert encodings == count


def check_every_size_of_a_buffer_is_seen(host):
    """Every size of a, (batch, m, k), is seen. The result differs with it but for k, in which b does."""
    addresses = (18 * MIB, 19 * MIB, 20 * MIB, 21 * MIB)
    shapes = {(2, M, K): 3, (3, M, K): 2, (3, 128, K): 2, (3, 128, 2 * K): 2, (384, 2 * K): 2, (1, 384, 2 * K): 2}
    for a, new in shapes.items():
        encodings, (maps, _) = execute(host, make(host, addresses, a=a))
        batch, m, k = (1, *a)[-3:]
        assert maps[:, 1:5].tolist() == [[k, 1, m, batch], [k, 1, N, 1], [N, 1, m, batch]]
        assert encodings == new, a


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

    def repeat(frame, found):
        for _ in range(2000):
            frame.call("execute")
        found.append((host.record.launches, host.record.encodings))

    found = []
    threads = [threading.Thread(target=repeat, args=(make(host, (i * MIB,) * 4), found)) for i in range(30, 34)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(2000, 3)] * 4  # each has a cache of maps of its own


def check_each_device_is_made_ready(host):
    """Code and the limit of shared memory are a device's own, and are there before a launch, which may be captured."""
    limits, loads = host.record.shared_limits, host.record.loads
    limits[:], loads[:] = (0, 0, 0), (0, 0, 0)
    frame = host.frame(functools.partial(product, kernel=1), TYPES, (MIB,) * 4)
    frame.call("instantiate")
    assert (list(limits), list(loads)) == ([0, 0, 0], [0, 0, 0])
    for device, expected in ((0, (1, 0, 0)), (1, (1, 1, 0)), (0, (1, 1, 0))):
        host.library.driver_set_device(device)
        frame.call("initialize")
        assert tuple(loads) == expected
        assert tuple(limits) == tuple(200_000 * ready for ready in expected)
    host.library.driver_set_device(2)
    message = (
        'gemm.launch.: the program was lowered for sm_90a, the device is sm_100; lower it with implementation="xla"'
    )
    with pytest.raises(RuntimeError, match=message):
        frame.call("initialize")
    host.library.driver_set_device(0)
    assert loads[2] == limits[2] == 0


def check_kernel_under_another_ones_key(host):
    """It is refused, and the kernel whose key it is compiles."""
    honest = host.frame(functools.partial(product, kernel=2), TYPES, (MIB,) * 4)
    forged = host.frame(functools.partial(product, kernel=2), TYPES, (MIB,) * 4)
    forged.set_attribute("source", 'extern "C" __global__ void coda_gemm(int* x) { *x = 3; }')
    for stage in ("instantiate", "initialize"):  # XLA leaves out the first where a program comes from its cache
        with pytest.raises(RuntimeError, match=r"the program's key [0-9a-f]{64} is not that of its source"):
            forged.call(stage)
    for stage in ("instantiate", "initialize", "execute"):
        honest.call(stage)


def check_split_k(host):
    """Every flag is zeroed before the kernel begins, and there are no more blocks than have some."""
    addresses = (MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB)
    make(host, addresses, m=128 * 1000, flags=132).call("execute")
    assert (host.record.zeroed_address, host.record.zeroed_words, host.record.grid) == (5 * MIB, 528, 132)
    make(host, addresses, m=128 * 1000, flags=100).call("execute")
    assert (host.record.zeroed_words, host.record.grid) == (400, 100)
    assert not host.record.begins_early
    launches = host.record.launches
    with pytest.raises(RuntimeError, match=r"the flags are s32\[1,4\]"):  # a cluster has two blocks
        make(host, addresses, flags=1).call("execute")
    assert host.record.launches == launches


def check_errors(host):
    with pytest.raises(RuntimeError, match=r"gemm\[launch\] \(bf16\[256,64\], bf16\[192,64\], bf16\[192\] -> bf16\["):
        make(host, (8, MIB, MIB, MIB)).call("execute")
    with pytest.raises(RuntimeError, match="there is no buffer 4"):
        make(host, pointers=(4,)).call("execute")
    frame = make(host)
    frame.set_attribute("halves", "2")
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
