"""Any block of a parameter, as a mesh may cut it, is that block of the whole: within a layer, a half and a head too."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_layers import GPT2, Llama, LlamaConfig
from flax_layers.checkpoints import from_hf, from_maxtext, maxtext, placement, table, to_hf, to_maxtext
from flax_layers.checkpoints.hf_names import entries
from tests.tiny_models import GPT2 as GPT2_CONFIG

P = PartitionSpec
CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    attention_bias=True,
)
QWEN3 = dataclasses.replace(CONFIG, qk_norm=True, attention_bias=False)


class Counted:
    """An array of a checkpoint that counts what is read of it."""

    def __init__(self, array):
        self.array, self.shape, self.read = array, array.shape, 0

    def __getitem__(self, index):
        block = self.array[index]
        self.read += block.size
        return block


TABLES = {
    "hugging face": lambda: entries(CONFIG),
    "maxtext, halves": lambda: maxtext._entries(CONFIG, True, "halves"),
    "maxtext, interleaved": lambda: maxtext._entries(CONFIG, True, "interleaved"),
    "maxtext, norms of heads": lambda: maxtext._entries(QWEN3, False, "interleaved"),
    "gpt2": lambda: entries(GPT2_CONFIG),
}


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("name", TABLES)
def test_every_block(name, apart):
    config = QWEN3 if "norms" in name else GPT2_CONFIG if name == "gpt2" else CONFIG
    if name == "gpt2":
        if apart:
            pytest.skip("GPT-2's query, key and value are one array")
        model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
    else:
        options = {"separate_qkv": apart, "separate_gate_up": apart}
        model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), **options))
    shapes, rng = nnx.to_pure_dict(nnx.state(model)), np.random.default_rng(0)
    checked = 0
    for entry in table.as_stored(TABLES[name](), shapes):
        if entry.path[0] == "layers" and entry.path[1] > 0:
            continue  # they are alike
        shape = table.at(shapes, entry.path).shape
        arrays = {part.name: Counted(rng.standard_normal(part.shape).astype(np.float32)) for part in entry.parts}

        def block(index, entry=entry, arrays=arrays, shape=shape):
            out = np.full([axis.stop - axis.start for axis in index], np.nan, np.float32)
            entry.read(arrays, shape, index, out)
            return out

        whole = block([slice(0, size) for size in shape])
        for part, again in zip(entry.parts, entry.split(whole), strict=True):
            np.testing.assert_allclose(again, arrays[part.name].array, rtol=1e-6)
        for index in itertools.product(*map(pieces, shape)):
            for array in arrays.values():
                array.read = 0
            np.testing.assert_array_equal(block(index), whole[index], err_msg=f"{entry.path} {index}")
            ends = [end for axis, size in zip(index, shape, strict=True) for end in (axis.start, axis.stop % size)]
            if all(end % 4 == 0 for end in ends):  # whole heads
                assert sum(array.read for array in arrays.values()) == whole[index].size, (entry.path, index)
            checked += 1
    assert checked > 500


def pieces(size):
    """All intervals of an axis; of a long one those between some of its places."""
    places = range(size + 1) if size < 10 else sorted({0, 1, 3, 4, size // 2, size - 5, size - 4, size - 1, size})
    return [slice(start, stop) for start, stop in itertools.combinations(places, 2)]


def stacked(config=CONFIG):
    model = Llama(config, scan_layers=True, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), nnx.state(model)))
    return model


def cut(mesh, *axes):
    """Shardings where these axes of a stacked parameter are cut, the first mesh axis cutting the first of them."""

    def sharding_of(path, leaf):
        spec = [None] * leaf.ndim
        if path[0] == "layers":
            for name, axis in zip(mesh.axis_names, axes, strict=False):
                if axis < leaf.ndim and leaf.shape[axis] % mesh.shape[name] == 0 and spec[axis] is None:
                    spec[axis] = name
        return NamedSharding(mesh, P(*spec))

    return sharding_of


@pytest.mark.parametrize("source", ["hugging face", "maxtext", "maxtext, stacked"])
@pytest.mark.parametrize(
    ("sizes", "axes"), [((4,), (0,)), ((2, 2, 2), (0, 2, -1)), ((2, 2), (-1, 0))], ids=["layers", "all", "reversed"]
)
@pytest.mark.slow
def test_a_mesh_that_cuts_stacked_layers(sizes, axes, source):
    """The layers of each device are its own, whichever it has; and so they are written."""
    names = ("x", "y", "z")[: len(sizes)]
    mesh = jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[: np.prod(sizes)]
    )
    expected, sharding_of = stacked(), cut(mesh, *axes)
    if source == "hugging face":
        read, write = from_hf, lambda model: to_hf(model, CONFIG)
    else:
        read, write = from_maxtext, lambda model: to_maxtext(model, CONFIG, scan_layers="stacked" in source)
    arrays = write(expected)
    model = read(arrays, CONFIG, scan_layers=True, shardings=sharding_of)
    want = dict(nnx.to_flat_state(nnx.state(expected)))
    cuts_layers = 0
    for path, x in nnx.to_flat_state(nnx.state(model)):
        assert x[...].sharding == sharding_of(path, x[...])
        cuts_layers += x[...].sharding.shard_shape(x.shape)[0] < x.shape[0] and path[0] == "layers"
        np.testing.assert_allclose(x[...], want[path][...], rtol=1e-6, err_msg=str(path))
    assert cuts_layers > 5
    for got, array in zip(*map(jax.tree.leaves, (write(model), write(expected))), strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-6)


@pytest.mark.parametrize("spec", [P("x"), P(("y", "x")), P(None, ("y", "x")), P()], ids=str)
def test_a_layer_of_what_lies_on_a_mesh(spec):
    """As a host reads it from its own devices, and as several processes gather it."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    whole = np.arange(4 * 8 * 3, dtype=np.float32).reshape(4, 8, 3) * np.float32(-1)
    array = jax.device_put(whole, NamedSharding(mesh, spec))
    for layer in range(4):
        np.testing.assert_array_equal(placement.on_host(array, (layer,)), whole[layer])
        np.testing.assert_array_equal(placement.on_host(array, (layer, 5)), whole[layer, 5])
    for index in ((), (1,), (2, 3)):
        np.testing.assert_array_equal(placement._gathered(array, index), whole[index])
    for index in ((0, 4, 0, 8, 0, 3), (1, 3, 3, 5, 1, 2), (2, 3, 1, 8, 0, 3), (0, 1, 4, 6, 2, 3), (1, 4, 2, 3, 0, 2)):
        block = tuple(slice(*index[i : i + 2]) for i in (0, 2, 4))
        np.testing.assert_array_equal(placement.block_of(array, block), whole[block])
