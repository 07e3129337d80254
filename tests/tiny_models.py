"""Sizes of models that a test runs in a moment."""

import flax_layers as layers

LLAMA = layers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
)
GPT2 = layers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
