"""Reads configurations of other programs: config.json of a Hugging Face folder, and old and new options of
MiniMind's train_pretrain.py (github.com/jingyaogong/minimind).
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_pretrain.config.loading import from_dict, validate
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import write_yaml
from llm_pretrain.errors import ConfigError, printable
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.huggingface import read_config
from llm_pretrain.files import file_name


@dataclass
class ImportedConfig:
    """Settings by section, and notes for the reader of the file.

    Args:
        origin: Source of the settings, for the file's first line.
        settings: Section -> field -> value.
        notes: What was not carried over, and what was assumed; they become comments at the top of the file.
        commands: Commands that prepare the data.
        remarks: `section.field` -> comment behind the setting.
        last_note: The most important note, which comes last in the file's comments and on the console.
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
        """Note contradictions in the result; raises ConfigError for a value of a wrong type."""
        try:
            config = from_dict(self.settings)
        except ConfigError as error:
            raise ConfigError(*(f"{self.origin}: {problem}" for problem in error.problems)) from error
        for problem in validate(config, needs_data="data" in self.settings):
            self.notes.append(f"to be fixed: {problem}")
        return self

    def text(self) -> str:
        """The text of the YAML file."""
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
    """The `model` section from a folder's config.json, to use with `model.init_from: FOLDER` for its weights.

    The section of a dense model has no expert settings. So it can be combined with a configuration that has
    experts; the dense weights are then upcycled.

    Raises:
        ConfigError: our decoder lacks the architecture.
        CheckpointError: config.json is missing or broken.
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


_OLD_NAMES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "out_dir": "save_dir"}
_ONLY_OLD = {"dim", "n_layers", "out_dir", "warmup_iters", "ddp", "local_rank"}
"""Options of MiniMind 2 from February to October 2025. Later options are also options of MiniMind 3."""
_FLAGS = {"use_wandb", "ddp"}
"""Options without a value."""
_DEFAULTS: dict[str, Any] = {
    **{"epochs": 1, "batch_size": 32, "learning_rate": 5e-4, "dtype": "bfloat16", "num_workers": 1},
    **{"accumulation_steps": 8, "grad_clip": 1.0, "log_interval": 100, "save_interval": 100},
    **{"hidden_size": 512, "num_hidden_layers": 8, "max_seq_len": 512, "use_moe": "0"},
    **{"data_path": "../dataset/pretrain_hq.jsonl", "wandb_project": "MiniMind-Pretrain"},
}
_NEW_DEFAULTS = _DEFAULTS | {
    **{"epochs": 2, "num_workers": 8, "save_interval": 1000, "hidden_size": 768, "max_seq_len": 340},
    "data_path": "../dataset/pretrain_t2t_mini.jsonl",
}
_PRECISIONS = {"bfloat16": "auto", "float16": "fp16", "float32": "fp32"}
_COUNTS = {
    **{"num_processes": "all", "nproc_per_node": "of each machine", "num_gpus": "of each machine"},
    **{"nnodes": "machines", "num_nodes": "machines"},
}
"""Launcher option (accelerate, torchrun or deepspeed) -> what it counts."""
_NOT_CARRIED_OVER = {
    "save_dir": "weights go to the run's own folder, see run.output_dir",
    "device": "the launcher and the machine decide",
    "warmup_iters": "MiniMind takes it and does not use it; schedule.warmup_steps would",
    "ddp": "start the run with torchrun or accelerate launch",
    "num_workers": "the loader needs none on a CPU, and takes 2 on a GPU",
    "local_rank": "the launcher sets it",
    "from_weight": "a .pth file; save it as a Hugging Face folder and name that in model.init_from",
    "from_resume": "a run continues from its newest checkpoint by itself, see checkpoint.resume",
    "use_compile": "see training.compile",
    "save_weight": "a prefix of file names",
}


_IGNORED = {("from_weight", "none"), ("from_resume", "0"), ("use_compile", "0")}
"""Options at their default values, which need no note."""


def from_minimind(text: str, version: int | None = None) -> ImportedConfig:
    """A complete configuration from a command line of MiniMind's pretraining.

    Args:
        text: The options, with or without the command before them.
        version: 2 (MiniMind2, 2025) or 3 (minimind-3, 2026); decides defaults and architecture. Default: 2
            if `text` has an option that only version 2 has, else 3.

    Raises:
        ConfigError: an option has a wrong value.
    """
    given, processes, unknown = _split(text)
    assumed = 2 if _ONLY_OLD & given.keys() else 3
    result = ImportedConfig(f"--from_minimind {text!r}")
    if version is None:
        result.notes.append(
            f"taken as the options of MiniMind {assumed}; --minimind_version {5 - assumed} takes the other's"
        )
    version = version or assumed
    given = {_OLD_NAMES.get(name, name): value for name, value in given.items()}
    values = (_DEFAULTS if version == 2 else _NEW_DEFAULTS) | given
    for name in unknown:
        result.not_carried_over(f"--{name}, an option that MiniMind's train_pretrain.py does not have")
    for name in sorted(given.keys() & _NOT_CARRIED_OVER.keys()):
        if (name, given[name]) not in _IGNORED:
            result.not_carried_over(f"--{name} {given[name]}".rstrip() + f" ({_NOT_CARRIED_OVER[name]})")
    is_old = version == assumed == 2
    _model(result, values, version, is_old)
    _training(result, values, processes, is_old)
    if version == 2:
        result.notes.append(
            f"the numbers are those of MiniMind 2 {'until October' if is_old else 'from December'} 2025: "
            "before December, the learning rate began at 1.1 * --learning_rate and aux_loss_alpha was 0.1, "
            "from then on at --learning_rate, and 0.01"
        )
    return result.check()


def _split(text: str) -> tuple[dict[str, str], int, list[str]]:
    """Known options and their values, the number of processes, and unknown options with their values."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--from_minimind: expected options, found {text!r}: {error}") from error
    script = next((i + 1 for i, word in enumerate(words) if word.endswith(".py")), 0)
    launcher, words = words[:script], words[script:]
    counts: dict[str, int] = {}
    for i, word in enumerate(launcher):
        name, _, value = word.replace("-", "_").removeprefix("__").partition("=")
        if kind := _COUNTS.get(name):
            count = value or launcher[min(i + 1, len(launcher) - 1)]
            counts[kind] = _number(int, name, count.rpartition(":")[2])  # MAX of torchrun's MIN:MAX
    processes = counts.get("all") or counts.get("of each machine", 1) * counts.get("machines", 1)
    known = {*_NEW_DEFAULTS, *_NOT_CARRIED_OVER, *_OLD_NAMES, *_FLAGS}
    given: dict[str, str] = {}
    unknown: list[str] = []
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if not word.startswith("--"):
            raise ConfigError(f"--from_minimind: expected an option such as --batch_size 32, found {word!r}")
        name, equals, value = word[2:].partition("=")
        if not equals and name not in _FLAGS:
            value = rest.pop() if rest and not rest[-1].startswith("--") else ""
        if name in known:
            given[name] = value
        else:
            unknown.append(f"{name} {value}".rstrip())
    return given, processes, unknown


def _number(kind: Callable[[str], Any], name: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ConfigError(f"--from_minimind: --{name}: expected {expected}, found {value!r}") from None


def _model(result: ImportedConfig, values: dict[str, Any], version: int, is_old: bool) -> None:
    """Set the model's shape; MiniMind's class MiniMindConfig fixes the values that no option sets."""
    hidden, layers = (_number(int, name, values[name]) for name in ("hidden_size", "num_hidden_layers"))
    experts = str(values["use_moe"]).lower() not in ("0", "false", "")
    if version == 2:
        width = -(-(hidden * 8 // 3) // 64) * 64
        shape = {"intermediate_size": width, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
        shape |= {"qk_norm": False}
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    else:
        width = math.ceil(hidden * math.pi / 64) * 64
        shape = {"intermediate_size": width, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "qk_norm": True}
        moe = {"num_experts": 4, "num_experts_per_tok": 1}
    own = {"vocab_size": 6400, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8}
    result.settings["model"] = own | shape | (moe if experts else {})
    if experts:
        coefficient = 0.1 if is_old else 0.01 if version == 2 else 5e-4
        result.set({"model.router_aux_loss_coef": coefficient * layers})
        result.notes.append(
            f"model.router_aux_loss_coef: MiniMind adds {coefficient:g} times each layer's balance loss, we "
            f"the mean over layers: {coefficient:g} * {layers}"
        )
    result.set({"run.name": f"minimind-{hidden}x{layers}" + ("-moe" if experts else "")})


def _training(result: ImportedConfig, values: dict[str, Any], processes: int, is_old: bool) -> None:
    whole = {
        name: _number(int, name, values[name])
        for name in ("batch_size", "accumulation_steps", "log_interval", "save_interval", "epochs",
                     "max_seq_len")
    }  # fmt: skip
    rate, clip = (_number(float, name, values[name]) for name in ("learning_rate", "grad_clip"))
    dtype, device = values["dtype"], values.get("device", "cuda")
    if dtype not in _PRECISIONS:
        raise ConfigError(
            f"--from_minimind: --dtype: expected one of {', '.join(_PRECISIONS)}, found {dtype!r}"
        )
    on_gpu = "cuda" in device
    if not on_gpu and dtype != "float32":
        result.notes.append(
            f"training.precision: fp32, as on device {device} there: {dtype} is for CUDA devices"
        )
    corpus, accumulation = str(values["data_path"]), max(1, whole["accumulation_steps"])
    total = whole["batch_size"] * accumulation * processes
    _data(result, corpus)
    result.set(
        {
            "training.precision": _PRECISIONS[dtype] if on_gpu else "fp32",
            "training.sequence_length": whole["max_seq_len"],
            "training.micro_batch_size": whole["batch_size"],
            "training.global_batch_size": total,
            "training.max_grad_norm": clip,
            "optimizer.learning_rate": rate + rate / 10 if is_old else rate,
            "optimizer.weight_decay": 0.01,  # this and beta2: defaults of torch's AdamW, as in MiniMind
            "optimizer.adam_beta2": 0.999,
            "schedule.name": "cosine",
            "schedule.min_learning_rate": rate / 10,
            "checkpoint.save_steps": max(1, whole["save_interval"] // accumulation),
            "logging.logging_steps": max(1, whole["log_interval"] // accumulation),
            "logging.wandb_mode": "online" if "use_wandb" in values else "disabled",
            "logging.wandb_project": file_name(str(values["wandb_project"])),
        }
    )
    result.notes.append(
        f"training.global_batch_size: {whole['batch_size']} * {accumulation} accumulation steps * "
        f"{processes} processes; MiniMind's grows with the number of processes, ours does not"
    )
    _set_max_steps(result, corpus, whole["epochs"], total)
    result.notes.append(
        "MiniMind pads every document to the sequence length and cuts it there; data.packing: pad comes "
        "nearest, the default packs documents and cuts off nothing"
    )


def _data(result: ImportedConfig, corpus: str) -> None:
    """Set a token store of the corpus as the data, and add commands that write store and tokenizer."""
    name = file_name(Path(corpus).stem)
    tokenizer, store = f"data/tokenizers/{name}", f"data/stores/{name}"
    for words in (
        ("tokenizer", "--input", corpus, "--vocab_size", "6400", "--output", tokenizer),
        (
            "prepare",
            "--input",
            corpus,
            "--special_tokens",
            "tokens",
            "--tokenizer",
            tokenizer,
            "--output",
            store,
        ),
    ):
        result.commands.append(shlex.join(["llm-pretrain", *words]))
    result.set({"data.sources": [{"store": store}]})


def _set_max_steps(result: ImportedConfig, corpus: str, epochs: int, global_batch_size: int) -> None:
    """Convert epochs to steps if the corpus exists, by counting its documents."""
    if not Path(corpus).is_file():
        steps = Config().training.max_steps
        result.set({"training.max_steps": steps})
        result.remarks["training.max_steps"] = "not MiniMind's: its data are not here to be counted"
        result.last_note = (
            f"not carried over: --epochs {epochs}, since {corpus} is not here to be counted; "
            f"training.max_steps: {steps} is our default: make it {epochs} * the documents / "
            f"{global_batch_size}"
        )
        return
    with Path(corpus).open("rb") as file:
        documents = sum(1 for line in file if line.strip())
    result.set({"training.max_steps": max(1, epochs * documents // global_batch_size)})
    result.notes.append(
        f"training.max_steps: {epochs} epochs of {documents:,} documents, one to a sequence as in MiniMind; "
        "packed, they make fewer sequences, and so many steps more epochs"
    )
