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
from coda_jax import ffi
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


def attention(*arrays, kernel=0, results=((2, 300, 4, 64),), dtype=jnp.bfloat16, **options):
    """A call of a kernel that is no product: q and k, with k's heads fewer, to one result of q's shape."""
    options = {"grid": [0, 1, 128, 0, 2, 1, 0, 0, 1], "threads": 384, "smem_bytes": 150_000, **options}
    source = f'extern "C" __global__ void coda_attention(int* x) {{ *x = {kernel}; }}'
    call = ffi.LaunchCall(**{"name": "attention[launch]", "source": source, "arch": "sm_90a"} | options)
    return ffi.launch_call(arrays, [jax.ShapeDtypeStruct(shape, dtype) for shape in results], call)


def launched(host, q=(2, 300, 4, 64), k=(2, 500, 2, 64), addresses=None, parameter_bytes=0, **options):
    """The call, executed; its block of parameters."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k)]
    addresses = addresses or [MIB * (i + 1) for i in range(2 + len(options.get("results", [0])))]
    frame = host.frame(functools.partial(attention, **options), types, addresses)
    host.library.driver_set_parameter_bytes(parameter_bytes)
    try:
        for stage in ("instantiate", "initialize", "execute"):
            frame.call(stage)
    finally:
        host.library.driver_set_parameter_bytes(PARAMETER_BYTES)
    return bytes(host.record.parameters[:parameter_bytes])


def check_parameters_of_a_launch(host):
    """Maps, pointers, sizes, words; no cluster."""
    options = {
        "maps": [0, 64, 128, 1, 64, 80, 2, 64, 64],
        "pointers": [2, -1, 0],
        "sizes": [0, 1, 1, 1, 1, 2],
        "words": [-7, 2**31 - 1],
    }
    encodings = host.record.encodings
    parameters = launched(host, parameter_bytes=3 * 128 + 3 * 8 + 5 * 4, overlaps=True, **options)
    assert host.record.encodings == encodings + 3
    maps = np.frombuffer(parameters[:384], np.uint64).reshape(3, 16)
    assert maps[:, 0].tolist() == [MIB, 2 * MIB, 3 * MIB]
    assert maps[:, 1:5].tolist() == [[64, 4, 300, 2], [64, 2, 500, 2], [64, 4, 300, 2]]
    assert maps[:, 5:8].tolist() == [[128, 512, 153600], [128, 256, 128000], [128, 512, 153600]]
    assert maps[:, 8:10].copy().view(np.uint32).tolist() == [[64, 1, 128, 1], [64, 1, 80, 1], [64, 1, 64, 1]]
    assert maps[:, 10].copy().view(np.uint32).tolist() == [9, 3] * 3  # bfloat16, swizzled over 128 bytes
    assert host.record.promotion == 3  # 256 bytes, of the last one too, which no product multiplies
    assert np.frombuffer(parameters[384:408], np.uint64).tolist() == [3 * MIB, 0, MIB]
    assert np.frombuffer(parameters[408:], np.int32).tolist() == [300, 500, 2, -7, 2**31 - 1]
    assert (host.record.grid, host.record.block, host.record.shared_bytes) == (3 * 4 * 2, 384, 150_000)
    assert (host.record.cluster, host.record.begins_early) == (0, 1)
    assert host.record.symbol == b"coda_attention"
    launched(host, parameter_bytes=3 * 128 + 3 * 8 + 5 * 4, **options)
    assert (host.record.encodings, host.record.begins_early) == (encodings + 3, 0)  # the same maps, kept


def check_maps_of_heads_are_told_apart(host):
    """Arrays at one address that differ in one size; a product's map of the joined heads is another one, too."""
    addresses = (40 * MIB, 41 * MIB, 42 * MIB)
    for q in ((2, 300, 4, 64), (2, 300, 4, 128), (2, 300, 2, 128), (2, 150, 2, 128), (3, 150, 2, 128)) * 2:
        parameters = launched(host, q, addresses=addresses, maps=[0, 64, 128], parameter_bytes=128)
        batch, rows, heads, columns = q
        assert np.frombuffer(parameters[:40], np.uint64).tolist() == [40 * MIB, columns, heads, rows, batch]
    _, (maps, _) = execute(host, make(host, (40 * MIB,) * 4, a=(2, 300, 256)))
    assert maps[0, 1:5].tolist() == [256, 1, 300, 2]
    for box in (64, 128, 80):
        parameters = launched(host, addresses=addresses, maps=[0, 64, box], parameter_bytes=128)
        assert np.frombuffer(parameters[64:80], np.uint32).tolist() == [64, 1, box, 1]


def check_grid_of_a_launch(host):
    """Dimensions over divisors, rounded up; no factor: one block. Without blocks nothing is launched."""
    grids = {(): 1, (0, 1, 300): 1, (0, 1, 299): 2, (1, 1, 128, 2, 3, 64, 0, 2, 1): 16, (1, 1, 2**31 - 1): 1}
    for grid, blocks in grids.items():
        launched(host, grid=grid)
        assert host.record.grid == blocks
    launches, zeroings = host.record.launches, host.record.zeroings
    launched(host, q=(2, 0, 4, 64), maps=[0, 64, 128], zeroed=[1])
    assert host.record.launches == launches
    assert (host.record.zeroings, host.record.zeroed_address) == (zeroings + 1, 2 * MIB)  # a result is 0 all the same
    many = (2**20, 2**20, 1, 64)
    assert not any(launched(host, q=many, k=(2, 0, 2, 64), grid=[0, 0, 1, 0, 1, 1, 1, 1, 1]))
    assert host.record.launches == launches
    with pytest.raises(RuntimeError, match=r"bf16\[1048576,1048576,1,64\].*the grid has more than 2\^31 - 1 blocks"):
        launched(host, q=many, grid=[0, 0, 1, 0, 1, 1])
    with pytest.raises(RuntimeError, match="a divisor of the grid is 0"):
        launched(host, grid=[0, 1, 0])


def check_zeroed_buffers(host):
    """Each one whole, before the kernel, which then does not begin early."""
    zeroings = host.record.zeroings
    launched(host, zeroed=[2, 1])
    assert (host.record.zeroings, host.record.begins_early) == (zeroings + 2, 0)
    assert (host.record.zeroed_address, host.record.zeroed_words) == (2 * MIB, 2 * 500 * 2 * 64 // 2)
    launched(host, results=[(3, 2), (0, 3), (3,)], dtype=jnp.float32, zeroed=[2, 3])
    assert (host.record.zeroings, host.record.zeroed_words) == (zeroings + 3, 6)  # one is without elements
    with pytest.raises(RuntimeError, match=r"buffer 2 bf16\[3,1\], which is zeroed, has 6 bytes, not a multiple of 4"):
        launched(host, results=[(3, 1)], zeroed=[2])
    with pytest.raises(RuntimeError, match="zeroed before cannot overlap"):
        launched(host, zeroed=[2], overlaps=True)


def check_map_of_an_array_without_elements(host):
    """It is zero bytes, and is not encoded."""
    launched(host, maps=[0, 64, 128, 1, 64, 64], parameter_bytes=256)
    encodings = host.record.encodings
    parameters = launched(host, k=(2, 0, 2, 64), maps=[0, 64, 128, 1, 64, 64], parameter_bytes=256)
    assert host.record.encodings == encodings
    assert any(parameters[:128]) and not any(parameters[128:])


def check_errors_of_a_launch(host):
    launches = host.record.launches
    for message, options in {
        r"attention\[launch\] \(bf16\[2,300,4,64\], bf16\[2,500,2,64\] -> bf16\[.*there is no buffer 3": {
            "pointers": [3]
        },
        "there is no buffer -2": {"pointers": [-2]},
        "there is no buffer -1": {"zeroed": [-1]},
        "the attribute grid has 2 numbers, not a multiple of 3": {"grid": [0, 1]},
        "the attribute maps has 4 numbers, not a multiple of 3": {"maps": [0, 64, 128, 1]},
        "the attribute sizes has 1 numbers, not a multiple of 2": {"sizes": [0]},
        r"buffer 1 bf16\[2,500,2,64\] has no axis 4": {"sizes": [1, 4]},
        r"buffer 0 bf16\[2,300,4,64\] has no axis -1": {"grid": [0, -1, 1]},
        r"buffer 1 bf16\[2,2147483648,2,64\]: its axis 1 exceeds 2\^31 - 1": {"sizes": [1, 1], "k": (2, 2**31, 2, 64)},
        r"buffer 0 bf16\[2,300,4,36\]: the distance of its heads, 72 bytes": {"maps": [0, 64, 8], "q": (2, 300, 4, 36)},
        r"buffer 2 bf16\[300,64\]: .*needs rank 4": {"maps": [2, 64, 8], "results": [(300, 64)]},
        r"buffer 0 bf16.*: its address is not a multiple of 16": {"maps": [0, 64, 8], "addresses": (8, MIB, MIB)},
        "30 tensor maps, 31 pointers and 3 numbers exceed .* 4096 bytes": {
            "maps": [0, 64, 8] * 30,
            "pointers": [0] * 31,
            "sizes": [0, 1],
            "words": [1, 2],
        },
    }.items():
        with pytest.raises(RuntimeError, match=message):
            launched(host, **options)
    assert host.record.launches == launches
    parameters = launched(
        host, maps=[0, 64, 8] * 30, pointers=[0] * 31, sizes=[0, 1], words=[5], parameter_bytes=4096
    )  # fills the space
    assert np.frombuffer(parameters[-8:], np.int32).tolist() == [300, 5]


def check_calls_share_no_kernel(host):
    """A product's kernel is not launched in the other call's place, though their text is one."""
    source = 'extern "C" __global__ void coda_gemm(int* x) { *x = 0; }'
    make(host)
    host.record.symbol = b""
    launched(host, source=source)
    assert host.record.symbol == b"coda_attention"


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
