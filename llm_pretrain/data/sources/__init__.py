"""What `--input` names: files of every supported format, hub data sets, the standard library."""

from llm_pretrain.data.sources.documents import EMPTY, Document, RawRecord, RecordError, parse_record
from llm_pretrain.data.sources.inputs import STDLIB, find_sources
from llm_pretrain.data.sources.readers import batch_records, read_records, read_sources

__all__ = [
    "EMPTY",
    "STDLIB",
    "Document",
    "RawRecord",
    "RecordError",
    "batch_records",
    "find_sources",
    "parse_record",
    "read_records",
    "read_sources",
]
