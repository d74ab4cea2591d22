"""What runs is what was asked for, and every rank takes part in what needs all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.engines import reset_accelerate, small_config
from support.launching import run_options

import train_pretrain
import train_pretrain_accelerate
from llm_pretrain.config.distributed_config import MeshSizes
from llm_pretrain.data.assembly import Batch
from llm_pretrain.data.loader import evaluation_batches
from llm_pretrain.data.store import TokenStore
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.checks import check_accelerate_settings, check_strategy
from llm_pretrain.model.decoder import Decoder, DecoderOutput, full_precision_modules
from llm_pretrain.runs.folder import RunFolder
from llm_pretrain.training.evaluation import Evaluator, Samples
from llm_pretrain.training.model_setup import initialize_weights


def test_a_difference_between_asked_and_set_up_names_both(plain_store: Path):
    config = small_config(plain_store, distributed={"strategy": "fsdp"})
    for kind, found in (("MULTI_CPU", "ddp"), ("MULTI_GPU", "ddp"), ("DEEPSPEED", "deepspeed")):
        with pytest.raises(ConfigError, match=f"strategy: fsdp, but Accelerate has set up {found} .{kind}"):
            check_strategy(config, kind, 2)
    with pytest.raises(ConfigError, match=r"strategy: ddp, but Accelerate has set up fsdp .FSDP"):
        check_strategy(small_config(plain_store), "FSDP", 2)
    check_strategy(config, "FSDP", 2)
    check_strategy(config, "NO", 1)
    with pytest.raises(ConfigError, match="restart a notebook's kernel"):  # an earlier training's
        check_strategy(config, "DEEPSPEED", 1)


def test_a_launched_mesh_is_the_configured_one(plain_store: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"USE_PARALLELISM_CONFIG": "true", "USE_FSDP": "true"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = small_config(plain_store, distributed={"strategy": "fsdp", "dp_replicate_size": 2})
    for name, own, wrong, said in (
        ("dp_replicate", "2", "4", "distributed.dp_replicate_size: 2"),
        ("dp_shard", "4", "2", "distributed.dp_shard_size: 4"),
        ("tp", "1", "2", "distributed: its fields set the mesh"),
    ):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", wrong)
        with pytest.raises(ConfigError, match=f"^{said}, but .*_{name}_size is {wrong}, not {own};"):
            check_accelerate_settings(config, 8)
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", own)
        check_accelerate_settings(config, 8)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend is inductor"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "use_megatron_lm"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params is true"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "training.activation_checkpointing: false"),
    ],
)
def test_what_no_field_of_ours_stands_for_is_refused(
    plain_store: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
):
    defaults = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    defaults |= {"FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false"}
    for name, value in defaults.items():
        monkeypatch.setenv(name, value)
    config = small_config(plain_store, distributed={"strategy": "fsdp"})
    check_accelerate_settings(config, 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        check_accelerate_settings(config, 1)


def test_one_training_s_strategy_is_not_the_next_one_s_launch(
    plain_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a notebook's kernel, where several trainings follow one another."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    reset_accelerate()
    for number, strategy in enumerate(("fsdp", "fsdp", "ddp")):
        assert train_pretrain_accelerate.main(short_run(plain_store, tmp_path / str(number), strategy)) == 0
    assert "ACCELERATE_USE_FSDP" not in os.environ
    # before it is refused, DeepSpeed's rendezvous of one process is in the environment
    with patch.dict(os.environ), pytest.raises(SystemExit) as stopped:
        train_pretrain_accelerate.main(short_run(plain_store, tmp_path / "zero", "deepspeed"))
    assert stopped.value.code == ConfigError.exit_code
    reset_accelerate()


def short_run(store: Path, folder: Path, strategy: str) -> list[str]:
    return run_options(
        "tiny-dense",
        store,
        "training.max_steps=1 training.global_batch_size=4 evaluation.eval_steps=0 "
        f"schedule.warmup_steps=0 logging.report=false distributed.strategy={strategy}",
        folder=folder,
    )


def test_deepspeed_by_hand_names_the_script_that_runs_it(plain_store: Path):
    config = small_config(plain_store, distributed={"strategy": "deepspeed"})
    with pytest.raises(ConfigError, match=r"found deepspeed, which train_pretrain_accelerate\.py runs"):
        train_pretrain.TorchrunEngine(config)


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_layers_matrices_are_left_for_low_precision(plain_store: Path, tied: bool):
    config = small_config(plain_store, model={"tie_word_embeddings": tied, "n_shared_experts": 1})
    model = Decoder(config.model)
    exempt = {id(p) for module in full_precision_modules(model) for p in module.parameters()}
    left = {name for name, p in model.named_parameters() if id(p) not in exempt}
    assert left
    assert all(".layers." in name and "norm" not in name and "gate.weight" not in name for name in left)
    assert {name.rpartition("mlp.")[2] for name in left if "mlp" in name} == {
        *("experts.gate_up_proj", "experts.down_proj"),
        *(f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    modules = full_precision_modules(model)
    assert modules[0] is model.model.embed_tokens
    assert modules[-1] is model.lm_head


class OneOfTwo:
    """One of two ranks, of which the other is asked to stop after `stop_after` rounds."""

    rank, world_size, device = 1, 2, torch.device("cpu")
    place = Place(MeshSizes(dp_shard=2), data=1)

    def __init__(self, model: Decoder, stop_after: int = 99):
        self.model, self.stop_after = model, stop_after
        self.rounds = 0
        self.tokens: list[int] = []

    def forward(self, batch: Batch) -> DecoderOutput:
        self.tokens.append(batch.num_loss_tokens)
        return self.model(**batch.model_inputs())

    def reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        self.rounds += 1
        return [value + int(self.rounds > self.stop_after) for value in values]

    def gather_objects(self, value: object) -> list[object]:
        return [value, value]


@pytest.fixture
def model(plain_store: Path) -> Decoder:
    model = Decoder(small_config(plain_store).model)
    initialize_weights(model, 0)
    return model


def evaluator(store: Path, engine: OneOfTwo, *, together: bool) -> Evaluator:
    batches = list(evaluation_batches(small_config(store)))[:3]
    assert len(batches) == 3
    return Evaluator(
        engine,
        engine.place,
        engine.forward,
        batches,
        TokenStore(store),
        lambda: False,
        is_collective=together,
    )


def test_a_rank_without_a_batch_computes_an_empty_one(plain_store: Path, model: Decoder):
    together, apart = OneOfTwo(model), OneOfTwo(model)
    metrics = evaluator(plain_store, together, together=True)(together.model)
    assert metrics == evaluator(plain_store, apart, together=False)(apart.model)
    assert metrics
    assert len(together.tokens) == 2
    assert together.tokens == [*apart.tokens, 0]


def test_ranks_give_up_together(plain_store: Path, model: Decoder):
    engine = OneOfTwo(model, stop_after=1)
    assert evaluator(plain_store, engine, together=True)(engine.model) is None
    assert len(engine.tokens) == 1


def test_samples_of_all_ranks_are_those_of_one(plain_store: Path, model: Decoder, tmp_path: Path):
    """Also where a text ends early: it is cut afterwards, and the number of forward passes stays the same."""
    store, passes = TokenStore(plain_store), []
    model.register_forward_hook(lambda *_: passes.append(1))

    def sampled(seed: int, *, together: bool) -> tuple[list[str], int]:
        evaluation = {"sample_prompts": ["a"], "sample_tokens": 12}
        config = small_config(plain_store, evaluation=evaluation, run={"seed": seed})
        samples = Samples(config, RunFolder(tmp_path), store, is_collective=together)
        assert samples.tokenizer is not None
        passes.clear()
        return samples._continuations(model, samples.tokenizer), len(passes)

    for seed in range(1000):
        texts, count = sampled(seed, together=False)
        if seed % 100 == 0 or count < 12:
            assert sampled(seed, together=True) == (texts, 12)
        if count < 12:
            return
    raise AssertionError("no text ended early")
