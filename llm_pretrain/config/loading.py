"""From YAML files and `--section.field VALUE` to a `Config`, with every problem reported at once.

jsonargparse builds the tree and writes the help from the docstrings; it is imported when it is needed,
and only ever sees settings that `checking.py` has passed. Contradictions are in `validation.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llm_pretrain.config.checking import (
    NoneType,
    Problem,
    check_tree,
    check_value,
    describe,
    field_types,
    one_line,
    settings,
    unknown_setting,
)
from llm_pretrain.config.model_config import VOCAB_MULTIPLE
from llm_pretrain.config.precision import resolve_precision
from llm_pretrain.config.tree import Config
from llm_pretrain.config.validation import validate
from llm_pretrain.config.yaml_text import YamlError, read_yaml, read_yaml_file, write_yaml
from llm_pretrain.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_CONFIG_HELP = "YAML file of settings; may be given several times, and the later file wins."
_LAUNCHER_OPTIONS = ("local-rank", "local_rank")
"""What `torch.distributed.launch` and DeepSpeed's launcher append; the environment says the same."""
_PRINT_HELP = "Print the resolved settings as YAML, which can be passed back as --config, and exit."


def load_config(
    argv: list[str] | None = None,
    *,
    prog: str | None = None,
    needs_data: bool = True,
    has_bf16: bool | None = None,
) -> Config:
    """The configuration that a command line asks for, its precision resolved.

    Later files win over earlier ones, setting by setting, and options win over all files.

    Args:
        argv: Arguments without the program's name; None takes the process's own.
        prog: Program name in the help.
        needs_data: Whether `data.sources` must name a store.
        has_bf16: What a precision of `auto` depends on; None asks this machine.

    Raises:
        ConfigError: with every problem that was found; contradictions that may only follow from
            another problem are left out.
        SystemExit: 0, after `--help` or `--print_config`.
    """
    line = _read_command_line(sys.argv[1:] if argv is None else list(argv))
    if line.wants_help:
        print(_help_text(prog or Path(sys.argv[0]).name))
        raise SystemExit(0)
    layers = []
    for file in line.files:
        data, problems = _read_file(file)
        sound, wrong = check_tree(data, file)
        layers.append(sound)
        line.problems += problems + wrong
    config = resolve_precision(_build(_merge([*layers, line.options])), has_bf16)
    if line.wants_print and not line.problems:
        print(dump_yaml(config, comments=True), end="")
        raise SystemExit(0)
    lines = [problem.line for problem in line.problems]
    lines += _contradictions(config, line.problems, needs_data)
    if lines:
        raise ConfigError(*dict.fromkeys(lines))
    return config


def from_dict(data: Mapping[str, Any]) -> Config:
    """The configuration of a (partial) tree of plain values; missing settings take their defaults.

    A precision of `auto` stays: `resolve_precision` is for what computes.

    Raises:
        ConfigError: unknown settings and wrong types; contradictions are `validate`'s business.
    """
    sound, problems = check_tree(data)
    if problems:
        raise ConfigError(*(problem.line for problem in problems))
    return _build(sound)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values: section, field, value."""
    return dataclasses.asdict(config)


def dump_yaml(config: Config, *, comments: bool = False) -> str:
    """The configuration as YAML that `--config` reads back to an equal one; on wish with its docs."""
    return write_yaml(to_dict(config), _docs() if comments else None)


def resolve_model(config: Config, tokenizer_size: int) -> Config:
    """The configuration with `model.vocab_size` filled in, for a tokenizer of `tokenizer_size` ids.

    Raises:
        ConfigError: the given `model.vocab_size` has no room for every id.
    """
    given = config.model.vocab_size
    if given is None:
        rows = -(-tokenizer_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows))
    if given < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size: expected at least the tokenizer's {tokenizer_size} ids, found {given}; "
            "leave it out to take the tokenizer's size"
        )
    return config


@dataclasses.dataclass
class _CommandLine:
    """A command line, taken apart."""

    files: list[str] = dataclasses.field(default_factory=list)
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    wants_help: bool = False
    wants_print: bool = False


def _read_command_line(arguments: list[str]) -> _CommandLine:
    line = _CommandLine()
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            line.wants_help = True
        elif word == "--print_config":
            line.wants_print = True
        elif name in _LAUNCHER_OPTIONS:
            if not equals and rest:
                rest.pop()
        elif not word.startswith("--") or not name:
            advice = "settings are written --section.field VALUE, files --config FILE"
            line.problems.append(Problem(f"{one_line(word)}: unexpected argument; {advice}"))
        else:
            given = value if equals else rest.pop() if rest and not rest[-1].startswith("--") else None
            _read_option(line, name, given)
    return line


def _read_option(line: _CommandLine, name: str, text: str | None) -> None:
    section, _, field = name.partition(".")
    kind = settings().get(name)
    if name == "config":
        if text:
            line.files.append(text)
        else:
            line.problems.append(Problem("--config: expected a file, found nothing", tuple(settings())))
    elif name in field_types(Config):
        example = next(iter(field_types(field_types(Config)[name])))
        advice = f"set its fields one by one, e.g. --{name}.{example} VALUE"
        line.problems.append(Problem(f"{name}: a section has no value of its own; {advice}", (name,)))
    elif kind is None:
        line.problems.append(unknown_setting(name))
    elif text is None:
        expected = f"{name}: expected {describe(kind)}, found no value after --{name}"
        line.problems.append(Problem(expected, (name,)))
    else:
        value = _read_value(kind, text)
        problems = check_value(name, kind, value)
        line.problems += problems
        if not problems:
            line.options.setdefault(section, {})[field] = value


def _read_value(kind: Any, text: str) -> Any:
    """An option's text as the value that it stands for; text stays text where a text is expected."""
    if check_value("", kind, text) == []:
        return None if text == "null" and NoneType in get_args(kind) else text
    try:
        value = read_yaml(text)
    except YamlError:
        return text
    return text if value is None and text.strip() not in ("null", "~") else value


def _read_file(name: str) -> tuple[Any, list[Problem]]:
    everything = tuple(settings())  # without this file no contradiction is certain
    shown = one_line(name)
    try:
        return read_yaml_file(name), []
    except FileNotFoundError:
        folder = Path(name).parent
        files = [str(path) for path in folder.glob("*.y*ml")] if folder.is_dir() else []
        near = difflib.get_close_matches(str(Path(name)), files, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        return None, [Problem(f"--config {shown}: no such file{advice}", everything)]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        return None, [Problem(f"--config {shown}: cannot be read: {reason}", everything)]
    except YamlError as error:
        place = f"{shown}:{error.line}" if error.line else shown
        return None, [Problem(f"--config {place}: not a valid YAML file: {error.text}", everything)]


def _merge(layers: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Later layers win, setting by setting; a list is one setting."""
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, fields in layer.items():
            merged.setdefault(section, {}).update(fields)
    return merged


def _build(tree: Mapping[str, Mapping[str, Any]]) -> Config:
    """The dataclasses of a checked tree."""
    parser = _parser()
    namespace = parser.parse_object(copy.deepcopy(dict(tree)))  # it writes into what it is given
    # named `instantiate_classes` before jsonargparse 4.49, where that name became a warning
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    sections = instantiate(namespace)
    return Config(**{section: sections[section] for section in field_types(Config)})


def _contradictions(config: Config, problems: list[Problem], needs_data: bool) -> list[str]:
    """Contradictions that no other problem can have caused, that is, that share no setting with one."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        return [f"WORLD_SIZE: expected a positive integer in the environment, found {text!r}"]
    doubtful = {name for problem in problems for name in problem.settings}
    return [
        line
        for line in validate(config, int(text), needs_data=needs_data)
        if not any(re.search(rf"\b{re.escape(name)}\b", line) for name in doubtful)
    ]


@functools.cache
def _parser(prog: str | None = None) -> ArgumentParser:
    import jsonargparse

    usage = "%(prog)s [--config FILE ...] [--section.field VALUE ...] [--print_config]"
    parser = jsonargparse.ArgumentParser(
        prog=prog, usage=usage, description=Config.__doc__, exit_on_error=False, default_env=False
    )
    parser.add_class_arguments(Config, as_group=True)
    return parser


def _help_text(prog: str) -> str:
    """The help, without the options that jsonargparse would add: for whole sections, for a list's end."""
    parser = _parser(prog)
    text = re.sub(r"\n  --\w+ CONFIG +Path to .*(?=\n)", "", parser.format_help())
    text = re.sub(r"\n  --[\w.]+\.help(?: .*)?(?:\n {20,}.*)*", "", text)
    text = re.sub(r"(--data\.sources) .*--data.*", r"\1 '[{store: FOLDER, weight: 1}, ...]'", text)
    text = re.sub(r"(--data\.weight_changes) .*--data.*", r"\1 '[{step: N, weights: [1, 2]}, ...]'", text)
    text = re.sub(r"(--evaluation\.sample_prompts) .*--eval.*", r"\1 '[TEXT, ...]'", text)
    own = f"  --config FILE         {_CONFIG_HELP}\n  --print_config        {_PRINT_HELP}\n"
    return re.sub(r"(\n  -h, --help .*\n)", lambda match: match[1] + own, text, count=1).rstrip()


def _docs() -> dict[str, str]:
    """Section and setting to its documentation, from the docstrings of the tree."""
    from llm_pretrain.config.reference import documentation

    docs: dict[str, str] = {}
    for section, cls in field_types(Config).items():
        docs[section], fields = documentation(cls)
        docs |= {f"{section}.{name}": text for name, text in fields.items()}
    return docs
