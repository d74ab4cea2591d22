"""Traps of launching and leaving: each check passes on our code and fails with the mistake put in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engines import small_config
from support.fork_server import Request, fork_server
from support.launching import ROOT
from support.probes import ACCELERATE, LIMIT_SECONDS, Launch, finish_probe, start_probe
from support.rank_cases import Outcome

from llm_pretrain.config.loading import dump_yaml

PROBE = ROOT / "tests" / "support" / "launch_probe.py"
PROCESSES = 2
HOW_TO_LAUNCH = ("accelerate launch --config_file configs/accelerate/cpu2.yaml", "torchrun --nproc_per_node")

YAML = "compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_machines: 1\nmachine_rank: 0\n"
YAML += f"num_processes: {PROCESSES}\nmixed_precision: 'no'\n"
LAUNCHER_FILES = {
    "multi_cpu": YAML + "distributed_type: MULTI_CPU\n",
    "fsdp": YAML + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n",
}


COUNT, BARE = "no count of processes", "bare accelerator"
ACCELERATE_OPTIONS = {
    "cpu": ["--cpu", "--num_processes", str(PROCESSES)],
    "multi_cpu": ["--config_file", "multi_cpu.yaml"],
    "fsdp": ["--config_file", "fsdp.yaml", "--main_process_port", "0"],
}
VARIANTS = {
    "cpu": [COUNT, "main"],
    "multi_cpu": [COUNT, "main"],
    "fsdp": ["no comparison of settings", "main"],
    "torchrun": [BARE, f"{BARE}, {COUNT}", "ours"],
}


@pytest.fixture(scope="module")
def launch(store_folder, tmp_path_factory) -> Callable[[str], Launch]:
    """`launch(name)`: the probe with every mistake that belongs to a launch, and at last without any.

    What is read from the launcher's command line needs a real launcher; the others' ranks are forked.
    """

    def launch(name: str) -> Launch:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.yaml").write_text(dump_yaml(small_config(store_folder, training={"max_steps": 1})))
        if name in LAUNCHER_FILES:
            (folder / f"{name}.yaml").write_text(LAUNCHER_FILES[name])
        options = ACCELERATE_OPTIONS.get(name, [])
        options = [str(folder / each) if each.endswith(".yaml") else each for each in options]
        if name in ("cpu", "multi_cpu"):
            command = [*ACCELERATE, *options, str(PROBE), str(folder), *VARIANTS[name]]
            return finish_probe(start_probe(command, folder), folder)
        request = Request(
            "support.launch_probe:run",
            [str(folder), VARIANTS[name]],
            PROCESSES,
            launcher="accelerate" if options else "torchrun",
            launcher_options=options,
            output=str(folder / "output"),
        )
        codes = fork_server().run(request, LIMIT_SECONDS)
        return Launch(int(any(codes)), (folder / "output").read_text(), folder)

    return launch


def check_connected(variant: list[dict]) -> None:
    """Either as many processes as were asked for train together, or each says how to launch them."""
    assert variant
    for found in variant:
        if found["error"] is None:
            assert found["processes"] == PROCESSES, f"{found['processes']} trained alone"
        else:
            assert all(text in found["error"] for text in HOW_TO_LAUNCH), found["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "multi_cpu"])
def test_a_launch_of_too_few_processes_stops_and_says_how_to(name, launch):
    finished: Launch = launch(name)
    assert finished.exit_code != 0
    lines = [line for line in finished.output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert all(text in lines[0] for text in HOW_TO_LAUNCH)
    assert f"{PROCESSES} processes were asked for, 1 joined" in lines[0]
    with pytest.raises(AssertionError, match="trained alone"):
        check_connected(finished.variant("no count of processes"))


def test_accelerate_under_torchrun_connects_its_processes(launch):
    finished: Launch = launch("torchrun")
    assert finished.exit_code == 0, finished.output[-2000:]
    ours = finished.variant("ours")
    assert [found["error"] for found in ours] == [None] * PROCESSES
    check_connected(ours)
    check_connected(finished.variant("bare accelerator"))  # the count stops it
    with pytest.raises(AssertionError, match="trained alone"):
        check_connected(finished.variant("bare accelerator, no count of processes"))


def test_an_fsdp_file_does_not_train_something_else(launch):
    finished: Launch = launch("fsdp")
    assert finished.exit_code != 0
    assert "distributed.strategy: ddp, but accelerate runs fsdp" in finished.output
    unchecked = finished.variant("no comparison of settings")
    assert [found["error"] for found in unchecked] == [None] * PROCESSES, "the trap is silent"
    assert all(found["strategy"] != "FSDP" and found["updates"] == [1] for found in unchecked)


def check_leaving(outcomes: list[Outcome]) -> None:
    """Ranks wait for each other, and only then leave, the wrapped model being gone by then."""
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.events[-2:] == ["barrier", "leave"]


@pytest.mark.parametrize(
    ("launcher", "traps"),
    [("torchrun", ["no_sync kept", "no barrier"]), ("accelerate", ["model kept", "no wait"])],
)
def test_the_process_group_goes_last(launcher, traps, ranks):
    check_leaving(ranks[f"{launcher} fp32"])
    for trap in traps:
        with pytest.raises(AssertionError):
            check_leaving(ranks[trap])
