"""What every command answers to options that cannot work: one line, an exit code, and nothing else."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ladders import SMALL_BASE
from support.launching import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.launch.jobs import Machine

BEFORE = {
    "chaos": "--config CONFIGS/tiny-dense.yaml --output new --data.sources '[{store: STORE}]'",
    "configs": "",
    "doctor": "",
    "estimate": "--config CONFIGS/minimind3-64m.yaml",
    "evaluate": "",
    "generate": "",
    "chat": "",
    "export": "",
    "inspect": "STORE",
    "ladder": "--input STORE --config base.yaml --output new",
    "parity": "--config CONFIGS/tiny-dense.yaml --output new --data.sources '[{store: STORE}]'",
    "prepare": "--tokenizer STORE/tokenizer --output new",
    "replay": "RUN --output new",
    "report": "",
    "simulate": "--config tiny-moe --model.vocab_size 4096",
    "top": "",
    "verify": "",
}
"""Command -> its first words, which work."""

MISTAKES: dict[str, list[tuple[str, int, str]]] = {
    "chaos": [
        ("--paths trainer", 2, "--paths: expected some of torchrun, accelerate, found 'trainer'"),
        ("--world-size 1,2", 2, "--world-size: expected one number"),
        ("--world-size 64", 2, "--world-size: expected at most 4 on this machine of 2 cores"),
        ("--steps 0", 2, "and 8 of them, one for each kill and two more, found --steps 0"),
        ("--checkpoint.save_steps 1", 2, "--checkpoint.save_steps: expected saves at least two steps apart"),
        ("--training.precision fp16", 2, "silently train in fp32"),
        ("--training.max_stepz 3", 2, "training.max_stepz: no such setting; did you mean training.max_ste"),
        ("--data.sources '[{store: /nowhere}]'", 65, "/nowhere"),
    ],
    "chat": [
        ("nowhere", 74, "config.json: expected"),
        ("RUN/weights --top_p 2", 2, "--top_p: expected"),
    ],
    "configs": [
        ("--folder empty", 2, "expected a folder with presets"),
        ("--from_pretrained nowhere", 74, "expected a weights folder's config.json"),
        ("--output x.yaml", 2, "one of the options --from_"),
        ("--from_minimind '--batch_size many'", 2, "--batch_size: expected an integer, found 'many'"),
        ("--from_minimind 'batch_size 3'", 2, "expected an option such as --batch_size 32, found 'batch_si"),
        ("""--from_minimind "--data_path 'open" """, 2, "expected options"),
    ],
    "doctor": [
        ("--accelerate_config nowhere", 2, "expected a YAML file, found: No such file"),
        ("--accelerate_config open.yaml", 2, "open.yaml: expected a YAML file, found: line 2"),
        ("--accelerate_config list.yaml", 2, "expected Accelerate's settings"),
    ],
    "estimate": [
        ("--mfu 1.5", 2, "--mfu: expected at most 1"),
        ("--world-size 0", 2, "--world_size: expected more than 0, found 0"),
        ("--tokens 0", 2, "--tokens: expected at least 1, found 0.0"),
        ("--price -1", 2, "--price: expected 0 or more, found -1"),
        ("--gpu t4 --training.precision bf16", 2, "training.precision: expected fp16 or fp32 on a t4"),
        ("--model.vocab_size null --data.sources '[{store: nowhere}]'", 2, "--model.vocab_size"),
    ],
    "evaluate": [
        ("outside", 2, "--store: expected a store, since SOURCE is in no run"),
        ("nowhere", 74, "none of them"),
        ("RUN --max_batches -1", 2, "--max_batches: expected"),
        ("RUN --sequence_length 0", 2, "--sequence_length: expected"),
        ("RUN --micro_batch_size 0", 2, "--micro_batch_size: expected"),
        ("RUN --input a --split train", 2, "--split: expected no --input"),
        ("RUN --input none.txt", 65, "none.txt"),
        ("RUN --store empty", 65, "store.json"),
        ("RUN --store STORE --store STORE/.", 2, "each named once, found '"),
        ("outside --store STORE", 65, "expected a store of the model's tokenizer"),
    ],
    "export": [
        (f"{source} --to {to} --output new", 74, "expected a weights folder")
        for source in ("nowhere", "empty", "STORE/tokenizer/tokenizer.json")
        for to in ("gguf", "huggingface")
    ],
    "generate": [
        ("nowhere --prompt a", 74, "nowhere/config.json: expected a weights folder"),
        ("RUN", 2, "--prompt: expected a text"),
        *(
            (f"RUN --prompt a {option} {value}", 2, f"{option}: expected")
            for option, value in (
                *(("--top_k", "-1"), ("--top_p", "0"), ("--top_p", "1.5"), ("--temperature", "nan")),
                *(("--max_new_tokens", "-1"), ("--num_samples", "0")),
                *(("--seed", "-1"), ("--device", "nonsense"), ("--device", "meta"), ("--device", "hpu")),
            )
        ),
        ("RUN --prompt_file -", 65, "found byte 0xff at offset 2"),
    ],
    "inspect": [
        ("--sequence_length 0", 2, "--sequence_length: expected 1 or more, found 0"),
    ],
    "ladder": [
        ("--budget soon", 2, "--budget: expected a time such as 20m or 2h, or FLOPs such as 1e16"),
        ("--budget 4e9", 2, "--input: expected a store of about 72,000 tokens"),
        ("--budget 1e7 --training.global_batch_size 1 --training.micro_batch_size 1", 2, "expected at least"),
        *(
            (f"--budget 4e9 --{name} {value}", 2, f"{name}: expected none, a ladder")
            for name, value in (
                *(("training.max_steps", 9), ("schedule.decay_steps", 9)),
                ("distributed.strategy", "fsdp"),
            )
        ),
        ("--budget 4e9 --model.init_from w", 2, "model.init_from: expected none"),
        ("--budget 4e9 --output .", 73, "in it"),
    ],
    "parity": [
        ("--paths torchrun,slurm", 2, "--paths: expected some of torchrun, accelerate, t"),
        ("--paths trainer", 2, "--paths: expected torchrun or accelerate among them"),
        ("--steps 0", 2, "--steps: expected 1 or more, found 0"),
        ("--world-size 0", 2, "--world-size: expected whole numbers from 1 on"),
        ("--world-size 64", 2, "--world-size: expected at most 4 on this machine of 2 cores, found 64"),
        ("--mesh ddp,tp", 2, "or sizes such as 2x2 or 2x2+ep2, found 'tp'"),
        ("--mesh hsdp", 2, "--mesh: expected a mesh that can run (hsdp W=1 is left out: expected 4"),
        ("--mesh ep", 2, "expected a divisor of model.num_experts, 0, found 2"),
        ("--world-size 2 --distributed.strategy fsdp --distributed.dp_shard_size 3", 2, "configured W=2 is"),
        ("--precision fp8", 2, "--precision: expected some of fp32, bf16, fp16, found 'fp8'"),
        ("--training.micro_batch_size 24", 2, "found 2 * 24 = 48"),
        ("--paths torchrun --world-size 1", 2, "expected two or more runs of one precision"),
        ("--world-size 1 --precision fp16", 2, "silently train in fp32"),
        ("--data.sources '[{store: /nowhere}]'", 65, "/nowhere"),
    ],
    "prepare": [("--input missing.jsonl", 65, "missing.jsonl")],
    "replay": [
        ("--from 4", 2, "--from: expected steps done before, 0 to 3, found 4"),
        ("--from 2 --to 2", 2, "--to: expected a step from 3 on, found 2"),
        ("--sample 0", 2, "--sample: expected 1 or more"),
        ("--seed 1", 2, "--seed: expected together with --sample"),
        ("--world-size 8 --training.micro_batch_size 1", 2, "expected at most 4 on this machine of 2 cores"),
        ("--world-size 3", 2, "training.global_batch_size: expected a multiple"),
        ("--training.max_stepz 1", 2, "no such setting"),
    ],
    "report": [
        ("nowhere", 2, "nowhere: expected a run's folder, such as runs/NAME"),
        ("empty", 2, "none of these"),
        ("RUN RUN", 2, "--output: expected a file"),
        ("RUN --output empty", 73, "found a folder"),
        ("RUN --output /proc/report.html", 73, "/proc/report.html: cannot be"),
    ],
    "simulate": [
        ("--gpu h100 --world-size 0", 2, "--world-size: expected 1 or more, found 0"),
        ("--gpu h100 --search 1", 2, "--search: expected 2 GPUs or more, found 1"),
        ("--gpu h100 --world-size 2", 2, "expected fsdp for a simulation of several processes, found ddp"),
    ],
    "top": [
        ("nowhere", 2, "nowhere: expected a run's folder"),
        ("empty.txt", 2, "empty.txt: expected a run's folder"),
        ("RUN --seconds nan", 2, "--seconds: expected a finite number, found nan"),
    ],
    "verify": [("nowhere", 2, "nowhere: expected a run's folder"), ("RUN --samples few", 2, "--samples")],
}
"""Command -> what is typed after its first words, the exit code, and a part of the line."""

CASES = [(command, *mistake) for command, mistakes in MISTAKES.items() for mistake in mistakes]


@pytest.fixture
def place(tmp_path, finished_run, monkeypatch) -> Path:
    """Where the command runs: weights of another tokenizer outside of a run, and files without sense."""
    outside = tmp_path / "outside"
    shutil.copytree(finished_run("dense").folder / "weights" / "step-00000004", outside)
    spec = json.loads((outside / "tokenizer.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    (outside / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "empty").mkdir()
    files = {"empty.txt": "", "open.yaml": "a: [1\n", "list.yaml": "- 1\n", "base.yaml": SMALL_BASE}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words", "code", "expected"), CASES, ids=[f"{each[0]} {each[1]:.60}" for each in CASES]
)
def test_a_mistake_is_one_line_and_nothing_starts(
    command, words, code, expected, place, plain_store, finished_run, monkeypatch, capsys
):
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr("llm_pretrain.forecast.budget.MIN_TOKENS", 1)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\xff")))
    monkeypatch.setattr(f"llm_pretrain.commands.{command}.this_machine", lambda: Machine(0, 2), raising=False)
    typed = f"{BEFORE[command]} {words}"
    names = {"CONFIGS": ROOT / "configs", "STORE": plain_store, "RUN": finished_run("dense").folder}
    for name, path in names.items():
        typed = typed.replace(name, str(path))
    before = sorted(place.rglob("*"))
    assert main([command, *shlex.split(typed)]) == code
    printed = capsys.readouterr()
    assert (expected in printed.err, printed.out) == (True, ""), printed
    assert printed.err.count("\n") == 1, printed.err
    assert sorted(place.rglob("*")) == before
