"""The configuration tree, its loading and its validation. Knows no other part of the package."""

from llm_pretrain.config.tree import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TrainingConfig,
)

__all__ = [
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
]
