"""How benchmarks time kernels: sets of arguments, traces of the profiler, classes of kernels."""

import functools
import itertools
import types
import weakref

import jax
import jax.numpy as jnp

from benchmarks import alone, hlo, timing, train_step


def kernel(name, instruction="", duration=1000.0):
    return timing.Kernel(name, instruction, 0.0, duration)


def test_classes_of_kernels():
    operations = {
        "custom-call.7": hlo.Operation("custom-call.7", "custom-call", (), (), "gated_backward"),
        "fusion.3": hlo.Operation("fusion.3", "fusion", (), (), "", "jit(coda)/transpose(jvp())/mul"),
        "gemm_fusion_dot.4": hlo.Operation("gemm_fusion_dot.4", "fusion", (), (), "product"),
    }
    classes = {
        ("coda_gemm", "custom-call.7"): "coda: gated_backward",
        ("coda_gemm", ""): "coda: ?",
        ("nvjet_hsh_128x256_64x4_2x1", "custom-call.9"): "product",
        ("gemm_fusion_dot_4", "gemm_fusion_dot.4"): "product",
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", ""): "attention",
        ("loop_multiply_fusion_3", "fusion.3"): "loop_multiply_fusion (mul)",
        ("coda_attention", "custom-call.8"): "attention",
        ("MemcpyD2D", "copy.2"): "copy or fill",
    }
    for (name, instruction), expected in classes.items():
        assert train_step.kernel_class(kernel(name, instruction), operations) == expected
    profile = {"coda: gated_backward": (5.0, 1), "product": (4.0, 1), "attention": (3.0, 1), "loop": (2.0, 1)}
    assert train_step.beyond(profile) == 2.0


def test_kernels_of_custom_calls():
    """Ours by the names in their attributes, others by their targets."""
    named = r'backend_config={"attributes":"{abi = 1 : i32, name = \"NAME\", source = \"x\"}"}'
    kinds = {
        ("coda_gemm", named.replace("NAME", "gated_backward")): "gated_backward",
        ("coda_gemm", ""): "coda_gemm",
        ("coda_launch", named.replace("NAME", "attention_forward")): "attention",
        ("coda_launch", named.replace("NAME", "attention_backward")): "attention_backward",
        ("coda_launch", ""): "attention",
        ("__cudnn$fmhaSoftmaxBackward", ""): "attention_backward",
        ("__cublas$gemm", ""): "product",
        ("Sharding", ""): "",
    }
    for (target, attributes), expected in kinds.items():
        assert hlo.kernel_of("custom-call", target, attributes) == expected


def test_alone_in_turn(monkeypatch):
    """Half of the seconds in order and half in reverse; the mean of both."""
    seen = []

    def executed(call, counter, seconds):
        seen.append((call, seconds))
        return alone.Execution(float(len(seen)), seconds)

    monkeypatch.setattr(alone, "executed", executed)
    found = alone.in_turn({"a": "call of a", "b": "call of b"}, None, 3.0)
    assert seen == [(f"call of {name}", 1.5) for name in "abba"]
    assert found == {"a": (2.5, 1.5), "b": (2.5, 1.5)}


def test_rotation():
    """Sets of arguments are twice the cache together; a result lives for a round, and not longer."""
    a, c = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert [timing.sets_beyond(size, (a, a), c) for size in (10, 256, 257, 513)] == [1, 1, 2, 3]
    alive = weakref.WeakSet()

    class Result:
        def __init__(self, number):
            self.number = number
            alive.add(self)

    call = timing.rotated([functools.partial(Result, number) for number in range(3)])
    assert [call().number for _ in range(5)] == [0, 1, 2, 0, 1]
    assert sorted(one.number for one in alive) == [0, 1, 2]


def test_kernels_outside_of_xla():
    """Kernels without a module belong to the burst they ran in, even if the clocks are some microseconds apart."""
    windows = [(1000.0, 2000.0), (5000.0, 6000.0)]
    spans = {"early": (900, 200), "in": (1200, 100), "late": (1990, 210), "between": (2000, 3000), "next": (5500, 50)}
    kernels = [timing.Kernel(name, "", float(start), float(duration)) for name, (start, duration) in spans.items()]
    assert [one.name for one in timing.during(windows, kernels)] == ["early", "in", "late", "next"]


def test_bursts_of_a_trace(tmp_path):
    """The host's trace has every burst, in the order in which they ran; with one outside of XLA none meets another."""
    waited = []
    ours = jax.jit(lambda x: x @ x)
    x = jnp.ones((64, 64))
    functions = {"ours": lambda: ours(x), "other": timing.Outside(lambda: x, lambda: waited.append(True))}
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            timing._round(functions, 2)
    (path,) = tmp_path.glob("**/*.xplane.pb")
    bursts = timing._bursts(jax.profiler.ProfileData.from_file(str(path)))
    assert {name: len(of) for name, of in bursts.items()} == {"ours": 3, "other": 3} and len(waited) == 3
    spans = sorted(itertools.chain.from_iterable(bursts.values()))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_kernels_of_a_trace():
    """By XLA module and in time order; host planes and other lines are left out. A kernel that began while another of
    its stream ran counts from that one's end, and for nothing if it was over by then.
    """

    def event(name, start, module="jit_f", duration=10.0):
        stats = [("hlo_module", module), ("hlo_op", f"{name}.1")] if module else []
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats)

    def plane(name, **lines):
        lines = [types.SimpleNamespace(name=key.replace("_", " "), events=events) for key, events in lines.items()]
        return types.SimpleNamespace(name=name, lines=lines)

    device = plane(
        "/device:GPU:0",
        Stream_7=[
            event("b", 20.0),
            event("a", 10.0),
            event("early", 25.0, duration=20.0),
            event("inside", 32.0, duration=3.0),
        ],
        Stream_8=[event("c", 15.0), event("other", 30.0, "jit_g"), event("alone", 41.0, None)],
        XLA_Ops=[event("b", 20.0)],
    )
    found = timing._kernels_by_module(
        types.SimpleNamespace(planes=[device, plane("/host:CPU", Stream_1=[event("h", 1.0)])])
    )
    assert {module: [one.name for one in kernels] for module, kernels in found.items()} == {
        "jit_f": ["a", "c", "b", "early", "inside"],
        "jit_g": ["other"],
        "": ["alone"],
    }
    assert found["jit_f"][0].instruction == "a.1"
    assert [(kernel.start, kernel.duration) for kernel in found["jit_f"][2:]] == [(20, 10), (30, 15), (45, 0)]
