"""Recipes of post-training on a toy model, which converge: SFT, DPO, GRPO, distillation from a teacher's top k."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layers as layers
from tests.gemm_cases import assert_close

VOCABULARY, BATCH, LENGTH = 32, 16, 12
CONFIG = layers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
RNG = np.random.default_rng(0)
PROMPT = jnp.asarray(RNG.integers(1, VOCABULARY, (BATCH, LENGTH)))
IS_ANSWER = jnp.arange(LENGTH - 1) >= 5  # of the tokens that are predicted, those of the answer


def model_of(seed, **options):
    return layers.Llama(CONFIG, rngs=nnx.Rngs(seed), **options)


def of_answers(model, tokens, **options):
    """Log-probabilities (B, T - 1) of the answers' tokens, 0 elsewhere: the head works on the answers alone."""
    mask = jnp.broadcast_to(IS_ANSWER, tokens[:, 1:].shape)
    return model.token_logprobs(tokens[:, :-1], tokens[:, 1:], token_mask=mask, **options)


def trained(model, loss, data, steps, rate=3e-2):
    """Metrics of each step, those that loss(model, data) returns beside the number."""
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, data):
        (_, metric), gradient = nnx.value_and_grad(loss, has_aux=True)(model, data)
        optimizer.update(model, gradient)
        return metric

    found = []
    for i in range(steps):
        found.append(float(step(model, optimizer, data(i) if callable(data) else data)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_of_a_model(tied):
    """The log-probabilities are those of the model's logits, with an adapted head, packed sequences and candidates.

    They are within segments by default.
    """
    model = layers.Llama(dataclasses.replace(CONFIG, tie_word_embeddings=tied), rngs=nnx.Rngs(0))
    layers.add_lora(model, 8, targets=["head"], rngs=nnx.Rngs(2))
    model.head.lora_b[...] = jnp.asarray(0.3 * RNG.standard_normal((8, VOCABULARY)), jnp.float32)
    labels, candidates = jnp.roll(PROMPT, -1, 1), jnp.asarray(RNG.integers(0, VOCABULARY, (*PROMPT.shape, 3)))
    segments = {"segment_ids": jnp.broadcast_to(jnp.arange(LENGTH) // 5, PROMPT.shape), "positions": "restart"}
    logp = jax.nn.log_softmax(model(PROMPT, **segments) / 0.7)
    is_last = jnp.isin(jnp.arange(LENGTH), jnp.asarray([4, 9]))
    got, entropy = model.token_logprobs(PROMPT, labels, temperature=0.7, entropy=True, across_segments=True, **segments)
    assert_close(got, jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0], rtol=1e-4)
    assert_close(entropy, -jnp.sum(jnp.exp(logp) * logp, axis=-1), rtol=1e-4)
    assert_close(
        model.token_logprobs(PROMPT, labels, temperature=0.7, **segments), jnp.where(is_last, 0, got), rtol=1e-4
    )
    of_candidates = model.token_logprobs(PROMPT, candidates, temperature=0.7, **segments)
    want = jnp.where(is_last[:, None], 0, jnp.take_along_axis(logp, candidates, axis=-1))
    assert_close(of_candidates, want, rtol=1e-4)


def test_supervised_fine_tuning():
    """The answers' mean log-probability; prompts cost the head nothing."""

    def loss(model, tokens):
        mean = jnp.sum(of_answers(model, tokens)) / (BATCH * IS_ANSWER.sum())
        return -mean, jnp.exp(mean)

    found = trained(model_of(0), loss, PROMPT, 40)
    assert found[0] < 0.1 and found[-1] > 0.6


@pytest.mark.slow
def test_direct_preference_optimization():
    """The chosen answers gain on the rejected ones beside a frozen reference, in log-probability."""
    rejected = PROMPT.at[:, 6:].set(jnp.asarray(RNG.integers(1, VOCABULARY, (BATCH, LENGTH - 6))))
    pairs = jnp.concatenate([PROMPT, rejected])
    reference = jnp.sum(of_answers(model_of(0), pairs), axis=1)

    def loss(model, tokens):
        gained = jnp.sum(of_answers(model, tokens), axis=1) - reference
        margin = 0.1 * (gained[:BATCH] - gained[BATCH:])
        return -jnp.mean(jax.nn.log_sigmoid(margin)), jnp.mean(margin)

    found = trained(model_of(0), loss, pairs, 20, rate=1e-2)
    assert abs(found[0]) < 1e-4 and found[-1] > 1


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_group_relative_policy_optimization(adapters):
    """The reward, the share of even tokens, rises; a KL term to a reference and an entropy bonus hold the policy."""
    model, reference, group = model_of(1), model_of(1), 8
    if adapters:
        layers.add_lora(model, 8, targets=["head"], rngs=nnx.Rngs(2))
    temperature = jnp.float32(1.0)

    @nnx.jit
    def sampled(model, reference, key):
        """Answers token by token from all logits, their log-probabilities under both models, and advantages."""
        tokens = jnp.repeat(PROMPT[:2], group, axis=0)
        for i in range(6, LENGTH):
            key, now = jax.random.split(key)
            tokens = tokens.at[:, i].set(jax.random.categorical(now, model(tokens)[:, i - 1] / temperature))
        reward = jnp.mean(tokens[:, 6:] % 2 == 0, axis=1)
        groups = reward.reshape(2, group)
        advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-3)
        old, of_reference = (of_answers(m, tokens, temperature=temperature) for m in (model, reference))
        return tokens, old, of_reference, advantage.reshape(-1, 1), reward.mean()

    def loss(model, data):
        tokens, old, of_reference, advantage, reward = data
        new, entropy = of_answers(model, tokens, temperature=temperature, entropy=True)
        ratio = jnp.exp(new - old)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        behind = of_reference - new
        kl = jnp.exp(behind) - behind - 1
        return -jnp.sum(gain - 0.02 * kl + 0.01 * entropy) / new.size, reward

    found = trained(model, loss, lambda i: sampled(model, reference, jax.random.key(i)), 25, rate=2e-2)
    assert np.mean(found[:3]) < 0.65 and np.mean(found[-3:]) > 0.85
    last = sampled(model, reference, jax.random.key(99))[0]
    assert float(of_answers(model, last, entropy=True)[1].sum()) > 1  # not one answer alone


@pytest.mark.slow
def test_distillation_from_the_top_of_a_teacher():
    """The student meets the teacher's k most probable tokens: cross-entropy with their renormalised probabilities."""
    teacher, student, k = model_of(3), model_of(4), 4
    logp, labels = jax.lax.top_k(jax.nn.log_softmax(3 * teacher(PROMPT)), k)
    share = jax.nn.softmax(logp)
    entropy = -jnp.mean(jnp.sum(share * jnp.log(share), axis=-1))

    def loss(model, tokens):
        of_labels = model.token_logprobs(tokens, labels)
        value = -jnp.mean(jnp.sum(share * of_labels, axis=-1))
        return value, value - entropy  # the divergence from what the teacher's top says

    found = trained(student, loss, PROMPT, 60)
    assert found[0] > 1.5 and 0 <= found[-1] < 0.5
