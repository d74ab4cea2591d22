"""`llm-pretrain configs`: foreign configurations as ours, each loss said; nothing foreign is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.corpora import make_tokenizer
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.config.loading import from_dict, load_config
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import read_yaml
from llm_pretrain.model.sizes import count_parameters


def imported(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[Config, str]:
    """The configuration that a command wrote, as `--config` reads it, and the file's comments."""
    file = tmp_path / "imported.yaml"
    assert main(["configs", *arguments, "--output", str(file), "--overwrite"]) == 0
    output = capsys.readouterr().out
    assert f"wrote  {file}" in output
    text = file.read_text()
    comments = " ".join(line.lstrip("# -") for line in text.splitlines() if line.startswith("#"))
    notes = [line.removeprefix("note   ") for line in output.splitlines() if line.startswith("note ")]
    assert all(note in comments for note in notes)
    return load_config(["--config", str(file)], needs_data=False), comments


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(["configs", *arguments]) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_listing_has_every_preset_with_its_size(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    presets = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    listed = {name: line for line in lines if (name := line.partition(" ")[0]) in presets}
    assert set(listed) == presets
    assert listed["olmoe-1b-7b"].split()[1:6] == ["6.92B", "1.28B", "16", "of", "8/64"]
    assert "1.41M*" in listed["quickstart"]
    assert "7 of 4/32+1, 1 dense" in listed["finegrained-moe-136m"]
    (tmp_path / "over.yaml").write_text("run: {name: over}\n")
    assert main(["configs", "--folder", str(tmp_path)]) == 0
    assert "extends another preset" in capsys.readouterr().out
    (tmp_path / "broken.yaml").write_text("model: {hidden_sizes: 3}\n")
    assert "broken.yaml: expected a configuration, found: model.hidden_sizes: no such" in refused(
        capsys, "--folder", str(tmp_path)
    )


SHAPE = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 999,
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 100, "tie_word_embeddings": True},
    "qwen3_moe": {
        "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}  # fmt: skip


def saved_config(name: str, folder: Path) -> Any:
    """transformers' configuration of an architecture, which is also written as config.json."""
    from transformers import AutoConfig  # takes a second, and every test process imports this file

    config = AutoConfig.for_model(name, **(SHAPE | FOLDERS[name]))
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folders_config_json_becomes_the_model_section(name, tmp_path, capsys):
    config_json = saved_config(name, tmp_path)
    (tmp_path / "model.safetensors").touch()
    make_tokenizer(tmp_path)
    config, comments = imported(capsys, tmp_path, "--from_pretrained", str(tmp_path))
    model = config.model
    assert (model.vocab_size, model.hidden_size, model.num_hidden_layers) == (999, 48, 3)
    assert model.tie_word_embeddings == config_json.tie_word_embeddings
    assert model.rms_norm_eps == config_json.rms_norm_eps
    assert model.rope_theta == config_json.rope_parameters["rope_theta"]
    assert model.qk_norm == (name == "qwen3_moe")
    assert (model.num_experts, model.first_k_dense_replace) == ((6, 1) if name == "qwen3_moe" else (0, 0))
    assert f"`init_from: {tmp_path}`" in comments
    assert f"prepare --tokenizer {tmp_path}`" in comments
    written = read_yaml((tmp_path / "imported.yaml").read_text())
    assert set(written) == {"model"}
    assert ("num_experts" in written["model"]) == (name == "qwen3_moe"), "a dense one leaves room to upcycle"


def test_minimind_3s_options(tmp_path, capsys):
    corpus = tmp_path / "pretrain_t2t_mini.jsonl"
    corpus.write_text('{"text": "a"}\n' * 5000)
    config, comments = imported(
        capsys, tmp_path, "--from_minimind",
        "torchrun --nproc_per_node 2 train_pretrain.py --use_moe 1 --batch_size 16 --accumulation_steps 4 "
        f"--learning_rate 1e-3 --dtype float16 --epochs 3 --data_path {corpus} --use_wandb "
        "--wandb_project mine --device cuda:0 --save_dir ../out --speed 9 --save_interval 1000 "
        "--num_workers 8",
    )  # fmt: skip
    model, training = config.model, config.training
    assert count_parameters(model).total == 198_416_640  # its README: 198M
    assert (model.num_experts, model.num_experts_per_tok, model.n_shared_experts) == (4, 1, 0)
    assert model.router_aux_loss_coef == pytest.approx(4e-3)
    assert (training.micro_batch_size, training.global_batch_size) == (16, 128)
    assert (training.sequence_length, training.precision, training.max_steps) == (
        340,
        "fp16",
        3 * 5000 // 128,
    )
    assert (config.optimizer.learning_rate, config.schedule.min_learning_rate) == (1e-3, 1e-4)
    assert (config.optimizer.weight_decay, config.optimizer.adam_beta2) == (0.01, 0.999)
    assert (config.logging.wandb_mode, config.logging.wandb_project) == ("online", "mine")
    assert config.checkpoint.save_steps == 250
    assert config.data.num_workers is None
    assert config.data.sources[0].store == "data/stores/pretrain_t2t_mini"
    assert f"--input {corpus} --vocab_size 6400" in comments
    for text in (
        "--speed 9, an option that",
        "--device cuda:0",
        "--save_dir ../out",
        "--num_workers 8",
        "taken as the options of",
    ):
        assert text in comments


def test_minimind_without_its_data_says_last_whose_max_steps_it_has(tmp_path, capsys):
    file, corpus = tmp_path / "mine.yaml", tmp_path / "corpus.jsonl"
    options = f"--epochs 2 --batch_size 8 --accumulation_steps 2 --data_path {corpus}"
    assert main(["configs", "--from_minimind", options, "--output", str(file)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "training.max_steps: 1000 is our default: make it 2 * the documents / 16" in last
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("  max_steps:")]
    assert line.startswith("  max_steps: 1000  # not MiniMind's")
    corpus.write_text('{"text": "a"}\n' * 80)
    assert main(["configs", "--from_minimind", options]) == 0
    assert "\n  max_steps: 10\n" in capsys.readouterr().out


def test_minimind_2s_numbers_are_those_of_its_options_time(capsys):
    """Before December 2025 aux_loss_alpha was 0.1, and the rate lr / 10 + 0.5 * lr * (1 + cos)."""
    for width, coefficient, rate in (("--dim 512", 0.8, 1.1e-3), ("--hidden_size 512", 0.08, 1e-3)):
        options = f"{width} --use_moe True --learning_rate 1e-3"
        assert main(["configs", "--minimind_version", "2", "--from_minimind", options]) == 0
        text = capsys.readouterr().out
        config = from_dict(read_yaml(text))
        assert config.model.router_aux_loss_coef == pytest.approx(coefficient)
        assert config.optimizer.learning_rate == pytest.approx(rate)
        assert config.schedule.min_learning_rate == pytest.approx(1e-4)
        assert f"MiniMind 2 {'until October' if coefficient == 0.8 else 'from December'} 2025" in text


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ("torchrun --nnodes=2 --nproc_per_node=8", 16),
        ("deepspeed --num_nodes 2 --num_gpus 4", 8),
        ("accelerate launch --num_machines 2 --num_processes 16", 16),
        ("python", 1),
    ],
)
def test_minimind_processes_are_counted_over_all_machines(launcher, processes, capsys):
    options = f"{launcher} train_pretrain.py --batch_size 4 --accumulation_steps 2"
    assert main(["configs", "--from_minimind", options]) == 0
    assert f"global_batch_size: {8 * processes}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data_path 'data/my books; rm'", "--input 'data/my books; rm' "),
        ("--\ud800 1", "not carried over: --\\ud800 1"),
        ("--hidden_size 500", "# - to be fixed: model.hidden_size: expected a multiple of"),
        ("--learning_rate inf", "# - to be fixed: optimizer.learning_rate: expected a finite number"),
    ],
)
def test_what_is_odd_is_quoted_escaped_or_noted(tmp_path, options, said):
    file = tmp_path / "ours.yaml"
    assert main(["configs", "--from_minimind", options, "--output", str(file)]) == 0
    assert said in " ".join(file.read_text().split("\n"))
    assert [path.name for path in tmp_path.iterdir()] == ["ours.yaml"]


def test_a_file_that_is_there_stays(tmp_path, capsys):
    file = tmp_path / "there.yaml"
    file.write_text("mine\n")
    line = refused(capsys, "--from_minimind", "--epochs 1", "--output", str(file), code=73)
    assert "expected a new file" in line
    assert file.read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]
    assert main(["configs", "--from_minimind", "--epochs 1"]) == 0
    assert capsys.readouterr().out.startswith("# Read from")
