"""Generation of text: the prompt in one pass, then one step a token over a key and value cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.typing import ArrayLike

from coda_jax.extend import hoist, vary, varying_axes
from flax_layers.decoding.generate_arguments import NO_TOKEN, check_arguments, check_tokens, static_arguments


class Decoder(Protocol):
    """The methods that `generate` needs of a model; `Llama` has them."""

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        """An empty cache, any pytree; a ValueError where the model has fewer positions."""

    def decode(self, tokens: jax.Array, cache: Any, *, lengths: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """Logits (B, V) after tokens (B, T), of which each row has its first `lengths`, and the cache."""


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: (B, max_new_tokens) int32, without the prompt; a row that has ended repeats its end token, -1 where its
        logits gave none.
      lengths: (B,) int32, how many tokens of each row are its own, the end token among them.
    """

    tokens: jax.Array
    lengths: jax.Array


def generate(
    model: Decoder,
    tokens: ArrayLike,
    *,
    max_new_tokens: int,
    lengths: ArrayLike | Sequence[int] | None = None,
    temperature: float | jax.Array = 0.0,
    top_k: int | None = None,
    top_p: float | jax.Array | None = None,
    eos_token: int | Sequence[int] | None = None,
    key: jax.Array | None = None,
) -> Generated:
    """Continues prompts: token t + 1 ~ softmax(logits_t / temperature), or argmax logits_t at temperature 0.

    Generation is one jitted program, compiled once for the model's structure, the shapes and the options (not for each
    temperature or top_p): the prompts in one pass that fills the cache, then a `lax.while_loop` whose body runs the
    model on one token a row, until all rows have ended. The products there have B rows. Values computed from parameters
    alone, as their casts to the compute dtype, are computed before the loop and kept while it runs.

    Args:
      model: a `Llama`, or any `Decoder` that is an nnx.Module.
      tokens: (B, T) integers, the prompts; shorter ones are padded after their end, with any token. They and the
        parameters may be sharded, over explicit mesh axes too: then the program runs over automatic ones of the same
        devices. Inside a jit, prompts sharded over explicit axes need an `nnx.shard_map` around this function.
      max_new_tokens: most tokens to make a row.
      lengths: (B,) integers, the prompts' lengths, 1 to T; default T. Padding is neither seen nor counted in positions.
      temperature: 0 for the likeliest token, else the logits' divisor. It and top_p may be traced arrays ().
      top_k: samples from the k likeliest tokens.
      top_p: samples from the fewest likeliest tokens whose probabilities sum to at least top_p; of those of top_k.
      eos_token: a token that ends a row, or several, () for none; default the model's `end_tokens`, which a Llama or a
        GPT2 of a Hugging Face folder has from generation_config.json or config.json, or none.
      key: of jax.random; required unless temperature is 0, also of a traced one.

    A row whose logits are NaN, or of which none is above -inf, has no next token: it ends with the token -1. So do all
    rows where a traced temperature or top_p is out of its range.

    Raises:
      ValueError: an argument out of its range or of another type, no key for sampling, T + max_new_tokens - 1 tokens,
        all but the last, beyond the model's positions; and a row without a next token, but inside of jit. For that a
        call outside of it waits for the tokens.
    """
    tokens = jnp.asarray(tokens)
    if not isinstance(lengths, jax.Array | None):
        lengths = np.asarray(lengths)
    eos_token = getattr(model, "end_tokens", ()) if eos_token is None else eos_token
    max_new_tokens, top_k, ends = static_arguments(max_new_tokens, top_k, eos_token)
    check_arguments(tokens, lengths, temperature, top_p, key)
    may_be_greedy = isinstance(temperature, jax.core.Tracer)
    graphdef, state = nnx.split(model)
    arrays = (
        state,
        tokens.astype(jnp.int32),
        None if lengths is None else jnp.asarray(lengths).astype(jnp.int32),
        None if not may_be_greedy and temperature == 0 else key,
        jnp.float32(temperature),
        None if top_p is None else jnp.float32(top_p),
    )
    options: Any = {"max_new_tokens": max_new_tokens, "top_k": top_k, "ends": ends, "may_be_greedy": may_be_greedy}
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        generated: Generated = _generate(graphdef, *arrays, **options)
    else:
        automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
        with jax.set_mesh(automatic):
            result = _generate(graphdef, *_on_mesh(arrays, automatic), **options)
        generated = _on_mesh(result, mesh)
    check_tokens(generated.tokens)
    return generated


def _explicit_mesh(arrays: Any) -> Any:
    """The mesh whose explicit axes shard some of these; None inside jit, or where no such mesh shards them."""
    leaves = jax.tree.leaves(arrays)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return None
    shardings = [x.sharding for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)]
    meshes = (x.mesh for x in shardings if AxisType.Explicit in x.mesh.axis_types and any(axes for axes in x.spec))
    return next(meshes, None)


def _on_mesh(arrays: Any, mesh: Any) -> Any:
    """The arrays with their specs on another mesh of the same devices."""

    def one(x: Any) -> Any:
        is_named = isinstance(getattr(x, "sharding", None), NamedSharding)
        return jax.device_put(x, NamedSharding(mesh, x.sharding.spec)) if is_named else x

    return jax.tree.map(one, arrays)


def candidates(logits: jax.Array, top_k: int | None, top_p: jax.Array | float | None) -> tuple[jax.Array, jax.Array]:
    """The tokens that may be drawn: the top_k likeliest, and of those the fewest whose probabilities reach top_p.

    Args:
      logits: (..., V).
      top_k, top_p: as in `generate`.

    Returns:
      Logits (..., k) float32 in falling order, -inf where top_p excludes one, and their tokens (..., k); k = V without
      top_k.
    """
    size = logits.shape[-1]
    logits, tokens = lax.top_k(logits.astype(jnp.float32), size if top_k is None else min(top_k, size))
    if top_p is not None:
        probability = jax.nn.softmax(logits, axis=-1)
        likelier = jnp.cumsum(probability, axis=-1) - probability  # the first one's is 0, so it always stays
        logits = jnp.where(likelier < top_p, logits, -jnp.inf)
    return logits, tokens


@partial(jax.jit, static_argnames=("graphdef", "max_new_tokens", "top_k", "ends", "may_be_greedy"))
def _generate(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompts: jax.Array,
    lengths: jax.Array | None,
    key: jax.Array | None,
    temperature: jax.Array,
    top_p: jax.Array | None,
    *,
    max_new_tokens: int,
    top_k: int | None,
    ends: tuple[int, ...],
    may_be_greedy: bool,
) -> Generated:
    model: Any = nnx.merge(graphdef, state)
    batch, prompt = prompts.shape

    def drawn(logits: jax.Array, step: Any) -> jax.Array:
        if key is None:
            return jnp.argmax(logits, axis=-1)
        is_greedy = may_be_greedy & (temperature == 0)
        logits, step_key = logits / jnp.where(is_greedy, 1.0, temperature), jax.random.fold_in(key, step)
        likeliest = jnp.argmax(logits, axis=-1) if may_be_greedy else None
        if top_k is None and top_p is None:
            token = jax.random.categorical(step_key, logits)
        else:
            logits, tokens = candidates(logits, top_k, top_p)
            token = jnp.take_along_axis(tokens, jax.random.categorical(step_key, logits)[:, None], axis=1)[:, 0]
        return token if likeliest is None else jnp.where(is_greedy, likeliest, token)

    def choose(logits: jax.Array, step: Any) -> jax.Array:
        logits = logits.astype(jnp.float32)
        is_chosen = jnp.max(logits, axis=-1) > -jnp.inf  # the maximum is NaN where a logit is
        is_chosen &= (temperature >= 0) & (temperature < jnp.inf)
        if top_p is not None:
            is_chosen &= (top_p > 0) & (top_p <= 1)
        return jnp.where(is_chosen, drawn(logits, step), NO_TOKEN).astype(jnp.int32)

    def ended(token: jax.Array) -> jax.Array:
        # Without end tokens all devices of a shard_map make equally many steps; else their collectives would never end.
        return jnp.isin(token, jnp.array((*ends, NO_TOKEN) if ends else (), jnp.int32))

    def running(carry: Any) -> jax.Array:
        step, done = carry[0], carry[3]
        return (step < max_new_tokens) & ~jnp.all(done)

    def body(carry: Any) -> Any:
        step, cache, token, done, out, count = carry
        logits, cache = decode(weights, token[:, None], cache)
        is_over = done | (token == NO_TOKEN)
        token = jnp.where(is_over, token, choose(logits, step))
        return step + 1, cache, token, done | ended(token), out.at[:, step].set(token), count + ~is_over

    cache = model.init_cache(batch, prompt + max_new_tokens - 1)  # the last token is not fed back
    logits, cache = model.decode(prompts, cache, lengths=lengths)
    token = choose(logits, 0)
    weights, decode = hoist(
        lambda state, tokens, cache: nnx.merge(graphdef, state).decode(tokens, cache), state, token[:, None], cache
    )
    out = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(token)
    (count,) = vary(varying_axes(token), jnp.ones(batch, jnp.int32))
    carry = (1, cache, token, ended(token), out, count)
    _, _, token, _, out, count = lax.while_loop(running, body, carry)
    return Generated(jnp.where(jnp.arange(max_new_tokens) < count[:, None], out, token[:, None]), count)
