"""Stages of a pipeline: the same bits as in one process, whatever the schedule. And with mistakes put in."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.launching import Finished, launch, run_options
from support.pipeline_plan import CASES, KINDS_OF, SHARDED
from support.rank_cases import Outcome, has_slow, run_ranks
from support.stepping import Driven
from torch import nn
from torch.torch_version import TorchVersion

from llm_pretrain.config.distributed_config import MeshSizes
from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.distributed.pipeline import Pipeline
from llm_pretrain.errors import ConfigError
from llm_pretrain.runs.rows import read_metrics

pytestmark = pytest.mark.pipeline
Outcomes = dict[str, list[Outcome]]

MISTAKES = ("without documents", "without masks", "without routers", "own norm")
ON_FOUR = ("four 1f1b", *(f"{schedule} sharded {kind}" for schedule, kind in SHARDED.items()))
WHOLE = [name for name in CASES if "whole" in name]
ON_TWO = [name for name in CASES if name not in (*ON_FOUR, *WHOLE)]


@pytest.fixture(scope="module")
def outcomes(
    masked_store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Outcomes:
    is_slow = has_slow(request)
    found: Outcomes = {}
    for world_size, names, quick in (
        (1, WHOLE, ["quick whole"]),
        (2, ON_TWO, ["quick 1f1b"]),
        (4, ON_FOUR, []),
    ):
        if chosen := names if is_slow else quick:
            folder = tmp_path_factory.mktemp(f"pipelines-{world_size}")
            found |= run_ranks(
                masked_store, folder, plan="pipeline_plan", world_size=world_size, names=set(chosen)
            )
    return found


def differing(expected: Driven, ranks: list[Outcome]) -> list[str]:
    """Names of what differs in a bit between one process and the ranks of a pipeline, which have parts."""
    wrong, seen = set(), set()
    for rank in ranks:
        assert rank.error is None
        found = rank.driven
        for name in ("losses", "grad_norms", "skipped", "digests"):
            if getattr(found, name) != getattr(expected, name):
                wrong.add(name)
        pairs = [(getattr(found, part), getattr(expected, part)) for part in PARTS]
        pairs += zip(found.gradients, expected.gradients, strict=True)
        for own, whole in pairs:
            wrong |= {name for name in own if not torch.equal(own[name], whole[name])}
        seen |= set(found.parameters)
    assert seen == set(expected.parameters)
    return sorted(wrong)


PARTS = ("parameters", "first_moments", "buffers", "averages")


def test_a_pipeline_gives_the_bits_of_one_process(outcomes: Outcomes):
    expected = outcomes["quick whole"][0].driven
    assert len(expected.losses) == 2
    assert all(norm and norm > 0.5 for norm in expected.grad_norms)  # every step is clipped
    assert differing(expected, outcomes["quick 1f1b"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(outcomes: Outcomes, mistake: str):
    assert differing(outcomes["quick whole"][0].driven, outcomes[mistake])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "kind"), [(schedule, kind) for schedule, kinds in KINDS_OF.items() for kind in kinds]
)
def test_every_schedule_gives_the_bits_of_one_process(outcomes: Outcomes, schedule: str, kind: str):
    expected = outcomes[f"whole {kind}"][0].driven
    assert len(expected.losses) == 20
    assert differing(expected, outcomes[f"{schedule} {kind}"]) == []


@pytest.mark.slow
def test_four_stages_give_the_bits_of_one_process(outcomes: Outcomes):
    assert differing(outcomes["whole fp32"][0].driven, outcomes["four 1f1b"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "kind"), SHARDED.items())
def test_sharded_stages_give_the_bits_of_fsdp(outcomes: Outcomes, schedule: str, kind: str):
    assert differing(outcomes[f"fsdp {kind}"][0].driven, outcomes[f"{schedule} sharded {kind}"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b tied", "zbv_zero_bubble tied", "1f1b tied bf16"])
def test_a_tied_embedding_differs_by_the_order_of_a_sum(outcomes: Outcomes, case: str):
    """At first its own gradient alone; in the end all by rounding, and both stages hold the same."""
    expected = outcomes[f"whole {case.partition(' ')[2]}"][0].driven
    ranks = [rank.driven for rank in outcomes[case]]
    first = [(name, gradient) for rank in ranks for name, gradient in rank.gradients[0].items()]
    differing = {name for name, gradient in first if not torch.equal(gradient, expected.gradients[0][name])}
    assert differing == {"model.embed_tokens.weight"}
    held = [rank.parameters[name] for rank in ranks for name in differing if name in rank.parameters]
    assert all(torch.equal(each, held[0]) for each in held)
    if "bf16" in case:
        return
    for rank in ranks:
        for name, own in rank.parameters.items():
            assert (own - expected.parameters[name]).norm() <= 1e-6 * expected.parameters[name].norm(), name
        assert rank.losses == pytest.approx(expected.losses, rel=1e-6)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Stages of torch 2.11 wait for the gradient of a router's counts, which have none."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    config, place = Config(), Place(MeshSizes(pp=2))
    with pytest.raises(ConfigError, match=r"pp_size: expected 1 with torch 2\.12\.1, found 2"):
        Pipeline(nn.Module(), config, place, None, torch.device("cpu"), nullcontext())  # type: ignore[arg-type]


PIPELINE = ["--distributed.strategy", "fsdp", "--distributed.pp_size", "2"]


def train(store: Path, folder: Path, world_size: int, *more: str) -> Finished:
    options = run_options(
        "tiny-moe",
        store,
        "training.max_steps=4 training.global_batch_size=16 model.num_hidden_layers=4 "
        "schedule.name=constant schedule.warmup_steps=0 optimizer.ema_decay=0.9 "
        "model.router_bias_update_rate=1e-3 evaluation.eval_steps=2 evaluation.max_batches=3 "
        "checkpoint.save_steps=2 checkpoint.keep_last=9 logging.parameters_sha256=true",
        *more,
    )
    return launch("torchrun", world_size, folder, options)


def rows(run: Finished) -> list[dict]:
    """The rows from step 3 on, without times."""
    kept = [row for row in read_metrics(run.folder / "metrics.jsonl") if row["step"] > 2]
    return [
        {key: value for key, value in row.items() if key != "time" and not key.startswith("perf/")}
        for row in kept
    ]


@pytest.mark.slow
def test_a_run_continues_with_and_without_stages(masked_store: Path, tmp_path: Path):
    untied = ["--model.tie_word_embeddings", "false"]
    whole = train(masked_store, tmp_path / "whole", 1, *untied)
    staged = train(masked_store, tmp_path / "staged", 2, *untied, *PIPELINE)
    later = ["--checkpoint.resume", str(tmp_path / "whole" / "checkpoints" / "step-00000002")]
    into = train(masked_store, tmp_path / "into", 2, *untied, *PIPELINE, *later)
    later = ["--checkpoint.resume", str(tmp_path / "staged" / "checkpoints" / "step-00000002")]
    out = train(masked_store, tmp_path / "out", 1, *untied, *later)
    file = Path("weights") / "step-00000004" / "model.safetensors"
    for run in (staged, into, out):
        assert rows(run) == rows(whole)
        assert (run.folder / file).read_bytes() == (whole.folder / file).read_bytes()
    best = Path("weights") / "best" / "model.safetensors"
    assert (staged.folder / best).read_bytes() == (whole.folder / best).read_bytes()


@pytest.mark.slow
def test_sharded_stages_of_a_tied_embedding_continue_in_one_process(masked_store: Path, tmp_path: Path):
    tied = ["--model.tie_word_embeddings", "true"]
    staged = train(masked_store, tmp_path / "staged", 4, *tied, *PIPELINE)
    last = str(tmp_path / "staged" / "checkpoints" / "step-00000004")
    out = train(masked_store, tmp_path / "out", 1, *tied, "--checkpoint.resume", last)
    file = Path("weights") / "step-00000004" / "model.safetensors"
    assert (out.folder / file).read_bytes() == (staged.folder / file).read_bytes()
