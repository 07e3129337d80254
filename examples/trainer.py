"""The training run's jitted functions: a step, a validation loss, a sample."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text
from flax import nnx

from flax_layers import Llama, LlamaConfig, muon_dimension_numbers
from flax_layers.decoding import generate


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the result of a run depends on; a run is resumed only with the same ones."""

    steps: int
    batch: int
    context: int
    width: int
    layers: int
    heads: int
    dtype: str
    learning_rate: float
    seed: int


class Trainer:
    """The compiled functions of a run. A state is {"params", "opt", "step"}; step is also the position in the data.

    step(state, text) -> (state, loss) is step_function compiled; it gives the state's buffers away.
    """

    def __init__(self, settings: Settings, train: np.ndarray):
        self.settings = settings
        config = LlamaConfig(
            vocab_size=stdlib_text.VOCAB_SIZE,
            hidden_size=settings.width,
            intermediate_size=-(-settings.width * 8 // 3 // 64) * 64,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
        )
        model = Llama(config, dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(settings.seed))
        self.graphdef, self._params = nnx.split(model, nnx.Param)
        self.optimizer = make_optimizer(settings)
        self.text = jnp.asarray(train)
        self.loss = jax.jit(self._loss)
        self.step = jax.jit(self.step_function, donate_argnums=0).lower(self.initial_state(), self.text).compile()

    def initial_state(self) -> dict[str, Any]:
        return {"params": self._params, "opt": self.optimizer.init(self._params), "step": jnp.zeros((), jnp.int32)}

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self._params))

    def _loss(self, params: nnx.State, windows: jax.Array) -> jax.Array:
        """Mean over windows (B, T + 1) of -log2 p(next byte)."""
        windows = windows.astype(jnp.int32)
        return nnx.merge(self.graphdef, params).loss(windows[:, :-1], windows[:, 1:]) / jnp.log(2.0)

    def step_function(self, state: dict[str, Any], text: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        settings = self.settings
        # The step decides the data, so a resumed run sees what an uninterrupted one would have.
        key = jax.random.fold_in(jax.random.key(settings.seed), state["step"])
        starts = jax.random.randint(key, (settings.batch,), 0, text.size - settings.context)
        windows = text[starts[:, None] + jnp.arange(settings.context + 1)]
        loss, grads = jax.value_and_grad(self._loss)(state["params"], windows)
        updates, opt = self.optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, loss

    def validate(self, params: nnx.State, windows: np.ndarray) -> float:
        """Mean bits per byte over windows (W, T + 1)."""
        batch = min(len(windows), max(1, 2**13 // self.settings.context))
        count = len(windows) // batch * batch
        losses = [self.loss(params, jnp.asarray(windows[i : i + batch])) for i in range(0, count, batch)]
        return float(jnp.mean(jnp.stack(losses)))

    def sample(self, params: nnx.State, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
        """The prompt continued by length sampled bytes, fewer where the context ends, ended by a file's end."""
        context = self.settings.context
        tokens = np.frombuffer(prompt, np.uint8)[None, -max(1, context // 2) :].astype(np.int32)
        made, lengths = generate(
            nnx.merge(self.graphdef, params),
            tokens,
            max_new_tokens=min(length, context + 1 - tokens.shape[1]),
            temperature=temperature,
            eos_token=stdlib_text.SEPARATOR,
            key=jax.random.key(self.settings.seed),
        )
        return prompt + np.asarray(made[0, : int(lengths[0])]).astype(np.uint8).tobytes().rstrip(b"\0")


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Muon for the matrices inside the blocks, AdamW for embedding, head and norms; warm-up, then cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, min(50, settings.steps // 10), settings.steps, 0.0
    )
    return optax.contrib.muon(
        schedule,
        adam_learning_rate=schedule,
        adam_b2=0.95,
        weight_decay=0.1,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=muon_dimension_numbers,
    )
