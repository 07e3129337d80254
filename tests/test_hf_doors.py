"""The files of a checkpoint are looked at, and a door that stays shut says why."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import flax_layers as layers
from flax_layers.checkpoints import (
    config_from_hf,
    config_to_hf,
    from_hf,
    from_maxtext,
    from_peft,
    incoming,
    load_hf_folder,
    load_peft_folder,
    safetensors_files,
    save_hf_folder,
    to_hf,
    to_maxtext,
    to_peft,
)
from tests.tiny_models import GPT2, LLAMA

TIED = dataclasses.replace(LLAMA, tie_word_embeddings=True)
TOKENS = jnp.arange(8)[None]
INDEX = "model.safetensors.index.json"


def model_of(config, seed=0, **options):
    cls = layers.GPT2 if isinstance(config, layers.GPT2Config) else layers.Llama
    return cls(config, **options, rngs=nnx.Rngs(seed))


# Tied heads and buffers


@pytest.mark.parametrize("config", [TIED, GPT2], ids=["llama", "gpt2"])
def test_a_head_of_its_own_under_a_tied_config(config, tmp_path):
    """The model gets it, with a warning; it is written as it is, and with the config that it has."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    arrays = to_hf(other := model_of(untied), untied)
    assert "lm_head.weight" in arrays
    with pytest.warns(UserWarning, match=r"another lm_head\.weight: the model gets it, and has tie_word_embeddings"):
        model = from_hf(arrays, config)
    np.testing.assert_array_equal(model(TOKENS), other(TOKENS))
    assert not model.config.tie_word_embeddings
    save_hf_folder(model, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load_hf_folder(tmp_path / "a")(TOKENS), other(TOKENS))
    with pytest.raises(ValueError, match=r"head\.kernel, for which its config has no place: give model\.config"):
        to_hf(model, config)


@pytest.mark.parametrize("config", [TIED, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_of_the_embedding_stays_tied(config, dtype, tmp_path, monkeypatch):
    """Compared in parts, also where one is in a file in another dtype."""
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in to_hf(model_of(config), config).items()}
    embedding = arrays["model.embed_tokens.weight" if config is TIED else "transformer.wte.weight"]
    arrays["lm_head.weight"] = embedding.astype(dtype)
    monkeypatch.setattr(incoming, "_BLOCK_BYTES", 8 * 3 * embedding.shape[1])
    model = from_hf(arrays, config)
    assert model.config.tie_word_embeddings and model.head.kernel is None
    save_hf_folder(model_of(config), tmp_path)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    assert load_hf_folder(tmp_path).head.kernel is None
    head = arrays["lm_head.weight"].copy()
    head[-1, -1] += 1
    with pytest.warns(UserWarning, match="the config ties the head"):
        assert not from_hf(arrays | {"lm_head.weight": head}, config).config.tie_word_embeddings


def test_a_head_of_another_size_under_a_tied_config():
    arrays = to_hf(model_of(TIED), TIED) | {"lm_head.weight": np.zeros((65, 16), np.float32)}
    with (
        pytest.warns(UserWarning, match="the config ties the head"),
        pytest.raises(ValueError, match=r"lm_head\.weight has shape \(65, 16\); the config makes it \(64, 16\)"),
    ):
        from_hf(arrays, TIED)


def gpt2_buffers(dtype=bool):
    masks = {f"transformer.h.{i}.attn.bias": np.tri(16, dtype=dtype)[None, None] for i in range(2)}
    return masks | {f"transformer.h.{i}.attn.masked_bias": np.float32(-1e4) for i in range(2)}


INV_FREQ = 10000.0 ** (-np.arange(0, 4, 2) / 4)


@pytest.mark.parametrize(
    "config, buffers, is_expected",
    [
        (GPT2, gpt2_buffers(), True),
        (GPT2, gpt2_buffers(np.uint8), True),
        (GPT2, gpt2_buffers() | {"transformer.h.1.attn.bias": np.ones((1, 1, 16, 16), bool)}, False),
        (LLAMA, {"model.layers.1.self_attn.rotary_emb.inv_freq": INV_FREQ.astype(ml_dtypes.bfloat16)}, True),
        (LLAMA, {"model.rotary_emb.inv_freq": INV_FREQ.astype(np.float32)}, True),
        (LLAMA, {"model.rotary_emb.inv_freq": np.array([1.0, 0.05])}, False),
        (LLAMA, {"model.rotary_emb.inv_freq": np.ones(3)}, False),
        (dataclasses.replace(LLAMA, rope_theta=5e5), {"model.rotary_emb.inv_freq": INV_FREQ}, False),
    ],
)
def test_buffers_are_compared_with_the_config(config, buffers, is_expected, tmp_path):
    arrays = to_hf(model_of(config), config) | buffers
    save_hf_folder(model_of(config), tmp_path)
    safetensors.numpy.save_file({n: np.asarray(x) for n, x in arrays.items()}, tmp_path / "model.safetensors")
    for load in (lambda: from_hf(arrays, config), lambda: load_hf_folder(tmp_path)):
        if is_expected:
            load()
        else:
            with pytest.warns(UserWarning, match=r"(inv_freq|attn\.bias) of the checkpoint is not what the config"):
                load()


@pytest.mark.parametrize(
    "config, name, shape",
    [
        (LLAMA, "model.layers.0.attn.bias", (16,)),
        (LLAMA, "model.layers.0.attn.masked_bias", ()),
        (GPT2, "transformer.h.0.attn.bias", (96,)),
        (GPT2, "transformer.h.0.attn.masked_bias", (96,)),
        (GPT2, "transformer.h.0.crossattention.attn.bias", (1, 1, 16, 16)),
        (TIED, "draft.lm_head.weight", (64, 16)),
    ],
)
def test_parameters_that_end_as_buffers_do(config, name, shape):
    with pytest.raises(ValueError, match=f"no {name}"):
        from_hf(to_hf(model_of(config), config) | {name: np.ones(shape, np.float32)}, config)


# Files


def write_index(path, weight_map):
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_beside_an_older_index(tmp_path):
    """As in transformers it is the file that is read."""
    save_hf_folder(model := model_of(LLAMA), tmp_path)
    older = {name: np.zeros_like(array) for name, array in to_hf(model, LLAMA).items()}
    safetensors.numpy.save_file(older, tmp_path / "model-00001-of-00001.safetensors")
    write_index(tmp_path, dict.fromkeys(older, "model-00001-of-00001.safetensors"))
    np.testing.assert_array_equal(load_hf_folder(tmp_path)(TOKENS), model(TOKENS))
    (tmp_path / "model.safetensors").unlink()
    assert not np.any(load_hf_folder(tmp_path)(TOKENS))


@pytest.mark.parametrize(
    "name", ["../precious.safetensors", "/{}/precious.safetensors", "..", "", "a/b", "a\\b", 3, None]
)
def test_an_index_that_names_no_file_of_the_folder(name, tmp_path):
    """It is not read, and nothing that it names is removed."""
    name = name.format(tmp_path) if isinstance(name, str) else name
    folder = tmp_path / "model"
    save_hf_folder(model_of(LLAMA), folder)
    precious = tmp_path / "precious.safetensors"
    safetensors.numpy.save_file(to_hf(model_of(LLAMA), LLAMA), precious)
    (folder / "model.safetensors").unlink()
    write_index(folder, {"model.norm.weight": name})
    with pytest.raises(ValueError, match=r"model.norm.weight is in .*: it must be the bare name of a file"):
        load_hf_folder(folder)
    save_hf_folder(model_of(LLAMA), folder)
    assert precious.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_an_index_that_names_other_files_of_the_folder(tmp_path):
    """Only files of parameters are removed."""
    save_hf_folder(model_of(LLAMA), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.safetensors").write_text("")
    write_index(tmp_path, {"a": "tokenizer.json", "b": "config.json", "c": "a.safetensors"})
    save_hf_folder(model := model_of(LLAMA, 1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    np.testing.assert_array_equal(load_hf_folder(tmp_path)(TOKENS), model(TOKENS))


# Dtypes


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_stored_dtypes(dtype, tmp_path):
    """Parameters are read as they are written, numbers of 8 bits too, in float32."""
    model = model_of(LLAMA, param_dtype="float32" if dtype == "float64" else dtype)
    save_hf_folder(model, tmp_path)
    arrays = to_hf(model, LLAMA)
    if dtype == "float64":
        arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
        safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    for name, array in to_hf(load_hf_folder(tmp_path), LLAMA).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, arrays[name].astype(np.float32), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_arrays_of_torch(dtype, is_parameter):
    """A state_dict of any floating dtype, of tensors or of parameters, of a model and of adapters."""
    torch = pytest.importorskip("torch")

    def tensors(arrays):
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.array(array)).to(getattr(torch, dtype))
            yield name, torch.nn.Parameter(tensor) if is_parameter else tensor

    def numbers(arrays):
        return {name: tensor.detach().to(torch.float32).numpy() for name, tensor in arrays.items()}

    given = dict(tensors(to_hf(model_of(LLAMA), LLAMA)))
    for name, array in to_hf(from_hf(given, LLAMA), LLAMA).items():
        np.testing.assert_array_equal(array, numbers(given)[name], err_msg=name)
    layers.add_lora(adapted := model_of(LLAMA), 4, rngs=nnx.Rngs(1))
    settings, arrays = to_peft(adapted)
    given = dict(tensors(arrays))
    from_peft(model := model_of(LLAMA), settings, given)
    for name, array in to_peft(model)[1].items():
        np.testing.assert_array_equal(array, numbers(given)[name], err_msg=name)


def integers(arrays):
    """One of them as integers, as a quantised one is stored."""
    name = next(name for name in arrays if "q_proj" in name or name.endswith("query.kernel"))
    return arrays | {name: np.zeros(arrays[name].shape, np.int8)}


def test_arrays_that_are_no_floating_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    quantised = integers(to_hf(model_of(LLAMA), LLAMA))
    message = r"q_proj.*is an array of (torch\.)?int8, .*must be dequantised first"
    with pytest.raises(ValueError, match=message):
        from_hf(quantised, LLAMA)
    with pytest.raises(ValueError, match=message):
        from_hf({name: torch.from_numpy(array) for name, array in quantised.items()}, LLAMA)
    save_hf_folder(model_of(LLAMA), tmp_path)
    safetensors.numpy.save_file(quantised, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_hf_folder(tmp_path)
    params = to_maxtext(model_of(LLAMA), LLAMA)
    params["decoder"]["layers"]["self_attention"]["query"]["kernel"] = np.zeros((16, 2, 4, 4), np.int8)
    with pytest.raises(ValueError, match=r"query\.kernel is an array of int8"):
        from_maxtext(params, LLAMA)
    layers.add_lora(adapted := model_of(LLAMA), 4, rngs=nnx.Rngs(1))
    settings, arrays = to_peft(adapted)
    with pytest.raises(ValueError, match=message):
        from_peft(model_of(LLAMA), settings, integers(arrays))


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float6_e3m2fn", "float8_e8m0fnu"])
def test_floating_numbers_that_say_nothing_without_scales(dtype):
    arrays = to_hf(model_of(LLAMA), LLAMA)
    name = next(name for name in arrays if "q_proj" in name)
    with pytest.raises(ValueError, match=rf"q_proj.*is an array of {dtype}, .*must be dequantised first"):
        from_hf(arrays | {name: np.ones(arrays[name].shape, getattr(ml_dtypes, dtype))}, LLAMA)


def test_numbers_of_8_bits_beside_their_scales(tmp_path):
    """Without the config's word too they are not read without the scales."""
    save_hf_folder(model_of(LLAMA, param_dtype="float8_e4m3fn"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"quantization_config={'quant_method': 'fp8'} is not supported"):
        load_hf_folder(tmp_path)
    arrays = {name: np.asarray(array, np.float32) for name, array in to_hf(model_of(LLAMA), LLAMA).items()}
    scale = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    safetensors.numpy.save_file(arrays | {scale: np.ones((1, 1), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="weight_scale_inv"):
        load_hf_folder(tmp_path, ignore=("quantization_config",))


def test_a_dtype_that_numpy_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setitem(safetensors_files._READ, "I8", "I8")  # as F4, which packages write of late
    save_hf_folder(model_of(LLAMA), tmp_path)
    safetensors.numpy.save_file(integers(to_hf(model_of(LLAMA), LLAMA)), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj.* is an array of I8"):
        load_hf_folder(tmp_path)


# Messages


class TheirConfig:
    """As a PretrainedConfig of transformers."""

    def to_dict(self):
        return config_to_hf(LLAMA)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda path: config_from_hf(TheirConfig()), TypeError, r"not a TheirConfig: give config\.to_dict\(\)"),
        (lambda path: config_from_hf(str(path)), TypeError, "not a str: .*; load_hf_folder takes a folder"),
        (lambda path: config_from_hf(path), TypeError, "load_hf_folder takes a folder"),
        (lambda path: config_from_hf(LLAMA), TypeError, "takes a dictionary, not a LlamaConfig"),
        (
            lambda path: from_peft(model_of(LLAMA), TheirConfig(), {}),
            TypeError,
            r"from_peft takes a dictionary, not a TheirConfig: give config\.to_dict\(\)",
        ),
        (lambda path: from_peft(model_of(LLAMA), path, {}), TypeError, "; load_peft_folder takes a folder"),
        (lambda path: from_peft(model_of(LLAMA), {}, {}, ignore="bias"), TypeError, "ignore='bias' must be a seq"),
        (lambda path: load_hf_folder(path / "torch", ignore=None), TypeError, "ignore=None must be a sequence"),
        (lambda path: from_hf({}, TheirConfig()), TypeError, "config is a TheirConfig, .*: config_from_hf makes one"),
        (lambda path: from_hf({}, {"model_type": "llama"}), TypeError, "config is a dict, .*: config_from_hf makes"),
        (lambda path: from_hf(object(), LLAMA), TypeError, r"not a object: give model\.state_dict\(\)"),
        (lambda path: to_hf(model_of(LLAMA), {}), TypeError, "config is a dict"),
        (
            lambda path: load_hf_folder("meta-llama/Llama-3.2-1B"),
            FileNotFoundError,
            r"no folder meta-llama.*huggingface_hub\.snapshot_download\('meta-llama/Llama-3\.2-1B'\) returns",
        ),
        (
            lambda path: load_peft_folder(model_of(LLAMA), "someone/adapter"),
            FileNotFoundError,
            r"snapshot_download\('someone/adapter'\)",
        ),
        (lambda path: load_hf_folder(path / "config.json"), NotADirectoryError, "is a file; give the folder"),
        (lambda path: load_hf_folder(path / "empty"), FileNotFoundError, "has no config.json; it must be a folder"),
        (lambda path: load_hf_folder(path / "cached"), FileNotFoundError, "cache, .*: give .*cached/snapshots/abc"),
        (lambda path: load_hf_folder(path / "run"), FileNotFoundError, "run/checkpoint-10 has one"),
        (lambda path: load_hf_folder(path / "adapter"), FileNotFoundError, r"it has adapters: .*load_peft_folder"),
        (lambda path: load_peft_folder(model_of(LLAMA), path), FileNotFoundError, r"it has a model: load_hf_folder"),
        (lambda path: load_peft_folder(model_of(LLAMA), path / "adapter"), FileNotFoundError, "peft writes it"),
        (lambda path: load_hf_folder(path / "shards"), FileNotFoundError, f"00002.safetensors wants the {INDEX}"),
        (lambda path: load_hf_folder(path / "torch"), FileNotFoundError, r"not in pytorch_model\.bin: save_pretrained"),
        (lambda path: load_hf_folder(path), FileNotFoundError, r"has no model\.safetensors; .*from_hf takes arrays"),
        (lambda path: load_hf_folder(path / "json"), ValueError, r"json/config\.json is no JSON"),
        (lambda path: load_hf_folder(path / "list"), ValueError, r"config\.json must be a dictionary, and is a list"),
        (lambda path: load_hf_folder(path / "mapless"), ValueError, "has no weight_map: copy it anew"),
        (
            lambda path: load_hf_folder(path / "damaged"),
            ValueError,
            r"model\.safetensors cannot be read, it is damaged",
        ),
    ],
)
def test_messages(call, error, message, tmp_path):
    settings = json.dumps(config_to_hf(LLAMA))
    files = {
        "config.json": settings,
        "empty/README.md": "",
        "cached/snapshots/abc/config.json": settings,
        "run/checkpoint-10/config.json": settings,
        "adapter/adapter_config.json": "{}",
        "shards/config.json": settings,
        "shards/model-00001-of-00002.safetensors": "",
        "torch/config.json": settings,
        "torch/pytorch_model.bin": "",
        "json/config.json": "{",
        "list/config.json": "[]",
        "mapless/config.json": settings,
        f"mapless/{INDEX}": "{}",
        "damaged/config.json": settings,
        "damaged/model.safetensors": "version https://git-lfs.github.com/spec/v1",
    }
    for name, content in files.items():
        Path(tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        call(tmp_path)
