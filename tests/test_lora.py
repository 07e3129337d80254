"""Adapters in the place of every projection: values, gradients, frozen kernels, merging, PEFT's folders."""

import functools
import json
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import textbook
from flax import nnx
from layer_checks import check_module

import coda_jax as coda
import flax_layers as layers
from flax_layers.checkpoints import from_hf, from_peft, load_peft_folder, save_peft_folder, to_hf, to_peft

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
LLAMA = layers.LlamaConfig(**SIZES, **HEADS)
MODELS = {
    "llama": lambda **options: layers.Llama(LLAMA, rngs=nnx.Rngs(0), **options),
    "separate": lambda **options: layers.Llama(
        LLAMA, separate_qkv=True, separate_gate_up=True, rngs=nnx.Rngs(0), **options
    ),
    "scanned": lambda **options: layers.Llama(LLAMA, scan_layers=True, rngs=nnx.Rngs(0), **options),
    "tied": lambda **options: layers.Llama(
        layers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True), rngs=nnx.Rngs(0), **options
    ),
    "gpt2": lambda **options: layers.GPT2(
        layers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2), rngs=nnx.Rngs(0), **options
    ),
}
TOKENS = jax.random.randint(jax.random.key(3), (2, 17), 0, 64)


def adapted(name, head=True, rank=8, **options):
    """A model with adapters everywhere, which are not zero."""
    model = MODELS[name](**options)
    layers.add_lora(model, rank, rngs=nnx.Rngs(1))
    if head:
        layers.add_lora(model, rank, targets=["head"], rngs=nnx.Rngs(2))
    state = nnx.state(model, nnx.LoRAParam)
    draws = iter(jax.random.split(jax.random.key(4), len(jax.tree.leaves(state))))
    nnx.update(model, jax.tree.map(lambda x: x + 0.05 * jax.random.normal(next(draws), x.shape), state))
    return model


def loss(model):
    return model.loss(TOKENS[:, :-1], TOKENS[:, 1:])


def frozen_gradient(model):
    return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(x for x in MODELS if x != "tied")])
def test_the_model_is_what_its_merged_kernels_are(name):
    """Values, and gradients: those of a and b follow from those of the merged kernel."""
    model, merged = adapted(name), adapted(name)
    if name == "gpt2":  # tied: the head's adapter is not merged
        model.head, merged.head = model.head.base_module, merged.head.base_module
    layers.merge_lora(merged)
    np.testing.assert_allclose(nnx.jit(model)(TOKENS), nnx.jit(merged)(TOKENS), rtol=2e-4, atol=2e-4)
    assert np.abs(np.asarray(merged(TOKENS) - MODELS[name]()(TOKENS))).max() > 0.05
    of_kernels = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(merged))
    found = dict(nnx.to_flat_state(nnx.jit(frozen_gradient)(model)))
    factors = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    for path in {path[:-1] for path in found}:
        of_kernel = of_kernels
        for key in path:
            of_kernel = of_kernel[key]
        a, b = (factors[*path, kind][...] for kind in ("lora_a", "lora_b"))
        dkernel = of_kernel if path[-1] == "gate_up" else of_kernel["kernel"]
        dkernel = dkernel.reshape(*a.shape[:-1], b.shape[-1])
        expected = {"lora_a": dkernel @ jnp.swapaxes(b, -1, -2), "lora_b": jnp.swapaxes(a, -1, -2) @ dkernel}
        for kind, x in expected.items():
            np.testing.assert_allclose(found[*path, kind][...], x, rtol=2e-3, atol=2e-6, err_msg=str((*path, kind)))


@pytest.mark.slow
def test_an_adapted_attention_by_the_tolerance_rule():
    module = layers.Attention(32, 4, num_kv_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    layers.add_lora(module, 8, rngs=nnx.Rngs(2))
    for name in ("qkv", "out"):
        getattr(module, name).lora_b[...] = 0.1 * jax.random.normal(
            jax.random.key(5), getattr(module, name).lora_b.shape
        )

    def plain(params, x):
        def merged(of_one):
            kernel, a, b = (
                y.astype(x.dtype) for y in (of_one["base_module"]["kernel"], of_one["lora_a"], of_one["lora_b"])
            )
            return {"kernel": kernel + a @ b}

        return textbook.attention({"qkv": merged(params["qkv"]), "out": merged(params["out"])}, x, 4, 2, 10000.0)

    check_module(module, lambda m, x: m(x), plain, jax.random.normal(jax.random.key(0), (2, 11, 32), jnp.bfloat16))


def cuda_products(model, wrt):
    """Calls of kernels in what is lowered for a GPU, in each call of a function, without those that nobody reads."""
    gradient = nnx.jit(lambda m: nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(m))
    text = gradient.trace(model).lower(lowering_platforms=("cuda",)).as_text()
    bodies = {part.partition("(")[0]: part for part in re.split(r"func\.func (?:public|private) @", text)[1:]}

    @functools.cache
    def calls(name):
        called = sum(map(calls, re.findall(r"\bcall @(\w+)\(", bodies[name])))
        return called + bodies[name].count("custom_call @coda")

    explained = coda.explain(gradient, model, platform="cuda")
    assert explained.kernels == sum(explained.products.values())
    return calls("main"), explained.kernels


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::coda_jax.FallbackWarning")
def test_frozen_kernels_have_no_gradient_products():
    """Four kernels a layer; the first layer's two dx, of a frozen embedding, are dropped too."""
    model = adapted("llama", head=False, dtype=jnp.bfloat16)
    calls, explained = cuda_products(model, nnx.Param)
    frozen_calls, frozen = cuda_products(model, nnx.LoRAParam)
    assert explained - frozen == 4 * 2 + 2
    assert calls - frozen_calls == 4 * 2 + 2


@pytest.mark.parametrize("chunk_bytes", [None, 128 * 64 * 4])
def test_a_frozen_head_has_no_gradient_product(chunk_bytes):
    """XLA drops it where nobody reads it, out of the loop over chunks too."""
    x, w = jax.random.normal(jax.random.key(0), (256, 16)), jax.random.normal(jax.random.key(1), (16, 64))

    def dots(argnums):
        def of(x, w):
            return coda.linear_cross_entropy(x, w, jnp.arange(256) % 64, chunk_bytes=chunk_bytes)[0]

        return jax.jit(jax.grad(of, argnums)).lower(x, w).compile().as_text().count(" dot(")

    assert (dots((0,)), dots((0, 1))) == (2, 3)


@pytest.mark.slow
def test_adapters_are_parts_of_their_block():
    """Rotary embedding, activation, norms and residuals stay in the products' epilogues, and nothing is said."""
    explained = coda.explain(frozen_gradient, adapted("llama"), platform="cuda")
    assert not explained.notes
    of_layers = [text for text in explained.blocks if text.startswith("block 'LlamaBlock'")]
    (forward,) = (text for text in of_layers if "forward" in text.splitlines()[0])
    for name in ("residual, rotation of heads, split columns", "residual, slice+silu", "residual, rms sum"):
        assert name in forward
    backward = [text for text in of_layers if text is not forward]
    assert len(backward) == 1  # equal layers are one function, whatever of each is differentiated
    for text in backward:
        assert "slice+silu, add, slice+silu backward" in text
        assert len(re.findall(r"\^T: .*\badd\b", text)) == 4  # the cotangent by an adapter's product to the kernel's
        passes = sorted(line.partition(":")[0] for line in text.splitlines() if line.startswith("XLA  add"))
        assert passes == ["XLA  add (32, 128)", "XLA  add (32, 64)", "XLA  add (32, 64)"]  # of q, k, v; of the norms


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache(name):
    model = adapted(name)
    out = layers.generate(model, TOKENS[:, :5], max_new_tokens=3)
    tokens = TOKENS[:, :5]
    for i in range(3):
        logits = nnx.jit(model)(tokens)
        np.testing.assert_array_equal(out.tokens[:, i], jnp.argmax(logits[:, -1], axis=-1))
        tokens = jnp.concatenate([tokens, out.tokens[:, i : i + 1]], axis=1)


@pytest.mark.slow
def test_an_optimizer_of_the_adapters_leaves_the_kernels():
    model, before = adapted("llama"), adapted("llama")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    first = loss(model)
    for _ in range(3):
        optimizer.update(model, frozen_gradient(model))
    assert loss(model) < first
    layers.remove_lora(model)
    layers.remove_lora(before)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(before))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(MODELS["llama"]()))


@pytest.mark.slow
def test_a_lora_linear_of_flax_merges_too():
    model = MODELS["llama"]()
    down = nnx.LoRALinear(96, 64, lora_rank=8, use_bias=True, rngs=nnx.Rngs(1))
    down.lora.lora_b[...] = jax.random.normal(jax.random.key(2), (8, 64))
    down.bias[...] = jax.random.normal(jax.random.key(3), (64,))
    model.layers[1].mlp.down = down
    expected = model(TOKENS)
    layers.merge_lora(model)
    assert isinstance(model.layers[1].mlp.down, layers.Linear)
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [name if name in ("scanned", "gpt2") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_peft_folders(name, tmp_path):
    model = adapted(name)
    save_peft_folder(model, tmp_path / "adapter", base_model="some/base")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (8, 8, "some/base")
    names = {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
    names = {"c_attn", "c_proj", "c_fc"} if name == "gpt2" else names
    assert set(settings["target_modules"]) == names | {"lm_head"}
    read = MODELS[name]()
    load_peft_folder(read, tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(model))


@pytest.mark.parametrize(
    ("settings", "scale_of"),
    [
        ({"lora_alpha": 6}, lambda rank, kind: 6 / rank),
        ({}, lambda rank, kind: 8 / rank),  # PEFT's default
        ({"lora_alpha": 6, "use_rslora": True}, lambda rank, kind: 6 / rank**0.5),
        (
            {"lora_alpha": 6, "use_rslora": True, "alpha_pattern": {"q_proj": 3, ".*_proj": 5}},
            lambda rank, kind: (3 if kind == "q" else 5) / rank**0.5,
        ),
        (
            {"lora_alpha": 6, "alpha_pattern": {"proj": 3, "layers.0.self_attn.v_proj": 5}},
            lambda rank, kind: (5 if kind == "v" else 6) / rank,
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "scale",
)
def test_the_scale_of_an_adapter(settings, scale_of):
    """alpha / r, or alpha / sqrt(r) of a rank-stabilised one, r its own; a pattern's alpha where its name ends so."""
    ranks, layer = {"q": 4, "v": 2}, "base_model.model.model.layers.0.self_attn"
    arrays = {}
    for kind, rank in ranks.items():
        arrays[f"{layer}.{kind}_proj.lora_A.weight"] = np.ones((rank, 64), "f4")
        arrays[f"{layer}.{kind}_proj.lora_B.weight"] = np.ones(({"q": 64, "v": 32}[kind], rank), "f4")
    model = MODELS["separate"]()
    from_peft(model, {"peft_type": "LORA", "r": 4, **settings}, arrays)
    for kind, name in (("q", "query"), ("v", "value")):
        adapter = getattr(model.layers[0].attention, name)
        assert adapter.lora_a.shape == (64, ranks[kind])
        np.testing.assert_allclose(adapter.lora_b[...], scale_of(ranks[kind], kind), rtol=1e-6)


@pytest.mark.slow
def test_adapters_that_peft_made_apart():
    """q and v alone, with lora_As and scales of their own, against their product added to the kernels."""
    rng = np.random.default_rng(0)
    arrays, deltas = {}, {}
    for i in range(2):
        for kind, columns, rank in (("q", 64, 4), ("v", 32, 2)):
            module = f"model.layers.{i}.self_attn.{kind}_proj"
            a, b = rng.normal(size=(rank, 64)).astype("f4"), 0.1 * rng.normal(size=(columns, rank)).astype("f4")
            arrays |= {f"base_model.model.{module}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))}
            deltas[f"{module}.weight"] = (16 / rank if kind == "q" else 6 / rank) * b @ a
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "alpha_pattern": {"v_proj": 6}, "bias": "none"}
    for name in ("llama", "separate", "scanned"):
        model = MODELS[name]()
        base = to_hf(model, LLAMA)
        merged = from_hf({name: array + deltas.get(name, 0) for name, array in base.items()}, LLAMA)
        from_peft(model, settings, arrays)
        np.testing.assert_allclose(model(TOKENS), merged(TOKENS), rtol=2e-4, atol=2e-4, err_msg=name)
        _, written = to_peft(model)
        again = MODELS[name]()
        from_peft(again, to_peft(model)[0], written)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_a_checkpoint_of_the_state(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    model, other = adapted("scanned"), MODELS["scanned"]()
    layers.add_lora(other, 8, rngs=nnx.Rngs(7))
    layers.add_lora(other, 8, targets=["head"], rngs=nnx.Rngs(7))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        state = nnx.state(other)
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(state)))
    nnx.update(other, state)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(other), nnx.state(model))


def broken(name, **settings):
    return lambda: from_peft(MODELS["llama"](), {"peft_type": "LORA", **settings}, {name: np.zeros((4, 64), "f4")})


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: layers.add_lora(MODELS["llama"](), 0, rngs=nnx.Rngs(0)), "rank=0 must be an integer, at least 1"),
        (lambda: layers.add_lora(MODELS["llama"](), 8, targets=["q"], rngs=nnx.Rngs(0)), "'q' is not one of qkv"),
        (lambda: layers.add_lora(MODELS["llama"](), 8, targets=["query"], rngs=nnx.Rngs(0)), "the model has no query"),
        (lambda: layers.add_lora(adapted("llama"), 8, rngs=nnx.Rngs(0)), "qkv has an adapter already"),
        (lambda: layers.merge_lora(adapted("tied")), "head is tied to the embedding"),
        (lambda: to_hf(adapted("llama"), LLAMA), "is an adapter, which this checkpoint has no place for: merge_lora"),
        (lambda: to_peft(MODELS["llama"]()), "the model has no adapters"),
        (broken(f"{LAYER}.lora_A.weight", use_dora=True), "use_dora=True of an adapter is not supported"),
        (broken(f"{LAYER}.lora_A.weight", use_dora="false"), "use_dora='false' of an adapter is not supported"),
        *(
            (
                broken(f"{LAYER}.lora_A.weight", init_lora_weights=kind),
                f"init_lora_weights='{kind}' of an adapter is not",
            )
            for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        (
            broken(f"{LAYER}.lora_A.weight", what_is_new=3),
            r"what_is_new=3 of an adapter is not supported: it is not known .*ignore=\('what_is_new',\)",
        ),
        (broken(f"{LAYER}.lora_A.weight"), "lacks base_model.*q_proj.lora_B.weight"),
        (broken(f"{LAYER}.lora_C.weight"), "a model of this config takes no base_model.*lora_C"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_a_head_that_peft_wrote_beside_its_adapter(name):
    """It is the model's own, or the adapter is another model's."""
    head = {"A": np.zeros((4, 64), "f4"), "B": np.zeros((64, 4), "f4")}
    arrays = {f"base_model.model.lm_head.lora_{x}.weight": array for x, array in head.items()}
    model = MODELS[name]()
    weight = np.asarray(model.embed.embedding[...] if name == "tied" else model.head.kernel[...].T)
    base = "base_model.model.lm_head.base_layer.weight"
    from_peft(model, {"peft_type": "LORA"}, arrays | {base: weight})
    assert isinstance(model.head, nnx.LoRA)
    with pytest.raises(ValueError, match=r"lm_head\.base_layer\.weight is not the model's own"):
        from_peft(MODELS[name](), {"peft_type": "LORA"}, arrays | {base: weight + 1})


def test_arrays_of_other_shapes_are_refused():
    arrays = {f"{LAYER}.lora_A.weight": np.zeros((4, 32), "f4"), f"{LAYER}.lora_B.weight": np.zeros((64, 4), "f4")}
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \(4, 32\); the model makes it \(4, 64\)"):
        from_peft(MODELS["llama"](), {"peft_type": "LORA"}, arrays)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"target_modules": ["k_proj"]},
            r"target_modules=\['k_proj'\] .* it does not name model\.layers\.0\.self_attn\.q_p",
        ),
        ({"target_modules": r".*layers\.1\..*"}, r"target_modules='.*layers.* does not name"),
        ({"target_modules": "(["}, r"target_modules: .* is no regular expression"),
        ({"target_modules": 3}, "target_modules=3 of an adapter; it must be a regular expression or a list"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, r"exclude_modules=\['q_proj'\] .* it names"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, r"layers_to_transform=\[1\] .* does not name"),
        ({"lora_alpha": "16"}, "lora_alpha='16' of an adapter; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan of an adapter; it must be a number"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern of 'q_proj'='8' of an adapter; it must be a number"),
        ({"use_rslora": "false"}, "use_rslora='false' of an adapter; it must be True or False"),
    ],
)
def test_settings_that_contradict_the_arrays(settings, message):
    """PEFT would not read arrays of a module that the settings do not name; ours read them where that is ignored."""
    arrays = {f"{LAYER}.lora_A.weight": np.ones((4, 64), "f4"), f"{LAYER}.lora_B.weight": np.ones((64, 4), "f4")}
    with pytest.raises(ValueError, match=message):
        from_peft(MODELS["llama"](), settings, arrays)
    from_peft(model := MODELS["llama"](), settings, arrays, ignore=list(settings))
    np.testing.assert_array_equal(model.layers[0].attention.qkv.lora_b[...][:, :64], np.full((4, 64), 2.0))


def test_arrays_without_a_rank():
    arrays = {f"{LAYER}.lora_A.weight": np.ones((0, 64), "f4"), f"{LAYER}.lora_B.weight": np.ones((64, 0), "f4")}
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \(0, 64\): the rank must be at least 1"):
        from_peft(MODELS["llama"](), {"peft_type": "LORA"}, arrays)


@pytest.mark.slow
def test_the_example(tmp_path):
    """examples/lora.py: adapters on packed sequences learn to count by 3, and do so still when read and merged."""
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "lora.py"))
    assert example["main"](tmp_path) == [10, 13, 16, 19]
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
