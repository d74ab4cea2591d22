"""The plan of the house, enforced: how imports run, who speaks of distribution, what the scripts share."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llm_pretrain"
SCRIPTS = {"torchrun": ROOT / "train_pretrain.py", "accelerate": ROOT / "train_pretrain_accelerate.py"}

_BASE = {"errors", "files", "config"}
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "config": {"errors", "files"},
    "model": {"errors", "config"},
    "data": {"errors", "files", "config"},
    "tracking": _BASE,
    "export": {*_BASE, "model"},
    "generation": {"errors", "config", "model"},
    "ladder": {*_BASE, "model", "tracking"},
    "optim": {"errors", "config", "model"},
    "memory": {"errors", "config", "model", "optim", "tracking"},
    "distributed": {*_BASE, "model", "optim", "memory"},
    "checkpoints": {*_BASE, "model", "export", "optim", "distributed"},
    "training": {
        *_BASE,
        *("model", "data", "tracking", "export", "generation"),
        *("optim", "memory", "distributed", "checkpoints"),
    },
    "simulation": {
        *("errors", "config", "model", "data", "tracking"),
        *("optim", "memory", "distributed", "training"),
    },
    "commands": {
        *("errors", "files", "config", "model", "data", "tracking", "export", "generation"),
        *("optim", "memory", "distributed", "checkpoints", "training", "ladder"),
    },
    "__main__": {"errors", "files", "memory", "commands"},
    "__init__": set(),
}
"""Part of the package -> the other parts it may import."""

SLOW_IMPORTS = {
    "transformers",
    "datasets",
    "wandb",
    "sentencepiece",
    "accelerate",
    "deepspeed",
    "tokenizers",
    "plotly",
    "rich",
    "gguf",
    "tensorboard",
    "jinja2",
    "pyarrow",
    "scipy",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports (outside `if TYPE_CHECKING`, which runs nothing)."""
    names: set[str] = set()
    nodes = parsed(path).body if top_level_only else ast.walk(parsed(path))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path):
    part = part_of(path)
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] != "llm_pretrain" or len(pieces) < 2 or pieces[1] in (part, "__version__"):
            continue
        assert pieces[1] in ALLOWED[part], f"{part} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_are_used_through_their_face(path: Path):
    """Outside its own folder a part is imported by name from its `__init__`, never from a file inside."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llm_pretrain."):
            pieces = node.module.split(".")
            by_module = pieces[1] == "distributed"  # some of its modules take a second to import
            assert len(pieces) == 2 or by_module or pieces[1] == part_of(path), (
                f"{path.name} imports {node.module}"
            )


SLOW_IMPORTED_BY = {
    "tracking/top.py": {"rich"},
    "data/chat/template.py": {"jinja2"},  # in its own process only
}


def test_slow_libraries_are_imported_where_they_are_needed():
    for path in modules():
        names = imports(path, top_level_only=True)
        assert "llm_pretrain.tracking.top" not in names, path  # the one module that imports rich as a whole
        slow = {name.split(".")[0] for name in names} & SLOW_IMPORTS
        assert not slow - SLOW_IMPORTED_BY.get(path.relative_to(PACKAGE).as_posix(), set()), f"{path}: {slow}"


def test_a_training_process_starts_without_the_slow_libraries():
    code = f"import sys, train_pretrain\nprint(*sorted({SLOW_IMPORTS!r} & set(sys.modules)))\n"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def test_only_the_accelerate_script_imports_accelerate():
    for path in [*modules(), SCRIPTS["torchrun"]]:
        assert not any(name.split(".")[0] == "accelerate" for name in imports(path)), path


LAYERS = ("context_parallel.py", "expert_parallel.py", "tensor_parallel.py", "pipeline.py")
"""Modules whose ranks compute a layer, or a part of the model, together."""
SHARDS = ("fsdp.py", "initial_values.py", "mesh.py", "sharded.py")
"""Modules about what is sharded, for both engines."""


def test_only_the_engines_and_checkpoints_touch_torch_distributed():
    for path in modules():
        distributed = {name for name in imports(path) if name.startswith("torch.distributed")}
        if part_of(path) == "checkpoints":
            distributed = {
                name for name in distributed if not name.startswith("torch.distributed.checkpoint")
            }
        if path.name in LAYERS:  # their exchanges are a layer's, not an engine's
            continue
        if part_of(path) == "simulation":  # its ranks are fake, or those of its own check
            continue
        if path.name in SHARDS:
            allowed = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh")
            distributed = {name for name in distributed if not name.startswith(allowed)}
        assert not distributed, f"{path}: {distributed}"
    assert not any(name.startswith("torch.distributed") for name in imports(SCRIPTS["accelerate"]))
    for path in [*modules(), SCRIPTS["accelerate"]]:
        assert not any(name.endswith(".DistributedDataParallel") for name in imports(path)), path


def class_methods(path: Path, class_name: str) -> list[str]:
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    raise AssertionError(f"{path} has no class {class_name}")


def test_engines_define_the_protocol_in_the_same_order():
    protocol = class_methods(PACKAGE / "training" / "step.py", "Engine")
    torchrun = class_methods(SCRIPTS["torchrun"], "TorchrunEngine")
    accelerate = class_methods(SCRIPTS["accelerate"], "AccelerateEngine")
    assert torchrun == accelerate
    assert [name for name in torchrun if name != "__init__"] == protocol


def test_the_scripts_differ_only_in_their_engine():
    """The two `main` functions are the same but for the engine's name."""
    bodies = []
    for name, path in SCRIPTS.items():
        source = path.read_text()
        main = next(
            node for node in parsed(path).body if isinstance(node, ast.FunctionDef) and node.name == "main"
        )
        segment = ast.get_source_segment(source, main)
        assert segment is not None
        bodies.append(
            segment.replace("TorchrunEngine" if name == "torchrun" else "AccelerateEngine", "Engine")
        )
    assert bodies[0] == bodies[1]


def test_files_have_one_subject():
    """Files stay within 600 lines, functions within 80."""
    for path in [*modules(), *SCRIPTS.values()]:
        assert path.read_text().count("\n") <= 600, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


def test_every_module_says_what_it_is_for():
    for path in modules():
        assert not parsed(path).body or ast.get_docstring(parsed(path)), path
