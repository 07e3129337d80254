"""`python -m benchmarks.blocks`: training steps of models of several architectures, by coda.block and by plain JAX.

Value and gradient of the loss of a decoder of about 1B parameters in bfloat16: an embedding, blocks, a norm, a head.
The variants of an architecture run interleaved in one process; their losses and gradients are compared before. Times
are the profiler's, of all kernels of a step; memory is XLA's plan. With --alone each variant also runs by itself, back
to back as in training: its wall clock's time and its energy. Writes benchmarks/results/<device>_blocks.csv.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import compare, results, timing
from benchmarks.alone import device_counter, executed
from benchmarks.block_forms import FORMS, Form, as_plain, hidden_states, made_block, parameters
from benchmarks.plain_llama import cross_entropy, rms_norm
from benchmarks.train_step import Measured, Step, compile_steps, report, use_whole_gpu
from benchmarks.variants import Variant

WAYS = {
    "block": Variant(fused=True),
    "operators": Variant(fused=True),
    "block_recompute": Variant(fused=True, remat="full"),
    "xla": Variant(fused=False),
    "xla_recompute": Variant(fused=False, remat="full"),
}


def loss_of(name: str, way: str, dtype: Any) -> Callable[..., jax.Array]:
    """loss(parameters, tokens, labels) of an architecture, written in one way."""
    form, variant = FORMS[name], WAYS[way]
    layer = form.operators if way == "operators" else made_block(name, dtype) if variant.fused else form.plain
    assert layer is not None

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        x = hidden_states(layer, params["layers"], x, fused=variant.fused, remat=variant.remat is not None)
        if variant.fused:
            norm = coda.rms_norm(x, params["norm"])
            losses, _ = coda.linear_cross_entropy(norm, params["head"], labels)
            return jnp.mean(losses)
        return cross_entropy(rms_norm(x, params["norm"], 1e-6) @ params["head"], labels)

    loss.__name__ = f"{name}_{way}"
    return loss


def all_parameters(form: Form, options: Any, dtype: Any) -> Any:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), options.layers + 2)
    width = options.width
    return {
        "embed": jax.random.normal(keys[0], (options.vocabulary, width), dtype),
        "layers": [parameters(form, key, width, options.hidden, dtype) for key in keys[2:]],
        "norm": jnp.ones(width, dtype),
        "head": jax.random.normal(keys[1], (width, options.vocabulary), dtype) / width**0.5,
    }


def plain_tree(form: Form, params: Any) -> Any:
    return params | {"layers": [as_plain(form, p) for p in params["layers"]]}


def measured(name: str, ways: Sequence[str], options: Any) -> list[Measured]:
    """Compiled, compared with the first plain way and timed."""
    form, dtype = FORMS[name], jnp.dtype(jnp.bfloat16)
    params = jax.jit(functools.partial(all_parameters, form, options, dtype))()
    tokens = jax.random.randint(jax.random.key(1), (options.batch, options.length), 0, options.vocabulary)
    labels = jnp.roll(tokens, -1, axis=1)
    given = {True: params, False: plain_tree(form, params)}

    def steps() -> Any:
        for way in ways:
            function = jax.value_and_grad(loss := loss_of(name, way, dtype))
            function.__name__ = loss.__name__
            yield Step(loss.__name__, WAYS[way], jax.jit(function), (given[WAYS[way].fused], tokens, labels))

    found = compile_steps(steps())
    expected = None
    for one in sorted(found, key=lambda one: one.variant.fused):
        if one.failure:
            continue
        loss, gradient = jax.block_until_ready(one.call())
        gradient = plain_tree(form, gradient) if one.variant.fused else gradient
        one.loss, expected = float(loss), expected or (float(loss), gradient)
        one.distance = compare.distance(gradient, expected[1], lambda path: str(path[-1]))
        if not abs(one.loss - expected[0]) <= 3e-3 * abs(expected[0]) or not one.distance <= 0.1:
            one.failure = f"wrong: loss {one.loss} for {expected[0]}, gradients differ by {one.distance:.3f}"
        del gradient
    del expected
    good = [one for one in found if not one.failure]
    timed = timing.executions({one.name: one.call for one in good}, rounds=options.repeats + 1)
    for one in good:
        one.executions = timed[one.name][1:]
        if options.alone:
            one.alone = executed(one.call, device_counter(), options.alone)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a variant's results are wrong."""
    parser = results.parser("benchmarks.blocks", __doc__)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--ways", default=",".join(WAYS))
    for name, value in (("repeats", 4), ("batch", 2), ("length", 8192), ("layers", 16), ("width", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--alone", type=float, default=0.0, help="seconds in which each variant also runs by itself")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=100352)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    wrong = False
    for name in options.forms.split(","):
        about = {key: getattr(options, key) for key in ("batch", "length", "layers", "width", "hidden", "vocabulary")}
        print(f"value and gradient of the loss of {name}, {about}   [{timing.clock()}]", flush=True)
        ways = [way for way in options.ways.split(",") if way != "operators" or FORMS[name].operators]
        found = measured(name, ways, options)
        rows += report(found, {"form": name, **about}, options.batch * options.length)
        wrong |= any(one.failure.startswith("wrong") for one in found)
        del found
    columns = list(dict.fromkeys(name for row in rows for name in row))
    results.write("_blocks", columns, rows, folder=options.out, commit=options.commit)
    return int(wrong)


if __name__ == "__main__":
    use_whole_gpu()
    sys.exit(main())
