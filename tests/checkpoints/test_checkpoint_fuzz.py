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
    for name in ("../outside", str(outside), "", "a/../../outside"):
        files = true_manifest["files"] | {name: file_digest(outside)}
        put(folder / MANIFEST_NAME, dumped(signed(true_manifest | {"files": files})))
        (problem,) = find_damage(folder, read_manifest(folder))
        assert "expected" in problem
        assert model_or_refusal(folder) is not None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run", "step"), "2"),
        (("run", "world_size"), 0),
        (("run", "launcher"), "mpirun"),
        (("run", "fingerprints"), {"tokenizer": 5}),
        (("environment",), {"torch": 2}),
        (("tensors", "model.norm.weight"), {"dtype": "float32"}),
        (("scalars", "x"), {"dtype": "float32", "value": "1"}),
        (("tied",), {"a": 1}),
        (("optimizer", "groups"), {"params": []}),
        (("optimizer", "without_state"), None),
        (("scaler",), {"scale": "big"}),
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


NONSENSE: dict[str, tuple[tuple[str | int, ...], object]] = {
    "no state of the loop": (("run", "extra"), {}),
    "a digest of text": (("run", "extra", "digest"), ["a"] * 8),
    "skipped steps as text": (("run", "extra", "skipped_in_a_row"), "three"),
    "spikes of one number": (("run", "extra", "spikes"), {"steps": [[1.0]], "in_a_row": 0}),
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
