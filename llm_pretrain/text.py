"""Numbers, tables and the reasons of errors as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def size_text(number: float) -> str:
    """A number of bytes as text, such as `1.5 GiB`, in the largest unit that makes it at least 1."""
    size = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def quantity(value: float) -> str:
    """A number of parameters, tokens or FLOPs as text: `12.3k`, `4.56M`, `7.62B`, `1.5T`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}" if unit else f"{value:.4g}"
        value /= 1000
    return f"{value:.3g}T"


def duration(seconds: float) -> str:
    """A time as text that budget options accept: `1h05m`, `12m30s`, `45s`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minute}m{second:02d}s" if minute else f"{second}s"


def setting_text(value: object) -> str:
    """The value of a setting as a configuration file has it: `null`, `true`, `0.1`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def reason_of(error: BaseException) -> str:
    """The text of an error on one line, of an OSError without number and file; its type if it has no text."""
    text = (error.strerror or error) if isinstance(error, OSError) else error
    return " ".join(str(text).split()) or type(error).__name__


def type_and_reason(error: BaseException) -> str:
    """The type and the whole text of an error, on one line; the type alone of an error without a text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its type if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def as_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of text as aligned columns; the columns numbered in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    lines = ([pad(cell, width) for pad, cell, width in zip(align, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, without a line break at its end; a `|` inside a cell is escaped."""
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (head, *rows))
    first, *others = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([first, "|---" * len(head) + "|", *others])
