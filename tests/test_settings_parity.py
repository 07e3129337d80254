"""Each setting of transformers and PEFT, changed once: its logits change if and only if ours change or refuse it."""

import copy
import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.checkpoints import config_from_hf, from_hf, load_peft_folder
from flax_layers.checkpoints.hf_experts import as_in_files
from flax_layers.checkpoints.hf_families import FAMILIES
from flax_layers.checkpoints.hf_names import entries
from flax_layers.models import MoEConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS

SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.5, "head_dim": 8, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0}
CAPS = {"query_pre_attn_scalar": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
BASES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3)),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2_window": lambda: transformers.Qwen2Config(**SIZES, **WINDOW),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=5),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=12),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "phi3": lambda: transformers.Phi3Config(**(SIZES | {"head_dim": 4}), sliding_window=5, pad_token_id=5),
    "granite": lambda: transformers.GraniteConfig(**SIZES, **GRANITE),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2, pad_token_id=5),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=5, **CAPS),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, sliding_window=5, sliding_window_pattern=2),
    "cohere": lambda: transformers.CohereConfig(**SIZES),
    "cohere2": lambda: transformers.Cohere2Config(
        **(SIZES | {"head_dim": 4}), sliding_window=5, sliding_window_pattern=2
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
}
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 12))
# Other values, where the rule of `other` gives one that the library refuses, or that says nothing.
OTHER = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu",
    "query_pre_attn_scalar": 3,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 1.5,
    "layer_norm_eps": 0.3,
    "no_rope_layer_interval": 1,
    "no_rope_layers": [0, 1],
    "activation_function": "relu",
    "rms_norm_eps": 0.3,
    "layer_norm_epsilon": 0.3,
    "vocab_size": 32,
    "hidden_size": 32,
    "n_embd": 32,
    "num_attention_heads": 8,
    "n_head": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 80,
    "n_positions": 80,
    "n_inner": 24,
    "sliding_window": 3,
    "max_window_layers": 1,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "problem_type": "regression",
    "id2label": {0: "a", 1: "b", 2: "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "num_labels": 3,
    "attn_implementation": "eager",
    "_attn_implementation": "eager",
    "experts_implementation": "eager",
    "_experts_implementation": "eager",
    "pruned_heads": {0: [1]},
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pad_token_id": 5,
    "cache_implementation": "static",
    "max_new_tokens": 7,
    "summary_type": "last",
    "transformers.js_config": {"dtype": "q4"},
    "_num_labels": 3,
    "architectures": ["Other"],
}
ROPES = {
    "rope_theta": {"rope_theta": 500.0, "rope_type": "default"},
    "linear": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8},
    "partial": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    **{
        f"llama3_{name}": LLAMA3 | {name: value}
        for name, value in {
            "factor": 2.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 50.0,
        }.items()
    },
}
NO_WINDOW = {"qwen2_moe", "qwen3_moe"}  # ours have none, also where transformers' would hide nothing
# What transformers' generation or older releases read, or what goes with arrays that are not there.
REFUSED = {"is_encoder_decoder", "partial", "bias", "tie_word_embeddings"}


def other(name, value):
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if name in ("num_hidden_layers", "n_layer") else value + 1
    if isinstance(value, float):
        return value + 0.25
    return "other" if value is None or isinstance(value, str) else None


def logits_of(settings, state):
    """transformers' logits, or None where it does not load the parameters."""
    config = transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(copy.deepcopy(settings))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if model.state_dict().keys() != state.keys():
        return None
    if [name for name, x in model.state_dict().items() if x.shape != state[name].shape]:
        return None
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)).logits.numpy()


def our_logits(config, arrays):
    if isinstance(config, MoEConfig):
        arrays = attempted(as_in_files, arrays, config) or {}
    if {p.name: p.shape for e in entries(config) for p in e.parts} != {n: x.shape for n, x in arrays.items()}:
        return None
    return np.asarray(from_hf(arrays, config)(jnp.asarray(TOKENS)))


def attempted(function, *args):
    """Returns what the function returns, or None where it raises."""
    try:
        return function(*args)
    except Exception:  # whatever the library raises
        return None


@pytest.fixture(scope="module", params=BASES)
def base(request):
    torch.manual_seed(0)
    config = BASES[request.param]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {name: x + 0.2 * torch.randn(x.shape) for name, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        embedding = "transformer.wte.weight" if config.model_type == "gpt2" else "model.embed_tokens.weight"
        state["lm_head.weight"] = state[embedding]
    settings = config.to_dict()
    arrays = {
        name: x.numpy() for name, x in state.items() if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    ours = config_from_hf(settings)
    want = logits_of(settings, state)
    np.testing.assert_allclose(our_logits(ours, arrays), want, atol=1e-5 * np.abs(want).max())
    return settings, state, arrays, want, ours


def fault(base, name, changed):
    """Says what is wrong: settings that change logits on one side alone, or to others."""
    settings, state, arrays, want, ours = base
    settings = {**settings, **changed}
    theirs = attempted(logits_of, settings, state)
    has_changed = theirs is None or np.abs(theirs - want).max() > 1e-4 * np.abs(want).max()
    try:
        config = config_from_hf(settings)
    except ValueError:
        config = None
    if config == ours:
        return f"{name}: transformers alone changes" if has_changed else ""
    found = None if config is None else our_logits(config, arrays)
    if found is None:
        is_refused = name in REFUSED or (settings["model_type"] in NO_WINDOW and "use_sliding_window" in changed)
        return "" if has_changed or is_refused else f"{name}: refused, and transformers does not change"
    if theirs is not None and np.abs(found - theirs).max() > 1e-4 * np.abs(want).max():
        return f"{name}: other logits than those of transformers"
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_default(model_type):
    """A file that has a model_type alone says what transformers' class of configurations does without arguments."""
    theirs = config_from_hf(transformers.CONFIG_MAPPING[model_type]().to_dict())
    ours = config_from_hf({"model_type": model_type})
    for field in dataclasses.fields(ours):
        name = f"resolved_{field.name}" if hasattr(ours, f"resolved_{field.name}") else field.name
        if name != "origin":
            assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("length", [5, 8, 9, 32])
def test_frequencies_of_dynamic_scaling(size, length):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    sizes = {"hidden_size": 2 * size, "num_attention_heads": 2, "max_position_embeddings": 8}
    ours = config_from_hf({"model_type": "llama", **sizes, "rope_scaling": rope}).rope_scaling
    found = ours.frequencies(size, 100.0, length)
    if size == 2:  # transformers divides by size - 2
        assert found.tolist() == [1.0]
        return
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_setting_of_a_config(base):
    settings = base[0]
    harmless = FAMILIES[settings["model_type"]].known.harmless
    of_class = transformers.CONFIG_MAPPING[settings["model_type"]]().to_dict()
    names = {*settings, *of_class, *(name for names in harmless.values() for name in names)}
    names -= {"model_type", "rope_parameters", "layer_types"}
    names -= {"return_dict"}  # transformers' own models do not run without it
    faults = [fault(base, name, {name: other(name, settings.get(name))}) for name in sorted(names)]
    assert not [x for x in faults if x]


@pytest.mark.filterwarnings("ignore")
def test_layer_types(base):
    if "layer_types" not in base[0]:
        pytest.skip("transformers reads none of this model")
    full, window = "full_attention", "sliding_attention"
    changes = [{"layer_types": types} for types in ([full, full], [window, window], [window, full])]
    changes += [{**WINDOW, "max_window_layers": first, "layer_types": None} for first in (0, 1, 2)]
    changes += [{**WINDOW, "sliding_window": 3}, {**WINDOW, "sliding_window": None}]
    faults = [fault(base, str(changed), changed) for changed in changes]
    assert not [x for x in faults if x]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rotary_settings(base):
    """In transformers 5's dictionary, and as older releases write them."""
    if "rope_parameters" not in base[0]:
        pytest.skip("no rotary embedding")
    faults = []
    by_layer = base[0]["model_type"] == "gemma3_text"  # a dictionary for each kind of layers
    local = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    for name, rope in ROPES.items():
        whole = {"full_attention": rope, **local} if by_layer else rope
        faults.append(fault(base, name, {"rope_parameters": whole}))
        old = {key: value for key, value in rope.items() if key != "rope_theta"}
        changed = {"rope_parameters": None, "rope_theta": rope["rope_theta"], "rope_scaling": old}
        faults.append(fault(base, name, changed))
        if "original_max_position_embeddings" in rope:
            outside = {"original_max_position_embeddings": 2 * rope["original_max_position_embeddings"]}
            faults.append(fault(base, name, {"rope_parameters": whole, **outside}))
    assert not [x for x in faults if x]


ADAPTER = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj", "down_proj"], "init_lora_weights": False}
OTHER_OF_PEFT = {
    "lora_alpha": [3, 16.0],
    "alpha_pattern": [{"q_proj": 3}, {"layers.1.mlp.down_proj": 2}, {"k_proj": 2}],
    "use_rslora": [True],
    "target_modules": [
        ["q_proj", "o_proj"],
        ["q_proj", "k_proj", "o_proj", "down_proj"],
        r".*\.(q_proj|o_proj|down_proj)",
        r".*layers\.1\..*_proj",
        "all-linear",
        None,
    ],
    "exclude_modules": [["q_proj"], ["layers.0.mlp.down_proj"], ["k_proj"], r".*o_proj"],
    "layers_to_transform": [0, [1], [0, 1]],
    "layers_pattern": ["layers", ["h"]],
    "fan_in_fan_out": [True],
    "bias": ["lora_only"],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [True, "gaussian", "orthogonal", "eva", "mica", "olora", "pissa", "pissa_niter_4", "corda"],
    "lora_dropout": [0.5],
    "inference_mode": [False],
    "megatron_core": ["other"],
    "loftq_config": [{"loftq_bits": 4, "loftq_iter": 1}],
    "corda_config": [{"corda_method": "kpm"}],
    "eva_config": [{"rho": 3.0}],
    "use_dora": [True],
    "velora_config": [{}],
    "alora_invocation_tokens": [[1, 2]],
    "trainable_token_indices": [[1, 2]],
    "layer_replication": [[[0, 2], [1, 2]]],
    "lora_bias": [True],
    "target_parameters": [["mlp.down_proj.weight"]],
    "ensure_weight_tying": [True],
    "base_model_name_or_path": ["other"],
    "revision": ["other"],
    "task_type": [None],
    "auto_mapping": [{"base_model_class": "Other", "unsloth_fixed": True}],
    "peft_version": ["0.1.0"],
    "peft_type": ["LOHA"],
    "qalora_group_size": [8],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_every_setting_of_an_adapter(is_tied, tmp_path):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    arrays = {name: x.numpy().copy() for name, x in state.items() if name != "lm_head.weight" or not is_tied}
    state = {name: x.clone() for name, x in state.items()}

    def fresh():
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(state)
        return model

    adapter = {**ADAPTER, "target_modules": [*ADAPTER["target_modules"], "lm_head"]} if is_tied else ADAPTER
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **adapter)
    peft.get_peft_model(fresh(), lora).save_pretrained(tmp_path / "base")
    written = json.loads((tmp_path / "base" / "adapter_config.json").read_text())

    def theirs(folder):
        model = peft.PeftModel.from_pretrained(fresh(), str(folder)).eval()
        with torch.no_grad():
            return model(torch.from_numpy(TOKENS)).logits.numpy()

    def ours(folder):
        model = from_hf(arrays, config_from_hf(config.to_dict()))
        load_peft_folder(model, folder)
        return np.asarray(model(jnp.asarray(TOKENS)))

    want = theirs(tmp_path / "base")
    size = np.abs(want).max()
    np.testing.assert_allclose(ours(tmp_path / "base"), want, atol=1e-4 * size)
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)} - {"runtime_config", "r", "rank_pattern"}
    faults = []
    for name in sorted(names | set(written) - {"r", "rank_pattern"}):
        for value in OTHER_OF_PEFT.get(name, [other(name, written.get(name)) or {"rank": 2}]):
            if is_tied and name not in ("ensure_weight_tying", "target_modules"):
                continue
            shutil.rmtree(tmp_path / "changed", ignore_errors=True)
            shutil.copytree(tmp_path / "base", tmp_path / "changed")
            (tmp_path / "changed" / "adapter_config.json").write_text(json.dumps({**written, name: value}))
            torch.manual_seed(1)
            after = attempted(theirs, tmp_path / "changed")
            has_changed = after is None or np.abs(after - want).max() > 1e-4 * size
            try:
                found = ours(tmp_path / "changed")
            except ValueError:
                if not has_changed and name not in REFUSED:
                    faults.append(f"{name}={value}: refused, and PEFT does not change")
                continue
            if after is None or np.abs(found - after).max() > 1e-4 * size:
                faults.append(f"{name}={value}: other logits than those of PEFT")
    assert not faults
