"""Between the kernels of a block's forward and backward pass nothing touches an activation that is not on a list."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_layers as layers
from benchmarks import hlo
from benchmarks.lab import between_kernels
from benchmarks.variants import TINY
from coda_jax import ffi

BATCH, LENGTH = 3, 37


def found(call):
    """The passes of call(block, x), as a pair: those that the list allows, and the others."""
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    dtype = jnp.bfloat16
    block = layers.LlamaBlock(64, 96, 2, num_kv_heads=1, head_dim=64, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    passes = between_kernels.block_passes(call, block, BATCH, LENGTH, dtype)
    wrong = between_kernels.not_allowed(passes, between_kernels.BLOCK)
    return [one for one in passes if one not in wrong], wrong


def scaled(x):
    return x * 1.0001


def inside(block, x):
    x = scaled(x + block.attention(block.attention_norm(x)))
    return x + block.mlp(block.mlp_norm(x))


def test_a_block_has_only_what_the_list_allows():
    allowed, wrong = found(lambda block, x: block(x))
    assert not wrong, "\n" + between_kernels.table(wrong, ())
    used = {rule.why for rule in between_kernels.BLOCK for one in allowed if rule(one)}
    assert used == {rule.why for rule in between_kernels.BLOCK if "under remat" not in rule.why}, "rules without use"


@pytest.mark.filterwarnings("default::coda_jax.FallbackWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: block(scaled(x)),
        lambda block, x: scaled(block(x)),
        inside,
    ],
    ids=["before", "after", "inside"],
)
def test_a_pass_more_is_found(call):
    _, wrong = found(call)
    assert "multiply" in {one.operation for one in wrong}


def test_a_training_step_has_only_what_the_list_allows():
    """Scanned, and with remat, which have passes that a block does not have."""
    if reason := ffi.unavailable_reason():
        pytest.skip(reason)
    passes = between_kernels.step_passes("coda_scan_recompute", TINY, BATCH, LENGTH, param_dtype=jnp.bfloat16)
    wrong = between_kernels.not_allowed(passes, between_kernels.step_rules(TINY.vocab_size))
    assert passes and not wrong, "\n" + between_kernels.table(wrong, ())


OPTIMISED = r"""
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[74,64]{1,0})->bf16[74,64]{1,0}}

%fused_computation (param_0: bf16[74,64]) -> bf16[74,64] {
  %param_0 = bf16[74,64]{1,0} parameter(0)
  ROOT %multiply.3 = bf16[74,64]{1,0} multiply(%param_0, %param_0)
}

%body (loop: (s32[], bf16[74,64])) -> (s32[], bf16[74,64]) {
  %loop = (s32[], bf16[74,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%loop), index=0
  %x.1 = bf16[74,64]{1,0} get-tuple-element(%loop), index=1
  %custom-call.7 = (bf16[74,64]{1,0}, f32[1,74]{1,0}) custom-call(%x.1, %x.1), custom_call_target="coda_gemm", CONFIG
  %y = bf16[74,64]{1,0} get-tuple-element(%custom-call.7), index=0
  %loop_multiply_fusion.2 = bf16[74,64]{1,0} fusion(%y), calls=%fused_computation, metadata={op_name="jit(step)/mul"}
  ROOT %tuple.1 = (s32[], bf16[74,64]{1,0}) tuple(%i, %loop_multiply_fusion.2)
}

%condition (loop.1: (s32[], bf16[74,64])) -> pred[] {
  %loop.1 = (s32[], bf16[74,64]{1,0}) parameter(0)
  ROOT %constant = pred[] constant(false)
}

ENTRY %main (x: bf16[74,64]) -> bf16[74,64] {
  %x = bf16[74,64]{1,0} parameter(0), metadata={op_name="x"}
  %zero = s32[] constant(0)
  %cublas-gemm.1 = (bf16[74,64]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %z = bf16[74,64]{1,0} get-tuple-element(%cublas-gemm.1), index=0
  %tuple.2 = (s32[], bf16[74,64]{1,0}) tuple(%zero, %z)
  %while.1 = (s32[], bf16[74,64]{1,0}) while(%tuple.2), condition=%condition, body=%body
  ROOT %out = bf16[74,64]{1,0} get-tuple-element(%while.1), index=1
}
""".replace(
    "CONFIG",
    r'backend_config={"custom_call_backend_config":{"attributes":"{abi = 1 : i32, key = \"0\", '
    r'name = \"norm_backward\", source = \"// name = \22x\22\"}"}}',
)


def test_optimised_hlo():
    """Loops are entered, fusions are not; a fusion is a pass, between the kernels that it stands between."""
    computations = hlo.hlo_computations(OPTIMISED)
    kernels = {one.name: one.kernel for computation in computations for one in computation if one.kernel}
    assert kernels == {"cublas-gemm.1": "product", "custom-call.7": "norm_backward"}
    is_activation = between_kernels.rows_of(2, 37)
    (one,) = [one for computation in computations for one in between_kernels.passes(computation, is_activation)]
    assert (one.operation, one.after, one.before) == ("fusion", {"norm_backward"}, {"output"})
    assert one.bytes == 2 * 74 * 64 * 2 and one.scope == "jit(step)/mul"


def test_hlo_of_this_jax():
    """The HLO that the installed jaxlib prints is parsed: the loop's body is there, and the product in it."""

    def function(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)

    compiled = jax.jit(function).lower(jnp.ones((74, 64)), jnp.ones((3, 64, 64))).compile()
    entry, *bodies = hlo.hlo_computations(compiled.as_text())
    assert "while" in {one.operation for one in entry}
    assert any("dot_general" in one.scope for body in bodies for one in body)
