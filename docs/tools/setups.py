"""What blocks need that a page does not say, for pages that show parts of a program; run before the first block."""

SETUPS = {
    "explain": """
import os
import tempfile

os.chdir(tempfile.mkdtemp())  # pictures are written
""",
    "layers": """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_layers import Llama, LlamaConfig, add_lora

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
model = Llama(LlamaConfig(vocab_size=64, **SIZES), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
tokens = jnp.arange(18).reshape(2, 9)
is_answer = jnp.broadcast_to(jnp.arange(8) >= 4, (2, 8))


def loss_of(model, tokens):
    return model.loss(tokens[:, :-1], tokens[:, 1:])
""",
    "parallel": """
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_layers import Llama, LlamaConfig
from flax_layers.checkpoints import load_hf_folder, save_hf_folder

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
folder, other_folder = tempfile.mkdtemp(), tempfile.mkdtemp()
save_hf_folder(Llama(LlamaConfig(vocab_size=64, **SIZES), rngs=nnx.Rngs(0)), folder)
""",
}
