"""The configuration: its tree of dataclasses, and loading and checking it."""

from llm_pretrain.config.distributed_config import DistributedConfig, MeshSizes
from llm_pretrain.config.evaluation_config import EvaluationConfig, PredictedLoss
from llm_pretrain.config.loading import (
    PRESETS,
    compiles,
    dump_yaml,
    from_dict,
    load_config,
    multiplies_in_bf16,
    resolve_model,
    resolve_precision,
    shape_problems,
    to_dict,
    unknown_setting,
    validate,
)
from llm_pretrain.config.mesh_checks import check_mesh
from llm_pretrain.config.model_config import VOCAB_MULTIPLE, YARN_BETAS, ModelConfig
from llm_pretrain.config.schema import LARGEST_INTEGER, build, matches_type
from llm_pretrain.config.tree import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TrainingConfig,
    WeightChange,
)
from llm_pretrain.config.yaml_text import YamlError, read_settings_text, read_yaml, read_yaml_file, write_yaml

__all__ = [
    "LARGEST_INTEGER",
    "PRESETS",
    "VOCAB_MULTIPLE",
    "YARN_BETAS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "MeshSizes",
    "ModelConfig",
    "OptimizerConfig",
    "PredictedLoss",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrainingConfig",
    "WeightChange",
    "YamlError",
    "build",
    "check_mesh",
    "compiles",
    "dump_yaml",
    "from_dict",
    "load_config",
    "matches_type",
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
