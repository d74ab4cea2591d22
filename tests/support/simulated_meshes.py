"""Compares simulated steps with real ones: the configuration made small, on ranks of this machine's CPU.

    python tests/support/simulated_meshes.py OPTIONS [RANK FOLDER]

`OPTIONS` is a JSON list of script options. Without a rank, it starts four ranks, simulates the same steps and
prints one line of JSON for each mesh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from llm_pretrain.config.loading import load_config
from llm_pretrain.config.mesh_checks import check_mesh
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ResourceError
from llm_pretrain.forecast.simulation.trace import Trace, traced_step
from llm_pretrain.forecast.simulation.worker import fake_ranks

RANKS = 4
EXPERTS = 8
_CPU = torch.device("cpu")
_MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 2": (2, {}),
    "fsdp 3": (3, {}),
    "fsdp 4": (4, {}),
    "hsdp 2 x 2": (4, {"dp_replicate_size": 2}),
    "cp 4": (4, {"cp_size": 4}),
    "hsdp 2 x cp 2": (4, {"dp_replicate_size": 2, "cp_size": 2}),
    "tp 2": (2, {"tp_size": 2}),
    "tp 4": (4, {"tp_size": 4}),
    "tp 2 x fsdp 2": (4, {"tp_size": 2}),
    "tp 2 x cp 2": (4, {"tp_size": 2, "cp_size": 2}),
    "pp 2": (2, {"pp_size": 2}),
    "pp 4": (4, {"pp_size": 4}),
    "pp 2 x fsdp 2": (4, {"pp_size": 2}),
    "pp 2 x tp 2": (4, {"pp_size": 2, "tp_size": 2}),
    "pp 2, interleaved": (2, {"pp_size": 2, "pp_schedule": "interleaved_1f1b"}),
}
_DENSE_MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 4, reduced once": (4, {"sync_each_batch": False}),
    "hsdp 2 x 2, reduced once": (4, {"dp_replicate_size": 2, "sync_each_batch": False}),
}
_EXPERT_MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "ep 2 x fsdp 2": (4, {"ep_size": 2}),
    "hsdp 2 x ep 2": (4, {"dp_replicate_size": 2, "ep_size": 2}),
    "ep 2 x cp 2": (4, {"ep_size": 2, "cp_size": 2}),
    "ep 4 x tp 2": (4, {"ep_size": 4, "tp_size": 2}),
    "ep 2 x pp 2": (4, {"ep_size": 2, "pp_size": 2}),
}


def meshes(config: Config) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name -> ranks, and sizes in the `distributed` section; those that the configuration allows."""
    found = _MESHES | (_EXPERT_MESHES if config.model.moe_layers else _DENSE_MESHES)
    return {
        name: (ranks, sizes)
        for name, (ranks, sizes) in found.items()
        if not [*check_mesh(small(config, ranks, sizes), ranks)]
    }


def traced_ranks(world_size: int, sizes: dict[str, Any]) -> list[int]:
    """The ranks that are compared: of a pipeline, the first of each stage."""
    stages = sizes.get("pp_size", 1)
    return [world_size // stages * stage for stage in range(stages)]


def small(config: Config, world_size: int, sizes: dict[str, Any]) -> Config:
    """The configuration on a mesh, with small sizes, two micro batches (more in a pipeline), and kernels that
    a CPU has for values and shapes alike."""
    model, training = config.model, config.training
    is_grouped = model.num_key_value_heads != model.num_attention_heads
    changes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4 if sizes.get("pp_size", 1) > 1 else min(3, model.num_hidden_layers),
        "num_attention_heads": 8 if is_grouped else 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    if model.moe_layers:
        changes |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    step = {"sequence_length": 48, "micro_batch_size": 2, "global_batch_size": 4 * world_size}
    head = "fused" if sizes.get("tp_size", 1) > 1 else "full"
    kernels = {"experts_implementation": "reference", "loss_implementation": head, "compile": "off"}
    precision = {"precision": "bf16" if training.precision == "fp16" else training.precision}
    return replace(
        config,
        model=replace(model, **changes),
        training=replace(training, **step, **kernels, **precision),
        evaluation=replace(config.evaluation, sample_prompts=[]),
        distributed=replace(config.distributed, **_FLAT | sizes),
    )


_FLAT: dict[str, Any] = {
    **{"strategy": "fsdp", "dp_replicate_size": 1, "dp_shard_size": None},
    **{"ep_size": 1, "cp_size": 1, "tp_size": 1, "pp_size": 1, "pp_schedule": "1f1b"},
}


def plain(trace: Trace) -> dict[str, Any]:
    """What is compared, as plain data."""
    rows = [[each.kind, each.group, len(each.ranks), each.size, each.on_host] for each in trace.collectives]
    return {"peak": trace.peak, "collectives": rows}


_NOT_COPIED = ("send", "recv_", "wait_tensor")
"""Operations that get the originals: no thread keeps these, and a send ends only when it is received."""


class OnCopies(TorchDispatchMode):
    """Makes collectives end before they return, and gives Gloo copies of the tensors.

    Gloo's threads keep tensors for some time after the result is there, so autograd copies a gradient too.
    Gloo also reduces and scatters in a buffer of its own. Neither memory belongs to the step.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_functional = func.namespace == "_c10d_functional"
        if not (is_functional or func.namespace == "c10d") or func._opname in _NOT_COPIED:
            return func(*args, **(kwargs or {}))
        given, structure = tree_flatten((args, kwargs or {}))
        copies = [each.clone() if isinstance(each, Tensor) else each for each in given]
        copied, options = tree_unflatten(copies, structure)
        out = func(*copied, **options)
        originals = {id(copy): each for copy, each in zip(copies, given, strict=True)}

        def finished(each: Any) -> Any:
            if is_functional:
                return torch.ops._c10d_functional.wait_tensor(each).clone()
            if isinstance(each, Tensor):
                return originals[id(each)]
            dist.Work.unbox(each).wait()
            return FakeWork().boxed()

        out = tree_map(finished, out)
        if not is_functional:
            for copy, each in zip(copies, given, strict=True):
                if isinstance(each, Tensor):
                    each.copy_(copy)
        return out


def run_rank(config: Config, rank: int, folder: Path) -> None:
    """Compute every mesh's step with three others; the ranks that are compared write what they did."""
    for number, (world_size, sizes) in enumerate(meshes(config).values()):
        if rank >= world_size:
            continue
        file = f"file://{folder / str(number)}"
        dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world_size)
        trace = traced_step(small(config, world_size, sizes), _CPU, real=OnCopies())
        dist.barrier()
        dist.destroy_process_group()
        if rank in traced_ranks(world_size, sizes):
            (folder / f"{number}-{rank}.json").write_text(json.dumps(plain(trace)))


def compare(config: Config, options: str) -> None:
    """Start the ranks, simulate the same, and print both."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, options]
        ranks = [
            subprocess.Popen([*command, str(rank), folder], stderr=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        expected: dict[str, tuple[str, dict[str, Any]]] = {}
        """Name of a file -> the mesh and rank, and its simulated step."""
        for number, (name, (world_size, sizes)) in enumerate(meshes(config).items()):
            for rank in (compared := traced_ranks(world_size, sizes)):
                with fake_ranks(world_size, "fake", rank):
                    trace = traced_step(small(config, world_size, sizes), _CPU)
                label = f"{name}, rank {rank}" if len(compared) > 1 else name
                expected[f"{number}-{rank}.json"] = label, plain(trace)
        failures = [(each.communicate()[1], each.returncode) for each in ranks]
        for text, code in failures:
            if code:
                lines = text.strip().splitlines()
                raise ResourceError(
                    f"--verify: expected steps to run here, found: {(lines or [''])[-1]:.200}"
                )
        for file, (label, simulated) in expected.items():
            real = json.loads((Path(folder) / file).read_text())
            print(json.dumps({"mesh": label, "simulated": simulated, "real": real}), flush=True)


def main() -> None:
    """Compare, or be one of the ranks."""
    torch.set_num_threads(1)
    config = load_config(json.loads(sys.argv[1]), needs_data=False, has_bf16=True)
    if len(sys.argv) == 2:
        compare(config, sys.argv[1])
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        run_rank(config, int(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
