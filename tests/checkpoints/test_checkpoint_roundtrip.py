"""What is restored is what was saved, to the last bit, and training goes on as if never interrupted."""

from __future__ import annotations

import dataclasses
import json
import platform

import pytest
import torch
from safetensors import safe_open
from support.checkpoint_helpers import FINGERPRINTS, Run, everything, same_bits
from torch import nn
from torch.amp.grad_scaler import GradScaler

from llm_pretrain import hardware
from llm_pretrain.checkpoints import tensor_files
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError, MismatchError
from llm_pretrain.hardware import environment
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.moe import update_router_bias
from llm_pretrain.training.model_setup import initialize_weights


@pytest.mark.parametrize("fused", [False, True])
def test_continues_bit_identically(tmp_path, fused):
    first = Run(tmp_path, fused=fused).train(3)
    path = first.save()
    saved = everything(first)
    resumed = Run(tmp_path, seed=1, fused=fused)
    found = resumed.restore()

    assert same_bits(everything(resumed), saved)
    assert found is not None
    assert (found.step, found.run.tokens_seen, found.run.wandb_id, found.run.world_size) == (3, 36, "abc", 1)
    assert (found.run.launcher, found.path, found.run.extra) == ("torchrun", path, {"skipped_in_a_row": 1})
    assert found.warnings == []
    assert same_bits(everything(resumed.train(4)), everything(first.train(4)))


def test_saving_changes_nothing(tmp_path):
    saving, plain = Run(tmp_path / "a"), Run(tmp_path / "b")
    for _ in range(3):
        saving.save()
        saving.train(1)
    assert same_bits(everything(saving), everything(plain.train(3)))


@pytest.mark.parametrize("fused", [False, True])
def test_moments_survive_a_change_of_implementation(tmp_path, fused):
    first = Run(tmp_path, fused=fused).train(3)
    first.save()
    resumed = Run(tmp_path, seed=1, fused=not fused)
    found = resumed.restore()
    assert found is not None
    assert found.warnings == []
    assert same_bits(everything(resumed), everything(first))
    assert resumed.optimizer.param_groups[0]["fused"] is (not fused)


@pytest.mark.parametrize("pending_gradients", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_moments_reach_any_optimizer(tmp_path, steps_before, pending_gradients):
    first = Run(tmp_path).train(3)
    first.save()
    resumed = Run(tmp_path, seed=1).train(steps_before)
    if pending_gradients:
        resumed.model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    resumed.restore()
    assert same_bits(everything(resumed), everything(first))
    assert same_bits(everything(resumed.train(1)), everything(first.train(1)))


def test_an_optimizer_that_never_stepped_stays_so(tmp_path):
    first = Run(tmp_path)
    first.save()
    assert not first.optimizer.state
    resumed = Run(tmp_path, seed=1).train(2)
    resumed.restore()
    assert not resumed.optimizer.state
    assert same_bits(everything(resumed.train(2)), everything(first.train(2)))


def test_a_parameter_without_state_stays_so(tmp_path):
    runs = [Run(tmp_path), Run(tmp_path, seed=1)]
    for run in runs:
        run.model.experts.requires_grad_(False)
        run.model.norm.weight.register_hook(lambda gradient: None)
    runs[0].train(2)
    runs[0].optimizer.state.pop(runs[0].model.norm.weight)
    runs[0].save()
    runs[1].restore()
    assert same_bits(everything(runs[1]), everything(runs[0]))
    assert runs[1].model.norm.weight not in runs[1].optimizer.state


def test_every_finite_bit_pattern_survives(tmp_path):
    """A zero's sign, the smallest and the largest; of those so many that their sum is no finite number."""
    first = Run(tmp_path).train(1)
    patterns = [0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x7F7FFFFF, 0x7F7FFFFF, 0x00800000]
    bits = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    with torch.no_grad():
        first.model.experts.view(-1)[: len(bits)] = bits
    first.save()
    resumed = Run(tmp_path, seed=1)
    resumed.restore()
    assert same_bits(everything(resumed), everything(first))


def test_tied_parameters_are_saved_once_and_stay_tied(tmp_path):
    first = Run(tmp_path).train(1)
    path = first.save()
    names = [name for file in path.glob("*.safetensors") for name in safe_open(file, "pt").keys()]  # noqa: SIM118  # a handle, not a dict
    assert "embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    resumed = Run(tmp_path, seed=1)
    resumed.restore()
    assert resumed.model.lm_head.weight is resumed.model.embed_tokens.weight
    assert "rotary" not in names


def test_the_decoder_comes_back_whole(tmp_path):
    config = ModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        router_bias_update_rate=0.01,
    )
    run = Run(tmp_path)
    models = []
    for seed in range(2):
        models.append(Decoder(config))
        initialize_weights(models[-1], seed)
        optimizer = torch.optim.AdamW(models[-1].parameters())
        if seed == 0:
            update_router_bias(models[0], torch.arange(8).view(2, 4), 0.01)
            path = run.store.write(run.store.stage(models[0], optimizer, None, run.facts()))
        else:
            found = run.store.find(expected=lambda step: FINGERPRINTS)
            assert found is not None
            run.store.load(found, models[1], optimizer, None)
    saved, restored = (model.state_dict() for model in models)
    assert same_bits(restored, saved)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert saved[bias].abs().sum() > 0
    content = json.loads((path / "manifest.json").read_text())
    assert content["tensors"][bias] == {"dtype": "float32", "shape": [4]}
    assert content["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(content["tensors"]) | set(content["tied"]) == set(saved)


def test_wrappers_leave_no_trace_in_names(tmp_path):
    first = Run(tmp_path).train(1)
    first.save(torch.compile(first.model, backend="eager"))
    resumed = Run(tmp_path, seed=1)
    resumed.restore()
    assert same_bits(everything(resumed), everything(first))


def test_large_states_are_split_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "BYTES_PER_FILE", 1500)
    first = Run(tmp_path).train(2)
    assert len(list(first.save().glob("*.safetensors"))) > 2
    resumed = Run(tmp_path, seed=1)
    resumed.restore()
    assert same_bits(everything(resumed), everything(first))


def test_without_a_checkpoint_nothing_is_touched(tmp_path):
    run = Run(tmp_path / "none")
    before = everything(run)
    assert run.restore() is None
    assert not run.optimizer.state
    assert same_bits(everything(run), before)
    assert run.store.committed() == []
    assert run.store.committed() == []


def test_half_precision_is_neither_saved_nor_loaded(tmp_path):
    run = Run(tmp_path).train(1)
    run.save()
    half = Run(tmp_path)
    half.model.bfloat16()
    with pytest.raises(MismatchError, match=r"experts is float32\[3, 8, 8\] in the checkpoint, bfloat16"):
        half.restore()
    with pytest.raises(CheckpointError, match="expected a parameter in float32, found bfloat16"):
        half.save()
    assert run.store.committed() == [1]


def test_mismatches_are_named_with_both_values(tmp_path):
    run = Run(tmp_path).train(1)
    path = run.save()
    other = {**FINGERPRINTS, "model.hidden_size": "16", "new.key": "1"}
    del other["data.store.0"]
    before = everything(run)
    with pytest.raises(MismatchError) as caught:
        run.restore(expected=other)
    message = str(caught.value)
    assert str(path) in message
    assert "model.hidden_size is 8 in the checkpoint, 16 here" in message
    assert "data.store.0 is ab12 in the checkpoint, absent here" in message
    assert "new.key is absent in the checkpoint, 1 here" in message
    assert "global_batch_size" not in message
    assert "\n" not in message
    assert caught.value.shared
    assert same_bits(everything(run), before)


def test_tensor_mismatches_are_all_named(tmp_path):
    Run(tmp_path).train(1).save()
    wider = Run(tmp_path, width=16)
    wider.model.register_buffer("extra", torch.zeros(2))
    with pytest.raises(MismatchError) as caught:
        wider.restore()
    for text in (
        "embed_tokens.weight is float32[32, 8] in the checkpoint, float32[32, 16] here",
        "experts is float32[3, 8, 8] in the checkpoint, float32[3, 16, 16] here",
        "norm.weight is float32[8] in the checkpoint, float32[16] here",
        "extra is absent in the checkpoint, float32[2] here",
    ):
        assert text in str(caught.value)


def test_untied_and_tied_do_not_mix(tmp_path):
    Run(tmp_path).train(1).save()
    untied = Run(tmp_path)
    untied.model.lm_head.weight = nn.Parameter(untied.model.embed_tokens.weight.detach().clone())
    with pytest.raises(
        MismatchError, match=r"lm_head\.weight is tied to embed_tokens.weight in the checkpoint"
    ):
        untied.restore()


def test_another_optimizer_is_a_mismatch(tmp_path):
    run = Run(tmp_path).train(1)
    run.save()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match="optimizer is AdamW in the checkpoint, SGD here"):
        run.restore()


def test_hyper_parameters_are_the_configurations(tmp_path):
    first = Run(tmp_path).train(1)
    first.optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    first.optimizer.param_groups[0]["steps_averaged"] = 7
    first.save()
    resumed = Run(tmp_path)
    resumed.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    found = resumed.restore()
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["steps_averaged"], group["betas"]) == (0.1 + 0.2, 7, (0.8, 0.9))
    assert found is not None
    assert [
        w for w in found.warnings if "betas was [0.9, 0.999]" in w and "[0.8, 0.9]" in w
    ] == found.warnings


def make_scaler(**options) -> GradScaler:
    scaler = GradScaler("cpu", **options)
    if scaler.is_enabled():
        scaler.scale(torch.ones(()))
    return scaler


def test_scaler_is_restored_exactly(tmp_path):
    first = Run(tmp_path).train(1)
    first.scaler = make_scaler(init_scale=3.0, growth_interval=5)
    first.scaler.update(new_scale=float(torch.tensor(1 / 3)))
    first.save()
    resumed = Run(tmp_path)
    resumed.scaler = make_scaler()
    found = resumed.restore()
    assert resumed.scaler.state_dict() == first.scaler.state_dict()
    assert found is not None
    assert found.warnings == []


@pytest.mark.parametrize("saved", [None, make_scaler(enabled=False)])
def test_an_enabled_scaler_starts_fresh_where_none_was_saved(tmp_path, saved):
    first = Run(tmp_path).train(1)
    first.scaler = saved
    first.save()
    resumed = Run(tmp_path)
    resumed.scaler = make_scaler(init_scale=1024.0)
    found = resumed.restore()
    assert resumed.scaler.get_scale() == 1024.0
    assert found is not None
    assert found.warnings == ["the checkpoint has no loss scale: it starts at 1024"]


@pytest.mark.parametrize("current", [None, make_scaler(enabled=False)])
def test_a_saved_scale_is_reported_where_no_scaler_is(tmp_path, current):
    first = Run(tmp_path).train(1)
    first.scaler = make_scaler(init_scale=8.0)
    first.save()
    resumed = Run(tmp_path)
    resumed.scaler = current
    found = resumed.restore()
    assert found is not None
    assert len(found.warnings) == 1
    assert "loss scale 8 is not used" in found.warnings[0]


def test_a_variable_that_changes_the_arithmetic_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    saved = environment(torch.device("cpu"))
    Run(tmp_path).train(1).save()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    found = Run(tmp_path).restore()
    assert found is not None
    assert [warning.split(" when ")[0] for warning in found.warnings] == [
        f"cpu_capability was {saved['cpu_capability']}",
        "ATEN_CPU_CAPABILITY was unset",
    ]


def test_another_number_of_threads_is_told(tmp_path, monkeypatch):
    Run(tmp_path).train(1).save()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    found = Run(tmp_path).restore()
    assert found is not None
    (warning,) = found.warnings
    assert warning.startswith(
        f"cpu_threads was {threads} when the checkpoint was saved and is {threads + 1} now"
    )


def test_manifest_tells_everything(tmp_path):
    run = Run(tmp_path).train(3)
    run.scaler = make_scaler()
    path = run.save()
    content = json.loads((path / "manifest.json").read_text())
    assert content["format_version"] == 1
    assert content["run"] == dataclasses.asdict(run.facts())
    assert content["environment"]["torch"] == torch.__version__
    assert content["environment"]["llm_pretrain"] == hardware.__version__
    assert content["environment"]["python"] == platform.python_version()
    assert content["tensors"]["optimizer.state.experts.exp_avg"] == {"dtype": "float32", "shape": [3, 8, 8]}
    assert content["scalars"]["optimizer.state.experts.step"] == {"dtype": "float32", "value": 3.0}
    assert content["scalars"]["updates"] == {"dtype": "int64", "value": 3}
    assert [group["weight_decay"] for group in content["optimizer"]["groups"]] == [0.1, 0.0]
    assert content["scaler"]["scale"] == 65536.0
    files = {file.name: file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"}
    assert {name: entry["bytes"] for name, entry in content["files"].items()} == files


def test_changed_versions_are_reported(tmp_path, monkeypatch):
    run = Run(tmp_path).train(1)
    run.save()
    was = hardware.__version__
    monkeypatch.setattr(hardware, "__version__", "99.0")
    found = run.restore()
    assert found is not None
    assert len(found.warnings) == 1
    assert f"llm_pretrain was {was}" in found.warnings[0]
    assert "99.0 now" in found.warnings[0]


def test_extra_comes_back_as_json(tmp_path):
    run = Run(tmp_path).train(1)
    others = {"tiny": 5e-324, "large": 2**63 + 1, "a byte that is no text": "\udcff", "zero": "\0"}
    extra = {"order": {10: (1, 2), 9: None}, **others}
    run.save(extra=extra)
    found = run.restore()
    assert found is not None
    assert found.run.extra == {"order": {"10": [1, 2], "9": None}, **others}
