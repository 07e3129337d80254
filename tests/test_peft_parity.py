"""Adapters against Hugging Face's PEFT: its folders read here, ours read there, with the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_transformers_parity import GPT2, LLAMA, TOKENS

from flax_layers.checkpoints import config_from_hf, from_hf, load_peft_folder, save_peft_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}
ATTENTION, MLP = ["q_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
CASES = {
    "attention": (lambda: transformers.LlamaConfig(**LLAMA), {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION}),
    "all": (
        lambda: transformers.LlamaConfig(**LLAMA),
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [*ATTENTION, "k_proj", *MLP, "lm_head"],
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6},
            "alpha_pattern": {"q_proj": 5},
        },
    ),
    "stabilised": (
        lambda: transformers.Qwen3Config(**LLAMA, head_dim=16),
        {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": MLP},
    ),
    "columns in another order": (
        lambda: transformers.CohereConfig(**LLAMA, pad_token_id=0, logit_scale=0.5),
        {"r": 4, "lora_alpha": 16, "target_modules": [*ATTENTION, "k_proj", *MLP]},
    ),
    "packed": (
        lambda: transformers.Phi3Config(**(LLAMA | {"hidden_size": 64}), pad_token_id=0, rope_parameters=PARTIAL),
        {"r": 4, "lora_alpha": 16, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    ),
    "soft caps": (
        lambda: transformers.Gemma2Config(**LLAMA, head_dim=16, final_logit_softcapping=3.0, tie_word_embeddings=False),
        {"r": 4, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP, "lm_head"]},
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(**GPT2),
        {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("separate_qkv", [False, True])
def test_folders_both_ways(name, separate_qkv, tmp_path):
    make, settings = CASES[name]
    if name in ("gpt2", "packed") and separate_qkv:
        pytest.skip("query, key and value are one array there")
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(make()).eval()
    state = {key: x.detach().numpy().copy() for key, x in base.state_dict().items()}
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    theirs.eval().save_pretrained(tmp_path / "theirs")
    options = {"separate_qkv": True} if separate_qkv else {}
    ours = from_hf(state, config_from_hf(base.config.to_dict()), **options)
    before = np.asarray(nnx.jit(ours)(jnp.asarray(TOKENS)))
    load_peft_folder(ours, tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    logits = np.asarray(nnx.jit(ours)(jnp.asarray(TOKENS)))
    assert np.abs(before - expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)

    save_peft_folder(ours, tmp_path / "ours")
    torch.manual_seed(0)
    again = transformers.AutoModelForCausalLM.from_config(make()).eval()
    read = peft.PeftModel.from_pretrained(again, str(tmp_path / "ours")).eval()
    with torch.no_grad():
        np.testing.assert_allclose(read(torch.from_numpy(TOKENS)).logits.numpy(), expected, rtol=1e-3, atol=1e-3)
