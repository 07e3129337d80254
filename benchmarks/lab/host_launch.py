"""The handler without a GPU: calls as XLA makes them, on a stand-in for the driver that records what it is asked for.

`python -m benchmarks.lab.host_launch` prints what a launch costs the host beside the driver. The stand-in takes
the place of ``libcuda.so.1`` in this process, so tests run it in a process of their own.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax import ffi

STAGES = {"instantiate": 0, "initialize": 2, "execute": 3}
_DTYPES = {"bool": 1, "int32": 4, "float16": 10, "float32": 11, "bfloat16": 16} | {  # XLA's enum
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
}


class Record(ctypes.Structure):
    """The requests of the calling thread to the driver; `parameters` are those of the last launch."""

    _fields_ = (
        ("encodings", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("device_queries", ctypes.c_uint64),
        ("zeroed_address", ctypes.c_uint64),
        ("zeroed_words", ctypes.c_uint64),
        ("zeroings", ctypes.c_uint64),
        ("grid", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("begins_early", ctypes.c_uint32),
        ("shared_limits", ctypes.c_uint32 * 3),
        ("loads", ctypes.c_uint32 * 3),
        ("promotion", ctypes.c_uint32),
        ("symbol", ctypes.c_char * 32),
        ("parameters", ctypes.c_ubyte * 4096),
    )


class Host:
    """The compiled stand-in.

    Args:
      directory: where it is built.
    """

    def __init__(self, directory: Path):
        path = directory / "libcuda.so.1"
        source = Path(__file__).with_suffix(".cc")
        command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        command += [f"-I{jax.ffi.include_dir()}", "-o", str(path), str(source)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(path))  # the handler's dlopen finds it by its soname
        self.library.frame_new.restype = ctypes.c_void_p
        self.library.frames_time.restype = ctypes.c_double
        self.library.driver_record.restype = ctypes.POINTER(Record)
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        handlers = ffi._ffi.handlers()
        if "execute" in handlers:  # of an older commit, on which kernels_diff runs this: its one target's
            handlers = {ffi.TARGET: handlers}
        self.handlers = {
            target: {stage: ctypes.c_void_p(get_pointer(capsule, None)) for stage, capsule in stages.items()}
            for target, stages in handlers.items()
        }

    @property
    def record(self) -> Record:
        return self.library.driver_record().contents

    def frame(
        self, call: Callable[..., object], types: Sequence[jax.ShapeDtypeStruct], addresses: Sequence[int]
    ) -> Frame:
        """The frame of the one `coda_jax.ffi.gemm_call` or `launch_call` in `call(*types)`.

        Args:
          call: the function.
          types: of its arguments.
          addresses: of the operands, then of the results.
        """
        equations = jax.make_jaxpr(call)(*types).eqns
        (equation,) = (equation for equation in equations if equation.primitive.name == "ffi_call")
        operands, results = ([v.aval for v in variables] for variables in (equation.invars, equation.outvars))
        target = equation.params["target_name"]
        return Frame(self, operands, results, dict(equation.params["attributes"]), addresses, target)

    def time_ns(self, frames: Sequence[Frame], stage: str = "execute", rounds: int = 1000) -> float:
        """Time of a call, of `frames` of one target in turn: the least mean of a round."""
        handles = (ctypes.c_void_p * len(frames))(*(frame.handle for frame in frames))
        nanoseconds = self.library.frames_time(handles, len(frames), frames[0].handlers[stage], STAGES[stage], rounds)
        if nanoseconds < 0:
            raise RuntimeError("a call failed")
        return nanoseconds


class Frame:
    """The call frame of one custom call.

    Args:
      operands, results: their types.
      attributes: strings, and what `numpy.asarray` takes.
      addresses: of the operands, then of the results.
      target: the custom call's name.
    """

    def __init__(
        self,
        host: Host,
        operands: Sequence[jax.ShapeDtypeStruct],
        results: Sequence[jax.ShapeDtypeStruct],
        attributes: Mapping[str, object],
        addresses: Sequence[int],
        target: str = ffi.TARGET,
    ):
        self.host = host
        self.handlers = host.handlers[target]
        self.handle = ctypes.c_void_p(host.library.frame_new()).value
        for i, (type_, address) in enumerate(zip((*operands, *results), addresses, strict=True)):
            dims = (ctypes.c_int64 * len(type_.shape))(*type_.shape)
            result = int(i >= len(operands))
            dtype = _DTYPES[type_.dtype.name]
            host.library.frame_buffer(self._handle, result, dtype, ctypes.c_void_p(address), dims, len(dims))
        for name, value in attributes.items():
            self.set_attribute(name, value)

    @property
    def _handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.handle)

    def set_attribute(self, name: str, value: object) -> None:
        if isinstance(value, str):
            data, dtype, array, count = value.encode(), -1, 0, 0
        else:
            value = np.asarray(getattr(value, "val", value))  # jax wraps an array to make it hashable
            data, dtype, array, count = value.tobytes(), _DTYPES[value.dtype.name], int(value.ndim > 0), value.size
        size = ctypes.c_int64(len(data))
        self.host.library.frame_attribute(self._handle, name.encode(), dtype, array, data, ctypes.c_int64(count), size)

    def move(self, index: int, address: int) -> None:
        """Puts buffer `index`, operands first, at another address."""
        self.host.library.frame_move(self._handle, index, ctypes.c_void_p(address))

    def call(self, stage: str) -> None:
        """Raises RuntimeError with the handler's message."""
        message = ctypes.create_string_buffer(4096)
        if self.host.library.frame_call(self._handle, self.handlers[stage], STAGES[stage], message, len(message) - 1):
            raise RuntimeError(message.value.decode())


def product(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array,
    *,
    kernel: int = 0,
    pointers: Sequence[int] = (2,),
    map_of_a: Sequence[int] = (1, 0, 64, 128, 128),
    flags: int = 0,
) -> list[jax.Array]:
    """One call with three tensor maps; each number `kernel` stands for a kernel of its own. With `flags` it is one
    with split-K, for so many blocks. `map_of_a` is a's, without the buffer.
    """
    call = ffi.GemmCall(
        name="gemm[launch]",
        source=f'extern "C" __global__ void coda_gemm(int* x) {{ *x = {kernel}; }}',
        arch="sm_90a",  # of the stand-in driver's device
        maps=[0, *map_of_a, 1, 1, 0, 64, 64, 128, 3, 1, 0, 64, 16, 128],
        pointers=pointers,
        transpose_a=False,
        transpose_b=True,
        tile_m=128,
        tile_n=192,
        halves=1,
        cluster_m=2,
        threads=384,
        smem_bytes=200_000,
        flags=4 if flags else -1,
    )
    results = [jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[0]), jnp.bfloat16)]
    if flags:
        results.append(jax.ShapeDtypeStruct((flags, 4), jnp.int32))
    return ffi.gemm_call([a, b, bias], results, call)


def main() -> None:
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 64), (192, 64), (192,))]
    with tempfile.TemporaryDirectory() as directory:
        host = Host(Path(directory))
        host.library.driver_set_parameter_bytes(3 * 128 + 8 + 16)
        for calls in (20, 320):
            addresses = range(1 << 30, 1 << 40, 1 << 20)
            frames = [
                host.frame(functools.partial(product, kernel=i % 20), types, addresses[4 * i : 4 * i + 4])
                for i in range(calls)
            ]
            for stage in STAGES:
                for frame in frames:
                    frame.call(stage)
            times = {stage: f"{host.time_ns(frames, stage):.0f} ns" for stage in ("initialize", "execute")}
            print(f"{calls} calls of 20 kernels in turn: {times}")


if __name__ == "__main__":
    main()
