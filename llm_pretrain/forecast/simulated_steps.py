"""Simulated steps for `llm-pretrain simulate`: the worker's results, the search for a mesh, findings."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from llm_pretrain.config.mesh_checks import check_mesh
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError, ResourceError
from llm_pretrain.hardware import Cluster
from llm_pretrain.launch.jobs import PACKAGE_ROOT, RUN_MODULE, launch_environment

PAGE = 4096
"""Bytes of a page. For smaller messages, a link's time is only the latency of its hops."""
LONG = 32_768
"""Sequence length, in tokens, from which `--search` also divides sequences over `cp`."""
SEARCHED_SHARE = 0.9
"""Share of the memory that a searched mesh may take; the allocator's fragmentation is not simulated."""
_SHARD_SIZES = 3
"""Number of shard sizes traced for each `ep_size`: the smallest that fits, and every second larger one."""
_STAGES = 8
"""Largest `pp_size` that `--search` tries; a trace needs more than twice as many micro batches."""
_TRACED = (3, 4)
"""Numbers of layers of the two traces for an extrapolation, besides leading dense layers."""
_TRACED_OF_A_STAGE = (2, 3)
"""Numbers of layers per stage for a pipeline's extrapolation: a stage reduces gradients after all layers."""


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Args:
        peak: Most bytes on a rank at once.
        held: Bytes by kind of tensor at the peak; empty if extrapolated.
        collectives: Rows by kind, group and group size; if extrapolated, of the trace with more layers.
        padding: The most padded parameter, as `name`, `rows`, `ranks` and `factor`.
        products, traffic: Seconds of computation bound by products, and by the memory's bandwidth.
        hidden, waited: Seconds by link of collectives beside computation, and of those it waits for.
        idle: Seconds that the ranks of a pipeline wait for each other.
        ranks: The rank whose memory this is, and the rank whose time this is; they may differ in a pipeline.
    """

    peak: int
    held: dict[str, int]
    collectives: list[dict[str, Any]]
    padding: dict[str, Any] | None
    products: float
    traffic: float
    hidden: dict[str, float]
    waited: dict[str, float]
    idle: float = 0.0
    ranks: tuple[int, int] = (0, 0)

    @property
    def computing(self) -> float:
        """Seconds of computation."""
        return self.products + self.traffic

    @property
    def seconds(self) -> float:
        """Least seconds of the step: the longest of computation and each hidden link, plus all waits."""
        return max([self.computing, *self.hidden.values()]) + sum(self.waited.values()) + self.idle

    @property
    def bound(self) -> str:
        """What takes longest: `products`, `memory traffic`, `other stages`, or a link."""
        computing = "products" if self.products >= self.traffic else "memory traffic"
        links = [*self.hidden.items(), *self.waited.items(), ("other stages", self.idle)]
        return max([(computing, self.computing), *links], key=lambda pair: pair[1])[0]

    def mfu(self, config: Config, world_size: int, machine: Cluster) -> float:
        """The model's FLOPs ÷ the FLOPs that all devices reach in the step's time at their peak."""
        from llm_pretrain.model.sizes import flops_per_token

        length, in_fp32 = config.training.sequence_length, config.training.precision == "fp32"
        peak = machine.fp32_tflops if in_fp32 else machine.bf16_tflops
        flops = flops_per_token(config.model, length) * config.training.tokens_per_step
        return flops / (self.seconds * peak * 1e12 * world_size)


class Simulator:
    """The worker process."""

    def __init__(self, process: subprocess.Popen[str], machine: Cluster):
        self._process, self._machine = process, machine

    def raw(
        self, options: Sequence[str], world_size: int, layers: int | None = None, rank: int = 0
    ) -> dict[str, Any]:
        """Ask the worker for a step; returns its `Trace` as plain data, with grouped collectives, and `time`.

        Raises:
            ConfigError: the worker found errors in the configuration.
            ResourceError: the worker failed.
        """
        job = {"options": list(options), "world_size": world_size, "layers": layers, "rank": rank}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # below, the error output says why
            print(json.dumps(job | {"machine": asdict(self._machine)}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            reason = _reason(self._process.stderr.read())
            raise ResourceError(f"simulate: expected a simulated step, found: {reason}")
        found = json.loads(line)
        if "errors" in found:
            raise ConfigError(*found["errors"])
        return found

    def step(self, options: Sequence[str], config: Config, world_size: int) -> SimulatedStep:
        """Simulate all layers. A pipeline's step has the fullest rank's memory, the slowest rank's time."""
        steps = []
        for rank in different_ranks(config, world_size):
            found = self.raw(options, world_size, rank=rank)
            fields = {name: found[name] for name in ("peak", "held", "collectives", "padding")}
            steps.append(SimulatedStep(**fields, **found["time"], ranks=(rank, rank)))
        return _of_all(steps)

    def extrapolated(self, options: Sequence[str], config: Config, world_size: int) -> SimulatedStep:
        """Extrapolate the step from two traces with few layers: the memory of each part, and each time, is
        linear in the number of layers or, in a pipeline, of layers per stage."""
        model, pp = config.model, config.distributed.mesh(world_size).pp
        period = model.decoder_sparse_step if model.moe_layers else 1
        counts = _TRACED if pp == 1 else _TRACED_OF_A_STAGE
        few, more = (pp * (model.first_k_dense_replace + count * period) for count in counts)
        if model.num_hidden_layers <= more:
            return self.step(options, config, world_size)
        times = (model.num_hidden_layers - few) / (more - few)

        def line(left: Any, right: Any) -> Any:
            if isinstance(left, dict):
                return {key: line(left.get(key, 0), right[key]) for key in right}
            return left + times * (right - left)

        steps = []
        for rank in different_ranks(config, world_size):
            first, second = (self.raw(options, world_size, layers, rank) for layers in (few, more))
            peak = int(max(line(first["highest"], second["highest"]).values()))
            found = {name: second[name] for name in ("collectives", "padding")}
            time = line(first["time"], second["time"])
            steps.append(SimulatedStep(peak, {}, **found, **time, ranks=(rank, rank)))
        return _of_all(steps)


def _of_all(steps: Sequence[SimulatedStep]) -> SimulatedStep:
    """The slowest rank's step, with the memory of the fullest rank."""
    largest, slowest = max(steps, key=lambda step: step.peak), max(steps, key=lambda step: step.seconds)
    of_both = (largest.ranks[0], slowest.ranks[0])
    return replace(slowest, peak=largest.peak, held=largest.held, ranks=of_both)


def different_ranks(config: Config, world_size: int) -> list[int]:
    """Ranks of a pipeline whose steps differ: the first, the last, and between them the first one with each
    number of layers. It has more micro batches in memory than later ranks with as many layers."""
    distributed, pp = config.distributed, config.distributed.mesh(world_size).pp
    between: dict[tuple[int, int], int] = {}
    for rank in range(1, pp - 1):
        layers = [layer for stage in distributed.stages(rank) for layer in config.stage_layers(stage)]
        between.setdefault((len(layers), sum(map(config.model.is_moe_layer, layers))), rank)
    found = {0, *between.values(), pp - 1}
    return [world_size // pp * rank for rank in sorted(found)]


def _reason(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:200]


@contextmanager
def simulator(machine: Cluster) -> Iterator[Simulator]:
    """A block with a worker process, which ends with the block."""
    with subprocess.Popen(
        [*RUN_MODULE, "llm_pretrain.forecast.simulation.worker"],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Simulator(process, machine)
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    """The worker's environment: no GPUs, and no torch warnings about process groups that send nothing."""
    return launch_environment(PACKAGE_ROOT, gpus="") | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Mesh:
    """Sizes of a mesh."""

    replicas: int
    shards: int
    ep: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def sizes(self) -> dict[str, int]:
        """Name in the `distributed` section -> size."""
        return {
            **{"dp_replicate_size": self.replicas, "dp_shard_size": self.shards, "ep_size": self.ep},
            **{"cp_size": self.cp, "tp_size": self.tp, "pp_size": self.pp},
        }

    def options(self) -> list[str]:
        """The mesh as options of a script: every size, since a preset may have others."""
        words = [word for name, size in self.sizes().items() for word in (f"--distributed.{name}", str(size))]
        words += ["--distributed.pp_schedule", "1f1b"] if self.pp > 1 else []
        return ["--distributed.strategy", "fsdp", *words]

    def of(self, config: Config) -> Config:
        """The configuration on this mesh."""
        fixed: Any = {"strategy": "fsdp", "pp_schedule": "1f1b"}
        return replace(config, distributed=replace(config.distributed, **fixed, **self.sizes()))


def candidates(config: Config, world_size: int, machine: Cluster) -> list[Mesh]:
    """Meshes to trace: for each `ep_size`, `cp_size` and `tp_size`, shard sizes that may fit into memory.

    One node holds all ranks of `cp_size` x `tp_size`, and all of `ep_size`. `cp_size` exceeds 1 only from
    `LONG` tokens on. If `cp` or `tp` divides the sequences, only the smallest shard size is taken.
    """
    powers = _powers(machine)
    contexts = powers if config.training.sequence_length >= LONG else [1]
    found = []
    for ep, cp, tp in itertools.product(powers, contexts, powers):
        if cp * tp <= machine.gpus_per_node:
            fitting = _fitting(config, world_size, machine, Mesh(1, 1, ep, cp, tp))
            found += fitting[::2][: _SHARD_SIZES if cp * tp == 1 else 1]
    return found


def pipelines(like: Mesh | None, config: Config, world_size: int, machine: Cluster) -> Iterator[list[Mesh]]:
    """For each `pp_size` up to `_STAGES` that divides the layers, shard sizes that may fit into memory.

    Args:
        like: The mesh whose other sizes are kept; if None, as many ranks as possible divide the experts.
    """
    experts = config.model.num_experts if config.model.moe_layers else 1
    like = like or Mesh(1, 1, ep=max(size for size in _powers(machine) if experts % size == 0))
    for pp in range(2, _STAGES + 1):
        if config.model.num_hidden_layers % pp == 0 and world_size % pp == 0:
            yield _fitting(config, world_size, machine, replace(like, pp=pp))[::2][:_SHARD_SIZES]


def _powers(machine: Cluster) -> list[int]:
    """Numbers of GPUs that divide a node."""
    node = machine.gpus_per_node
    return [size for size in range(1, node + 1) if node % size == 0]


def _fitting(config: Config, world_size: int, machine: Cluster, like: Mesh) -> list[Mesh]:
    """`like` with all replicas and shards that may fit, by ascending number of ranks that share state."""
    node, sequence = machine.gpus_per_node, like.cp * like.tp
    experts = config.model.num_experts if config.model.moe_layers else 1
    ranks = world_size // like.pp
    if experts % like.ep or world_size % (like.pp * sequence):
        return []
    meshes = [
        replace(like, replicas=ranks // size, shards=size // sequence)
        for size in range(min(ranks, max(2, sequence)), ranks + 1)
        if ranks % size == 0
        and size % sequence == 0
        and size % like.ep == 0
        and (size % node == 0 or node % size == 0 or size == ranks)
    ]
    return [mesh for mesh in meshes if _may_fit(mesh, config, world_size, machine)]


def _may_fit(mesh: Mesh, config: Config, world_size: int, machine: Cluster) -> bool:
    """Whether a mesh is allowed, and fits into memory by the estimate of `llm-pretrain estimate`."""
    from llm_pretrain.memory import estimate_memory

    on_mesh = mesh.of(config)
    rows, data = config.training.micro_batch_size, mesh.replicas * mesh.shards
    if config.training.global_batch_size % (rows * data) or [*check_mesh(on_mesh, world_size)]:
        return False
    return estimate_memory(on_mesh, world_size, on_gpu=True).peak <= SEARCHED_SHARE * machine.memory_gb * 1e9


def findings(step: SimulatedStep, config: Config, machine: Cluster) -> list[str]:
    """What is wrong with a step, one line each."""
    found = []
    if (padding := step.padding) and padding["factor"] > 1.02:
        fitting = min(padding["rows"] & -padding["rows"], padding["ranks"])  # the power of two that divides
        found.append(
            f"{padding['name']} has {padding['rows']} rows over {padding['ranks']} ranks: with padding all "
            f"parameters take {padding['factor']:.2f} times their size; use distributed.dp_shard_size "
            f"{fitting} or fewer, or distributed.ep_size"
        )
    gathers = [row for row in step.collectives if row["kind"] == "all_gather" and row["ranks"] > 1]
    for row in gathers:
        if (shard := row["smallest"] // row["ranks"]) < PAGE:
            found.append(
                f"a rank's part of an all-gather over {row['group']} is {shard} bytes, less than a page: "
                f"its time is that of {row['ranks'] - 1} hops; use a smaller distributed.dp_shard_size"
            )
    for link, seconds in step.hidden.items():
        if seconds > step.computing:
            found.append(
                f"{link} is slower than the step: its collectives take {seconds * 1e3:.1f} ms beside "
                f"{step.computing * 1e3:.1f} ms of computation"
            )
    if config.distributed.ep_size > machine.gpus_per_node:
        found.append(
            f"distributed.ep_size {config.distributed.ep_size} spans nodes of {machine.gpus_per_node} GPUs: "
            "tokens travel over the network, and computation waits for them"
        )
    return found
