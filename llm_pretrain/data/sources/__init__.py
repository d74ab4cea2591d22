"""What `--input` names: files of every supported format, hub data sets, the standard library."""

from llm_pretrain.data.sources.inputs import saved_splits

__all__ = [
    "saved_splits",
]
