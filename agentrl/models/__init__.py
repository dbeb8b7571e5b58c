"""Model names -> local folders, tiny test models, and folders written and read without pickles.

Importing this package, naming a model and making a tiny one load neither torch nor transformers.
"""

from agentrl.models.cache import home, install_folder
from agentrl.models.folders import count_parameters, load_model, load_tokenizer, save_hf_folder, weight_files
from agentrl.models.names import KNOWN_NAMES, TINY_NAMES, KnownModel, find, known_models, prepare, resolve

__all__ = [
    "KNOWN_NAMES",
    "TINY_NAMES",
    "KnownModel",
    "count_parameters",
    "find",
    "home",
    "install_folder",
    "known_models",
    "load_model",
    "load_tokenizer",
    "prepare",
    "resolve",
    "save_hf_folder",
    "weight_files",
]
