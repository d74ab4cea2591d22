"""Exported weights have the same bytes however the model is cut, and a wrong cut is noticed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.corpora import make_tokenizer
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llm_pretrain.checkpoints import weights
from llm_pretrain.checkpoints.state import Piece
from llm_pretrain.checkpoints.tensor_files import read_tensors, write_pieces, write_safetensors
from llm_pretrain.checkpoints.weights import HeldWeights, WeightFiles, model_weights, save_weights
from llm_pretrain.config.distributed_config import DistributedConfig
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import Config, TrainingConfig
from llm_pretrain.distributed import mesh as meshes
from llm_pretrain.distributed.collectives import OneRank
from llm_pretrain.distributed.fsdp import clear_mesh_caches, parallelize
from llm_pretrain.distributed.mesh import Place, build_meshes
from llm_pretrain.errors import CheckpointError, DivergedError
from llm_pretrain.export.config_json import match_hf_architecture
from llm_pretrain.export.huggingface import to_huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

DENSE = ModelConfig(
    vocab_size=70,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
MOE = replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20)
SIGMOID: dict[str, Any] = {"scoring_func": "sigmoid", "n_shared_experts": 1, "router_bias_update_rate": 0.1}
MODELS = {
    "qwen3": DENSE,
    "llama": replace(DENSE, qk_norm=False, hidden_size=32, tie_word_embeddings=False),
    "qwen3_moe": replace(MOE, routed_scaling_factor=2.5),
    "mixtral": replace(MOE, qk_norm=False),
    "qwen2_moe": replace(MOE, qk_norm=False, norm_topk_prob=False, n_shared_experts=1),
    "ernie4_5_moe": replace(MOE, qk_norm=False, router_bias_update_rate=0.1, first_k_dense_replace=1),
    "glm4_moe": replace(MOE, **SIGMOID, first_k_dense_replace=1),
    "hy_v3": replace(MOE, **SIGMOID, decoder_sparse_step=2, num_hidden_layers=4),
    "none": replace(MOE, router_bias_update_rate=0.1),
}
BF16 = torch.bfloat16


def decoder(config: ModelConfig) -> Decoder:
    """With a value other than 0 everywhere."""
    model = Decoder(config)
    initialize_weights(model, 3)
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.add_(0.01 * number + 0.001)
    return model


def cut(name: str, tensor: Tensor, parts: int, dice: random.Random) -> Iterator[Piece]:
    """A tensor in boxes: cut anywhere in each dimension."""
    bounds = [
        sorted({0, size, *(dice.randrange(size + 1) for _ in range(parts - 1))}) for size in tensor.shape
    ]
    for box in itertools.product(*(itertools.pairwise(each) for each in bounds)):
        yield Piece(name, tensor[tuple(slice(*each) for each in box)], tuple(start for start, _ in box))


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def pieces_of(model: Decoder, seed: int = 0) -> list[Piece]:
    dice = random.Random(seed)
    state_dict = model.state_dict()
    pieces = [piece for name in state_dict for piece in cut(name, state_dict[name], 3, dice)]
    dice.shuffle(pieces)
    return pieces


@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_any_cut_make_the_file_of_the_whole(tmp_path: Path, name: str):
    model = decoder(MODELS[name])
    if name != "none":
        assert match_hf_architecture(MODELS[name]) == name
    state_dict = model.state_dict()
    write_safetensors(tmp_path / "whole", to_huggingface(state_dict, MODELS[name], BF16), {"format": "pt"})
    files = WeightFiles(state_dict, MODELS[name], BF16)
    pieces = pieces_of(model)
    files.create(tmp_path)
    covered = [files.write(tmp_path, pieces[rank::3]) for rank in range(3)]
    files.check(tmp_path, covered)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()


def held(config: ModelConfig, rank: int, world_size: int, sizes: dict[str, int]) -> HeldWeights:
    """What a rank of a mesh holds and writes; the pieces are copies."""
    ranks: Any = SimpleNamespace(rank=rank, world_size=world_size)
    with rank_of(rank, world_size), torch.device("meta"):
        model = Decoder(config)
        training = TrainingConfig(precision="fp32")
        distributed = DistributedConfig("fsdp", **sizes)
        settings = replace(Config(), model=config, training=training, distributed=distributed)
        with torch.device("cpu"):
            parallelize(model, build_meshes(settings, "cpu", world_size), Place(), settings)
            initialize_weights(model, 3, device=torch.device("cpu"))
            found = model_weights(model, ranks)
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in found.tensors.items()}
    return HeldWeights(shapes, [replace(each, tensor=each.tensor.clone()) for each in found.pieces])


MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp 2": (2, {}),
    "fsdp 3": (3, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "ep 2, by rows": (8, {"ep_size": 2}),
    "ep 2, hsdp": (8, {"ep_size": 2, "dp_replicate_size": 2}),
}


@pytest.mark.parametrize(
    ("name", "mesh"), [*(("qwen3_moe", mesh) for mesh in MESHES), ("ernie4_5_moe", "ep 2, hsdp")]
)
def test_every_mesh_writes_the_bytes_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mesh: str
):
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 6000)
    monkeypatch.setattr(meshes, "set_timeout", lambda *_: None)  # warns of a group that is a fake
    config, (world_size, sizes) = MODELS[name], MESHES[mesh]
    for folder in ("one", "several"):
        (tmp_path / folder).mkdir()
    model = Decoder(config)
    initialize_weights(model, 3)
    alone = WeightFiles(model.state_dict(), config, BF16)
    alone.create(tmp_path / "one")
    alone.check(tmp_path, [alone.write(tmp_path / "one", model_weights(model).pieces)])
    ranks = [held(config, rank, world_size, sizes) for rank in range(world_size)]
    files = [WeightFiles(each.tensors, config, BF16) for each in ranks]
    files[0].create(tmp_path / "several")
    covered = [own.write(tmp_path / "several", each.pieces) for own, each in zip(files, ranks, strict=True)]
    files[0].check(tmp_path, covered)
    assert content(tmp_path / "several") == content(tmp_path / "one")
    assert len(content(tmp_path / "one")) > 3
    written = [sum(piece.tensor.nbytes for piece in each.pieces) for each in ranks]
    assert sum(written) == sum(tensor.nbytes for tensor in model.state_dict().values())
    replicas = sizes.get("dp_replicate_size", 1)
    shares = [sum(written[begin :: world_size // replicas]) for begin in range(world_size // replicas)]
    for begin, share in enumerate(shares):
        largest = max(piece.tensor.nbytes for piece in ranks[begin].pieces)
        for own in written[begin :: len(shares)]:
            assert abs(own - share / replicas) <= largest, "the replicas share the writing"


@pytest.mark.parametrize("mistake", ["twice", "missing", "twice for another", "moved"])
def test_a_part_from_no_rank_or_from_several_is_noticed(tmp_path: Path, mistake: str):
    model = decoder(MODELS["qwen3_moe"])
    pieces = sorted(pieces_of(model), key=lambda each: tuple(each.tensor.shape))
    same = next(
        number
        for number, (left, right) in enumerate(itertools.pairwise(pieces))
        if left.tensor.shape == right.tensor.shape and left.tensor.numel() and left.name == right.name
    )
    if mistake == "twice":
        pieces.append(pieces[same])
    elif mistake == "missing":
        del pieces[same]
    elif mistake == "twice for another":
        pieces[same] = pieces[same + 1]
    else:
        pieces[same] = replace(pieces[same], offsets=pieces[same + 1].offsets)
    files = WeightFiles(model.state_dict(), MODELS["qwen3_moe"], BF16)
    files.create(tmp_path)
    covered = [files.write(tmp_path, pieces[rank::2]) for rank in range(2)]
    with pytest.raises(CheckpointError, match="expected each part of the weights from one rank, found"):
        files.check(tmp_path, covered)


@pytest.mark.parametrize(
    ("value", "error", "pattern"),
    [
        (7e4, CheckpointError, r"model\.norm\.weight: expected finite values within 6\.55e\+04 .* 70000"),
        (float("nan"), DivergedError, r"model\.norm\.weight: expected finite values to save, found nan"),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_its_rank(
    tmp_path: Path, value: float, error: type[Exception], pattern: str
):
    files = WeightFiles({"model.norm.weight": torch.empty(24)}, DENSE, torch.float16)
    files.create(tmp_path)
    files.write(tmp_path, [Piece("model.norm.weight", torch.ones(12), (0,))])
    with pytest.raises(error, match=pattern):
        files.write(tmp_path, [Piece("model.norm.weight", torch.full((12,), value), (12,))])


def test_a_folder_that_the_machines_do_not_share_is_named(tmp_path: Path):
    files = WeightFiles({"model.norm.weight": torch.empty(24)}, DENSE, BF16)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected the file that rank 0 has made"):
        files.write(tmp_path, [Piece("model.norm.weight", torch.ones(24), (0,))])


class OtherRank:
    """Rank 0 of two; the other one reports what it is told to."""

    rank, world_size = 0, 2

    def __init__(self, failure: CheckpointError | None):
        self.failure, self.calls = failure, 0

    def gather_objects(self, value: Any) -> list[Any]:
        self.calls += 1
        return [value, (0, self.failure if self.calls == 3 else None)]  # after token and files


@pytest.mark.parametrize("failure", [CheckpointError("full on rank 1"), None])
def test_a_rank_that_fails_or_writes_nothing_leaves_earlier_exports(
    tmp_path: Path, failure: CheckpointError | None
):
    def save(step: int, ranks: Any) -> Path:
        return save_weights(
            tmp_path / "weights",
            step,
            decoder(DENSE),
            DENSE,
            dtype="bf16",
            tokenizer_folder=make_tokenizer(tmp_path / "tokenizer"),
            token_ids={},
            keep_last=2,
            sequence_length=8,
            ranks=ranks,
        )

    before = save(1, OneRank())
    kept = content(before)
    with pytest.raises(CheckpointError, match="full on rank 1" if failure else "found parts from none"):
        save(2, OtherRank(failure))
    assert list((tmp_path / "weights").iterdir()) == [before]
    assert content(before) == kept


def test_pieces_of_all_ranks_are_read_by_one_process(tmp_path: Path):
    whole = {"matrix": torch.arange(12.0).view(4, 3), "vector": torch.arange(5.0)}
    files = []
    for rank, rows in enumerate(((0, 1), (1, 4))):
        pieces = [Piece("matrix", whole["matrix"][slice(*rows)], (rows[0], 0))]
        pieces += [Piece("vector", whole["vector"], (0,))] * (rank == 0)
        files += write_pieces(pieces, tmp_path, rank=rank)
    read = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    read_tensors(read, tmp_path, files)
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    with pytest.raises(CheckpointError, match=r"reading tensors failed: .*matrix: not all values are in"):
        read_tensors(read, tmp_path, files[:1])
    (tmp_path / files[1]).write_bytes((tmp_path / files[1]).read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"shard-00002.*: expected a safetensors file"):
        read_tensors(read, tmp_path, files)
