"""`llm-pretrain train` and the package that it is installed from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.config.loading import PRESETS, load_config
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import RESUMABLE_PATHS, SCRIPTS

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture
def started(monkeypatch, tmp_path, plain_store):
    """Runs the command up to its exec; returns the launcher's command and its launch file."""
    monkeypatch.chdir(tmp_path)
    Path("x").symlink_to(plain_store)

    def start(*arguments: str) -> tuple[list[str], dict | None]:
        found: list[tuple[list[str], dict | None]] = []

        def execv(executable: str, command: list[str]) -> None:
            file = None
            if "--config_file" in command:
                path = command[command.index("--config_file") + 1]
                assert os.path.isfile(path), "Accelerate asks this before it reads the file"
                file = json.loads(Path(path).read_text())
                os.close(int(Path(path).name))
            assert executable == command[0] == sys.executable
            found.append((command, file))
            raise SystemExit  # the process would be another from here on

        monkeypatch.setattr(os, "execv", execv)
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "LLM_PRETRAIN_OMP_NUM_THREADS"):
            monkeypatch.setenv(name, "")  # restored after the test, which lets the command set it
            del os.environ[name]
        with pytest.raises(SystemExit):
            main(["train", *arguments])
        return found[0]

    return start


LAUNCHER = ["-P", str(ROOT / "llm_pretrain" / "launch" / "launcher.py")]
OPTIONS = ("--config", "tiny-dense", "--data.sources", "[{store: x}]", "--run.name=mine")


def test_torchrun_gets_the_script_and_its_options(started):
    command, _ = started("--nproc", "2", *OPTIONS)
    assert command[1:6] == [*LAUNCHER, "torch.distributed.run", "--standalone", "--nproc_per_node"]
    assert command[6:] == ["2", str(ROOT / "train_pretrain.py"), *OPTIONS]
    command, _ = started(*OPTIONS[:2], "--nproc=1", *OPTIONS[2:])
    assert command[1:] == [str(ROOT / "train_pretrain.py"), *OPTIONS], "one process needs no launcher"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ranks_share_the_cores_and_leave_them_while_they_wait(launcher, started, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    started("--launcher", launcher, "--nproc", "2", *OPTIONS)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("3", "passive")


@pytest.mark.parametrize(
    ("strategy", "gpus", "nproc", "expected"),
    [
        ("ddp", 0, 2, {"distributed_type": "MULTI_GPU", "use_cpu": True}),
        ("ddp", 0, 1, {"distributed_type": "NO", "use_cpu": True}),
        ("ddp", 3, None, {"distributed_type": "MULTI_GPU", "use_cpu": False}),
        ("fsdp", 0, 2, {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_version": 2}}),
        (
            "deepspeed",
            0,
            2,
            {"use_cpu": False, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        ),
    ],
)
def test_accelerate_gets_a_file_that_starts_all_processes(
    started, monkeypatch, strategy, gpus, nproc, expected
):
    monkeypatch.setattr("llm_pretrain.commands.train.gpu_count", lambda: gpus)
    options = [*OPTIONS, "--distributed.strategy", strategy, "--training.precision", "fp32"]
    options += ["--distributed.zero_stage", "3"] if strategy == "deepspeed" else []
    count = [] if nproc is None else ["--nproc", str(nproc)]
    command, file = started("--launcher", "accelerate", *count, *options)
    assert command[1:5] == [*LAUNCHER, "accelerate.commands.launch", "--config_file"]
    assert command[-len(options) - 1 :] == [str(ROOT / "train_pretrain_accelerate.py"), *options]
    assert command[command.index("--num_processes") + 1] == str(nproc or gpus)
    assert file is not None
    assert file | expected == file
    assert file["num_processes"] == (nproc or gpus)
    assert file["mixed_precision"] == "no"


def test_mistakes_are_found_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    assert main(["train", "--nproc", "0", *OPTIONS]) == 2
    assert "--nproc: expected 1 or more, found 0" in capsys.readouterr().err
    assert main(["train", "--nproc", "5", *OPTIONS]) == 2
    lines = capsys.readouterr().err
    assert "training.global_batch_size: expected a multiple of" in lines, "of five processes"
    assert main(["train", "--nproc", "2", *OPTIONS]) == 65
    [line] = capsys.readouterr().err.splitlines()
    assert "error: x: expected a folder with store.json, found none" in line, "without a launcher's traceback"
    assert "`llm-pretrain prepare --output x`" in line
    with pytest.raises(SystemExit) as stop:
        main(["train", *OPTIONS, "--print_config"])
    assert stop.value.code == 0
    assert "  name: mine\n" in capsys.readouterr().out


def test_a_preset_is_found_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml", str(PRESETS / "quickstart.yaml")):
        assert load_config(["--config", name]).run.name == "quickstart"
    with pytest.raises(
        ConfigError, match=r"configs/quickstart\.yaml: no such file; the preset is named quick"
    ):
        load_config(["--config", "configs/quickstart.yaml"])
    Path("quickstart").write_text("run: {name: mine}\n")
    assert load_config(["--config", "quickstart"], needs_data=False).run.name == "mine"


def test_the_package_lists_are_complete():
    """What `pip install .` takes: every package, both scripts, every preset and file beside the code."""
    found = {".".join(path.relative_to(ROOT).parts[:-1]) for path in ROOT.glob("llm_pretrain/**/__init__.py")}
    assert set(SETUPTOOLS["packages"]) == found | {"llm_pretrain.configs"}
    assert set(SETUPTOOLS["py-modules"]) == {Path(SCRIPTS[path]).stem for path in RESUMABLE_PATHS}
    folders = {name: ROOT / name.replace(".", "/") for name in SETUPTOOLS["packages"]}
    folders |= {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}
    listed = {
        path
        for name, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in folders[name].glob(pattern)
    }
    beside = {path for folder in ("configs", "llm_pretrain") for path in (ROOT / folder).rglob("*.*")}
    assert {path for path in beside if path.is_file() and path.suffix not in (".py", ".pyc")} == listed


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the built wheel, over the packages of this one."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("configs/", "tests/"))]
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    (Path(site.stdout.strip()) / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [*pip, "--python", str(python), "install", *offline, "--force-reinstall", str(wheel)], check=True
    )
    return python.parent


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_an_installed_package_trains_outside_of_the_checkout(installed, plain_store, tmp_path, launcher):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in ("random", "torch", "accelerate"):  # a user's own, which nothing may import
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(installed / "llm-pretrain"), *arguments], cwd=tmp_path, env=environment, check=False,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    listing = run("configs")
    assert listing.returncode == 0, listing.stderr
    assert {path.stem for path in PRESETS.glob("*.yaml")} <= {
        line.partition(" ")[0] for line in listing.stdout.splitlines()
    }
    printed = run("train", "--launcher", launcher, "--config", "quickstart", "--print_config")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "  name: quickstart\n" in printed.stdout
    options = ["--launcher", launcher, "--nproc", "2", "--config", "tiny-dense", "--run.output_dir", "run"]
    options += ["--training.max_steps", "2", "--schedule.warmup_steps", "0"]
    options += ["--logging.wandb_mode", "disabled"]
    trained = run("train", *options, "--data.sources", f"[{{store: {plain_store}}}]")
    assert trained.returncode == 0, trained.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    found = {key: status[key] for key in ("state", "step", "launcher", "world_size")}
    assert found == {"state": "finished", "step": 2, "launcher": launcher, "world_size": 2}
