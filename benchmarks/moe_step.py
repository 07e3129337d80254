"""`python -m benchmarks.moe_step`: value and gradient of a Qwen3-MoE-like model's loss, fused and plain.

Four layers of Qwen3-30B-A3B's sizes on 16384 tokens by default, in bfloat16, the auxiliary loss in the loss. Beside
coda_jax's layers is plain JAX with `jax.lax.ragged_dot`. The variants run interleaved in one process on the same
parameters; losses and gradients are compared before anything is timed. Times are the profiler's, of all kernels of a
step. A variant that does not fit the device has what it would need, by XLA's `memory_analysis`. Below the tables
stands what `coda_jax.explain` says of the first fused variant. Writes benchmarks/results/<device>_moe_step.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from benchmarks import plain_moe, results, timing
from benchmarks.train_step import Step, check, compile_steps, report, run_interleaved, use_whole_gpu
from benchmarks.variants import UNROLLED, Variant
from flax_layers import Llama, MoEConfig

TINY = MoEConfig(
    vocab_size=256,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
VARIANTS = UNROLLED | {
    # Not among the defaults: ragged_dot by cuDNN, which XLA takes for it if it is asked to.
    "xla_cudnn": Variant(fused=False, compiler_options={"xla_gpu_experimental_use_ragged_dot_fusion": True}),
}
DEFAULTS = list(UNROLLED)
# The eighth and the ninth of 128 probabilities are often as close as two roundings: some tokens have another expert.
LOSS_RTOL, GRADIENT_RTOL = 5e-3, 0.3


class Parameters:
    """The same parameters in the form that each variant takes, which share their arrays."""

    def __init__(self, config: MoEConfig):
        self.config = config
        rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))
        self.model = Llama(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)

    def of(self, variant: Variant) -> Any:
        state = nnx.state(self.model, nnx.Param)
        return state if variant.fused else plain_moe.from_fused(nnx.to_pure_dict(state), self.config)

    def plain_gradient(self, variant: Variant, gradient: Any) -> Any:
        """A variant's gradient under the names of the plain model."""
        return plain_moe.from_fused(nnx.to_pure_dict(gradient), self.config) if variant.fused else gradient


def step(name: str, variant: Variant, config: MoEConfig) -> Callable[..., Any]:
    """value_and_grad of the loss: f(parameters of the variant, tokens, labels)."""
    if variant.fused:
        dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        make = lambda: Llama(config, remat=variant.remat, **dtypes, rngs=nnx.Rngs(0))  # noqa: E731
        graphdef, _, others = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            model: Llama = nnx.merge(graphdef, params, others)
            return model.loss(tokens, labels)
    else:

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            remat = variant.remat is not None
            found: jax.Array = plain_moe.loss(params, tokens, labels, config=config, dtype=jnp.bfloat16, remat=remat)
            return found

    function = jax.value_and_grad(loss)
    function.__name__ = name  # timing.executions tells variants apart by it
    return function


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser("benchmarks.moe_step", __doc__)
    parser.add_argument("--variants", default=",".join(DEFAULTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=6, help="measured executions of each variant (default 6)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds, on (2, 24) tokens")
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        parser.error(f"--variants: {unknown[0]} is none of {', '.join(VARIANTS)}")
    if min(options.repeats, options.batch, options.length, options.layers) < 1:
        parser.error("--repeats, --batch, --length and --layers must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a variant's results are wrong."""
    options = parse(arguments)
    config = dataclasses.replace(TINY if options.tiny else MoEConfig.qwen3_30b_a3b(), num_hidden_layers=options.layers)
    shape = (2, 24) if options.tiny else (options.batch, options.length)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    labels = jnp.roll(tokens, -1, axis=1)
    parameters = Parameters(config)
    about = {"model": "qwen3_moe", "batch": shape[0], "length": shape[1], "layers": config.num_hidden_layers}
    print(f"value and gradient of a Qwen3-MoE's loss, {about}   [{timing.clock()}]", flush=True)

    def steps() -> Iterator[Step]:
        for name in options.variants:
            variant = VARIANTS[name]
            if jax.default_backend() != "gpu":
                variant = dataclasses.replace(variant, compiler_options=None)
            yield Step(name, variant, jax.jit(step(name, variant, config)), (parameters.of(variant), tokens, labels))

    measured = compile_steps(steps())
    check(measured, parameters, loss_rtol=LOSS_RTOL, gradient_rtol=GRADIENT_RTOL)
    run_interleaved(measured, options.repeats)
    rows = report(measured, about, tokens.size)
    for name in [name for name in options.variants if VARIANTS[name].fused][:1]:
        variant = VARIANTS[name]
        print(f"\n{name}:\n{coda.explain(step(name, variant, config), parameters.of(variant), tokens, labels)}")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    results.write("_moe_step", columns, rows, folder=options.out, commit=options.commit)
    return int(any(one.failure.startswith("wrong") for one in measured))


if __name__ == "__main__":
    use_whole_gpu()
    sys.exit(main())
