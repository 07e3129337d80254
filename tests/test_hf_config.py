"""Settings in config.json: what is read, what is known to be harmless, and what is refused by name and value."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from flax_layers import GPT2Config, Llama, LlamaConfig, RopeScaling
from flax_layers.checkpoints import (
    config_from_hf,
    config_to_hf,
    from_hf,
    from_maxtext,
    load_hf_folder,
    save_hf_folder,
    to_hf,
    to_maxtext,
)
from flax_layers.checkpoints.hf_families import FAMILIES
from flax_layers.checkpoints.hf_names import entries
from flax_layers.checkpoints.hf_settings import RESTATED
from tests.tiny_models import LLAMA

# Settings of public models, as their config.json has them, and how many parameters they have.
PUBLIC = json.loads(Path(__file__).with_name("hf_configs.json").read_text())
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models(name):
    """Each loads, has as many parameters as its model card says, and is written as what it was."""
    settings = PUBLIC[name]["config"]
    config = config_from_hf(settings)
    assert sum(math.prod(part.shape) for entry in entries(config) for part in entry.parts) == PUBLIC[name]["parameters"]
    written = config_to_hf(config)
    assert (written["model_type"], written["architectures"]) == (settings["model_type"], settings["architectures"])
    plain = dataclasses.replace(config, origin=None)
    assert config_to_hf(plain, model_type=settings["model_type"])["model_type"] == settings["model_type"]
    again = config_from_hf(json.loads(json.dumps(written)))
    resolved = {"num_key_value_heads": written.get("num_key_value_heads"), "head_dim": written.get("head_dim")}
    assert again == (config if isinstance(config, GPT2Config) else dataclasses.replace(config, **resolved))


CHANGES = [
    {"sliding_window": 5},
    {"sliding_window": None},
    {"attention_bias": True, "attention_out_bias": None},
    {"attention_bias": True, "attention_out_bias": False},
    {"attention_bias": False, "attention_out_bias": None},
    {"attention_bias": False, "attention_out_bias": None, "sliding_window": 5},
    {"qk_norm": True, "attention_out_bias": None},
    {"rope_scaling": RopeScaling(original_max_position_embeddings=64)},
    {"rope_scaling": None, "rope_theta": 77.0},
    {"num_hidden_layers": 3},
]


@pytest.mark.parametrize("name", [name for name in PUBLIC if PUBLIC[name]["config"]["model_type"] != "gpt2"])
def test_a_public_model_that_is_changed(name):
    """It is written over the settings that it came with, as another kind of model where its own lacks the change."""

    def resolved(config):
        names = ("num_key_value_heads", "head_dim", "attention_out_bias")
        return dataclasses.replace(config, **{x: getattr(config, f"resolved_{x}") for x in names})

    public = PUBLIC[name]["config"]
    types = {"layer_types": ["full_attention"] * public["num_hidden_layers"]}
    written = 0
    for settings in (public, public | types, transformers_5(public)):
        for change in CHANGES:
            given = config_from_hf(settings)
            if change == {"sliding_window": None} and "sliding_attention" in (given.layer_types or ()):
                with pytest.raises(ValueError, match="sliding_window=None beside layer_types"):
                    dataclasses.replace(given, **change)
                continue
            config = dataclasses.replace(given, **change)
            try:
                found = config_to_hf(config)
            except ValueError as error:
                assert "has no place" in str(error)
                continue
            written += 1
            assert resolved(config_from_hf(json.loads(json.dumps(found)))) == resolved(config), change
    assert written > 15


@pytest.mark.parametrize(
    "model_type, change, message",
    [
        ("granite", {"qk_norm": True}, "as a granite, qk_norm=True must be False"),
        (
            "granite",
            {"attention_bias": True, "attention_out_bias": False},
            "as a granite, attention_out_bias=False must be None or as attention_bias",
        ),
        ("gemma2", {"partial_rotary_factor": 0.5}, r"as a gemma2, partial_rotary_factor=0\.5 must be 1\.0"),
        ("gemma3_text", {"qk_norm": False}, r"as a gemma2, rope_local_base_freq=10000\.0 must be None"),
        (
            "olmo2",
            {"sliding_window": 4, "qk_norm": False},
            "of olmo2: as a olmo2, qk_norm=False must be True; sliding_window=4 must be None",
        ),
        ("cohere", {"qk_norm": True}, "of cohere, cohere2: as a cohere, qk_norm=True must be False"),
    ],
)
def test_a_configuration_of_no_kind_is_refused_by_its_fields(model_type, change, message):
    """Not by all that it has."""
    settings = {"model_type": model_type, "embedding_multiplier": 2.0} if model_type == "granite" else None
    config = dataclasses.replace(config_from_hf(settings or {"model_type": model_type}), **change)
    with pytest.raises(ValueError, match=rf"this {type(config).__name__} has no place in .*{message}$") as caught:
        config_to_hf(config)
    assert len(str(caught.value)) < 260


def transformers_5(settings):
    """The settings as that release writes them."""
    rope = {"rope_theta": settings.get("rope_theta", 1e4), "rope_type": "default"} | (
        settings.get("rope_scaling") or {}
    )
    rest = {key: value for key, value in settings.items() if key not in ("rope_theta", "rope_scaling")}
    if (local := rest.pop("rope_local_base_freq", None)) is not None:
        of_window = {"rope_type": "default", "rope_theta": local}
        return rest | {"rope_parameters": {"full_attention": rope, "sliding_attention": of_window}}
    return rest | {"rope_parameters": rope}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_setting_is_of_two_kinds(model_type):
    known = FAMILIES[model_type].known
    harmless = [name for names in known.harmless.values() for name in names]
    assert len(harmless) == len(set(harmless))
    assert not known.read & set(harmless) and not known.values.keys() & set(harmless)


WRONG = {
    "unknown": ("llama", {"logit_scale": 0.5}, "logit_scale=0.5"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config={'quant_method'"),
    "bias": ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    "bias_by_name": ("llama", {"mlp_bias": "false"}, "mlp_bias='false'"),
    "proportional": (
        "qwen2",
        {"rope_scaling": {"type": "proportional", "factor": 4.0}},
        r"rope_scaling={'type': 'proportional', 'factor': 4.0}",
    ),
    "yarn_of_a_phi3": ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling={'type': 'yarn'"),
    "extra_rope": ("llama", {"rope_scaling": {**LLAMA3, "attention_factor": 0.5}}, "attention_factor=0.5"),
    "factor_alone": ("llama", {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor=2.0"),
    "two_types": ("llama", {"rope_scaling": {"rope_type": "default", "type": "linear"}}, "type='linear'"),
    "two_ropes": (
        "llama",
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5.0}},
        "rope_parameters={'rope_theta'",
    ),
    "original": (
        "llama",
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
        "original_max_position_embeddings=4096",
    ),
    "code": ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "auto_map={'AutoModelForCausalLM'"),
    "bidirectional": ("qwen2", {"is_causal": False}, "is_causal=False"),
    "no_bias": ("qwen2", {"attention_bias": False}, "attention_bias=False"),
    "mistral_bias": ("mistral", {"attention_bias": True}, "attention_bias=True"),
    "caps_of_others": ("gemma", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "both_directions": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "qk_norm_of_a_cohere": ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    "pattern": ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    "no_rope_layers": ("smollm3", {"no_rope_layers": [1, 2]}, r"no_rope_layers=\[1, 2\]"),
    "window_by_name": ("qwen3", {"use_sliding_window": "false"}, "use_sliding_window='false'"),
    "mixed_layers": (
        "qwen3",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types=\['full_attention', 'sliding_attention'\]",
    ),
    "layers_of_a_llama": (
        "llama",
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        r"layer_types=\['sliding_attention'\]",
    ),
    "layer_count": ("qwen3", {"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types="),
    "gpt2_scale": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    "gpt2_rotary": ("gpt2", {"rope_theta": 10000.0}, "rope_theta=10000.0"),
    "cross": ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
# Settings that say again what others do, as files of Phi-4-mini, Gemma 2 9B, OLMo 2 and Llamas with YaRN have them; and
# one that says another thing.
RESTATED_CASES = [
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}, {"full_attn_mod": 2}),
    ("phi3", {"interpolate_factor": 1}, {"interpolate_factor": 4}),
    ("phi3", {"lm_head_bias": False}, {"lm_head_bias": True}),
    ("gemma2", {"sliding_window": 512, "sliding_window_size": 512}, {"sliding_window_size": 1024}),
    ("gemma2", {"sliding_window_size": 4096}, {"sliding_window_size": 512}),
    ("mistral", {"sliding_window": 512, "sliding_window_size": 512}, {"sliding_window_size": 4096}),
    ("llama", {}, {"sliding_window_size": 4096}),
    ("olmo2", {"qk_norm": True, "use_qk_norm": True}, {"qk_norm": False}),
    ("gemma3_text", {"qk_norm": True}, {"qk_norm": False}),
    ("llama", {"qk_norm": False, "qk_layer_norms": False}, {"qk_norm": True}),
    ("qwen3", {"attention_bias": True, "qkv_bias": True}, {"qkv_bias": False}),
    ("qwen2_moe", {"qkv_bias": True, "attention_bias": True}, {"attention_bias": False}),
    ("llama", {"rope_scaling": {**YARN, "finetuned": True}}, {"rope_scaling": {**YARN, "finetuned": False}}),
]


@pytest.mark.parametrize("model_type, agreeing, differing", RESTATED_CASES)
def test_settings_that_say_again_what_others_do(model_type, agreeing, differing):
    """They change nothing, and are refused by name where they say another thing."""
    plain = {name: value for name, value in agreeing.items() if name not in RESTATED or name == "attention_bias"}
    if "rope_scaling" in plain:
        plain["rope_scaling"] = YARN
    config = config_from_hf({"model_type": model_type, **agreeing})
    other = config_from_hf({"model_type": model_type, **plain})
    assert dataclasses.replace(other, origin=config.origin) == config
    written = config_to_hf(config)
    assert all(written[name] == value for name, value in agreeing.items() if name in RESTATED)
    assert config_from_hf(written).rope_scaling == config.rope_scaling
    name = "finetuned" if "rope_scaling" in differing else next(iter(differing))
    with pytest.raises(ValueError, match=rf"^{name}=\w+ is not supported: .*ignore=\('{name}',\)"):
        config_from_hf({"model_type": model_type, **agreeing, **differing})


def test_a_setting_that_is_said_twice_is_written_twice():
    config = config_from_hf({"model_type": "gemma2", "sliding_window": 512, "sliding_window_size": 512})
    written = config_to_hf(dataclasses.replace(config, sliding_window=256))
    assert (written["sliding_window"], written["sliding_window_size"]) == (256, 256)
    assert config_from_hf(written).sliding_window == 256


def test_a_model_of_texts_and_images():
    """The refusal says how its text model is read."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    settings = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    with pytest.raises(ValueError, match=r"Its text model is one, a gemma3_text: give config_from_hf .* text_config"):
        config_from_hf(settings)
    assert config_from_hf(settings["text_config"]).hidden_size == 2560
    with pytest.raises(ValueError, match=r"must be one of llama, .*gpt2$"):
        config_from_hf({"model_type": "other", "text_config": {"model_type": "other"}})


@pytest.mark.parametrize("case", WRONG)
def test_a_setting_that_ours_do_not_have(case):
    """The refusal names it, its value and the remedy, which then works."""
    model_type, settings, message = WRONG[case]
    settings = {"model_type": model_type, **settings}
    with pytest.raises(ValueError, match=rf"{message}.* is not supported: .*ignore=\('\w+',\) reads") as refused:
        config_from_hf(settings)
    remedy = re.search(r"ignore=\('(\w+)',\)", str(refused.value))[1]
    assert isinstance(config_from_hf(settings, ignore=[remedy]), LlamaConfig | GPT2Config)


def test_ignored_rope_parameters_still_give_rope_theta():
    """Not rope_theta, which transformers 5 writes nowhere else."""
    settings = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}}
    config = config_from_hf(settings, ignore=("rope_parameters",))
    assert config == config_from_hf({"model_type": "llama", "rope_theta": 5e5})
    assert config_from_hf(settings, ignore=("rope_parameters", "rope_theta")).rope_theta == 1e4
    settings = {"model_type": "llama", "rope_scaling": LLAMA3, "original_max_position_embeddings": 4096}
    config = config_from_hf(settings, ignore=("original_max_position_embeddings",))
    assert config.rope_scaling == RopeScaling(original_max_position_embeddings=8192)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: config_from_hf({"model_type": "llama"}, ignore="auto_map"),
            "ignore='auto_map' must be a sequence of na",
        ),
        (lambda: config_from_hf(LlamaConfig()), "a dictionary"),
        (lambda: config_from_hf([1]), "a dictionary"),
    ],
)
def test_arguments_of_other_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_null_is_not_set():
    nothing = dict.fromkeys(("rope_scaling", "quantization_config", "head_dim", "tie_word_embeddings", "what_is_new"))
    assert config_from_hf({"model_type": "llama", **nothing}) == config_from_hf({"model_type": "llama"})
    assert config_from_hf({"model_type": "mistral"}).sliding_window == 4096
    assert config_from_hf({"model_type": "mistral", "sliding_window": None}).sliding_window is None


def test_other_names_of_gpt2_s_sizes():
    """They win in transformers, too."""
    names = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = config_from_hf({"model_type": "gpt2", "n_embd": 32, **names})
    assert (config.n_embd, config.n_layer, config.n_head, config.n_positions) == (64, 3, 2, 32)


BAD_VALUES = [
    *(
        (LlamaConfig, name, "false")
        for name in ("tie_word_embeddings", "attention_bias", "attention_out_bias", "qk_norm")
    ),
    *((LlamaConfig, name, 1) for name in ("tie_word_embeddings", "qk_norm")),
    *((LlamaConfig, "rope_theta", x) for x in (0, -1.0, math.nan, math.inf, 10**400, "10000", True)),
    *((LlamaConfig, "rms_norm_eps", x) for x in (True, math.nan, "1e-6")),
    *((LlamaConfig, "num_hidden_layers", x) for x in (2.0, "2", True)),
    *((LlamaConfig, "hidden_act", x) for x in ("silly", ["silu"], None, 3)),
    *((LlamaConfig, "sliding_window", x) for x in (0, True)),
    *((GPT2Config, "activation_function", x) for x in ("silly", ["gelu"])),
    (GPT2Config, "layer_norm_epsilon", False),
    *((RopeScaling, "factor", x) for x in (0, -8.0, math.nan, math.inf, "8", True)),
    *((RopeScaling, "low_freq_factor", x) for x in (-1.0, 4.0, 5.0, math.nan, "1")),
    *((RopeScaling, "high_freq_factor", x) for x in (0, 1.0, math.inf)),
    *((RopeScaling, "original_max_position_embeddings", x) for x in (0, math.nan, "8192")),
]


@pytest.mark.parametrize("config, name, value", BAD_VALUES)
def test_values_out_of_their_range(config, name, value):
    with pytest.raises(
        ValueError, match=rf"^{config.__name__}: \w+={re.escape(repr(value))}; it must be |it must be above"
    ):
        config(**{name: value})
    where = {LlamaConfig: "llama", GPT2Config: "gpt2"}.get(config)
    in_file = {"attention_out_bias", "qk_norm", "sliding_window"}
    if where and value is not None and name not in in_file:
        with pytest.raises(ValueError, match=rf"{name}="):
            config_from_hf({"model_type": where, name: value})
    if config is RopeScaling:
        with pytest.raises(ValueError, match="RopeScaling: "):
            config_from_hf({"model_type": "llama", "rope_scaling": {**LLAMA3, name: value}})


@pytest.mark.parametrize("wrong", [{"num_hidden_layers": 10**9}, {"num_hidden_layers": 10**9, "vocab_size": 10**12}])
def test_more_layers_than_arrays(wrong, tmp_path):
    """The file is not believed: no table of so many layers is made."""
    save_hf_folder(model := Llama(LLAMA, rngs=nnx.Rngs(0)), tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings | wrong))
    with pytest.raises(ValueError, match="lacks layers: the config has 1000000000, and there are 21 arrays in all"):
        load_hf_folder(tmp_path / "model")
    arrays = {f"h.{i}.x": np.ones(1) for i in range(3)}
    with pytest.raises(ValueError, match="lacks layers: the config has 1000000000, and there are 3 arrays in all"):
        from_hf(arrays, GPT2Config(n_layer=10**9))
    for scan_layers in (False, True):
        with pytest.raises(ValueError, match="1000000000"):
            from_maxtext(to_maxtext(model, LLAMA, scan_layers=scan_layers), dataclasses.replace(LLAMA, **wrong))


def test_a_folder_whose_setting_is_ignored(tmp_path):
    model = Llama(LLAMA, rngs=nnx.Rngs(0))
    safetensors.numpy.save_file(to_hf(model, LLAMA), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(LLAMA), "logit_scale": 0.5}))
    with pytest.raises(ValueError, match=r"logit_scale=0\.5 is not supported"):
        load_hf_folder(tmp_path)
    read = load_hf_folder(tmp_path, ignore=("logit_scale",))
    for name, array in to_hf(read, read.config).items():
        np.testing.assert_array_equal(array, to_hf(model, LLAMA)[name])
