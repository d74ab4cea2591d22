"""Whatever stands in a checkpoint or in weights, their readers say in one line what they found.

A manifest vouches for itself by a digest that anybody can compute, so half of the damaged ones carry the
right one: then the types of its parts are looked at. Nothing is allocated on a manifest's word alone.
"""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.finished_runs import FinishedRun
from support.fuzzing import fuzzed
from support.launching import train
from support.mutating import damaged_bytes, damaged_json, dumped, linked_copy, put

from llm_pretrain.__main__ import main as run_command
from llm_pretrain.checkpoints.manifest import (
    MANIFEST_NAME,
    Manifest,
    _digest,
    file_digest,
    find_damage,
    read_manifest,
)
from llm_pretrain.checkpoints.opening import open_model
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError

STEP = "step-00000004"


@pytest.fixture(scope="module")
def finished(finished_run: Callable[[str], FinishedRun]) -> FinishedRun:
    return finished_run("mixture")


@pytest.fixture(scope="module")
def run(finished: FinishedRun) -> Path:
    """Its folder, of which links are damaged."""
    return finished.folder


def resumed(finished: FinishedRun, folder: Path) -> int:
    """Exit code of another step."""
    return train(*finished.options, "--run.output_dir", str(folder), "--training.max_steps", "5")


@pytest.fixture(scope="module")
def true_manifest(run: Path) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / STEP / MANIFEST_NAME).read_text())


def signed(content: Any) -> Any:
    """The content with the digest that it should have."""
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "sha256"}
        content["sha256"] = _digest(json.loads(json.dumps(content)))
    return content


def changed(manifest: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A copy with a value at a place; * is the first key."""
    content = json.loads(json.dumps(manifest))
    owner: Any = content
    for key in path[:-1]:
        owner = owner[next(iter(owner)) if key == "*" else key]
    owner[path[-1]] = value
    return content


def one_line(error: PretrainError) -> str:
    """The message, which has a line for each problem."""
    text = str(error)
    assert text
    for problem in getattr(error, "problems", (text,)):
        assert problem
        assert "\n" not in problem
    return text


def manifest_or_refusal(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        one_line(error)
        return None


def model_or_refusal(folder: Path) -> str | None:
    try:
        open_model(folder)
    except (CheckpointError, ConfigError) as error:
        return one_line(error)
    return None


@pytest.mark.fuzz
def test_any_manifest_is_read_or_refused(run: Path, true_manifest: dict[str, Any], tmp_path: Path):
    folder = linked_copy(run, tmp_path / "run") / "checkpoints" / STEP
    accepted = 0

    @given(
        content=damaged_json(true_manifest).flatmap(
            lambda content: st.sampled_from([dumped(content), dumped(signed(content))])
        )
        | damaged_bytes(dumped(true_manifest))
    )
    @fuzzed(40)
    def check(content: bytes) -> None:
        nonlocal accepted
        put(folder / MANIFEST_NAME, content)
        tracemalloc.start()
        try:
            manifest = manifest_or_refusal(folder)
            damage = find_damage(folder, manifest) if manifest else []
            refusal = model_or_refusal(folder)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 64 << 20
        accepted += manifest is not None
        if manifest is None or damage:
            assert refusal is not None

    check()
    print(f"{accepted} damaged manifests were read")


def test_a_manifest_names_no_file_outside_of_its_folder(
    run: Path, true_manifest: dict[str, Any], tmp_path: Path
):
    folder = linked_copy(run, tmp_path / "run") / "checkpoints" / STEP
    outside = tmp_path / "outside"
    outside.write_text("x")
    for name in ("../outside", str(outside), "..", ".", "", "a/../../outside"):
        files = true_manifest["files"] | {name: file_digest(outside)}
        put(folder / MANIFEST_NAME, dumped(signed(true_manifest | {"files": files})))
        (problem,) = find_damage(folder, read_manifest(folder))
        assert "expected" in problem
        assert model_or_refusal(folder) is not None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run", "step"), "2"),
        (("run", "step"), -1),
        (("run", "step"), True),
        (("run", "world_size"), 0),
        (("run", "launcher"), "mpirun"),
        (("run", "fingerprints"), {"tokenizer": 5}),
        (("run", "extra"), []),
        (("environment",), {"torch": 2}),
        (("tensors", "model.norm.weight"), {"dtype": "float32"}),
        (("tensors", "model.norm.weight"), {"dtype": "float32", "shape": [64.0]}),
        (("tensors", "model.norm.weight"), None),
        (("scalars", "x"), {"dtype": "float32", "value": "1"}),
        (("scalars", "x"), {"dtype": "int64", "value": 10**40}),
        (("tied",), {"a": 1}),
        (("optimizer", "class"), 1),
        (("optimizer", "groups"), {"params": []}),
        (("optimizer", "without_state"), None),
        (("scaler",), {"scale": "big"}),
        (("files",), []),
        (("files", "x"), {"bytes": "1", "sha256": "0" * 64}),
        (("files", "x"), {"bytes": 1, "sha256": ["0"]}),
    ],
)
def test_a_signed_manifest_of_wrong_parts_is_unsound(
    true_manifest: dict[str, Any], tmp_path: Path, path: tuple, value: object
):
    (tmp_path / MANIFEST_NAME).write_bytes(dumped(signed(changed(true_manifest, path, value))))
    field = ".".join(path) if path[0] == "run" else path[0]
    with pytest.raises(CheckpointError, match=rf"^manifest\.json: {field}: expected .*, found "):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(dumped(signed(true_manifest)))
    read_manifest(tmp_path)


def damaged_header(content: bytes) -> st.SearchStrategy[bytes]:
    """A safetensors file with its header damaged, its length right or not, or any of its bytes."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]

    def with_header(value: Any) -> st.SearchStrategy[bytes]:
        text = dumped(value)
        sizes = st.sampled_from([len(text)] * 6 + [0, 1, len(text) + 1, 2**31, 2**40, 2**63, 2**64 - 1])
        return sizes.map(lambda length: struct.pack("<Q", length) + text + data)

    return st.one_of(damaged_json(header).flatmap(with_header), damaged_bytes(content))


def safetensors_of(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


@pytest.mark.fuzz
def test_any_tensors_of_a_checkpoint_are_read_or_refused(
    run: Path, true_manifest: dict[str, Any], tmp_path: Path
):
    """Signed anew, as no accident does it: then the reader itself must say what is wrong."""
    folder = linked_copy(run, tmp_path / "run") / "checkpoints" / STEP
    file = safetensors_of(folder)

    @given(content=damaged_header(file.read_bytes()))
    @fuzzed(10)
    def check(content: bytes) -> None:
        put(file, content)
        put(folder / MANIFEST_NAME, dumped(true_manifest))
        assert "is damaged" in (model_or_refusal(folder) or "is damaged")
        files = true_manifest["files"] | {file.name: file_digest(file)}
        put(folder / MANIFEST_NAME, dumped(signed(true_manifest | {"files": files})))
        model_or_refusal(folder)

    check()


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_any_weights_are_opened_or_refused(run: Path, tmp_path: Path, name: str):
    folder = linked_copy(run, tmp_path / "run") / "weights" / STEP
    true = (folder / name).read_bytes()
    contents = (
        damaged_header(true)
        if name.endswith(".safetensors")
        else damaged_json(json.loads(true)).map(dumped) | damaged_bytes(true)
    )

    @given(content=contents)
    @fuzzed(12)
    def check(content: bytes) -> None:
        put(folder / name, content)
        model_or_refusal(folder)

    check()


def command_or_refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Exit code of a command whose errors are lines of its own."""
    capsys.readouterr()
    code = run_command(arguments)
    error = capsys.readouterr().err
    assert code in (0, 1, 2, 65, 74, 78), error
    assert "Traceback" not in error
    return code


COMMANDS = {
    "verify": lambda run, _: ["verify", str(run), "--samples", "1"],
    "generate": lambda run, _: ["generate", str(run), "--prompt", "a", "--max_new_tokens", "1"],
    "export": lambda run, out: [
        *("export", str(run / "weights" / STEP), "--to", "huggingface", "--output", str(out))
    ],
}


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_refuse_damaged_folders(
    command: str, run: Path, true_manifest: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = linked_copy(run, tmp_path / "run")
    weights, checkpoint = copy / "weights" / STEP, copy / "checkpoints" / STEP
    config = json.loads((weights / "config.json").read_text())
    tensors = safetensors_of(weights).read_bytes()

    @given(data=st.data())
    @fuzzed(10, per_cent=5)
    def check(data: st.DataObject) -> None:
        put(checkpoint / MANIFEST_NAME, dumped(signed(data.draw(damaged_json(true_manifest)))))
        put(weights / "config.json", dumped(data.draw(damaged_json(config) | st.just(config))))
        put(weights / "model.safetensors", data.draw(damaged_header(tensors) | st.just(tensors)))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        command_or_refusal(COMMANDS[command](copy, tmp_path / "out"), capsys)

    check()


@pytest.mark.slow
@pytest.mark.fuzz
def test_a_run_goes_on_from_a_damaged_checkpoint_or_says_why_not(
    finished: FinishedRun, true_manifest: dict[str, Any], tmp_path: Path
):
    """Manifests that are not what the run wrote: exit code 0, 74 or 78, and no traceback."""

    def ended(content: Any) -> int:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        finished.copy(tmp_path / "run")
        put(tmp_path / "run" / "checkpoints" / STEP / MANIFEST_NAME, dumped(content))
        return resumed(finished, tmp_path / "run")

    @given(content=damaged_json(true_manifest))
    @fuzzed(4, per_cent=2)
    def check(content: Any) -> None:
        assert ended(content) in (0, 2, 74, 78)

    assert ended(true_manifest) == 0
    check()


NONSENSE: dict[str, tuple[tuple[str | int, ...], object]] = {
    "no state of the loop": (("run", "extra"), {}),
    "a digest of text": (("run", "extra", "digest"), ["a"] * 8),
    "a short digest": (("run", "extra", "digest"), [1]),
    "skipped steps as text": (("run", "extra", "skipped_in_a_row"), "three"),
    "the best without a loss": (("run", "extra", "best"), {"step": 1}),
    "spikes of one number": (("run", "extra", "spikes"), {"steps": [[1.0]], "in_a_row": 0}),
    "an evaluation of text": (("run", "extra", "evaluation"), {"eval/loss": "low"}),
    "a scaler of nothing": (("scaler",), {"scale": 1.0}),
    "a counter of text": (("scalars", "*", "value"), "many"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_signed_manifest_of_nonsense_is_refused_in_one_line(
    finished: FinishedRun, true_manifest: dict[str, Any], tmp_path: Path, capsys, case: str
):
    """A run that resumes looks at every part before it uses it."""
    folder = finished.copy(tmp_path / "run").folder
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    place, value = NONSENSE[case]
    content = changed(true_manifest, place, value)
    put(folder / "checkpoints" / STEP / MANIFEST_NAME, json.dumps(signed(content)).encode())
    capsys.readouterr()
    assert resumed(finished, folder) == 74
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert f"{STEP}" in line
    assert "expected " in line
