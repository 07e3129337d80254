"""Tiny configurations of transformers' model families, in which each setting matters: T is above every window."""

import transformers

SIZES = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = SIZES | {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5}
CAPS = {"query_pre_attn_scalar": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8}
TURNED = 12  # of 16 columns
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(TURNED // 2)],
    "long_factor": [1.5 + 0.3 * i for i in range(TURNED // 2)],
    "partial_rotary_factor": TURNED / 16,
}
LOCAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 5.0}
PHI3 = SIZES | {"hidden_size": 64, "sliding_window": None}
FAMILIES = {
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=16, hidden_act="gelu"),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, **CAPS),
    "gemma2_bias": lambda: transformers.Gemma2Config(**GEMMA, attention_bias=True, tie_word_embeddings=False),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA, query_pre_attn_scalar=11, sliding_window_pattern=2, rope_parameters=LOCAL
    ),
    "gemma3_caps": lambda: transformers.Gemma3TextConfig(**GEMMA, final_logit_softcapping=3.0),
    "phi3": lambda: transformers.Phi3Config(**(PHI3 | {"sliding_window": 5})),
    "phi3_short": lambda: transformers.Phi3Config(**PHI3, original_max_position_embeddings=31, rope_parameters=LONG),
    "phi3_long": lambda: transformers.Phi3Config(**PHI3, original_max_position_embeddings=16, rope_parameters=LONG),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo2_bias": lambda: transformers.Olmo2Config(**SIZES, attention_bias=True, rms_norm_eps=1e-2),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.3),
    "cohere_bias": lambda: transformers.CohereConfig(**SIZES, attention_bias=True, layer_norm_eps=1e-2),
    "cohere2": lambda: transformers.Cohere2Config(**SIZES, logit_scale=0.3, sliding_window=5, sliding_window_pattern=2),
    "granite": lambda: transformers.GraniteConfig(**SIZES, **GRANITE),
    "granite_bias_tied": lambda: transformers.GraniteConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "smollm3_window": lambda: transformers.SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 0, 1], use_sliding_window=True, sliding_window=5, attention_bias=True
    ),
    "qwen2_some_windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "llama_linear": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
    ),
    "llama_dynamic": lambda: transformers.LlamaConfig(
        **SIZES | {"max_position_embeddings": 12},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 3.0},
    ),
    "llama_yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama_yarn_settings": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters=YARN
        | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 2.0, "truncate": False},
    ),
    "qwen3_yarn": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=16, rope_parameters=YARN | {"attention_factor": 1.3}
    ),
}
