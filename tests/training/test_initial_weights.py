"""Starting from a weights folder: the same function as the folder's, or one line that says why not."""

from __future__ import annotations

import dataclasses
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.corpora import make_tokenizer
from support.launching import assert_same_tensors, checkpoint_tensors, launch, train

import llm_pretrain.training.model_setup as model_setup
from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.loading import dump_yaml
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, DataConfig, SourceConfig
from llm_pretrain.distributed.pipeline import keep_stages
from llm_pretrain.errors import ConfigError, PretrainError
from llm_pretrain.export.config_json import huggingface_config, native_config
from llm_pretrain.export.huggingface import TensorFiles, to_huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

DENSE = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.1,  # logits far from uniform, so that a difference shows
)
TOKENS = torch.randint(0, 259, (2, 40), generator=torch.Generator().manual_seed(3))
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def built(config: ModelConfig, seed: int) -> Decoder:
    model = Decoder(config).eval()
    initialize_weights(model, seed)
    return model


def write_folder(folder: Path, config: ModelConfig, seed: int = 5) -> Decoder:
    """A folder as Hugging Face's, and the decoder that is in it."""
    model = built(config, seed)
    folder.mkdir(parents=True)
    save_file(to_huggingface(model.state_dict(), config, torch.float32), folder / "model.safetensors")
    text = json.dumps(huggingface_config(config, **IDS, dtype="fp32"))
    (folder / "config.json").write_text(text)
    return model


def load(folder: Path, config: ModelConfig, **sections: object) -> tuple[Decoder, list[str]]:
    """A decoder that starts from `folder`, and the notes."""
    config = dataclasses.replace(config, init_from=str(folder))
    model = built(config, 0)
    return model, model_setup.load_initial_weights(model, Config(model=config, **sections))  # type: ignore[arg-type]


def problems_of(folder: Path, config: ModelConfig, **sections: object) -> tuple[str, ...]:
    with pytest.raises(PretrainError) as caught:
        load(folder, config, **sections)
    lines = caught.value.problems if isinstance(caught.value, ConfigError) else (str(caught.value),)
    assert all("\n" not in line for line in lines)
    return lines


@torch.no_grad()
def distance(left: Decoder, right: Decoder, rows: int = 320) -> float:
    """Largest difference of the logits of the first `rows` ids."""
    a, b = left(TOKENS).logits, right(TOKENS).logits
    return float((a[..., :rows] - b[..., :rows]).abs().max())


MOE = dataclasses.replace(DENSE, num_experts=6, num_experts_per_tok=2)


@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        dataclasses.replace(DENSE, qk_norm=False, tie_word_embeddings=False),
        dataclasses.replace(MOE, first_k_dense_replace=1, norm_topk_prob=False),
    ],
    ids=["qwen3", "llama", "qwen3_moe"],
)
def test_a_run_starts_with_the_folders_weights_to_the_last_bit(tmp_path: Path, config: ModelConfig):
    theirs = write_folder(tmp_path / "folder", config)
    ours, notes = load(tmp_path / "folder", config)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert notes == [f"started from the weights in {tmp_path / 'folder'}"]


@pytest.mark.parametrize(
    ("schedule", "tied", "is_upcycled"),
    [("1f1b", True, False), ("1f1b", False, True), ("zbv_zero_bubble", True, True)],
    ids=["tied", "upcycled", "zbv"],
)
def test_the_stages_of_a_pipeline_start_with_their_parts(
    tmp_path: Path, schedule: str, tied: bool, is_upcycled: bool
):
    source = dataclasses.replace(DENSE, num_hidden_layers=6, tie_word_embeddings=tied)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    target = dataclasses.replace(source, **experts if is_upcycled else {}, init_from=str(tmp_path / "folder"))
    write_folder(tmp_path / "folder", source)
    stages = DistributedConfig(strategy="fsdp", pp_size=3, pp_schedule=schedule)  # type: ignore[arg-type]
    config = Config(model=target, distributed=stages)
    whole, found = built(target, 0), set()
    model_setup.load_initial_weights(whole, config)
    for rank in range(3):
        part = built(target, 0)
        keep_stages(part, config, stages.stages(rank))
        model_setup.load_initial_weights(part, config)
        own = part.state_dict()
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in own.items())
        found |= own.keys()
    assert found == whole.state_dict().keys()


def test_two_layers_of_the_folder_are_in_memory_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The one that is read, and the one before it."""
    config = dataclasses.replace(DENSE, num_hidden_layers=6)
    write_folder(tmp_path / "folder", config)
    read: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    read_tensor = TensorFiles.read

    def watched(files: TensorFiles, name: str) -> torch.Tensor:
        tensor = read_tensor(files, name)
        read.append(weakref.ref(tensor))
        alive.append(sum(each() is not None for each in read))
        return tensor

    monkeypatch.setattr(TensorFiles, "read", watched)
    load(tmp_path / "folder", config)
    assert len(read) == 2 + 6 * 11
    assert max(alive) <= 2 * 11


UPCYCLED = {
    "copies": MOE,
    "some layers": dataclasses.replace(MOE, first_k_dense_replace=1),
    "all chosen": dataclasses.replace(MOE, num_experts_per_tok=6, norm_topk_prob=False),
    "scaled": dataclasses.replace(MOE, routed_scaling_factor=2.5),
    "sigmoid": dataclasses.replace(MOE, scoring_func="sigmoid", router_bias_update_rate=1e-3),
    "shared": dataclasses.replace(MOE, n_shared_experts=2),
    "slices": dataclasses.replace(
        MOE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24, n_shared_experts=1
    ),
}


@pytest.mark.parametrize("config", UPCYCLED.values(), ids=UPCYCLED.keys())
def test_an_upcycled_model_starts_as_the_dense_one(tmp_path: Path, config: ModelConfig):
    dense = write_folder(tmp_path / "folder", DENSE)
    model, notes = load(tmp_path / "folder", config)
    assert distance(model, dense) < 1e-5
    assert distance(built(config, 0), dense) > 1e-2
    assert "upcycled" in notes[1]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"num_experts": 0}, "model.num_experts: expected 6, found 0"),
        ({"norm_topk_prob": False}, "model.norm_topk_prob: expected true"),
        ({"moe_intermediate_size": 20}, "model.moe_intermediate_size: expected 48"),
        (
            {"moe_intermediate_size": 16},
            "model.num_experts_per_tok, model.num_experts: expected multiples of 3",
        ),
        ({"first_k_dense_replace": 1, "intermediate_size": 96, "moe_intermediate_size": 48},
         "model.intermediate_size: expected 48, found 96"),
    ],
)  # fmt: skip
def test_what_cannot_start_as_the_folders_model_is_refused_by_field(
    tmp_path: Path, changes: dict, start: str
):
    is_dense = changes.get("num_experts") == 0
    write_folder(tmp_path / "folder", MOE if is_dense else DENSE)
    (line,) = problems_of(tmp_path / "folder", dataclasses.replace(MOE, **changes))
    assert line.startswith(start)


def test_every_differing_field_is_named_with_both_values_and_the_way_out(tmp_path: Path):
    folder = tmp_path / "folder"
    write_folder(folder, MOE)
    other = dataclasses.replace(
        *(MOE,), hidden_size=64, num_key_value_heads=4, rope_theta=1e4, num_experts=8, qk_norm=False,
        norm_topk_prob=False, first_k_dense_replace=1, tie_word_embeddings=False, vocab_size=640, head_dim=16,
        moe_intermediate_size=24, rms_norm_eps=1e-5, hidden_act="relu2",
    )  # fmt: skip
    lines = problems_of(folder, other)
    assert {line.partition(":")[0].removeprefix("model.") for line in lines} == {
        *("hidden_size", "num_key_value_heads", "head_dim", "rope_theta", "qk_norm", "tie_word_embeddings"),
        *("num_experts", "norm_topk_prob", "moe_intermediate_size", "first_k_dense_replace"),
        *("rms_norm_eps", "vocab_size", "hidden_act"),
    }
    assert lines[0].startswith(f"model.hidden_size: expected 32, found 64; as in {folder} (model.init_from)")
    assert all(f"llm-pretrain configs --from_pretrained {folder} --output FILE" in line for line in lines)


def test_what_changes_no_weight_may_differ(tmp_path: Path):
    theirs = write_folder(tmp_path / "folder", DENSE)
    changed = dataclasses.replace(
        DENSE, initializer_range=0.5, hidden_dropout=0.1, max_position_embeddings=128, intermediate_size=48
    )
    assert distance(load(tmp_path / "folder", changed)[0].eval(), theirs) == 0.0


def test_the_vocabulary_may_be_padded_and_nothing_else(tmp_path: Path):
    theirs = write_folder(tmp_path / "folder", dataclasses.replace(DENSE, vocab_size=300))
    ours, notes = load(tmp_path / "folder", DENSE)
    assert distance(ours, theirs, rows=300) == 0.0
    assert notes[1] == "vocabulary padded from 300 to 320 rows; the new ones are random"
    assert float(ours.lm_head.weight.detach()[300:].std()) > 0.05
    for rows in (299, 301, 384):
        (line,) = problems_of(tmp_path / "folder", dataclasses.replace(DENSE, vocab_size=rows))
        assert line.startswith("model.vocab_size: expected 300, or that rounded up to a multiple of 64")


def cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def of_another_kind(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "gpt2"}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "found none; name a folder such as RUN/weights/step-"),
    "another architecture": (of_another_kind, "config.json: model_type: expected one of qwen3"),
    "a torn file": (cut_short, "model.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "a torn configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_cannot_start_a_run_is_one_line(tmp_path: Path, name: str):
    damage, said = DAMAGE[name]
    write_folder(tmp_path / "folder", DENSE)
    damage(tmp_path / "folder")
    (line,) = problems_of(tmp_path / "folder", DENSE)
    assert line.startswith("model.init_from: ")
    assert said in line


def test_another_tokenizer_than_the_stores_is_refused(tmp_path: Path, plain_store: Path):
    write_folder(tmp_path / "folder", DENSE)
    data = DataConfig(sources=[SourceConfig(str(plain_store))])
    shutil.copy(plain_store / "tokenizer" / "tokenizer.json", tmp_path / "folder")
    load(tmp_path / "folder", DENSE, data=data)
    shutil.copy(make_tokenizer(tmp_path / "other", bos=False) / "tokenizer.json", tmp_path / "folder")
    (line,) = problems_of(tmp_path / "folder", DENSE, data=data)
    assert "2 ids differ, the first is 256, '</s>' there and '<s>' here" in line
    assert f"prepare the store with --tokenizer {tmp_path / 'folder'}" in line
    larger = dataclasses.replace(DENSE, vocab_size=999)  # as large as that other tokenizer
    assert problems_of(tmp_path / "folder", larger, data=data) == (line,)


def options(store: Path, folder: Path, model: ModelConfig, *more: str) -> list[str]:
    settings = folder.with_name(f"{folder.name}.yaml")
    settings.write_text(dump_yaml(Config(model=model)))
    return [
        *("--config", str(settings), "--data.sources", f"[{{store: {store}}}]"),
        *("--run.output_dir", str(folder), "--training.sequence_length", "64"),
        *("--training.micro_batch_size", "2", "--training.global_batch_size", "8"),
        *("--training.max_steps", "2", "--checkpoint.save_steps", "1", "--logging.logging_steps", "1"),
        *("--evaluation.max_batches", "1", "--training.precision", "fp32", "--distributed.cpu_threads", "1"),
        *("--logging.wandb_mode", "disabled", "--logging.report", "false", *more),
    ]


def test_a_resumed_run_does_not_look_at_the_folder_again(
    plain_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_folder(tmp_path / "weights", DENSE)
    model = dataclasses.replace(MOE, init_from=str(tmp_path / "weights"))
    arguments = options(plain_store, tmp_path / "run", model, "--evaluation.eval_steps", "0")
    assert train(*arguments) == 0
    assert "upcycled: each of 6 experts" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "weights")
    assert train(*arguments, "--training.max_steps", "3") == 0
    assert "started from the weights" not in capsys.readouterr().out
    assert "init_from" not in (tmp_path / "run" / "weights" / "step-00000003" / "config.json").read_text()


@pytest.mark.slow
def test_both_launchers_start_alike(plain_store: Path, tmp_path: Path):
    write_folder(tmp_path / "weights", DENSE)
    model = dataclasses.replace(MOE, init_from=str(tmp_path / "weights"))
    runs = []
    for launcher in ("torchrun", "accelerate"):
        folder = tmp_path / launcher
        runs.append(launch(launcher, 2, folder, options(plain_store, folder, model)))
    assert runs[0].exact_rows() == runs[1].exact_rows()
    left, right = (checkpoint_tensors(run.folder, 2) for run in runs)
    assert_same_tensors(left, right)


@pytest.mark.slow
def test_a_folder_that_transformers_wrote_goes_on_where_it_stopped(tmp_path: Path):
    """In its own layout, in bf16 and in several shards."""
    import transformers

    from llm_pretrain.export.config_json import model_config_from_huggingface
    from llm_pretrain.export.huggingface import read_config

    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "folder", max_shard_size="30KB")
    assert (tmp_path / "folder" / "model.safetensors.index.json").exists()
    ours = model_config_from_huggingface(read_config(tmp_path / "folder"))
    model, _ = load(tmp_path / "folder", ours)
    with torch.no_grad():
        reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
        expected = reread.eval()(TOKENS).logits
        assert float((model(TOKENS).logits - expected).abs().max()) < 1e-5
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_positions_may_be_stretched_but_not_unstretched(tmp_path: Path):
    write_folder(tmp_path / "folder", DENSE)
    stretched = dataclasses.replace(DENSE, rope_type="yarn", rope_factor=4.0, max_position_embeddings=256)
    load(tmp_path / "folder", stretched)
    write_folder(tmp_path / "stretched", DENSE)
    text = json.dumps(native_config(stretched, **IDS, dtype="fp32"))
    (tmp_path / "stretched" / "config.json").write_text(text)
    lines = problems_of(tmp_path / "stretched", DENSE)
    assert {"model.rope_type", "model.rope_factor"} <= {line.partition(":")[0] for line in lines}
