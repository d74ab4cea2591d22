"""The model card: a weights folder's README.md, so that whoever finds the folder knows what it is.

A pure function of facts: no clock, no file, no path of the machine, no launcher. The same training writes the
same card, whoever launches it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from llm_pretrain.config import Config, OptimizerConfig, dump_yaml
from llm_pretrain.errors import ConfigError
from llm_pretrain.export.homes import HOMES, home_of
from llm_pretrain.model import count_parameters

_KEPT = {"sample_prompts"}
"""Settings whose text may begin like a path and is none."""


@dataclass(frozen=True)
class CardSource:
    """One source of the training data.

    Args:
        label: What metrics call it.
        weight: Its share, relative to the others.
        documents: For training.
        tokens: For training, in one epoch.
    """

    label: str
    weight: float
    documents: int
    tokens: int


@dataclass(frozen=True)
class CardFacts:
    """What a card tells.

    Args:
        config: Resolved.
        step: Optimizer steps done.
        tokens_seen: Loss tokens of all steps so far.
        sources: Of the data.
        tokenizer_size: Tokens that the tokenizer has.
        tokenizer_hash: SHA-256 of its tokenizer.json.
        has_chat_template: Whether it has one.
        world_size: Processes of the last attempt.
        versions: Of the libraries that trained it.
        evaluation: Metrics `eval/…` of the last evaluation; empty where there was none.
        evaluation_step: Its step.
        is_best: Whether these weights are those with the lowest evaluation loss.
    """

    config: Config
    step: int
    tokens_seen: int
    sources: Sequence[CardSource]
    tokenizer_size: int
    tokenizer_hash: str
    has_chat_template: bool
    world_size: int
    versions: Mapping[str, str | None]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    is_best: bool = False


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with the front matter that hubs read; the license is left to its owner."""
    model_type = _home(facts)
    parts = [
        _front_matter(model_type),
        _summary(facts, model_type),
        _use(facts, model_type),
        _data(facts),
        _training(facts),
        _evaluation(facts),
        _limits(),
        f"## Settings\n\n```yaml\n{dump_yaml(_settings(facts.config)).strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _home(facts: CardFacts) -> str | None:
    """`model_type` of the folder's config.json where transformers knows it."""
    try:
        return home_of(facts.config.model)
    except ConfigError:
        return None


def _front_matter(model_type: str | None) -> str:
    tags = ["llm_pretrain", "pretrained", *([model_type] if model_type else [])]
    library = "transformers" if model_type else "llm_pretrain"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _summary(facts: CardFacts, model_type: str | None) -> str:
    model, size = facts.config.model, count_parameters(facts.config.model)
    kind = f"`{HOMES[model_type].architecture}`" if model_type else "a model of llm_pretrain's own format"
    rows = [("Parameters", f"{size.total:,}")]
    if model.moe_layers:
        rows += [
            ("Parameters a token uses", f"{size.active:,}"),
            ("Experts", f"{model.num_experts}, {model.num_experts_per_tok} for each token"),
        ]
    rows += [
        ("Architecture", kind),
        ("Layers, width", f"{model.num_hidden_layers}, {model.hidden_size}"),
        ("Vocabulary", f"{facts.tokenizer_size:,} tokens ({model.vocab_size:,} rows)"),
        ("Weights", facts.config.checkpoint.weights_dtype + _average(facts.config)),
        ("Step", f"{facts.step:,}" + (", the lowest evaluation loss so far" if facts.is_best else "")),
    ]
    title = f"# {facts.config.run.name}"
    return f"{title}\n\nA language model pretrained from text by llm_pretrain.\n\n{_table(('', ''), rows)}"


def _use(facts: CardFacts, model_type: str | None) -> str:
    lines = ["## Use", "", "```sh", 'llm-pretrain generate . --prompt "Once upon"']
    lines += ["llm-pretrain chat ."] if facts.has_chat_template else []
    lines += ["llm-pretrain export . --to gguf --output model.gguf   # llama.cpp", "```"]
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
    return "\n".join(lines)


def _data(facts: CardFacts) -> str:
    total = sum(source.weight for source in facts.sources) or 1.0
    rows = [
        (source.label, f"{source.weight / total:.1%}", f"{source.documents:,}", f"{source.tokens:,}")
        for source in facts.sources
    ]
    table = _table(("Source", "Share of samples", "Documents", "Tokens"), rows)
    return f"## Data\n\n{table}\n\nTokenizer: SHA-256 `{facts.tokenizer_hash[:16]}` of its tokenizer.json."


def _training(facts: CardFacts) -> str:
    training, optimizer = facts.config.training, facts.config.optimizer
    rows = [
        ("Steps", f"{facts.step:,} of {training.max_steps:,}"),
        ("Tokens trained on", f"{facts.tokens_seen:,}"),
        ("Batch", f"{training.global_batch_size} sequences of {training.sequence_length} tokens"),
        ("Precision", training.precision),
        ("Optimizer", f"{optimizer.name}, learning rate {_rates(optimizer)}"),
        ("Processes", str(facts.world_size)),
        *((name, version) for name, version in facts.versions.items() if version),
    ]
    return f"## Training\n\n{_table(('', ''), rows)}"


def _average(config: Config) -> str:
    decay = config.optimizer.ema_decay
    return f", of the parameters averaged over steps (decay {decay:g})" if decay else ""


def _rates(optimizer: OptimizerConfig) -> str:
    if optimizer.name != "muon":
        return f"{optimizer.learning_rate:g}"
    return f"{optimizer.muon_learning_rate:g}, and {optimizer.learning_rate:g} of AdamW for what is no map"


def _evaluation(facts: CardFacts) -> str:
    if not facts.evaluation:
        return "## Evaluation\n\nNone was made."
    rows = [(name.removeprefix("eval/"), f"{value:.4f}") for name, value in sorted(facts.evaluation.items())]
    where = f"On the validation documents of the data, at step {facts.evaluation_step:,}"
    return f"## Evaluation\n\n{where}; loss in nats per token.\n\n{_table(('Metric', 'Value'), rows)}"


def _limits() -> str:
    return (
        "## Limits\n\nA base model continues text. It was trained on the data above and nothing else, and "
        "nobody has checked what it says; it can be wrong, and it can repeat what it has read."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _settings(config: Config) -> Config:
    """What describes the model: not where its run stood, nor which checkpoint an attempt went on from."""
    run = dataclasses.replace(config.run, output_dir=None)
    checkpoint = dataclasses.replace(config.checkpoint, resume="auto")
    return _portable(dataclasses.replace(config, run=run, checkpoint=checkpoint))


def _portable(value: Any) -> Any:
    """The configuration with paths of the machine cut down to their last part."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            each.name: _portable(getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.name not in _KEPT
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
