"""A network of two machines on one: two network namespaces, and a link between them that can be slow or bad.

Run as a program, this file is the link: it makes the namespaces and carries Ethernet frames between a TAP
device in each, late, out of order where the delay varies, and not all of them. It stands in for `tc netem`,
which not every kernel has, and can go dead without a word. Needs root and Linux.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
FRAME = 65536


JUMBO = 9000
"""Largest packet, in bytes, on a link with a rate: Python carries some ten thousand packets a second."""


@dataclass
class Quality:
    """Of a link.

    Args:
        delay: Of each frame, in seconds.
        jitter: How much that varies.
        loss: Share of frames that are lost.
        rate: Bytes per second in each direction; frames wait for the ones before them. 0: no limit.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


class Network:
    """Two namespaces, `machines`, whose devices are called `interfaces`, and the process between them."""

    def __init__(self, machines: list[str], interfaces: list[str], link: subprocess.Popen[str]):
        self.machines, self.interfaces, self._link = machines, interfaces, link

    def command(self, machine: int, command: list[str]) -> list[str]:
        """`command` as one of the machines runs it."""
        return ["ip", "netns", "exec", self.machines[machine], *command]

    def go_dead(self) -> int:
        """From now on the link loses every frame, and nobody is told; returns how many it has carried."""
        assert self._link.stdin is not None
        assert self._link.stdout is not None
        self._link.stdin.write("dead\n")
        self._link.stdin.flush()
        return int(self._link.stdout.readline())

    def set_down(self) -> None:
        """Switch the device of both machines off."""
        for machine, interface in zip(self.machines, self.interfaces, strict=True):
            _ip("-n", machine, "link", "set", interface, "down")


def why_not() -> str | None:
    """Why there can be no such network here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux: network namespaces"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    name = f"probe-{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs `ip netns`: {error}"
    return None


@contextmanager
def two_machines(quality: Quality, seed: int = 0) -> Iterator[Network]:
    """A network of two. It and all that runs in it end with the block, and with this process in any case."""
    token = uuid.uuid4().hex[:6]
    machines, interfaces = [f"machine{i}-{token}" for i in (0, 1)], [f"tap{i}-{token}" for i in (0, 1)]
    numbers = [str(value) for value in (*astuple(quality), seed)]
    link = subprocess.Popen(
        [sys.executable, __file__, *machines, *interfaces, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests; it is told by the end of its input
    )
    assert link.stdin is not None
    assert link.stdout is not None
    try:
        assert link.stdout.readline() == "ready\n"
        yield Network(machines, interfaces, link)
    finally:
        link.stdin.close()
        link.wait()
        link.stdout.close()


def serve(machines: list[str], interfaces: list[str], quality: Quality, seed: int) -> None:
    """Make the namespaces, carry frames between them until the input ends, and leave nothing of them."""
    taps = [open_tap(interface) for interface in interfaces]
    made: list[str] = []
    try:
        for machine, interface, address in zip(machines, interfaces, ADDRESSES, strict=True):
            _ip("netns", "add", machine)
            made.append(machine)
            _ip("link", "set", interface, "netns", machine)
            _ip("-n", machine, "address", "add", f"{address}/24", "dev", interface)
            _ip("-n", machine, "link", "set", "lo", "up")
            jumbo = ("mtu", str(JUMBO), "txqueuelen", "2000") if quality.rate else ()
            _ip("-n", machine, "link", "set", interface, *jumbo, "up")
        print("ready", flush=True)
        carry(taps, quality, seed)
    finally:
        for machine in made:
            for process in _ip("netns", "pids", machine).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _ip("netns", "del", machine)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def open_tap(name: str) -> int:
    """A TAP device of this name, which lives as long as the descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def carry(taps: list[int], quality: Quality, seed: int) -> None:
    """Carry frames until standard input ends; the line `dead` kills the link and answers with a count."""
    chance = random.Random(seed)
    sent_at = [0.0, 0.0]  # when the last frame of each side has left it
    waiting: list[tuple[float, int, int, bytes]] = []
    number, is_alive = 0, True
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*taps, sys.stdin], [], [], timeout)
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            is_alive = False
            print(number, flush=True)
        for side, tap in enumerate(taps):
            if tap not in ready:
                continue
            frame = os.read(tap, FRAME)
            late = quality.delay + chance.uniform(-1, 1) * quality.jitter
            if is_alive and chance.random() >= quality.loss:
                number += 1
                sent_at[side] = max(sent_at[side], time.monotonic())
                if quality.rate:
                    sent_at[side] += len(frame) / quality.rate
                heapq.heappush(waiting, (sent_at[side] + max(0.0, late), number, 1 - side, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, side, frame = heapq.heappop(waiting)
            if is_alive:
                try:
                    os.write(taps[side], frame)
                except OSError:  # the device is down
                    continue


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(-10)  # a link does not wait for those who use it
    numbers = [float(word) for word in sys.argv[5:9]]
    serve(sys.argv[1:3], sys.argv[3:5], Quality(*numbers), int(sys.argv[9]))
