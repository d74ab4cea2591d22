"""The plan of the house, enforced: how imports run, who speaks of distribution, what the scripts share."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llm_pretrain"
SCRIPTS = {"torchrun": ROOT / "train_pretrain.py", "accelerate": ROOT / "train_pretrain_accelerate.py"}

_BASE = {"errors", "files", "hardware", "text", "version"}
_CORE = {
    *("config", "model", "data", "optim", "memory", "launch", "runs", "tracking", "export", "distributed"),
    *("checkpoints", "training"),
}
ALLOWED = {
    "version": set(),
    "errors": set(),
    "text": set(),
    "files": {"errors", "text"},
    "hardware": {"errors", "files", "text", "version"},
    "config": _BASE,
    "model": {*_BASE, "config"},
    "data": {*_BASE, "config"},
    "optim": {*_BASE, "config", "model"},
    "memory": {*_BASE, "config", "model", "optim"},
    "launch": {*_BASE, "config", "model", "memory"},
    "runs": {*_BASE, "config", "launch"},
    "tracking": {*_BASE, "config", "runs"},
    "export": {*_BASE, "config", "model", "optim"},
    "distributed": {*_BASE, "config", "model", "optim", "launch"},
    "checkpoints": {*_BASE, "config", "model", "export", "optim", "distributed"},
    "training": {*_BASE, *_CORE},
    "audit": {*_BASE, *_CORE},
    "forecast": {*_BASE, *_CORE},
    "api": {*_BASE, *_CORE, "audit", "forecast"},
    "commands": {*_BASE, *_CORE, "audit", "forecast", "api"},
    "__main__": {*_BASE, *_CORE, "audit", "forecast", "api", "commands"},
    "__init__": {"version", "api"},
}
"""Part of the package -> the other parts it may import. The two scripts may import what `training` may, and
`audit` and `forecast` may import the scripts."""

SLOW_IMPORTS = {
    *("transformers", "datasets", "wandb", "sentencepiece", "accelerate", "deepspeed", "tokenizers"),
    *("plotly", "rich", "gguf", "tensorboard", "jinja2", "pyarrow", "scipy"),
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
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULE_NAMES = {module_name(path) for path in modules()}


@cache
def modules_used(path: Path) -> set[str]:
    """Modules of the package that a file imports, under TYPE_CHECKING and inside functions too."""
    found = set()
    for node in ast.walk(parsed(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.append(inner if inner in MODULE_NAMES else node.module)
        found |= {name for name in names if name.partition(".")[0] == "llm_pretrain"}
    return found


def test_imports_run_one_way_and_reach_one_level_into_another_part():
    """What is deeper is imported from the `__init__` of its folder."""
    for path, name in [(each, name) for each in modules() for name in modules_used(each)]:
        part, pieces = part_of(path), name.split(".")
        assert len(pieces) > 1, f"{path} imports the package's root"
        assert pieces[1] in {part, *ALLOWED[part]}, f"{path}: {part} imports {name}"
        assert pieces[1] == part or len(pieces) <= 3, f"{path} imports {name}"


def test_no_module_needs_itself():
    """No circles of imports, not even of those that only a type checker follows."""
    uses = {module_name(path): modules_used(path) for path in modules()}
    for name, found in uses.items():  # the face of a folder is no user of what it hands on
        if (ROOT / Path(*name.split("."))).is_dir():
            uses[name] = set()
        found -= {name}
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        pytest.fail(" needs ".join(reversed(error.args[1])))


SLOW_IMPORTED_BY = {
    "tracking/top.py": {"rich"},
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


MAY_TOUCH_DISTRIBUTED = ("launch/", "distributed/", "checkpoints/", "optim/muon.py", "optim/param_groups.py")
"""Where ranks meet: their start, exchanges of layers and shards, checkpoints, and Muon's divided work. The
simulation's ranks are fake."""


def touches_distributed(path: Path) -> set[str]:
    """Names of `torch.distributed` that a file imports or reads."""
    read = {ast.unparse(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
    return {name for name in imports(path) | read if name.startswith("torch.distributed")}


def test_only_the_engines_and_checkpoints_touch_torch_distributed():
    for path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith((*MAY_TOUCH_DISTRIBUTED, "forecast/simulation/")):
            assert not touches_distributed(path), path
    assert not touches_distributed(SCRIPTS["accelerate"])
    for path in [*modules(), SCRIPTS["accelerate"]]:
        assert not any(name.endswith(".DistributedDataParallel") for name in imports(path)), path


def class_methods(path: Path, class_name: str) -> list[str]:
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    raise AssertionError(f"{path} has no class {class_name}")


def test_engines_define_the_protocol_in_the_same_order():
    classes = {"training/engine.py": "Engine", "training/step.py": "StepEngine"}
    classes["distributed/collectives.py"] = "Ranks"
    protocol = [name for file, each in classes.items() for name in class_methods(PACKAGE / file, each)]
    torchrun = class_methods(SCRIPTS["torchrun"], "TorchrunEngine")
    accelerate = class_methods(SCRIPTS["accelerate"], "AccelerateEngine")
    by_hand, accelerated = ([name for name in each if name in protocol] for each in (torchrun, accelerate))
    assert by_hand == accelerated
    assert set(by_hand) == set(protocol)
    assert set(torchrun) - set(protocol) == {"__init__", "backward"}
    assert set(accelerate) - set(protocol) == {"__init__", "shard"}


def test_the_scripts_differ_only_in_their_engine():
    """The two `main` functions are the same but for the engine's name."""
    bodies = set()
    for path in SCRIPTS.values():
        (main,) = (
            node for node in parsed(path).body if isinstance(node, ast.FunctionDef) and node.name == "main"
        )
        source = ast.get_source_segment(path.read_text(), main) or ""
        bodies.add(source.replace("TorchrunEngine", "Engine").replace("AccelerateEngine", "Engine"))
    assert len(bodies) == 1


def test_one_file_replaces_names():
    """What else the package varies is handed in."""
    users = [path for path in modules() if any(name.startswith("unittest") for name in imports(path))]
    assert users == [PACKAGE / "forecast/simulation/patches.py"]


def test_functions_have_one_subject():
    """They stay within 80 lines."""
    for path in [*modules(), *SCRIPTS.values()]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


def test_every_module_says_what_it_is_for():
    for path in modules():
        assert not parsed(path).body or ast.get_docstring(parsed(path)), path
