"""The presets in configs/: the size in the first line is the model's, the data's commands work, it trains."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from support.launching import ROOT, Finished, train

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.memory import CUDA_CONTEXT, estimate_memory
from llm_pretrain.model.sizes import count_parameters
from llm_pretrain.training.saving import CheckpointManager

PRESETS = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "\n  hidden_size:" in path.read_text()  # the others go over one of these
]
FIRST_LINE = re.compile(
    r"# (\S+): total ([\d,]+) parameters, active ([\d,]+)(?:, with a vocabulary of ([\d,]+))?"
)
PUBLISHED = {
    "minimind-26m": 25.83, "minimind-104m": 104, "minimind-moe-145m": 145, "minimind3-64m": 64,
    "minimind3-moe": 198, "gpt2-124m": 124, "smol-135m": 134.5, "qwen3-0.6b": 596, "tinyllama-1.1b": 1100,
    "olmoe-1b-7b": 6919, "qwen3-30b-a3b": 30532,
}  # fmt: skip
"""Millions of parameters: what the model's own publication says, to the digits that it gives."""
TOO_LARGE = {"qwen3-0.6b", "tinyllama-1.1b", "olmoe-1b-7b", "qwen3-30b-a3b"}
"""To be trained here even for a step: their shapes are built on the meta device only."""
PROCESSES = {
    "char-0.8m": (1,),
    "tiny-dense": (1, 2),
    "tiny-moe": (1, 2),
    "ladder": (1,),  # runs of a ladder are of one process
    "quickstart": (1, 2),
    "quickstart-chat": (1, 2),
    "gpt2-124m": (1, 2, 4, 8),
    "qwen3-30b-a3b": (4, 8, 64),
}
"""Numbers of processes that a preset's batch divides into; the others' into 1, 2, 4 and 8."""


def number(text: str) -> int:
    return int(text.replace(",", ""))


def loaded(preset: Path) -> Config:
    return load_config(["--config", str(preset)])


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_the_first_line_says_name_and_size(preset: Path):
    match = FIRST_LINE.fullmatch(preset.read_text().splitlines()[0])
    assert match, "`# NAME: total N parameters, active N`"
    config = loaded(preset)
    model = config.model
    assert (match[4] is None) == (model.vocab_size is not None)
    if match[4]:
        model = dataclasses.replace(model, vocab_size=number(match[4]))
    assert match[1] == preset.stem == config.run.name
    assert (number(match[2]), number(match[3])) == count_parameters(model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_its_published_size(name: str):
    total = count_parameters(loaded(ROOT / "configs" / f"{name}.yaml").model).total / 1e6
    digits = len(str(PUBLISHED[name]).partition(".")[2])
    assert round(total, digits) == PUBLISHED[name]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_sound_at_usual_numbers_of_processes(preset: Path, monkeypatch: pytest.MonkeyPatch):
    for world_size in PROCESSES.get(preset.stem, (1, 2, 4, 8)):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        config = loaded(preset)
    assert config.schedule.warmup_steps > 0
    assert config.optimizer.learning_rate > config.schedule.min_learning_rate


def test_the_kubernetes_jobs_settings_fit_its_pods(monkeypatch: pytest.MonkeyPatch):
    _, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(int(variables["PODS"]) * int(variables["PROCESSES"])))
    load_config(container["args"], needs_data=False)
    asked, allowed = container["resources"]["requests"], container["resources"]["limits"]
    assert asked == allowed
    assert str(allowed["nvidia.com/gpu"]) == variables["PROCESSES"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_fits_one_gpu_of_80_gb_or_eight_with_its_own_strategy(name: str):
    given = ["--config", name, "--training.precision", "bf16", "--model.vocab_size"]
    vocabulary = load_config(["--config", name]).model.vocab_size or 6400
    for compiled in ("on", "off"):
        options = [*given, str(vocabulary), "--training.compile", compiled]
        config = load_config(options, has_bf16=True)
        world_size = 8 if config.distributed.strategy == "fsdp" else 1
        assert estimate_memory(config, world_size, on_gpu=True).peak + CUDA_CONTEXT <= 80e9


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_the_datas_commands_make_the_presets_store(preset: Path):
    """`llm-pretrain tokenizer` and `prepare` take the options, and each makes what the next one needs."""
    lines = [line for line in preset.read_text().splitlines() if line.startswith("#   llm-pretrain ")]
    if preset.stem in ("ladder", "quickstart", "tiny-dense", "tiny-moe"):
        assert not lines, "their store is `make store`'s"
        return
    parsed = {}
    for line in lines:
        name, *words = shlex.split(line)[2:]
        parser = argparse.ArgumentParser(prog=name)
        import_module(f"llm_pretrain.commands.{name}").add_arguments(parser)
        parsed[name] = parser.parse_args(words)
    config = loaded(preset)
    assert parsed["prepare"].output == config.data.sources[0].store
    if preset.stem == "quickstart-chat":  # on the quickstart's weights, and so with its tokenizer
        assert parsed["prepare"].tokenizer == "data/tokenizers/stdlib"
        return
    assert list(parsed) == ["tokenizer", "prepare"]
    assert parsed["tokenizer"].output == parsed["prepare"].tokenizer
    if config.model.vocab_size is not None:
        assert parsed["tokenizer"].vocab_size == config.model.vocab_size


SHORTENED = ("--model.num_hidden_layers", "2", "--model.vocab_size", "null", "--training.precision", "fp32")
"""Two layers of the preset's width, and the tokenizer's vocabulary; many CPUs only emulate bf16."""


def check_step(preset: Path, store: Path, folder: Path, *more: str) -> None:
    """A preset's model trains for one step on short sequences."""
    config = loaded(preset)
    code = train(
        *("--config", str(preset), "--data.sources", f"[{{store: {store}}}]"),
        *("--run.output_dir", str(folder), "--training.sequence_length", "32"),
        *("--training.micro_batch_size", "2", "--training.global_batch_size", "4"),
        *("--training.max_steps", "1", "--schedule.warmup_steps", "1", "--schedule.decay_steps", "null"),
        *("--evaluation.eval_steps", "0", "--checkpoint.save_steps", "0", "--logging.logging_steps", "1"),
        *("--logging.wandb_mode", "disabled", "--distributed.cpu_threads", "1"),
        *("--model.init_from", "null", *more),
    )
    assert code == 0
    (row,) = Finished(0, "", folder).rows.values()
    assert row["train/skipped"] is None
    assert 4.0 < row["train/loss"] < 16.0
    assert row["train/grad_norm"] > 0
    assert row["train/learning_rate"] == config.optimizer.learning_rate
    assert ("moe/load" in row) == (config.model.num_experts > 0)
    for load, layer in zip(row.get("moe/load", ()), config.model.moe_layers, strict=False):  # two layers
        assert sum(load) == pytest.approx(1)
        assert row[f"moe/layer_{layer}/load_max"] == pytest.approx(max(load) * config.model.num_experts)
        assert row[f"moe/layer_{layer}/dead_experts"] == load.count(0)


@pytest.fixture
def no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model's checkpoint is as large as it is."""
    monkeypatch.setattr(CheckpointManager, "save", lambda self, progress, *, last: None)


@pytest.mark.parametrize("name", ["char-0.8m", "minimind-26m", "quickstart-chat"])
def test_two_layers_of_a_preset_take_a_step(
    name: str, plain_store: Path, tmp_path: Path, no_checkpoints: None
):
    check_step(ROOT / "configs" / f"{name}.yaml", plain_store, tmp_path / "run", *SHORTENED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [path for path in PRESETS if path.stem not in TOO_LARGE], ids=lambda path: path.stem
)
def test_a_whole_preset_takes_a_step(preset: Path, plain_store: Path, tmp_path: Path, no_checkpoints: None):
    check_step(preset, plain_store, tmp_path / "run")
