"""What an import has gathered: our settings, and what could not become one. It reads no foreign format."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from llm_pretrain.config import from_dict, read_settings_text, validate, write_yaml
from llm_pretrain.errors import ConfigError


@dataclass
class Imported:
    """Settings by section, and notes for the reader of the file.

    Args:
        origin: Where they came from, for the file's first line.
        remarks: Comments behind the settings themselves, by `section.field`.
        last_note: The note that must not be overlooked: last in the file's head and on the console.
    """

    origin: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    last_note: str | None = None

    def set(self, name: str, value: Any) -> None:
        """Set `section.field`; None is no value."""
        section, _, setting = name.partition(".")
        if value is not None:
            self.settings.setdefault(section, {})[setting] = value

    def note(self, text: str) -> None:
        """Something that the settings do not say: not carried over, or assumed."""
        self.notes.append(text)

    def data(self, corpus: str, name: str, vocab_size: int, tokenizer: str | None = None) -> None:
        """Train on a store that two commands make of `corpus`; a tokenizer of its own unless one is given."""
        store = f"data/stores/{file_name(name)}"
        if tokenizer is None:
            tokenizer = f"data/tokenizers/{file_name(name)}"
            self.commands.append(
                f"llm-pretrain tokenizer --input {corpus} --vocab_size {vocab_size} --output {tokenizer}"
            )
        self.commands.append(
            f"llm-pretrain prepare --input {corpus} --tokenizer {tokenizer} --output {store}"
        )
        self.settings["data"] = {**self.settings.get("data", {}), "sources": [{"store": store}]}

    def check(self) -> Imported:
        """Note contradictions in the result; ConfigError where a value has not its setting's type."""
        try:
            config = from_dict(self.settings)
        except ConfigError as error:
            raise ConfigError(*(f"{self.origin}: {problem}" for problem in error.problems)) from error
        for problem in validate(config, needs_data="data" in self.settings):
            self.note(f"to be mended: {problem}")
        return self

    def text(self) -> str:
        """The YAML file."""
        lines = [f"Read from {self.origin} by `llm-pretrain configs`."]
        lines += self.notes + ([self.last_note] if self.last_note else [])
        comment = "".join(
            textwrap.fill(
                line, 100, initial_indent="# " if i == 0 else "# - ",
                subsequent_indent="# " if i == 0 else "#   ", break_long_words=False, break_on_hyphens=False,
            ) + "\n"
            for i, line in enumerate(lines)
        )  # fmt: skip
        if self.commands:
            comment += "# The data:\n" + "".join(f"#   {command}\n" for command in self.commands)
        order = ("run", "model", "data", "training", "optimizer", "schedule")
        names = sorted(
            self.settings, key=lambda name: (name not in order, order.index(name) if name in order else 0)
        )
        return comment + "".join(self._section(name) for name in names)

    def _section(self, name: str) -> str:
        text = write_yaml({name: self.settings[name]})
        for setting, remark in self.remarks.items():
            section, _, key = setting.partition(".")
            if section == name:
                text = re.sub(rf"(?m)^(  {key}: .*)$", rf"\1  # {remark}", text)
        return text


def file_name(text: str) -> str:
    """`text` as a name of runs and folders."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "imported"


def read_text(path: str, option: str) -> str:
    """A foreign file's text; ConfigError in one line where it cannot be read."""
    try:
        return read_settings_text(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{option} {path}: expected a text file, found: {reason}") from error


def swiglu_width(hidden_size: int) -> int:
    """8/3 of the hidden size, rounded up to a multiple of 64: as many parameters as a GELU of 4 times it.

    GLU variants, arXiv:2002.05202, section 3.
    """
    return -(-(hidden_size * 8 // 3) // 64) * 64
