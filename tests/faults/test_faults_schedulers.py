"""Slurm and Kubernetes: what their examples do with a run that is stopped, fails, or is done.

No cluster is needed: `srun` and `scontrol` are small scripts on PATH, everything else is real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.interrupting import assert_exact
from support.launching import NO_REPORT, ROOT, TIMEOUT_SECONDS, Finished, environment

from llm_pretrain import errors

EXAMPLES = ROOT / "examples"
REQUEUE = EXAMPLES / "requeue.sh"
SCRIPTS = [REQUEUE, *sorted((EXAMPLES / "slurm").iterdir()), EXAMPLES / "kubernetes" / "worker.sh"]
CODES = {each.exit_code for each in vars(errors).values() if isinstance(each, type)} | {
    0,
    errors.EXIT_PREEMPTED,
}
NEVER_AGAIN = {0, 2, 65, 70, 76, 78}


def requeue(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(REQUEUE), *words]
    env = environment() | {"PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def write_status(folder: Path, **fields: Any) -> None:
    """As a run does: a new file in the place of the old."""
    (folder / "new").write_text(json.dumps({"state": "failed", "step": 3, "reason": "because"} | fields))
    os.replace(folder / "new", folder / "status.json")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_exit_code_has_its_decision(tmp_path: Path):
    before = requeue("mark", str(tmp_path)).stdout.strip()
    for code in sorted(CODES):
        write_status(tmp_path, exit_code=code)
        decided = requeue("decide", str(tmp_path), before, "0")
        assert decided.returncode == (1 if code in NEVER_AGAIN else 0), (code, decided.stderr)
        expected = "not again: " if code in NEVER_AGAIN else "again: "
        assert decided.stderr.startswith(f"requeue: {expected}")
        assert requeue("code", str(tmp_path), before, "1").returncode == (code or 1)


STATUSES = [
    ({"state": "running", "exit_code": None}, True),  # killed before it could say anything
    ({"state": "failed", "exit_code": 74}, True),
    ({"state": "preempted", "exit_code": 75}, False),
    *((content, True) for content in ("", "[]", '{"exit_code": null}')),
]


@pytest.mark.parametrize(("status", "bounded"), STATUSES, ids=str)
def test_restarts_are_bounded_but_for_stops_by_a_signal(
    tmp_path: Path, status: dict[str, Any] | str, bounded: bool
):
    if isinstance(status, str):  # damaged
        (tmp_path / "status.json").write_text(status)
    else:
        write_status(tmp_path, **status)
    assert requeue("decide", str(tmp_path), "none", "9").returncode == 0
    assert (requeue("decide", str(tmp_path), "none", "10").returncode == 0) != bounded


STOPPED, FAILED = {"state": "preempted", "exit_code": 75}, {"exit_code": 71}
COUNTED = {
    "failures after a stop": [
        (STOPPED | {"step": 12}, 12, 0),
        *((FAILED, restarts, decided) for restarts, decided in ((13, 0), (22, 0), (23, 1))),
        (FAILED, 0, 0),  # another job
    ],
    "stops that get nowhere, as of a time limit shorter than the start-up": [
        (STOPPED | {"step": 0}, restarts, decided) for restarts, decided in ((0, 0), (10, 0), (11, 1))
    ],
}
"""What a run leaves, how often its job was started again, and what is decided."""


@pytest.mark.parametrize("name", COUNTED)
def test_failures_count_from_the_last_stop_by_a_signal(name: str, tmp_path: Path):
    """A job that is stopped at its time limit every few hours was started again often before it fails."""
    for status, restarts, decided in COUNTED[name]:
        write_status(tmp_path, **status)
        assert requeue("decide", str(tmp_path), "none", str(restarts)).returncode == decided, restarts


def test_an_attempt_that_never_reached_its_folder_is_not_started_again(tmp_path: Path):
    """A configuration mistyped after a preemption: the status is still that of the attempt before."""
    assert requeue("decide", str(tmp_path), "none", "0").returncode == 1
    write_status(tmp_path, state="preempted", exit_code=75)
    before = requeue("mark", str(tmp_path)).stdout.strip()
    decided = requeue("decide", str(tmp_path), before, "0")
    assert decided.returncode == 1
    assert "never reached" in decided.stderr
    assert requeue("code", str(tmp_path), before, "2").returncode == 2
    write_status(tmp_path, state="preempted", exit_code=75)
    assert requeue("decide", str(tmp_path), before, "0").returncode == 0


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "job.yaml").read_text()))


def test_the_job_judges_every_exit_code():
    service, job = documents()
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if (codes := rule.get("onExitCodes"))
        for code in codes["values"]
    }
    assert {code for code, action in actions.items() if action == "FailJob"} == NEVER_AGAIN - {0}
    assert {code for code, action in actions.items() if action == "Ignore"} == {errors.EXIT_PREEMPTED}
    assert actions.keys() == CODES - {0}
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName", container["name"]) == container["name"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["FIRST"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(variables["PODS"]) == spec["completions"]
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert (ROOT / container["command"][0]).is_file()
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_pods_start_together_or_with_fewer(tmp_path: Path):
    """By what torchrun is told; it takes in machines only with a store of rank 0's own."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    job = {each["name"]: each["value"] for each in container["env"]} | {"RUN": str(tmp_path)}
    job |= environment() | {"JOB_COMPLETION_INDEX": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    starts = [
        subprocess.run(
            ["bash", "examples/kubernetes/worker.sh"],
            cwd=ROOT, env=job | {"MIN_PODS": fewest}, check=True, capture_output=True, text=True,
        ).stdout
        for fewest in ("", "1")
    ]  # fmt: skip
    assert starts[0].startswith(
        " --nnodes 2 --node_rank 1 --master_addr pretrain-0.pretrain --master_port 29500 --nproc_per_node 8 "
    )
    meeting = f"--rdzv-backend c10d --rdzv-endpoint pretrain-0.pretrain:29500 --rdzv-id {tmp_path} "
    assert starts[1].startswith(f"1 --nnodes 1:2 --max-restarts 10 {meeting}")


def on_node_one(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What pretrain.sbatch starts on the second of two nodes; the commands that it calls are replaced."""
    commands = {
        "torchrun": 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"\nexit 1\n',
        "squeue": 'echo "$STATE"\n',
        "srun": 'exit "$UNREACHABLE"\n',
        "scontrol": 'echo scontrol "$@"\n',
        "scancel": 'echo scancel "$@"\n',
    }
    for name, text in commands.items():
        (folder / name).write_text("#!/usr/bin/env bash\n" + text)
        (folder / name).chmod(0o755)
    job = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7", "FIRST": "n0", "PORT": "29500"}
    job |= {"RUN": str(folder), "PROCESSES": "8", "STATE": "RUNNING", "UNREACHABLE": "0"}
    env = environment() | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "examples/slurm/task.sh", "--config", "x.yaml"],
        cwd=ROOT, env=env | job | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_nodes_start_together_or_with_fewer(tmp_path: Path):
    words = "train_pretrain.py --config x.yaml\n"
    fewer = on_node_one(tmp_path, MIN_NODES="1", LAUNCHER="torchrun").stdout
    meeting = "--max-restarts 10 --rdzv-backend c10d --rdzv-endpoint n0:29500 --rdzv-id 7"
    assert fewer == f"1 --nnodes 1:2 --nproc_per_node 8 {meeting} {words}"
    together = on_node_one(tmp_path, LAUNCHER="torchrun").stdout
    meeting = "--master_addr n0 --master_port 29500 --signals-to-handle SIGTERM,SIGUSR1"
    assert together == f" --nnodes 2 --node_rank 1 --nproc_per_node 8 {meeting} {words}"


@pytest.mark.parametrize(
    ("unreachable", "state", "exit_code", "expected"),
    [
        ("1", "RUNNING", 71, ["scontrol requeue 7"]),
        ("1", "RUNNING", 2, ["scancel 7"]),
        ("0", "RUNNING", 71, []),
    ],
)
def test_another_node_decides_for_a_first_one_that_is_lost(
    unreachable: str, state: str, exit_code: int, expected: list[str], tmp_path: Path
):
    write_status(tmp_path, exit_code=exit_code)
    done = on_node_one(tmp_path, MIN_NODES="1", UNREACHABLE=unreachable, STATE=state)
    assert done.stdout.splitlines()[1:] == expected
    assert done.returncode == 1


def cluster(folder: Path) -> dict[str, str]:
    """A node called localhost, whose `scontrol requeue` leaves a note."""
    folder.mkdir()
    scripts = {
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n',
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$2" >> "$NOTES"; fi\n',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"\n',
        "accelerate": f'exec {sys.executable} -m accelerate.commands.accelerate_cli "$@"\n',
    }
    for name, text in scripts.items():
        (folder / name).write_text("#!/usr/bin/env bash\n" + text)
        (folder / name).chmod(0o755)
    return environment() | {
        "PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(folder / "notes"), "PYTHON": sys.executable,
        "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "PROCESSES": "2",
        "ACCELERATE_USE_CPU": "true", "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip


def wait_for_rows(process: subprocess.Popen[str], metrics: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None, f"ended before row {count}:\n{process.communicate()[0][-4000:]}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_job(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_slurm_job_is_requeued_until_its_run_is_done(
    launcher: str, options: list[str], undisturbed: Finished, tmp_path: Path
):
    """Stopped by SIGUSR1 before its time limit, twice; the third time it ends. Exact in the end."""
    env, run = cluster(tmp_path / "cluster"), tmp_path / "run"
    notes = Path(env["NOTES"])
    for restart, rows in enumerate((5, 14, None)):
        job = {"RUN": str(run), "SLURM_JOB_ID": f"{os.getpid() % 20000}", "SLURM_RESTART_COUNT": str(restart)}
        job["PORT"] = str(20000 + (os.getpid() * 3 + restart) % 20000)
        process = start_job(
            ["bash", "examples/slurm/pretrain.sbatch", *NO_REPORT, *options],
            env | job | {"LAUNCHER": launcher},
        )
        if rows is not None:
            wait_for_rows(process, run / "metrics.jsonl", rows)
            os.killpg(process.pid, signal.SIGUSR1)  # the batch script ignores it, as Slurm spares it
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        requeued = notes.read_text().splitlines() if notes.exists() else []
        assert len(requeued) == min(restart + 1, 2), output[-4000:]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], process.returncode) == ("finished", 0)
    assert len((run / "attempts.jsonl").read_text().splitlines()) == 3
    assert_exact(Finished(0, "", run), undisturbed)


def test_slurm_gives_a_save_the_time_that_it_asks_for():
    text = (EXAMPLES / "slurm" / "pretrain.sbatch").read_text()
    match = re.search(r"--signal=USR1@(\d+)", text)
    shutdown = re.search(r"SHUTDOWN_TIMEOUT:-(\d+)}", text)
    assert match is not None
    assert shutdown is not None
    assert 30 < int(shutdown[1]) < int(match[1])
    assert "#SBATCH --requeue" in text
