"""One run in the eighteen layouts of a table of torchtitan's, run by `parity`, beside its losses.

pytorch/torchtitan#3029, comment of 2026-08-04: seed 42, deterministic, global batch 8, micro batches of one
sequence, ten steps. Here the preset tiny-moe with eight layers, in fp32, on processes that may share cores.
Settings such as `--optimizer.learning_rate 3e-3` replace the preset's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.launching import add_store_option, token_store
from benchmarks.reporting import SkippedError, report
from llm_pretrain.audit.parity import is_violated, launch_and_compare
from llm_pretrain.audit.variants import ParityPlan, make_plan
from llm_pretrain.commands.parity import render
from llm_pretrain.config.loading import PRESETS
from llm_pretrain.errors import ConfigError
from llm_pretrain.launch.jobs import LaunchContext, Machine, exit_on_signals, this_machine
from llm_pretrain.launch.options import add_settings, as_options
from llm_pretrain.text import as_table


class Layout(NamedTuple):
    """A layout of the published table.

    Args:
        name: There.
        mesh: As in `distributed_of`.
        world_size: Number of processes.
        losses: After steps 1, 5 and 10, there.
    """

    name: str
    mesh: str
    world_size: int
    losses: tuple[float, float, float]


STEPS = (1, 5, 10)
"""Steps of the table; the last one is a run's length."""
PUBLISHED = (
    Layout("single GPU", "ddp", 1, (12.05575, 10.89670, 9.81530)),
    Layout("fsdp2", "1x2", 2, (12.07003, 11.09161, 9.97418)),
    Layout("pp2", "1x1+pp2", 2, (12.04905, 10.87594, 9.81217)),
    Layout("cp2", "1x1+cp2", 2, (12.06936, 11.05554, 9.97089)),
    Layout("tp2", "1x1+tp2", 2, (12.05239, 11.01701, 9.95286)),
    Layout("fsdp2 x tp2 x pp2", "1x2+tp2+pp2", 8, (12.05729, 10.63687, 9.73056)),
    Layout("fsdp2 x tp2 x cp2", "1x2+cp2+tp2", 8, (12.04102, 11.00072, 9.93129)),
    Layout("tp2 x pp2 x cp2", "1x1+cp2+tp2+pp2", 8, (12.04419, 10.64952, 9.74151)),
    Layout("fsdp2 x pp2 x cp2", "1x2+cp2+pp2", 8, (12.07969, 10.77366, 9.77886)),
    Layout("ep2 x fsdp2", "1x2+ep2", 2, (12.07003, 11.10597, 9.96939)),
    Layout("ep2 x fsdp2 x tp2 x pp2", "1x2+ep2+tp2+pp2", 8, (12.03851, 10.82012, 9.80058)),
    Layout("ep2 x fsdp2 x tp2 x cp2", "1x2+ep2+cp2+tp2", 8, (12.05770, 11.02899, 9.92700)),
    Layout("ep2 x fsdp2 x pp2 x cp2", "1x2+ep2+cp2+pp2", 8, (12.06318, 10.81674, 9.77785)),
    Layout("ep8 x fsdp8", "1x8+ep8", 8, (12.03346, 10.88771, 9.86456)),
    Layout("pp4", "1x1+pp4", 4, (12.06240, 11.10712, 9.93111)),
    Layout("pp8", "1x1+pp8", 8, (12.04408, 10.81012, 9.81014)),
    Layout("tp4", "1x1+tp4", 4, (12.03252, 11.02760, 9.93343)),
    Layout("cp4", "1x1+cp4", 4, (12.07386, 11.02728, 9.94493)),
)
QUICK = ["--only", "pp2", "tp2"]
SETTINGS: dict[str, object] = {
    **{"run.seed": 42, "training.global_batch_size": 8, "training.micro_batch_size": 1},
    # what eight stages, four tensor-parallel ranks and eight expert-parallel ones can divide
    **{"model.num_hidden_layers": 8, "model.num_attention_heads": 4, "model.num_key_value_heads": 4},
    # at tiny-moe's own rate eight layers train unevenly, which amplifies rounding
    **{"optimizer.learning_rate": 8e-4, "schedule.min_learning_rate": 8e-5},
}
TIMEOUT_SECONDS = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options, and every setting of the configuration."""
    names = [each.name for each in PUBLISHED[1:]]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        help="layouts beside the single GPU",
        metavar="NAME",
    )
    add_store_option(parser)
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what `parity` says of each run, the table of losses and their spreads; 1 beyond its bounds."""
    layouts = [PUBLISHED[0], *(each for each in PUBLISHED if each.name in arguments.only)]
    machine = this_machine()
    with token_store(arguments.store) as store, tempfile.TemporaryDirectory() as temporary, exit_on_signals():
        plan = plan_layouts(layouts, machine, store, Path(temporary), arguments.settings)
        results = launch_and_compare(plan, LaunchContext(plan.scripts, machine, TIMEOUT_SECONDS))
        print("\n" + render(results))
        losses = [[each.run.rows.get(step, {}).get("train/loss") for step in STEPS] for each in results]
    rows = [["layout", *(f"step {step}" for step in STEPS), *(f"torchtitan, {step}" for step in STEPS)]]
    for layout, here in zip(layouts, losses, strict=True):
        shown = ["-" if loss is None else f"{loss:.8f}" for loss in here]
        rows.append([layout.name, *shown, *(f"{loss:.5f}" for loss in layout.losses)])
    spread, published = spreads(losses), spreads([each.losses for each in layouts])
    print("\n" + as_table([*rows, ["spread", *spread, *published]]))
    what = f"largest minus smallest loss of {len(layouts)} layouts after steps {_dotted(STEPS)}"
    note = f"torchtitan {_dotted(published)}"
    report(
        what,
        _dotted(spread),
        bound="each run within `parity`'s bounds",
        met=not is_violated(results),
        note=note,
    )
    return int(is_violated(results))


def plan_layouts(
    layouts: Sequence[Layout], machine: Machine, store: Path, output: Path, settings: Sequence[str]
) -> ParityPlan:
    """A parity call with one run for each layout; on a CPU maybe of more processes than cores.

    Raises:
        ConfigError: settings with which a layout cannot be.
        SkippedError: fewer GPUs than processes.
    """
    sizes = sorted({each.world_size for each in layouts})
    if 0 < machine.gpus < sizes[-1]:
        raise SkippedError(f"needs {sizes[-1]} GPUs, found {machine.gpus}")
    sources = {"data.sources": f"[{{store: {store}}}]"}
    call = argparse.Namespace(
        config=[str(PRESETS / "tiny-moe.yaml")],
        settings=[*as_options(SETTINGS | sources), *settings],
        paths="torchrun",
        world_size=",".join(map(str, sizes)),
        mesh=",".join(each.mesh for each in layouts),
        steps=STEPS[-1],
        output=str(output),
        **dict.fromkeys(("accumulation", "precision")),
    )
    plan = make_plan(call, replace(machine, cores=max(machine.cores, sizes[-1])))
    by_place = {(each.mesh, each.world_size): each for each in plan.variants}
    places = [(each.mesh, each.world_size) for each in layouts]
    if missing := [f"{mesh} W={size}" for mesh, size in places if (mesh, size) not in by_place]:
        raise ConfigError(*(note for note in plan.notes if note.startswith(tuple(missing))))
    return replace(plan, variants=[by_place[place] for place in places])


def spreads(columns: Sequence[Sequence[float | None]]) -> list[str]:
    """Largest minus smallest loss of each step."""
    found = []
    for values in zip(*columns, strict=True):
        known = [each for each in values if each is not None]
        found.append(f"{max(known) - min(known):.2g}" if known else "-")
    return found


def _dotted(values: Sequence[object]) -> str:
    return " · ".join(map(str, values))
