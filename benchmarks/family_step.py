"""`python -m benchmarks.family_step`: value and gradient of the loss of other models than Llamas, fused and plain.

Sizes of a Gemma 2 2B, a Gemma 3 1B and a Qwen2.5 1.5B. Beside coda_jax's layers plain JAX of the same parameters
(`benchmarks.plain_families`), both as they are and with layers that are computed again in the backward pass. Losses and
gradients are compared before anything is timed; the variants run interleaved in one process, and with --alone each also
by itself. Times are the profiler's, of all kernels of a step; without a GPU the wall clock's. Writes
benchmarks/results/<device>_family_<model>.csv: a row a variant and a row a class of kernels.
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

from benchmarks import plain_families, results, timing
from benchmarks.alone import device_counter, executed
from benchmarks.train_step import Step, check, compile_steps, report, run_interleaved, use_whole_gpu
from benchmarks.variants import UNROLLED, Variant
from flax_layers import GemmaConfig, LlamaConfig
from flax_layers.models import model_class


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration, and the tokens (B, T) of a step."""

    config: LlamaConfig
    batch: int
    length: int


MODELS = {
    "gemma2_2b": Model(
        GemmaConfig(
            vocab_size=256000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=8192,
            sliding_window=4096,
            layer_types=("sliding_attention", "full_attention") * 13,
            query_pre_attn_scalar=256,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        batch=1,
        length=8192,
    ),
    "gemma3_1b": Model(
        GemmaConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=32768,
            sliding_window=512,
            layer_types=tuple("full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)),
            query_pre_attn_scalar=256,
            qk_norm=True,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        batch=2,
        length=8192,
    ),
    "qwen2_1_5b": Model(
        LlamaConfig(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rope_theta=1e6,
            attention_bias=True,
            attention_out_bias=False,
            tie_word_embeddings=True,
        ),
        batch=2,
        length=8192,
    ),
}
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


def tiny(model: Model) -> Model:
    """The same family in a size that a CPU runs in seconds."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = model.config
    window = None if config.sliding_window is None else 8
    return Model(dataclasses.replace(config, **sizes, **heads, sliding_window=window), batch=2, length=24)


class Parameters:
    """The same parameters in the form that each variant takes, which share their arrays."""

    def __init__(self, config: LlamaConfig):
        # The generator that XLA compiles in no time.
        rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))
        self.state = nnx.state(model_class(config)(config, **DTYPES, rngs=rngs), nnx.Param)

    def of(self, variant: Variant) -> Any:
        return self.state if variant.fused else nnx.to_pure_dict(self.state)

    def plain_gradient(self, variant: Variant, gradient: Any) -> Any:
        """A variant's gradient under the names of the plain model."""
        return nnx.to_pure_dict(gradient) if variant.fused else gradient


def steps(model: Model, parameters: Parameters, names: Sequence[str]) -> Iterator[Step]:
    """The variants, jitted, on the same parameters, in bfloat16."""
    tokens = jax.random.randint(jax.random.key(1), (model.batch, model.length), 0, model.config.vocab_size)
    labels = jnp.roll(tokens, -1, axis=1)
    for name in names:
        variant = UNROLLED[name]
        function = fused(model.config, variant) if variant.fused else plain(model.config, variant)
        function.__name__ = name  # timing.executions tells variants apart by it
        yield Step(name, variant, jax.jit(jax.value_and_grad(function)), (parameters.of(variant), tokens, labels))


def fused(config: LlamaConfig, variant: Variant) -> Callable[..., jax.Array]:
    make = lambda: model_class(config)(config, remat=variant.remat, **DTYPES, rngs=nnx.Rngs(0))  # noqa: E731
    graphdef, _, others = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, others).loss(tokens, labels)

    return loss


def plain(config: LlamaConfig, variant: Variant) -> Callable[..., jax.Array]:
    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return plain_families.loss(params, config, tokens, labels, jnp.bfloat16, remat=variant.remat is not None)

    return loss


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser("benchmarks.family_step", __doc__)
    parser.add_argument("--model", default="gemma2_2b", choices=[*MODELS])
    parser.add_argument("--variants", nargs="+", default=[*UNROLLED], choices=[*UNROLLED])
    parser.add_argument("--repeats", type=int, default=4, help="measured executions of each variant (default 4)")
    parser.add_argument("--alone", type=float, default=0.0, help="seconds in which each variant also runs by itself")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.layers or 1) < 1:
        parser.error("--repeats and --layers must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None, counter: Callable[[], float] | None = None) -> int:
    """The command; 1 if a variant's results are wrong."""
    options = parse(arguments)
    model = tiny(MODELS[options.model]) if options.tiny else MODELS[options.model]
    if options.layers:
        model = dataclasses.replace(model, config=plain_families.with_layers(model.config, options.layers))
    about = {
        "model": options.model,
        "batch": model.batch,
        "length": model.length,
        "layers": model.config.num_hidden_layers,
        "param_dtype": "bfloat16",
    }
    print(f"value and gradient of the loss, {about}   [{timing.clock()}]", flush=True)
    parameters = Parameters(model.config)
    measured = compile_steps(steps(model, parameters, options.variants))
    check(measured, parameters, loss_rtol=3e-3, gradient_rtol=0.1)
    good = run_interleaved(measured, options.repeats)
    if options.alone:
        for one in good:
            one.alone = executed(one.call, counter or device_counter(), options.alone)
    rows = report(measured, about, model.batch * model.length)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    results.write(f"_family_{options.model}", columns, rows, folder=options.out, commit=options.commit)
    return int(any(one.failure.startswith("wrong") for one in measured))


if __name__ == "__main__":
    use_whole_gpu()
    sys.exit(main())
