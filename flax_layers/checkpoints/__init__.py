"""Parameters from and to the checkpoints of Hugging Face and MaxText, adapters from and to those of PEFT."""

from flax_layers.checkpoints.hf_config import config_from_hf, config_to_hf
from flax_layers.checkpoints.hugging_face import from_hf, load_hf_folder, save_hf_folder, to_hf
from flax_layers.checkpoints.maxtext import from_maxtext, to_maxtext
from flax_layers.checkpoints.maxtext_folder import load_maxtext_folder
from flax_layers.checkpoints.peft import from_peft, load_peft_folder, save_peft_folder, to_peft

__all__ = [
    "config_from_hf",
    "config_to_hf",
    "from_hf",
    "from_maxtext",
    "from_peft",
    "load_hf_folder",
    "load_maxtext_folder",
    "load_peft_folder",
    "save_hf_folder",
    "save_peft_folder",
    "to_hf",
    "to_maxtext",
    "to_peft",
]
