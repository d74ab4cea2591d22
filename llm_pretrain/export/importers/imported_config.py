"""A configuration read from elsewhere, and the reader of a Hugging Face folder's config.json."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.yaml_text import write_yaml
from llm_pretrain.errors import ConfigError, printable
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.huggingface import read_config


@dataclass
class ImportedConfig:
    """Settings by section, and notes for the reader of the file.

    Args:
        origin: Source of the settings, for the file's first line.
        settings: Section to field to value.
        notes: What was not carried over or was assumed; comments at the top of the file.
        commands: Commands that prepare the data.
        remarks: Comments behind single settings, by `section.field`.
        last_note: The most important note: last in the file's comments and on the console.
    """

    origin: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    last_note: str | None = None

    def set(self, values: Mapping[str, Any]) -> None:
        """Set `section.field` to its value, for each of `values`."""
        for name, value in values.items():
            section, _, setting = name.partition(".")
            self.settings.setdefault(section, {})[setting] = value

    def not_carried_over(self, text: str) -> None:
        """Note an option that has no equivalent here."""
        self.notes.append(f"not carried over: {text}")

    def check(self) -> ImportedConfig:
        """Note contradictions in the result; ConfigError for a value of a wrong type."""
        try:
            config = from_dict(self.settings)
        except ConfigError as error:
            raise ConfigError(*(f"{self.origin}: {problem}" for problem in error.problems)) from error
        for problem in validate(config, needs_data="data" in self.settings):
            self.notes.append(f"to be fixed: {problem}")
        return self

    def text(self) -> str:
        """The YAML file."""
        lines = [f"Read from {self.origin} by `llm-pretrain configs`."]
        lines += self.notes + ([self.last_note] if self.last_note else [])
        comment = "".join(
            textwrap.fill(
                printable(line), 100, initial_indent="# " if i == 0 else "# - ",
                subsequent_indent="# " if i == 0 else "#   ", break_long_words=False, break_on_hyphens=False,
            ) + "\n"
            for i, line in enumerate(lines)
        )  # fmt: skip
        if self.commands:
            comment += "# The data:\n" + "".join(f"#   {printable(command)}\n" for command in self.commands)
        order = ("run", "model", "data", "training", "optimizer", "schedule")
        names = sorted(
            self.settings, key=lambda name: (name not in order, order.index(name) if name in order else 0)
        )
        return comment + "".join(self._section(name) for name in names)

    def _section(self, name: str) -> str:
        text = write_yaml({name: self.settings[name]})
        for setting, remark in self.remarks.items():
            section, _, key = setting.partition(".")
            if section == name:
                text = re.sub(rf"(?m)^(  {key}: .*)$", rf"\1  # {remark}", text)
        return text


_EXPERT_SETTINGS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "n_shared_experts"),
    *("scoring_func", "routed_scaling_factor", "first_k_dense_replace", "decoder_sparse_step"),
    *("router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate"),
)
_SCALING_SETTINGS = ("rope_type", "rope_factor", "original_max_position_embeddings")


def from_pretrained(folder: str) -> ImportedConfig:
    """The `model` section of a folder's config.json, for `model.init_from: FOLDER` where it has weights.

    For a dense model it leaves the expert settings out, so that it can be combined with a configuration
    with experts, which is then upcycled.

    Raises:
        ConfigError: an architecture that our decoder lacks.
        CheckpointError: no config.json, or a broken one.
    """
    try:
        model = model_config_from_huggingface(read_config(folder))
    except ConfigError as error:
        raise ConfigError(*(f"{Path(folder)}: {problem}" for problem in error.problems)) from error
    left_out = {"init_from"} | (set() if model.moe_layers else set(_EXPERT_SETTINGS))
    left_out |= set() if model.rope_type != "default" else set(_SCALING_SETTINGS)
    values = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(ModelConfig)
        if field.name not in left_out and getattr(model, field.name) is not None
    }
    result = ImportedConfig(folder, {"model": values})
    if any((Path(folder) / f"model.safetensors{end}").exists() for end in ("", ".index.json")):
        result.notes.append(f"add `init_from: {folder}` to the section to start from its weights")
    else:
        result.notes.append(f"{folder} has no model.safetensors: training starts from random weights")
    if (Path(folder) / "tokenizer.json").exists():
        result.notes.append(f"prepare the data in its tokens: `llm-pretrain prepare --tokenizer {folder}`")
    return result
