"""`make lab-between_kernels`: what stands between the kernels of a training step and touches activations.

Every operation that reads or writes an activation, and is neither a product nor attention, is a pass over memory that
fusion should have removed, but for those of `ALLOWED`. The command compiles the step of `benchmarks.train_step` for
this machine's GPU and lists the operations that XLA left, with their bytes; it fails on any that is not allowed.
tests/test_between_kernels.py looks at the StableHLO of one block in the same way, without a GPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import hlo
from benchmarks.variants import LLAMA_3_1B, TINY, VARIANTS, Parameters, Setting, layer_kernel, step

OUTPUT = "output"
# What has no kernel of its own: it makes no array, or XLA reads it in place.
FREE = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "get_tuple_element", "return", "bitcast"),
    *("reshape", "broadcast_in_dim", "optimization-barrier", "optimization_barrier", "after-all", *hlo.CONTROL),
}


@dataclasses.dataclass(frozen=True)
class Pass:
    """An operation that is no kernel of ours, no product and no attention, and touches an activation.

    Attributes:
      operation: "multiply", "fusion", ...
      after: the kernels that make what it reads, through other passes or directly; "input" for arguments.
      before: the kernels that read what it makes; "output" for results.
      bytes: of the activations that it reads and writes.
      scope: JAX's name stack.
      shapes: of those activations.
    """

    operation: str
    after: frozenset[str]
    before: frozenset[str]
    bytes: int
    scope: str
    shapes: frozenset[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Passes that may be there: those of `only` that read what kernels of `after` make, for kernels of `before`.

    None stands for all kernels.
    """

    why: str
    after: frozenset[str] | None
    before: frozenset[str] | None
    only: Callable[[Pass], bool]

    def __call__(self, one: Pass) -> bool:
        in_place = (self.after is None or one.after <= self.after) and (
            self.before is None or one.before <= self.before
        )
        return in_place and self.only(one)


def allowed(
    why: str, after: str | None, before: str | None, only: Callable[[Pass], bool] = lambda one: bool(one.after)
) -> Allowed:
    """One with the kernels' names in a line; by default of passes that read an activation that a kernel made."""
    places = [None if names is None else frozenset(names.split()) for names in (after, before)]
    return Allowed(why, *places, only)


# The products behind norms, and those that make dx and dW backward; where a norm is applied the latter is bare.
QKV, QKV_BACKWARD = "LlamaBlock_0", "LlamaBlock_backward_6 LlamaBlock_backward_7"
GATE_UP, MLP_BACKWARD = "LlamaBlock_2", "LlamaBlock_backward_2 LlamaBlock_backward_3"
MLP = "LlamaBlock_3"
NORM_BACKWARD = f"{QKV_BACKWARD} {MLP_BACKWARD} gemm"
STREAM = f"input LlamaBlock_1 {MLP} loop"  # what makes the stream
BLOCK = (
    allowed(
        "rotary embedding's backward pass, the packing of dq, dk, dv, and the row sums of q dq + k dk + v dv",
        f"{QKV} attention_backward input",
        NORM_BACKWARD,
        lambda one: hlo.ATTENTION_BACKWARD in one.after,
    ),
    allowed(
        "q, k, v in float32 for the same row sums",
        f"{QKV} input",
        NORM_BACKWARD,
        lambda one: one.operation == "convert",
    ),
    allowed(
        "a norm that is applied, where that moves fewer bytes, and the sums of its rows' squares",
        STREAM,
        f"{QKV} {GATE_UP} {NORM_BACKWARD}",
        lambda one: one.operation in ("convert", "multiply", "square", "reduce"),
    ),
    allowed(
        "its derivative, which is added to the stream's cotangent",
        f"{STREAM} {NORM_BACKWARD}",
        f"{NORM_BACKWARD} LlamaBlock_backward_0 {OUTPUT}",
        lambda one: one.after == {"LlamaBlock_1"} or bool({*NORM_BACKWARD.split(), "input"} & one.after),
    ),
    allowed(
        "in StableHLO, what is kept under remat rounded to the precision that it has, which XLA drops",
        f"{QKV} attention LlamaBlock_1 {MLP}",
        None,
        lambda one: one.operation == "reduce_precision",
    ),
)


def step_rules(vocab_size: int) -> tuple[Allowed, ...]:
    """The rules of a whole training step: those of its blocks, and those of the passes that it may have besides."""

    def named(*names: str) -> Callable[[Pass], bool]:
        return lambda one: bool(re.search("|".join(names), f"{one.operation} {one.scope}"))

    return (
        *BLOCK,
        allowed("the loss over logits", None, None, lambda one: any(vocab_size in shape for shape in one.shapes)),
        allowed(
            "the final norm, formed for the loss; the loop that makes the loss again by logits is a function",
            f"{MLP} loop input",
            "loss_sums loss_exponentials gemm loop",
        ),
        allowed(
            "of few tokens, the final norm of those whose targets say where the logits are",
            "loop",
            "product",
        ),
        allowed(
            "the final norm's backward pass",
            f"{MLP} gemm loop",
            f"LlamaBlock_backward_0 gemm {NORM_BACKWARD} loop",
        ),
        allowed(
            "the embedding's rows, and their squares for the first norm",
            "input",
            None,
            named("gather", "take", "select", "convert", "square", "reduce_sum"),
        ),
        allowed("the embedding's gradient", f"{NORM_BACKWARD} loop", "output", named("scatter")),
        allowed("the zeros that the loss head's loop puts its dx into", "", "loop", lambda one: not one.after),
        allowed(
            "arrays of all layers, or of chunks, read and written by a loop",
            None,
            None,
            named(r"dynamic_\w*(slice|index)"),
        ),
    )


def passes(computation: hlo.Computation, is_activation: Callable[[tuple[int, ...]], bool]) -> list[Pass]:
    """The passes of one computation, in order. Values that are no activations are not followed.

    Args:
      computation: of `hlo`.
      is_activation: whether an array of this shape is one.
    """

    def names(edges: Sequence[tuple[str, hlo.Array]]) -> list[str]:
        return [name for name, array in edges if is_activation(array.shape)]

    def seen_as(one: hlo.Operation) -> str:
        return layer_kernel(one.kernel) or ("loop" if one.operation in hlo.CONTROL else "")

    after: dict[str, frozenset[str]] = {hlo.INPUT: frozenset({hlo.INPUT})}
    for one in computation:
        makers = [after.get(name, frozenset()) for name in names(one.operands)]
        label = hlo.INPUT if one.operation == "parameter" else seen_as(one)
        after[one.name] = frozenset({label}) if label else frozenset().union(*makers)
    before: dict[str, frozenset[str]] = collections.defaultdict(frozenset)
    for one in reversed(computation):
        label = OUTPUT if one.operation == "return" else seen_as(one)
        for name in names(one.operands):
            before[name] |= frozenset({label}) if label else before[one.name]
    found = []
    for one in computation:
        touched = [array for _, array in one.operands if is_activation(array.shape)]
        touched += [array for array in one.results if is_activation(array.shape)]
        if touched and not seen_as(one) and one.operation not in FREE:
            read = frozenset().union(*(after.get(name, frozenset()) for name in names(one.operands)))
            size, shapes = sum(array.bytes for array in touched), frozenset(array.shape for array in touched)
            found.append(Pass(one.operation, read, before[one.name], size, one.scope, shapes))
    return found


def not_allowed(found: Sequence[Pass], rules: Sequence[Allowed]) -> list[Pass]:
    """The passes that no rule allows."""
    return [one for one in found if not any(rule(one) for rule in rules)]


def table(found: Sequence[Pass], rules: Sequence[Allowed]) -> str:
    """The passes with their bytes, those between the same kernels together, and why they are allowed."""
    groups: dict[tuple[Any, ...], list[Pass]] = collections.defaultdict(list)
    for one in found:
        why = next((rule.why for rule in rules if rule(one)), "NOT ALLOWED")
        groups[one.operation, one.scope.rpartition("/")[2], one.after, one.before, why].append(one)
    lines = [f"{'count':>5} {'MB':>9}  operation"]
    for (operation, scope, after, before, why), ones in sorted(
        groups.items(), key=lambda item: -sum(one.bytes for one in item[1])
    ):
        between = f"{'+'.join(sorted(after)) or '-'} -> {'+'.join(sorted(before)) or '-'}"
        lines.append(
            f"{len(ones):5} {sum(one.bytes for one in ones) / 1e6:9.1f}  {operation} ({scope}), {between}: {why}"
        )
    lines.append(f"{len(found):5} {sum(one.bytes for one in found) / 1e6:9.1f}  in all")
    return "\n".join(lines)


@contextlib.contextmanager
def opaque_attention() -> Iterator[None]:
    """`jax.nn.dot_product_attention` as two custom calls, as cuDNN's is, for lowering where cuDNN cannot be traced."""

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        out, lse = jax.ffi.ffi_call(hlo.ATTENTION, [jax.ShapeDtypeStruct(q.shape, q.dtype), lse])(q, k, v)
        return out, (q, k, v, out, lse)

    def backward(kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept[:3]]
        return tuple(jax.ffi.ffi_call(hlo.ATTENTION_BACKWARD, types)(*kept, dout))

    attention.defvjp(forward, backward)

    def replaced(q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> jax.Array:
        return attention(q, k, v)

    with mock.patch.object(jax.nn, "dot_product_attention", replaced):
        yield


def block_passes(call: Callable[[Any, Any], Any], module: Any, batch: int, length: int, dtype: Any) -> list[Pass]:
    """The passes in the StableHLO, lowered for CUDA, of a block's value and gradients; attention is opaque.

    Args:
      call: f(module, x), with the stream (batch, length, D) before and after.
      module: a TransformerBlock; its parameters are the arguments, with the stream and its cotangent.
      batch, length: B, T; see `rows_of`.
      dtype: of the stream.
    """
    from flax import nnx

    graphdef, params = nnx.split(module)
    width = module.attention_norm.num_features

    def step(params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda params, x: call(nnx.merge(graphdef, params), x), params, x)
        return out, pullback(cotangent)

    x = jax.ShapeDtypeStruct((batch, length, width), dtype)
    with opaque_attention():
        lowered = jax.jit(step).trace(params, x, x).lower(lowering_platforms=("cuda",))
    computations = hlo.stablehlo_computations(lowered.compiler_ir("stablehlo"))
    return [one for computation in computations for one in passes(computation, rows_of(batch, length))]


def rows_of(batch: int, length: int, smallest: int = 16) -> Callable[[tuple[int, ...]], bool]:
    """Whether a shape has a row for each of B T tokens, and `smallest` numbers in it; no width may be T or B T."""

    def is_activation(shape: tuple[int, ...]) -> bool:
        return (length in shape or batch * length in shape) and math.prod(shape) >= smallest * batch * length

    return is_activation


def step_passes(name: str, config: Any, batch: int, length: int, *, param_dtype: Any) -> list[Pass]:
    """The passes of a variant of `benchmarks.variants`: on a GPU those that XLA left, elsewhere those of StableHLO."""
    variant = VARIANTS[name]
    parameters = Parameters(Setting(config, jnp.bfloat16, param_dtype))
    tokens = jnp.zeros((batch, length), jnp.int32)
    traced_with = contextlib.nullcontext() if jax.default_backend() == "gpu" else opaque_attention()
    with traced_with:
        traced = step(name, variant, parameters.setting).trace(parameters.of(variant), tokens, tokens)
        if jax.default_backend() == "gpu":
            computations = hlo.hlo_computations(traced.lower().compile().as_text())
        else:
            lowered = traced.lower(lowering_platforms=("cuda",))
            computations = hlo.stablehlo_computations(lowered.compiler_ir("stablehlo"))
    # The least of what is looked at is half of the keys; the tables of sines are less.
    keys = config.resolved_num_key_value_heads * config.resolved_head_dim // 2
    return [one for each in computations for one in passes(each, rows_of(batch, length, keys))]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if something is not allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab.between_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variant", default="coda", choices=[name for name, one in VARIANTS.items() if one.fused])
    parser.add_argument("--param-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="the small model of benchmarks.train_step")
    options = parser.parse_args(arguments)
    config = dataclasses.replace(TINY if options.tiny else LLAMA_3_1B, num_hidden_layers=options.layers)
    batch, length = (3, 37) if options.tiny else (2, 8064)  # no multiple of a width
    found = step_passes(options.variant, config, batch, length, param_dtype=jnp.dtype(options.param_dtype))
    rules = step_rules(config.vocab_size)
    print(table(found, rules))
    wrong = not_allowed(found, rules)
    print(f"{len(wrong)} of {len(found)} passes over activations are not allowed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
