"""Trains on forked ranks with `faulty_io.c` preloaded, many times over, with a fault in each rank."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.faulty_io import Fault
from support.fork_server import ForkServer, start_server
from support.launching import script_request


@dataclass(frozen=True)
class Ended:
    """How one rank ended: exit code (negative: by that signal), what it printed, seconds after the first."""

    exit_code: int
    output: str
    seconds: float


class CrashProbe:
    """A fork server of its own with the compiled `faulty_io.c` in it; `folder` is for its own files."""

    def __init__(self, library: Path, folder: Path):
        self.library, self.folder = library, folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "socket"
        preload = {"LD_PRELOAD": str(library)}
        self._process = start_server(path, ends_with=os.getpid(), variables=preload)
        self._server = ForkServer(path)

    def train(
        self,
        folder: Path,
        options: list[str],
        *,
        world_size: int = 1,
        launcher: str = "torchrun",
        faults: dict[int, Fault] | None = None,
        journal: Path | None = None,
        with_data: bool = False,
        limit: float = 120,
        before: Sequence[tuple[str, list[Any]]] = (),
        file_size: int | None = None,
    ) -> list[Ended]:
        """Run a script into `folder`, each rank with its fault; their ends in the order of ranks.

        `journal` gets the calls below the folder, with their data if `with_data`. A rank that runs longer
        than `limit` seconds ends with -14. `before` and `file_size`: as in `Request`.
        """
        chosen = [(faults or {}).get(rank, Fault()) for rank in range(world_size)]
        texts = [str(self.library), str(folder), str(journal or os.devnull), with_data]
        arming = ("support.faulty_io:arm", [*texts, [vars(fault) for fault in chosen]])
        outputs = [self.folder / f"output-{rank}" for rank in range(world_size)]
        request = script_request(
            launcher,
            world_size,
            folder,
            options,
            outputs=[str(output) for output in outputs],
            before=[*before, arming],
            end_seconds=math.inf,
            limit=limit,
            file_size=file_size,
        )
        request = replace(request, launcher="torchrun", launcher_options=[])
        while True:
            for output in outputs:
                output.unlink(missing_ok=True)
            running = self._server.start(request)
            codes = running.wait(limit + 60)
            printed = [output.read_text() for output in outputs]
            if not any("EADDRINUSE" in text for text in printed):  # else a process took the free port first
                break
        first = min(running.ended)
        return [
            Ended(code, text, ended - first)
            for code, text, ended in zip(codes, printed, running.ended, strict=True)
        ]

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
