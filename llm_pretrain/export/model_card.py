"""Writes the model card, README.md in a weights folder. It names neither launcher nor paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from llm_pretrain.config.loading import dump_yaml
from llm_pretrain.config.tree import Config, OptimizerConfig
from llm_pretrain.export.config_json import HF_ARCHITECTURES
from llm_pretrain.export.huggingface import model_type_of
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.text import markdown_table

_NO_PATHS = {"sample_prompts"}
"""Settings whose text can look like a path."""


@dataclass(frozen=True)
class ModelCardSource:
    """One source of the training data.

    Args:
        label: The source's name in metrics.
        samples: Number of samples drawn from the source so far.
        documents: Number of training documents.
        tokens: Number of training tokens in one epoch.
    """

    label: str
    samples: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class ModelCardData:
    """The content of a model card.

    Args:
        config: The run's resolved configuration.
        step: Optimizer steps done.
        tokens_seen: Loss tokens of all steps so far.
        sources: The sources of the training data.
        tokenizer_size: Number of tokens in the tokenizer.
        tokenizer_hash: SHA-256 of the tokenizer.json.
        has_chat_template: Whether the tokenizer has a chat template.
        world_size: Number of processes of the last attempt.
        versions: Versions of the libraries.
        evaluation: Metrics `eval/…` of the last evaluation; empty if there was none.
        evaluation_step: Step of that evaluation.
        is_best: Whether these weights have the lowest evaluation loss so far.
        started_from: Name of the run with whose state training started; None without one.
    """

    config: Config
    step: int
    tokens_seen: int
    sources: Sequence[ModelCardSource]
    tokenizer_size: int
    tokenizer_hash: str
    has_chat_template: bool
    world_size: int
    versions: Mapping[str, str | None]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    is_best: bool = False
    started_from: str | None = None


def model_card(data: ModelCardData) -> str:
    """The card as Markdown, with the front matter that hubs read. The owner must choose the license."""
    model_type = model_type_of(data.config.model)
    parts = [
        _front_matter(model_type),
        _summary(data, model_type),
        _use(data, model_type),
        _data(data),
        _training(data),
        _evaluation(data),
        _limits(data.started_from or data.config.model.init_from),
        f"## Settings\n\n```yaml\n{dump_yaml(_settings(data.config)).strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(model_type: str | None) -> str:
    tags = ["llm_pretrain", "pretrained", *([model_type] if model_type else [])]
    library = "transformers" if model_type else "llm_pretrain"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _summary(data: ModelCardData, model_type: str | None) -> str:
    model, size = data.config.model, count_parameters(data.config.model)
    kind = (
        f"`{HF_ARCHITECTURES[model_type].class_name}`"
        if model_type
        else "a model of llm_pretrain's own format"
    )
    rows = [("Parameters", f"{size.total:,}")]
    if model.moe_layers:
        rows += [
            ("Parameters a token uses", f"{size.active:,}"),
            ("Experts", f"{model.num_experts}, {model.num_experts_per_tok} for each token"),
        ]
    rows += [
        ("Architecture", kind),
        ("Layers, width", f"{model.num_hidden_layers}, {model.hidden_size}"),
        ("Vocabulary", f"{data.tokenizer_size:,} tokens ({model.vocab_size:,} rows)"),
        ("Weights", data.config.checkpoint.weights_dtype + _average(data.config)),
        ("Step", f"{data.step:,}" + (", the lowest evaluation loss so far" if data.is_best else "")),
    ]
    title, table = f"# {data.config.run.name}", markdown_table(("", ""), rows)
    return f"{title}\n\nA language model pretrained from text by llm_pretrain.\n\n{table}"


def _use(data: ModelCardData, model_type: str | None) -> str:
    lines = ["## Use", "", "```sh", 'llm-pretrain generate . --prompt "Once upon"']
    lines += ["llm-pretrain chat ."] if data.has_chat_template else []
    hidden_act = data.config.model.hidden_act
    if hidden_act == "silu":
        lines += ["llm-pretrain export . --to gguf --output model.gguf   # llama.cpp"]
    lines += ["```"]
    if model_type:
        lines += [
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'tokenizer = AutoTokenizer.from_pretrained(".")',
            'model = AutoModelForCausalLM.from_pretrained(".")',
            'inputs = tokenizer("Once upon", return_tensors="pt", return_token_type_ids=False)',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
            "```",
        ]
        if hidden_act != "silu":
            lines += [
                "",
                f"The activation is `{hidden_act}`; vLLM and mlx-lm refuse it, or compute SiLU instead.",
            ]
    return "\n".join(lines)


def _data(data: ModelCardData) -> str:
    total = sum(source.samples for source in data.sources) or 1
    rows = [
        (source.label, f"{source.samples / total:.1%}", f"{source.documents:,}", f"{source.tokens:,}")
        for source in data.sources
    ]
    table = markdown_table(("Source", "Share of samples", "Documents", "Tokens"), rows)
    return f"## Data\n\n{table}\n\nTokenizer: SHA-256 `{data.tokenizer_hash[:16]}` of its tokenizer.json."


def _training(data: ModelCardData) -> str:
    training, optimizer = data.config.training, data.config.optimizer
    rows = [
        ("Steps", f"{data.step:,} of {training.max_steps:,}"),
        ("Tokens trained on", f"{data.tokens_seen:,}"),
        ("Batch", f"{training.global_batch_size} sequences of {training.sequence_length} tokens"),
        ("Precision", training.precision),
        ("Optimizer", f"{optimizer.name}, learning rate {_rates(optimizer)}"),
        ("Processes", str(data.world_size)),
        *((name, version) for name, version in data.versions.items() if version),
    ]
    return f"## Training\n\n{markdown_table(('', ''), rows)}"


def _average(config: Config) -> str:
    decay = config.optimizer.ema_decay
    return f", of the parameters averaged over steps (decay {decay:g})" if decay else ""


def _rates(optimizer: OptimizerConfig) -> str:
    if (rate := optimizer.matrix_rate) is None:
        return f"{optimizer.learning_rate:g}"
    return f"{rate:g}, and {optimizer.learning_rate:g} of AdamW for what is no map"


def _evaluation(data: ModelCardData) -> str:
    if not data.evaluation:
        return "## Evaluation\n\nNone was made."
    rows = [(name.removeprefix("eval/"), f"{value:.4f}") for name, value in sorted(data.evaluation.items())]
    where = f"On the validation documents of the data, at step {data.evaluation_step:,}"
    return f"## Evaluation\n\n{where}; loss in nats per token.\n\n{markdown_table(('Metric', 'Value'), rows)}"


def _limits(started_from: str | None) -> str:
    origin = "It was trained on the data above and nothing else, and"
    if started_from is not None:
        name = PurePosixPath(_portable(started_from)).name or started_from
        origin = f"It started from the weights `{name}`, was trained on the data above, and"
    return (
        f"## Limits\n\nA base model continues text. {origin} nobody has checked what it says; it can be "
        "wrong, and it can repeat what it has read."
    )


def _settings(config: Config) -> Config:
    """The configuration without the run's folder and the checkpoint from which an attempt began."""
    run = dataclasses.replace(config.run, output_dir=None)
    checkpoint = dataclasses.replace(config.checkpoint, resume="auto", start_from=None)
    return _portable(dataclasses.replace(config, run=run, checkpoint=checkpoint))


def _portable(value: Any) -> Any:
    """The configuration with absolute paths shortened to their last part."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            each.name: _portable(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.name not in _NO_PATHS
        }
        return dataclasses.replace(value, **changes)
    if isinstance(value, list):
        return [_portable(each) for each in value]
    if isinstance(value, str):
        if PurePosixPath(value).is_absolute() or value.startswith("~"):
            return PurePosixPath(value).name
        if PureWindowsPath(value).is_absolute():
            return PureWindowsPath(value).name
    return value
