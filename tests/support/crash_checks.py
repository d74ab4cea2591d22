"""What must hold of a run's folder after a crash at any point, and of the run that goes on from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.crash_probe import CrashProbe, Ended
from support.faulty_io import Call, Fault, Tree, read_tree, write_tree
from support.launching import Finished, run_options

from llm_pretrain.checkpoints.folders import committed_folders
from llm_pretrain.checkpoints.manifest import file_digest, find_damage, read_manifest
from llm_pretrain.errors import CheckpointError
from llm_pretrain.runs.rows import read_metrics

LAST = 3
"""`training.max_steps`."""


def small_options(store: Path) -> list[str]:
    """Three steps of a very small mixture of experts with dropout, each evaluated and saved."""
    return run_options(
        "tiny-moe",
        store,
        "model.hidden_size=16 model.num_hidden_layers=1 model.num_experts=2 "
        "model.moe_intermediate_size=16 model.intermediate_size=32 model.hidden_dropout=0.1 "
        f"training.max_steps={LAST} schedule.warmup_steps=1 checkpoint.save_steps=1 "
        "training.sequence_length=32 training.global_batch_size=4 training.micro_batch_size=2 "
        "evaluation.max_batches=1 evaluation.eval_steps=1 logging.logging_steps=1 "
        "checkpoint.keep_last=2",
    )


@dataclass
class Scenario:
    """A run to disturb, from the content `start` of its folder to its end, and what it must come to.

    `damaged`: steps whose checkpoint is damaged in `start`; a save replaces them. `rows`, `checkpoints`,
    `weights`: of the undisturbed run, exact rows and digests by step. `sound`: hashes of checkpoints that
    were looked at before.
    """

    options: list[str]
    world_size: int
    launcher: str
    start: Tree
    damaged: set[int]
    rows: dict[int, dict]
    checkpoints: dict[int, dict]
    weights: dict[int, dict]
    sound: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.launcher} x {self.world_size}, {'going on' if self.start else 'from the start'}"


def make_scenarios(
    probe: CrashProbe, folder: Path, options: list[str], *, world_size: int, launcher: str = "torchrun"
) -> tuple[Scenario, Scenario]:
    """The run from its start, and from two checkpoints of which the newer one is damaged."""
    launch = {"world_size": world_size, "launcher": launcher}
    undisturbed = folder / "undisturbed"
    ends = probe.train(undisturbed, [*options, "--checkpoint.keep_last", "9"], **launch)
    assert {end.exit_code for end in ends} == {0}, ends[0].output
    oracle = {
        "options": options,
        **launch,
        "rows": exact_rows(undisturbed),
        "checkpoints": {
            step: tensor_digests(path)
            for step, path in committed_folders(undisturbed / "checkpoints").items()
        },
        "weights": {
            step: file_digest(path / "model.safetensors")
            for step, path in committed_folders(undisturbed / "weights").items()
        },
    }
    assert set(oracle["checkpoints"]) == set(oracle["weights"]) == set(oracle["rows"]) - {0} == {1, 2, 3}

    killed = folder / "killed"
    synchronous = [*options, "--checkpoint.async_save", "false"]
    fault = Fault("before", 0, only=f"mkdir:weights/.step-{LAST:08d}")
    ends = probe.train(killed, synchronous, faults={0: fault}, **launch)
    assert ends[0].exit_code == -9, ends[0].output
    (file,) = (killed / "checkpoints" / "step-00000002").glob("shard-00001-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    fresh = Scenario(start={}, damaged=set(), **oracle)
    return fresh, Scenario(start=read_tree(killed), damaged={2}, **oracle)


def tensor_digests(checkpoint: Path) -> dict[str, str]:
    """Digest of every tensor's bits, and of all scalars; the files differ in the order of their remarks."""
    content = read_manifest(checkpoint)
    digests = {"scalars": json.dumps([content.scalars, content.optimizer])}
    for name in content.files:
        data = (checkpoint / name).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for tensor, facts in json.loads(data[8:start]).items():
            if tensor != "__metadata__":
                first, last = facts["data_offsets"]
                digests[f"{name} {tensor}"] = hashlib.sha256(data[start + first : start + last]).hexdigest()
    return digests


def exact_rows(folder: Path) -> dict[int, dict]:
    """What must be equal to the last bit, by step; none where there is no row yet."""
    if not (folder / "metrics.jsonl").exists():
        return {}
    return Finished(0, "", folder).exact_rows()


def run(
    scenario: Scenario,
    probe: CrashProbe,
    folder: Path,
    faults: dict[int, Fault],
    journal: Path | None = None,
    before: Sequence[tuple[str, list[Any]]] = (),
) -> list[Ended]:
    """Start the scenario in `folder` with faults in it, and mistakes put in by `before`."""
    if not folder.exists():
        write_tree(scenario.start, folder)
    return probe.train(
        folder,
        scenario.options,
        world_size=scenario.world_size,
        launcher=scenario.launcher,
        faults=faults,
        journal=journal,
        with_data=journal is not None,
        before=before,
    )


def durable_steps(calls: list[Call], root: Path, scenario: Scenario) -> list[tuple[int, int]]:
    """Newest step whose checkpoint, and whose `best`, a power cut after each call may no longer take away."""
    durable = {"checkpoints": 1, "weights": 2} if scenario.start else {"checkpoints": 0, "weights": 0}
    promised, after_each = dict(durable), []
    for call in calls:
        after_each.append((durable["checkpoints"], durable["weights"]))
        if call.outcome in ("failed", "refused", "before", "half"):
            continue
        target = Path(call.other)
        if call.call == "rename" and target.parent == root / "checkpoints" and target.name[:5] == "step-":
            promised["checkpoints"] = int(target.name[5:])
        if call.call == "rename" and target == root / "weights" / "best":
            promised["weights"] = int(Path(call.path).name.split(".")[1][5:])
        for kind in promised:
            if call.call == "fsync" and call.path == str(root / kind):
                durable[kind] = promised[kind]
        after_each[-1] = (durable["checkpoints"], durable["weights"])
    return after_each


def check_folder(folder: Path, scenario: Scenario, durable: tuple[int, int] = (0, 0)) -> int:
    """Everything that counts as written is whole and the undisturbed run's; returns the newest sound step.

    Raises:
        AssertionError: a crash has damaged or lost something that it must not.
    """
    newest = _check_checkpoints(folder, scenario)
    assert newest >= durable[0], f"step {durable[0]} was safe and is gone"
    _check_weights(folder / "weights", scenario, durable[1])
    rows = exact_rows(folder) if newest else {}
    expected = {step: row for step, row in scenario.rows.items() if step <= newest}
    found = {step: row for step, row in rows.items() if step <= newest}
    if newest:
        assert found.keys() == expected.keys(), "a row of a step that is saved was lost"
        assert found == expected
    for name in ("status.json", "config.yaml"):
        if (folder / name).exists():
            text = (folder / name).read_text()
            assert text.endswith("\n"), f"{name} is half written: {text[:60]!r}"
    if (folder / "status.json").exists():
        json.loads((folder / "status.json").read_text())
    return newest


def _check_checkpoints(folder: Path, scenario: Scenario) -> int:
    newest = 0
    for step, path in committed_folders(folder / "checkpoints").items():
        content = hash((step, *sorted(read_tree(path).items())))
        if content not in scenario.sound:
            try:
                problems = find_damage(path, read_manifest(path))
            except CheckpointError as error:
                problems = [str(error)]
            if problems and step in scenario.damaged:
                continue
            assert not problems, f"{path.name} counts and is damaged: {problems}"
            assert tensor_digests(path) == scenario.checkpoints[step], f"{path.name} is not the undisturbed's"
            scenario.sound.add(content)
        newest = max(newest, step)
    return newest


def _check_weights(weights: Path, scenario: Scenario, durable_best: int) -> None:
    named = committed_folders(weights)
    best = [path for path in weights.glob("*") if path.name == "best"] or [*weights.glob(".best.replaced-*")]
    for path in best[:1]:
        step = json.loads((path / "best.json").read_text())["step"]
        named = {**named, -step: path}
    assert max(0, -min(named, default=0)) >= durable_best, f"best of step {durable_best} was safe and is gone"
    for step, path in named.items():
        assert file_digest(path / "model.safetensors") == scenario.weights[abs(step)], path
        for file in ("config.json", "generation_config.json", "tokenizer.json", "README.md"):
            text = (path / file).read_text()
            assert text.strip("\0"), f"{path.name}/{file} is empty"
            if file.endswith(".json"):
                json.loads(text)


def check_continued(scenario: Scenario, probe: CrashProbe, folder: Path) -> None:
    """The same command again goes on from the newest sound checkpoint, and comes to the same end."""
    newest = check_folder(folder, scenario)
    # what is left of deleting old ones goes with the next save, and here there is none
    nothing_to_save = newest == LAST and LAST in committed_folders(folder / "weights")
    ends = run(scenario, probe, folder, {})
    output = ends[0].output
    assert {end.exit_code for end in ends} == {0}, output[-3000:]
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert attempts[-1]["step"] == newest
    damage = [line for line in output.splitlines() if "damaged" in line]
    assert not damage or scenario.damaged, damage
    check_finished(scenario, folder, tidy=not nothing_to_save)


def check_finished(scenario: Scenario, folder: Path, *, tidy: bool = True) -> None:
    """The run is at its end, as if nothing had happened, and if `tidy`, nothing is left lying about."""
    assert check_folder(folder, scenario) == LAST
    assert exact_rows(folder) == scenario.rows
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    for parent, kept in (("checkpoints", []), ("weights", ["best"])) if tidy else ():
        names = sorted(path.name for path in (folder / parent).iterdir())
        assert names == [*kept, "step-00000002", "step-00000003"], (parent, names)
    assert [path.name for path in folder.iterdir() if ".tmp-" in path.name] == []
    if not tidy:  # the best may be one that could not be written, of which a warning tells
        return
    rows = read_metrics(folder / "metrics.jsonl")
    best = min((row for row in rows if row["step"]), key=lambda row: row["eval/loss"])["step"]
    assert json.loads((folder / "weights" / "best" / "best.json").read_text())["step"] == best
