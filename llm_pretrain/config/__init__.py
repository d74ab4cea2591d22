"""The configuration tree, its loading and its validation. Knows no other part of the package."""

from llm_pretrain.config.checking import unknown_setting
from llm_pretrain.config.loading import dump_yaml, from_dict, load_config, resolve_model, to_dict
from llm_pretrain.config.model_config import VOCAB_MULTIPLE, ModelConfig
from llm_pretrain.config.precision import multiplies_in_bf16, resolve_precision
from llm_pretrain.config.tree import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TrainingConfig,
    WeightChange,
)
from llm_pretrain.config.validation import shape_problems, validate
from llm_pretrain.config.yaml_text import YamlError, read_settings_text, read_yaml, read_yaml_file, write_yaml

__all__ = [
    "VOCAB_MULTIPLE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrainingConfig",
    "WeightChange",
    "YamlError",
    "dump_yaml",
    "from_dict",
    "load_config",
    "multiplies_in_bf16",
    "read_settings_text",
    "read_yaml",
    "read_yaml_file",
    "resolve_model",
    "resolve_precision",
    "shape_problems",
    "to_dict",
    "unknown_setting",
    "validate",
    "write_yaml",
]
