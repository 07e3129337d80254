"""The contents of a checkpoint that our classes do not model stay with the model, and are written again."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layers as layers
from flax_layers.checkpoints import (
    config_from_hf,
    config_to_hf,
    folder,
    from_hf,
    from_maxtext,
    from_peft,
    load_hf_folder,
    load_peft_folder,
    save_hf_folder,
    save_peft_folder,
    to_hf,
    to_maxtext,
    to_peft,
)
from tests.tiny_models import GPT2, LLAMA

MODELS = {
    "llama": lambda: layers.Llama(LLAMA, rngs=nnx.Rngs(0)),
    "scanned": lambda: layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0)),
    "qwen3": lambda: layers.Llama(dataclasses.replace(LLAMA, qk_norm=True), rngs=nnx.Rngs(0)),
    "gpt2": lambda: layers.GPT2(GPT2, rngs=nnx.Rngs(0)),
}
MORE = {"bos_token_id": 60, "eos_token_id": 61, "pad_token_id": 62, "a_trainer_s_key": {"nested": [1, None, "x"]}}
IGNORE = ("a_trainer_s_key",)
GENERATION = {"eos_token_id": [61, 63], "temperature": 0.6, "unknown": True}
TOKENS = jnp.arange(8)[None]


def read(path, name="config.json"):
    return json.loads((path / name).read_text())


def write(path, settings, generation=GENERATION):
    (path / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))


def folder_of(model, path, more=MORE, generation=GENERATION):
    save_hf_folder(model, path)
    write(path, read(path) | more, generation)
    return path


def trained(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model.loss(TOKENS[:, :-1], TOKENS[:, 1:]))(model))

    step(model, optimizer)
    return nnx.merge(*nnx.split(copy.deepcopy(nnx.clone(model))))


@pytest.mark.smoke
@pytest.mark.parametrize("is_same_folder", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_loaded_trained_saved(name, is_same_folder, tmp_path):
    path = folder_of(MODELS[name](), tmp_path / "a")
    settings = read(path)
    model = trained(load_hf_folder(path, ignore=IGNORE, **({"scan_layers": True} if name == "scanned" else {})))
    target = path if is_same_folder else tmp_path / "b"
    save_hf_folder(model, target)
    assert read(target) == settings and read(target, "generation_config.json") == GENERATION
    for parameter, array in to_hf(load_hf_folder(target, ignore=IGNORE), model.config).items():
        np.testing.assert_array_equal(array, to_hf(model, model.config)[parameter])


@pytest.mark.parametrize(
    "former, changes, expected",
    [
        ({"torch_dtype": "bfloat16"}, {}, {"torch_dtype": "float32"}),
        ({"dtype": "bfloat16"}, {}, {"dtype": "float32", "torch_dtype": ...}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
        (
            {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {},
            {
                "rope_theta": ...,
                "rope_scaling": ...,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
        ),
        (
            {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_theta": 1e6, "rope_scaling": layers.RopeScaling(factor=8.0)},
            {
                "rope_theta": ...,
                "rope_scaling": ...,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e6,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    ],
)
def test_ours_is_written_over_it(former, changes, expected, tmp_path):
    """Also under the names and in the form that it had there; nothing is said twice. `...`: no such key."""
    path = folder_of(MODELS["llama"](), tmp_path / "a")
    settings = read(path) | former
    settings = {name: value for name, value in settings.items() if value is not ...}
    settings.pop("torch_dtype" if "dtype" in settings else "dtype", None)
    write(path, settings)
    config = dataclasses.replace(load_hf_folder(path, ignore=IGNORE).config, **changes)
    save_hf_folder(layers.Llama(config, rngs=nnx.Rngs(0)), tmp_path / "b")
    written = read(tmp_path / "b")
    assert {name: written.get(name, ...) for name in expected} == expected
    assert {name: written[name] for name in MORE} == MORE
    again = load_hf_folder(tmp_path / "b", ignore=IGNORE).config
    assert (again == config and again.origin != config.origin) or not changes


ROPE = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"type": "yarn", "factor": 4.0}
IGNORED = {
    "unknown": ("llama", {"logit_scale": 0.5}, {"logit_scale": 0.5}),
    "refused": ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
    "code": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, {"auto_map": {"AutoModel": "x.Y"}}),
    "not_set": ("llama", {"logit_scale": None}, {"logit_scale": None}),
    "part": ("llama", {"rope_parameters": {**ROPE, "news": 3}}, {"rope_parameters": {**ROPE, "news": 3}}),
    # Said by fields of the config, or of the former files.
    "scaling": ("llama", {"rope_scaling": YARN}, {"rope_scaling": None}),
    "nonsense": ("llama", {"rope_scaling": "yarn"}, {"rope_scaling": None}),
    "layers": ("llama", {"layer_types": 7}, {"layer_types": ...}),
    "size": ("llama", {"head_dim": "x"}, {"head_dim": 128}),
    "alias": ("gpt2", {"hidden_size": 64}, {"hidden_size": ..., "n_embd": 768}),
    "former": ("llama", {"quantization_config": {"quant_method": "fp8"}}, {"quantization_config": ...}),
}


@pytest.mark.parametrize("case", IGNORED)
def test_ignored_settings_are_written_again(case):
    """But for what fields of the config say. `...`: no such key."""
    model_type, more, expected = IGNORED[case]
    settings = {"model_type": model_type, **more}
    ignore = ("news",) if case == "part" else tuple(more)
    config = config_from_hf(settings, ignore=ignore)
    written = json.loads(json.dumps(config_to_hf(dataclasses.replace(config, initializer_range=0.5))))
    assert {name: written.get(name, ...) for name in expected} == expected
    assert config_from_hf(written, ignore=ignore) == dataclasses.replace(
        config_from_hf(config_to_hf(config), ignore=ignore), initializer_range=0.5
    )


def test_ignored_settings_are_not_read(tmp_path):
    path = folder_of(MODELS["llama"](), tmp_path / "a", {"eos_token_id": 61, "pad_token_id": 62}, None)
    model = load_hf_folder(path, ignore=("eos_token_id",))
    assert model.end_tokens == () and load_hf_folder(path).end_tokens == (61,)
    save_hf_folder(model, tmp_path / "b")
    assert read(tmp_path / "b") == read(path)


def test_lists_of_layers_and_what_is_unset():
    settings = config_to_hf(LLAMA) | {"layer_types": ["full_attention"] * 2}
    config = config_from_hf(settings)
    assert config_to_hf(config)["layer_types"] == ["full_attention"] * 2
    assert "layer_types" not in config_to_hf(dataclasses.replace(config, num_hidden_layers=3))
    config = config_from_hf({"model_type": "gpt2", "n_inner": 40})
    assert config_to_hf(dataclasses.replace(config, n_inner=None))["n_inner"] is None


def test_configs_are_what_they_were():
    """Equal, hashed, shown, copied and written as JSON as without an origin; a config that was pickled has none."""
    config = config_from_hf(config_to_hf(LLAMA) | MORE, ignore=IGNORE)
    explicit = dataclasses.replace(LLAMA, num_key_value_heads=4, head_dim=4)
    assert config == explicit and hash(config) == hash(explicit) and repr(config) == repr(explicit)
    again = layers.LlamaConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and config_to_hf(again) == config_to_hf(config)
    assert copy.deepcopy(config).origin == config.origin
    assert LLAMA.origin is None and "eos_token_id" not in config_to_hf(LLAMA)


def test_models_are_what_they_were():
    """The origin is no leaf; a model of the same origin is no other program, and one of another keeps its own."""
    count = 0

    @nnx.jit
    def step(model):
        nonlocal count
        count += 1
        model.norm.scale[...] += 1

    arrays, settings = to_hf(MODELS["llama"](), LLAMA), config_to_hf(LLAMA)
    one, same = (from_hf(arrays, config_from_hf(settings | MORE, ignore=IGNORE)) for _ in range(2))
    other = from_hf(arrays, config_from_hf(settings | {"eos_token_id": 1}))
    fresh = MODELS["llama"]()
    assert jax.tree.structure(nnx.state(one)) == jax.tree.structure(nnx.state(fresh))
    for model in (one, same):
        step(model)
    assert count == 1
    step(other)
    step(fresh)
    assert (one.end_tokens, same.end_tokens, other.end_tokens, fresh.end_tokens) == ((61,), (61,), (1,), ())
    assert config_to_hf(other.config)["eos_token_id"] == 1 and fresh.config.origin is None
    assert "a_trainer_s_key" not in repr(one)


@pytest.mark.parametrize(
    "more, generation, expected",
    [
        (MORE, GENERATION, (61, 63)),
        (MORE, {"eos_token_id": 63}, (63,)),
        (MORE, {"temperature": 1.0}, (61,)),
        (MORE, None, (61,)),
        ({}, None, ()),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_generation_ends_where_the_folder_says(more, generation, expected, tmp_path):
    model = load_hf_folder(folder_of(MODELS["llama"](), tmp_path / "a", more, generation), ignore=IGNORE)
    assert model.end_tokens == expected


def test_a_text_ends_there(tmp_path):
    plain = layers.generate(MODELS["llama"](), TOKENS, max_new_tokens=6)
    assert plain.lengths[0] == 6
    ended = int(plain.tokens[0, 1])
    path = folder_of(MODELS["llama"](), tmp_path / "a", MORE, {"eos_token_id": [ended, 63]})
    model = load_hf_folder(path, ignore=IGNORE)
    assert layers.generate(model, TOKENS, max_new_tokens=6).lengths[0] <= 2
    assert layers.generate(model, TOKENS, max_new_tokens=6, eos_token=()).lengths[0] == 6


def test_end_tokens_that_are_none(tmp_path):
    path = folder_of(MODELS["llama"](), tmp_path / "a", generation={"eos_token_id": "</s>"})
    model = load_hf_folder(path, ignore=IGNORE)
    with pytest.raises(ValueError, match=r"eos_token_id='</s>' of generation_config\.json is no integer"):
        layers.generate(model, TOKENS, max_new_tokens=1)
    assert layers.generate(model, TOKENS, max_new_tokens=1, eos_token=3).tokens.shape == (1, 1)


@pytest.mark.parametrize("name", ["llama", "scanned", "gpt2"])
def test_adapters_keep_their_settings(name, tmp_path):
    model = MODELS[name]()
    layers.add_lora(model, 4, rngs=nnx.Rngs(1))
    save_peft_folder(model, tmp_path / "a", base_model="some/base")
    more = {
        "revision": "main",
        "lora_dropout": 0.05,
        "task_type": "SEQ",
        "peft_version": "0.17",
        "init_lora_weights": True,
        "a_trainer_s_key": [1, None],
    }
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more | {"lora_alpha": 8}))
    read_model = MODELS[name]()
    load_peft_folder(read_model, tmp_path / "a", ignore=IGNORE)
    read_model = nnx.merge(*nnx.split(read_model))
    save_peft_folder(read_model, tmp_path / "b")
    written = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert {k: written.get(k) for k in more} == more | {"init_lora_weights": None}
    assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == ("some/base", 4, 4)
    again = MODELS[name]()
    load_peft_folder(again, tmp_path / "b", ignore=IGNORE)
    np.testing.assert_array_equal(again(TOKENS), read_model(TOKENS))
    save_peft_folder(again, tmp_path / "b", base_model="another")
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["base_model_name_or_path"] == "another"


def test_adapters_never_stand_beside_the_settings_of_others(tmp_path, monkeypatch):
    """Both are there in one step: a process that ends before it leaves the former ones."""
    path = tmp_path / "a"
    layers.add_lora(model := MODELS["llama"](), 4, rngs=nnx.Rngs(1))
    layers.add_lora(other := MODELS["llama"](), 8, rngs=nnx.Rngs(2))
    save_peft_folder(model, path)
    former = {file.name: file.read_bytes() for file in path.iterdir()}

    def end(a, b):
        assert {file.name: file.read_bytes() for file in path.glob("a*")} == former
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder, "_exchanged", end)
        save_peft_folder(other, path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == former
    save_peft_folder(other, path)
    assert {file.name for file in path.iterdir() if file.read_bytes() != former[file.name]} == former.keys()


def test_which_modules_have_adapters_is_said_once():
    """By target_modules: other settings of PEFT's would choose among them again."""
    model = MODELS["llama"]()
    layers.add_lora(model, 4, targets=["down"], rngs=nnx.Rngs(1))
    settings, arrays = to_peft(model)
    read_model = MODELS["llama"]()
    from_peft(read_model, settings | {"exclude_modules": None, "layers_to_transform": [0, 1]}, arrays)
    written, _ = to_peft(read_model)
    assert not written.keys() & {"exclude_modules", "layers_to_transform"}
    assert written["target_modules"] == ["down_proj"]


@pytest.mark.parametrize("rotary, query_scaled", [("interleaved", False), ("halves", True)])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_maxtext_s_conventions_are_those_that_came_in(rotary, query_scaled, scan_layers):
    config = dataclasses.replace(LLAMA, rope_scaling=layers.RopeScaling() if rotary == "halves" else None)
    options = {"rotary": rotary, "query_scaled": query_scaled}
    params = to_maxtext(layers.Llama(config, rngs=nnx.Rngs(0)), config, scan_layers=scan_layers, **options)
    model = nnx.merge(*nnx.split(from_maxtext(params, config, **options)))
    for back in (to_maxtext(model, config), to_maxtext(nnx.state(model), model.config)):
        jax.tree.map(np.testing.assert_array_equal, back, params)


def test_hugging_face_s_settings_through_maxtext(tmp_path):
    config = config_from_hf(config_to_hf(LLAMA) | MORE, ignore=IGNORE)
    model = from_maxtext(to_maxtext(MODELS["llama"](), LLAMA), config)
    save_hf_folder(model, tmp_path / "a")
    written = read(tmp_path / "a")
    assert {name: written[name] for name in MORE} == MORE
