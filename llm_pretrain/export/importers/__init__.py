"""Configurations of other libraries, as this package's."""

from llm_pretrain.export.importers.imported_config import ImportedConfig, from_pretrained
from llm_pretrain.export.importers.minimind import from_minimind

__all__ = [
    "ImportedConfig",
    "from_minimind",
    "from_pretrained",
]
