"""`open_model`: the right folder, the right bits, and one line for everything else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.finished_runs import FinishedRun
from support.launching import checkpoint_tensors

from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.errors import CheckpointError


@pytest.fixture
def folder(finished_run: Callable[[str], FinishedRun], tmp_path: Path) -> Path:
    """A copy to damage: checkpoints and weights of steps 2 and 4."""
    return finished_run("mixture").copy(tmp_path / "run").folder


def test_a_checkpoint_is_read_to_the_last_bit(folder: Path):
    opened = open_model(folder / "checkpoints" / "step-00000002")
    saved = checkpoint_tensors(folder, 2)
    state = opened.model.state_dict()
    assert all(torch.equal(state[name], saved[name]) for name in state if name in saved)
    assert (
        len([name for name in saved if not name.startswith("optimizer.")]) >= len(state) - 1
    )  # the tied head
    assert (opened.kind, opened.step, opened.token_ids) == ("checkpoint", 2, {})
    assert not opened.model.training
    assert opened.run is not None
    assert (opened.tokenizer_folder / "tokenizer.json").is_file()


@pytest.mark.parametrize(("named", "used"), [("sdpa", "sdpa"), ("varlen", "auto")])
def test_a_checkpoint_has_the_kernels_of_its_run_but_those_of_cuda(folder: Path, named: str, used: str):
    config = folder / "config.yaml"
    text = config.read_text().replace("attention_implementation: auto", f"attention_implementation: {named}")
    text = text.replace("precision: fp32", "precision: bf16")  # which varlen needs
    config.write_text(text.replace("loss_implementation: auto", "loss_implementation: full"))
    kernels = open_model(folder).model.model.kernels
    assert (kernels.attention, kernels.loss) == (used, "full")


def test_what_a_folder_stands_for(folder: Path):
    def found(name: str) -> str:
        return str(open_model(folder / name).path.relative_to(folder))

    assert found("") == found("checkpoints") == found("checkpoints/step-00000004")
    assert found("weights") == "weights/step-00000004"
    shutil.copytree(folder / "weights" / "step-00000004", folder / "weights" / "step-00000007")
    assert found("") == "weights/step-00000007"
    (folder / "weights" / "best" / "best.json").write_text('{"step": 2, "eval/loss": 1.5}')
    best = open_model(folder / "weights" / "best")
    assert (best.kind, best.step) == ("weights", 2)
    assert best.token_ids["eos_token_id"] is not None
    assert best.run is not None


def test_the_tokenizer_is_found_where_the_store_is_gone(folder: Path, tmp_path: Path):
    config = (folder / "config.yaml").read_text()
    store = open_model(folder).run.data.sources[0].store
    (folder / "config.yaml").write_text(config.replace(store, str(tmp_path / "gone")))
    assert open_model(folder).tokenizer_folder == folder / "weights" / "step-00000004"
    for file in (folder / "weights").glob("*/tokenizer.json"):
        other = json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}
        file.write_text(json.dumps(other))  # not the tokenizer that the run was trained with
    assert open_model(folder).tokenizer_folder is None


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: flip_a_bit(next(path.glob("*.safetensors"))),
            r"is damaged: .*safetensors: expected SHA-256",
        ),
        (
            lambda path: (path.parent.parent / "config.yaml").unlink(),
            r"config\.yaml: expected the configuration",
        ),
        (
            lambda path: (path.parent.parent / "config.yaml").write_text("{"),
            r"config\.yaml: expected a run's",
        ),
        (
            lambda path: edit(path, "rope_theta: 1000000.0", "rope_theta: 10000.0"),
            r"config\.yaml: expected model\.rope_theta 1000000\.0.*found 10000\.0",
        ),
    ],
    ids=["bit", "no-config", "broken-config", "other-config"],
)
def test_damage_is_named_in_one_line(folder: Path, damage, message):
    path = folder / "checkpoints" / "step-00000004"
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def edit(path: Path, old: str, new: str) -> None:
    file = path.parent.parent / "config.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_broken_json_beside_weights_is_named(folder: Path):
    path = folder / "weights" / "step-00000004"
    (path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected .*, found: "):
        open_model(path)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text()) | {"hidden_size": 8}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"expected the tensors that config\.json describes"):
        open_model(path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_a_pipe_in_weights_is_not_waited_for(folder: Path, name: str):
    weights = folder / "weights" / "step-00000004"
    (weights / name).unlink()
    os.mkfifo(weights / name)
    if name.startswith(("config", "model")):
        with pytest.raises(CheckpointError, match=f"{name}: expected .* found: .*no plain file"):
            open_model(weights)
    else:
        opened = open_model(weights)  # as without the file
        assert (opened.tokenizer_folder is None) == (name == "tokenizer.json")
