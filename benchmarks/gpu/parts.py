"""What a part of a round is given: its cases with their stores, and where its results go.

    python -m benchmarks.gpu.parts CONTEXT

runs one part in a process of its own; `rounds.py` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.documents import Documents, make_store
from benchmarks.gpu.rounds import PACKED
from benchmarks.launching import VOCAB_SIZE, preset_without_data, training_options
from llm_pretrain.config.loading import load_config, resolve_model
from llm_pretrain.config.tree import Config
from llm_pretrain.data.loader import open_stores
from llm_pretrain.hardware import device_peak_flops
from llm_pretrain.launch.out_of_memory import is_out_of_memory
from llm_pretrain.model.sizes import flops_per_token

_HOPPER = re.compile("H[12]00")
"""The GPUs of the goals: equal in arithmetic, an H200 with more memory and bandwidth."""


class Case(NamedTuple):
    """A training: preset, length, micro batch (all of a step), settings, and the goal on an H100 or H200."""

    name: str
    preset: str
    length: int
    micro_batch_size: int
    settings: dict[str, str] = {}  # noqa: RUF012 (never written to)
    goal: int | None = None
    """Tokens per second."""


_WIDTHS = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
_SHAPE = {f"model.{name}": str(value) for name, value in _WIDTHS.items()}
_EXPERTS = {"model.num_experts": "64", "model.num_experts_per_tok": "8", "model.moe_intermediate_size": "576"}
CASES = {
    case.name: case
    for case in (
        Case("gpt2-124m", "gpt2-124m", 1024, 64, goal=430_000),
        Case(
            "qwen3-0.6b", "qwen3-0.6b", 4096, 8, {"training.activation_checkpointing": "false"}, goal=60_000
        ),
        Case("minimind3-64m", "minimind3-64m", 340, 192),
        Case("finegrained-moe-136m", "finegrained-moe-136m", 512, 64),
        Case("mixture", "gpt2-124m", 1024, 32, _SHAPE | _EXPERTS),
        Case("dense of equal FLOPs", "gpt2-124m", 1024, 32, _SHAPE | {"model.intermediate_size": "4608"}),
        Case("tiny-dense", "tiny-dense", 64, 24),
        Case("tiny-moe", "tiny-moe", 64, 24),
    )
}
"""What is measured, by name. `mixture` has 1.08B parameters, of which 0.19B answer a token."""
DOCUMENTS = {VOCAB_SIZE: 500, 6400: 12_000, 50_304: 20_000, 151_936: 6_000}
"""Documents of the packed stores by vocabulary size: enough for a round's largest batches."""


def vocabulary(case: Case) -> int:
    """The preset's vocabulary size; VOCAB_SIZE where the data would say."""
    return preset_without_data(case.preset).model.vocab_size or VOCAB_SIZE


def case_options(case: Case, store: Path, folder: Path) -> list[str]:
    """The script's options for a case."""
    options = training_options(case.preset, store, folder)
    size = str(case.micro_batch_size)
    options += ["--training.micro_batch_size", size, "--training.global_batch_size", size]
    options += ["--training.sequence_length", str(case.length), "--training.precision", "bf16"]
    options += [word for name, value in case.settings.items() for word in (f"--{name}", value)]
    return [*options, "--logging.report", "false"]


def dense_twin(case: Case) -> Case:
    """A dense model of the same shape and active FLOPs, but for rounding its width to 64."""

    def flops(*settings: str) -> float:
        options = case_options(case, Path("unused"), Path("unused"))
        config = load_config([*options, *settings], needs_data=False, has_bf16=True)
        return flops_per_token(resolve_model(config, vocabulary(case)).model, case.length)

    def dense(width: int) -> dict[str, str]:
        return {"model.num_experts": "0", "model.n_shared_experts": "0", "model.first_k_dense_replace": "0",
                "model.router_aux_loss_coef": "0", "model.router_z_loss_coef": "0",
                "model.router_bias_update_rate": "0", "model.scoring_func": "softmax",
                "model.intermediate_size": str(width)}  # fmt: skip

    one, two = (flops(*(word for name, value in dense(width).items() for word in (f"--{name}", value)))
                for width in (64, 128))  # fmt: skip
    width = 64 * max(1, round(1 + (flops() - one) / (two - one)))
    return case._replace(
        name=f"{case.name}'s dense twin ({width} wide)", settings=case.settings | dense(width), goal=None
    )


@dataclass(frozen=True)
class Context:
    """One part of a round.

    Args:
        part: Its name.
        function: `module.function` of this package.
        words: Its arguments.
        output: Folder of the results.
        work: Folder of the round for temporary files.
        is_dry: Whether everything is tiny and on CPUs.
        halvings: How often the micro batch was halved since memory ran out.
    """

    part: str
    function: str
    words: Sequence[str]
    output: str
    work: str
    is_dry: bool
    halvings: int = 0

    def emit(
        self, what: str, value: Any, unit: str = "", *, show: bool = True, goal: float | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        """Append a result.

        Args:
            what: Was measured.
            value: A number, a text or a list of them.
            unit: Of the value.
            show: Whether it stands in the summary.
            goal: The least value that is aimed at on an H100 or H200.
            more: What else to keep of it.
        """
        row = {"part": self.part, "t": int(time.time()), "what": what, "value": value, "unit": unit,
               "show": show, "goal": goal, **more}  # fmt: skip
        line = json.dumps(_plain(row), ensure_ascii=False)
        print(line, flush=True)
        with Path(self.output, "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def emit_failure(self, what: str, error: BaseException) -> None:
        """Append an exception in one line; its traceback goes to the log."""
        traceback.print_exception(error)
        self.emit(f"{what}: FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")

    def emit_speed(
        self, case: Case, side: str, stretches: Sequence[float], flops: float, first: float,
        memory: int | None = None, **more: Any,
    ) -> float:  # fmt: skip
        """Append tokens per second, the median of stretches, with MFU, memory and seconds to the first step.

        Args:
            case: Its goal is that of our own speed.
            side: `default`, `joined` or another variant of ours, or a peer's name.
            stretches: Tokens per second of each.
            flops: Of a token.
            first: Seconds to the end of the first step, compilation included.
            memory: Bytes at the peak; None takes this process's on the GPU.
            more: What else to keep.
        """
        speed, peak, sheet = statistics.median(stretches), self.peak().get("bf16_flops"), None
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        if device:
            sheet = device_peak_flops(device)
            memory = memory or torch.cuda.max_memory_allocated()
        self.emit(
            f"{case.name}, {side}: tokens/s", speed, "tok/s", case=case.name, side=side,
            goal=case.goal if side in ("default", "joined") and _HOPPER.search(device) else None,
            mfu=speed * flops / sheet if sheet else None,
            mfu_of_product=speed * flops / peak if peak else None,
            peak_gib=memory / 2**30 if memory else None, first_step_s=first,
            least=min(stretches), most=max(stretches), **more,
        )  # fmt: skip
        return speed

    def peak(self) -> dict[str, float]:
        """What the part `facts` of this round measured; empty without it."""
        with suppress(OSError):
            return json.loads(Path(self.work, "peak.json").read_text())
        return {}

    def counted(self, kind: str, case: str) -> Any:
        """What `make gpu-pack` counted of a case beforehand: its `peaks`, or its `bounds` if they are this
        GPU's; None if it could not."""
        with suppress(OSError):
            counted = json.loads((PACKED / "counted.json").read_text())
            device = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else counted["gpu"]
            if kind == "peaks" or counted["gpu"] in device:
                return counted.get(kind, {}).get(case)
        return None

    def case(self, name: str) -> Case:
        """A case by name, its micro batch halved as often as memory ran out; tiny in a dry round."""
        case = CASES[name]
        if self.is_dry:
            tiny = CASES["tiny-moe" if "moe" in name or "mixture" in name else "tiny-dense"]
            case = tiny._replace(name=name, micro_batch_size=4, settings={"training.precision": "fp32"})
        return case._replace(micro_batch_size=max(1, case.micro_batch_size >> self.halvings))

    def store(self, case: Case) -> Path:
        """The packed store of the case's vocabulary; in a dry round a small one, made by the first to ask."""
        size = vocabulary(case)
        if not self.is_dry:
            return PACKED / "stores" / str(size)
        folder = Path(self.work, "stores", str(size))
        if not folder.exists():
            own = folder.with_name(f"{os.getpid()}")  # parts that run at the same time may make it, too
            own.parent.mkdir(exist_ok=True)
            make_store(own, Documents.lognormal(DOCUMENTS[size], size), size)
            with suppress(OSError):
                own.rename(folder)
        return folder

    def options(self, case: Case, *settings: str) -> list[str]:
        """The script's options of a case, and `setting:value`s that differ from it; no micro batch is larger
        than the case's."""
        options = case_options(case, self.store(case), Path(self.work, self.part, "run"))
        for setting in settings:
            name, _, value = setting.partition(":")
            if name == "training.micro_batch_size":
                value = str(min(int(value), case.micro_batch_size))
            options += [f"--{name}", value]
        return options

    def config(self, case: Case, *settings: str) -> Config:
        """The resolved configuration of a case, as `options`."""
        config = load_config(self.options(case, *settings))
        return resolve_model(config, open_stores(config)[0].vocab_size)

    def halve(self, words: Sequence[str]) -> None:
        """Start over with half the micro batch and these words; in a new process image nothing is left of
        the failed attempt on the device."""
        self.emit("out of memory: half the micro batch", " ".join(words))
        halved = dataclasses.replace(self, halvings=self.halvings + 1, words=list(words))
        command = [sys.executable, "-m", "benchmarks.gpu.parts", json.dumps(dataclasses.asdict(halved))]
        os.execv(sys.executable, command)

    def run(self) -> None:
        """Call the part's function."""
        module, _, name = self.function.partition(".")
        function: Callable[..., None] = getattr(import_module(f"benchmarks.gpu.{module}"), name)
        try:
            function(self, *self.words)
        except Exception as error:
            if is_out_of_memory(error) and self.halvings < 6:
                self.halve(self.words)
            self.emit_failure(self.part, error)
            sys.exit(1)


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def stretches(step: Callable[[], object], tokens: int, steps: int, count: int = 3) -> list[float]:
    """Tokens per second of `count` stretches of `steps` steps, after as many steps to warm up."""
    found = []
    for _ in range(1 + count):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        found.append(tokens * steps / (time.perf_counter() - start))
    return found[1:]


def _plain(value: Any) -> Any:
    """The value in JSON's types, floats with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | None) else str(value)


if __name__ == "__main__":
    Context(**json.loads(sys.argv[1])).run()
