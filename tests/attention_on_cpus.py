"""Attention's lowering for GPUs without one: a stand-in for the kernels, or XLA's form in their place on CPUs."""

import contextlib
import functools

import jax
from jax._src.interpreters import mlir  # a rule that a test added must go away with it

from coda_jax import ffi
from coda_jax.attend import cuda, kernel
from coda_jax.attend.primitive import FORMS, attention_backward_p, attention_forward_p, is_backward, types_of


def stand_in(monkeypatch, reason=None):
    """Puts in the kernels' place custom calls of the same target, arguments and results, which no device can run.

    Args:
      reason: why the kernels cannot compute anything; None if they can compute what is in 16 bits.

    Returns:
      A list to which each launch adds whether it was told to yield.
    """
    launches = []

    def launch(name, arrays, results, yields):
        launches.append(yields)
        call = ffi.LaunchCall(name=name, source="", arch="", threads=128, smem_bytes=0, grid=(0, 0, 1))
        return ffi.launch_call(list(arrays), results, call)

    def forward(*arrays, spec, yields):
        results = types_of(attention_forward_p, *map(jax.typeof, arrays), spec=spec)
        return launch("attention", arrays, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results], yields)

    def backward(*arrays, spec, yields):
        results = types_of(attention_backward_p, *map(jax.typeof, arrays), spec=spec)
        return launch("attention_backward", arrays, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results], yields)

    def unsupported_reason(avals, spec):
        assert len(avals) == spec.count
        return reason or (None if avals[0].dtype.itemsize == 2 else f"query is {avals[0].dtype}")

    monkeypatch.setattr(kernel, "forward", forward)
    monkeypatch.setattr(kernel, "backward", backward)
    monkeypatch.setattr(kernel, "unsupported_reason", unsupported_reason)
    return launches


@contextlib.contextmanager
def partitioned_on_cpus():
    """Yields a list of (whether it is backward, spec, types of a device's arrays, pairs), one for each lowering."""
    records = []

    def form_of(arrays, spec, seen, *, primitive, **_):
        types = [jax.core.ShapedArray(x.shape, x.dtype) for x in arrays]
        records.append((is_backward(primitive), spec, types, seen))
        return functools.partial(FORMS[primitive], spec=spec, on_cpu=False)

    jax.clear_caches()
    for primitive in FORMS:
        rule = functools.partial(cuda._lower, primitive=primitive, form_of=form_of)
        mlir.register_lowering(primitive, rule, platform="cpu")
    try:
        yield records
    finally:
        for primitive in FORMS:
            del mlir._platform_specific_lowerings["cpu"][primitive]
        jax.clear_caches()
