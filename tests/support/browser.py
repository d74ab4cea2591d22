"""Headless Chromium, the system's own, for looking at pages; without a network and with a fresh profile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DRAWN = "document.documentElement.dataset.drawn === 'true'"
"""Whether a report has drawn all that it was asked to."""
PLOTS = """() => [...document.querySelectorAll('.plot')].map(plot => {
    const drawn = plot.querySelectorAll('.scatterlayer .trace path.js-line, .heatmaplayer image');
    const box = plot.querySelector('.main-svg')?.getBoundingClientRect();
    return [plot.id, drawn.length, box ? Math.round(box.width - plot.clientWidth) : null];
})"""
"""Of each chart: id, drawn curves and maps, and by how much it is wider than its place."""
OVERLAPS = """() => {
    const kinds = 'h1, h2, h3, figcaption, nav a, legend, label, dt, dd, .kicker';
    const texts = [...document.querySelectorAll(kinds)];
    const boxes = texts.map(each => [each, each.getBoundingClientRect()]).filter(([, box]) => box.width);
    const found = [];
    boxes.forEach(([one, a], index) => boxes.slice(index + 1).forEach(([other, b]) => {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 1 && !one.contains(other)) found.push([one.textContent, other.textContent]);
    }));
    return found;
}"""
"""Pairs of texts that overlap."""


def chromium() -> str:
    """The browser's path; the test is skipped where there is none, or nothing to drive it."""
    pytest.importorskip("playwright", reason="needs playwright (extra `test`)")
    named = os.environ.get("CHROMIUM")
    path = named or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium), or its path in CHROMIUM")
    return path


@dataclass
class Seen:
    """What a page did beside what it shows."""

    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(page: Path, profile: Path, *, width: int, dark: bool = False) -> Iterator[tuple[Any, Seen]]:
    """A drawn report in a window of `width` pixels: playwright's page, and what it has seen."""
    from playwright.sync_api import sync_playwright

    path, seen = chromium(), Seen()
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=path,
            headless=True,
            args=list(FLAGS),
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
        )
        try:
            window = context.new_page()
            window.on("console", lambda message: seen.messages.append(message.text))
            window.on("pageerror", lambda error: seen.messages.append(str(error)))
            window.on("request", lambda request: seen.requests.append(request.url))
            window.goto(page.as_uri())
            window.wait_for_function(DRAWN)
            yield window, seen
        finally:
            context.close()
