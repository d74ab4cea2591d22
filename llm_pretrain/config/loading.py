"""From YAML files and `--section.field VALUE` to a checked `Config`, with every problem reported at once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from llm_pretrain.config.mesh_checks import check_mesh
from llm_pretrain.config.model_config import VOCAB_MULTIPLE, ModelConfig
from llm_pretrain.config.schema import (
    NoneType,
    build,
    check_ranges,
    check_value,
    describe,
    documentation,
    field_types,
    in_file,
    show,
)
from llm_pretrain.config.tree import Config
from llm_pretrain.config.yaml_text import YamlError, read_yaml, read_yaml_file, write_yaml
from llm_pretrain.errors import ConfigError, printable
from llm_pretrain.files import expand_paths
from llm_pretrain.text import reason_of, setting_text

_PACKAGE = Path(__file__).resolve().parents[1]
PRESETS = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), _PACKAGE)
"""Folder of the presets: in the installed package, or in the checkout."""
_Tree = dict[str, dict[str, Any]]
_LENGTHS = ("max_steps", "max_tokens")
"""Settings of `training` of which a run has one."""


def load_config(
    argv: list[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    prog: str | None = None,
    needs_data: bool = True,
    has_bf16: bool | None = None,
    world_size: int | None = None,
) -> Config:
    """The configuration that a command line asks for, its precision resolved.

    Later files override earlier ones, setting by setting, and options override all files. A preset's warm-up
    and decay that contradict a shorter run of the user are shortened, with a note on standard error.

    Args:
        argv: Arguments without the program's name; None takes the arguments of the process.
        settings: Values by section and field, which override the arguments.
        prog: Program name in the help.
        needs_data: Whether `data.sources` must name a store.
        has_bf16: Whether a precision of `auto` becomes bf16; None asks this machine.
        world_size: Number of processes of the run; None takes WORLD_SIZE of the environment, else 1.

    Raises:
        ConfigError: with every unknown setting and wrong type; without these, with what `validate` finds.
        SystemExit: 0, after `--help` or `--print_config`.
    """
    line = _read_command_line(sys.argv[1:] if argv is None else list(argv))
    if line.wants_help:
        print(_help_text(prog or Path(sys.argv[0]).name))
        raise SystemExit(0)
    tree, preset, own = _Tree(), _Tree(), set[str]()
    for file in expand_paths(line.files, "config"):
        data, origin, problems = _read_file(file)
        sound, wrong = check_tree(data, origin)
        _merge(tree, sound)
        if os.path.dirname(os.path.abspath(origin)) == str(PRESETS):
            _merge(preset, sound)
            own -= _names(sound)
        else:
            own |= _names(sound)
        line.problems += problems + wrong
    sound, wrong = check_tree(settings)
    _merge(line.options, sound)
    line.problems += wrong
    _merge(tree, line.options)
    tree = expand_paths(tree)
    for note in [
        *_resolve_length(tree, line.problems),
        *_shorten_schedule(tree, preset, own | _names(line.options)),
    ]:
        if world_size is None and os.environ.get("RANK", "0") == "0":  # else another process prints the note
            print(f"note: {note}", file=sys.stderr)
    config = resolve_precision(build(Config, tree), has_bf16)
    if world_size is None:
        found = os.environ.get("WORLD_SIZE", "1")
        if not found.isdecimal() or not int(found):
            raise ConfigError(f"WORLD_SIZE: expected a number from 1 on, found {show(found)}; unset it")
        world_size = int(found)
    needs_data = needs_data and not line.wants_print
    if problems := line.problems or validate(config, world_size, needs_data=needs_data):
        raise ConfigError(*dict.fromkeys(problems))
    if line.wants_print:
        print(dump_yaml(config, comments=True), end="")
        raise SystemExit(0)
    return config


def from_dict(data: Mapping[str, Any]) -> Config:
    """The configuration of a (partial) tree of plain values; missing settings take their defaults.

    This function does not resolve a precision of `auto` (see `resolve_precision`) and does not look for
    contradictions (see `validate`).

    Raises:
        ConfigError: unknown settings and wrong types.
    """
    sound, problems = check_tree(data)
    if problems:
        raise ConfigError(*problems)
    return build(Config, sound)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values: section, field, value."""
    return dataclasses.asdict(config)


def dump_yaml(config: Config, *, comments: bool = False) -> str:
    """The configuration as YAML; `--config` reads it back to an equal one. `comments` adds documentation."""
    docs: dict[str, str] = {}
    if comments:
        for section, cls in field_types(Config).items():
            docs[section], fields = documentation(cls)
            docs |= {f"{section}.{name}": text for name, text in fields.items()}
    return write_yaml(to_dict(config), docs)


def resolve_model(config: Config, tokenizer_size: int) -> Config:
    """The configuration with sizes of `model` filled in, for a tokenizer of `tokenizer_size` ids.

    Raises:
        ConfigError: the given `model.vocab_size` has no room for every id.
    """
    given = config.model.vocab_size
    if given is not None and given < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size: expected at least the tokenizer's {tokenizer_size} ids, found {given}; "
            "leave it out to take the tokenizer's size"
        )
    rows = given or -(-tokenizer_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    sizes = {"vocab_size": rows, "max_position_embeddings": config.longest_sequence}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))


def compiles(config: Config, world_size: int = 1, *, on_gpu: bool) -> bool:
    """Whether layers are compiled; `auto` compiles them on a GPU, except under DeepSpeed and with a pipeline
    schedule that splits backward passes."""
    if config.training.compile == "auto":
        distributed = config.distributed
        splits_backward = distributed.splits_backward and distributed.mesh(world_size).pp > 1
        return on_gpu and distributed.strategy != "deepspeed" and not splits_backward
    return config.training.compile == "on"


def resolve_precision(config: Config, has_bf16: bool | None = None) -> Config:
    """The configuration with precision `auto` replaced: by `bf16` on hardware that has it, else by `fp32`.

    Args:
        has_bf16: Whether the device has bf16 products; None asks this machine.
    """
    if config.training.precision != "auto":
        return config
    precision = "bf16" if (multiplies_in_bf16() if has_bf16 is None else has_bf16) else "fp32"
    return dataclasses.replace(config, training=dataclasses.replace(config.training, precision=precision))


def multiplies_in_bf16() -> bool:
    """Whether the GPU, or the CPU if there is no GPU, has bf16 products in hardware, not in emulation.

    `_is_mkldnn_bf16_supported` alone is not enough on x86: it is true of every CPU with AVX-512, where oneDNN
    converts to fp32 and back, slower than fp32. On Arm, the function checks for the bf16 instructions.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def validate(config: Config, world_size: int = 1, *, needs_data: bool = True) -> list[str]:
    """Lists the numbers out of range in `config`; without these, its contradictions. One line each, which
    begins with the setting.

    Args:
        config: A configuration whose fields have their types.
        world_size: Number of processes of the run.
        needs_data: Whether `data.sources` must name a store.
    """
    out_of_range = [
        line
        for section, kind in field_types(Config).items()
        for line in check_ranges(kind, vars(getattr(config, section)), f"{section}.")
    ]
    if out_of_range:
        return out_of_range
    sizes = list(check_mesh(config, world_size)) or [*config.check_batch(world_size)]
    return [*config.check(needs_data), *sizes]


def shape_problems(model: ModelConfig) -> list[str]:
    """Problems of a model shape that was read from a foreign file: wrong types, or else impossible values."""
    wrong_types = [
        line
        for name, kind in field_types(ModelConfig).items()
        for line in check_value(f"model.{name}", kind, getattr(model, name))
    ]
    return wrong_types or [*check_ranges(ModelConfig, vars(model), "model.")] or [*model.check_heads()]


@functools.cache
def settings() -> dict[str, Any]:
    """Every setting as `section.field`, with its type."""
    return {
        f"{section}.{name}": kind
        for section, section_class in field_types(Config).items()
        for name, kind in field_types(section_class).items()
    }


def unknown_setting(name: str, origin: str = "") -> str:
    """The message about a setting that does not exist; it names the most similar setting that exists."""
    known = [*settings(), *field_types(Config)]
    name = printable(name)
    plain = name.replace("-", "_")
    last = plain.rpartition(".")[2]
    near = [candidate for candidate in known if candidate.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(plain, known, n=1)
    advice = f"did you mean {near[0]}?" if near else "--help lists them all"
    return f"{name}: no such setting; {advice}{in_file(origin)}"


def check_tree(data: object, origin: str = "") -> tuple[_Tree, list[str]]:
    """The settings of `data` with correct types, and one line for each problem of the others.

    Args:
        data: Content of a configuration file: a mapping of sections, each a mapping of fields. A section
            without fields may be null.
        origin: File that `data` was read from, for the messages.
    """
    sections = {} if data is None else data
    if not isinstance(sections, Mapping):
        found = f"found {show(data)}{in_file(origin)}"
        return {}, [f"configuration: expected sections such as `model:` with their fields, {found}"]
    sound: _Tree = {}
    problems: list[str] = []
    for section, fields in sections.items():
        if isinstance(section, str) and section in settings():
            parent, _, name = section.partition(".")
            advice = f"`{parent}: {{{name}: …}}`{in_file(origin)}"
            problems.append(f"{section}: in a file, write it inside its section, {advice}")
        elif section not in field_types(Config):
            problems.append(unknown_setting(str(section), origin))
        elif fields is not None and not isinstance(fields, Mapping):
            found = f"found {show(fields)}{in_file(origin)}"
            problems.append(f"{section}: expected a section with its fields, {found}")
        else:
            sound[section] = {}
            for field, value in (fields or {}).items():
                name = f"{section}.{field}"
                if isinstance(field, str) and name in settings():
                    found = check_value(name, settings()[name], value, origin)
                else:
                    found = [unknown_setting(name, origin)]
                problems += found
                if not found:
                    sound[section][field] = value
    return sound, problems


@dataclasses.dataclass
class _CommandLine:
    """The parts of a command line."""

    files: list[str] = dataclasses.field(default_factory=list)
    options: _Tree = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    wants_help: bool = False
    wants_print: bool = False


def _read_command_line(arguments: list[str]) -> _CommandLine:
    """Splits a command line. argparse would stop at the first problem and accept abbreviated names."""
    line = _CommandLine()
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            line.wants_help = True
        elif word == "--print_config":
            line.wants_print = True
        elif not word.startswith("--") or not name:
            advice = "settings are written --section.field VALUE, files --config FILE"
            line.problems.append(f"{printable(word)}: unexpected argument; {advice}")
        else:
            given = value if equals else rest.pop() if rest and not rest[-1].startswith("--") else None
            _read_option(line, name, given)
    return line


def _read_option(line: _CommandLine, name: str, text: str | None) -> None:
    section, _, field = name.partition(".")
    kind = settings().get(name)
    if name == "config" and text:
        line.files.append(text)
    elif name == "config":
        line.problems.append("--config: expected a file, found nothing")
    elif name in field_types(Config):
        example = next(iter(field_types(field_types(Config)[name])))
        advice = f"set its fields one by one, e.g. --{name}.{example} VALUE"
        line.problems.append(f"{name}: a section has no value of its own; {advice}")
    elif kind is None:
        line.problems.append(unknown_setting(name))
    elif text is None:
        line.problems.append(f"{name}: expected {describe(kind)}, found no value after --{name}")
    else:
        value = _read_value(kind, text)
        problems = check_value(name, kind, value)
        line.problems += problems
        if not problems:
            line.options.setdefault(section, {})[field] = value


def _read_value(kind: Any, text: str) -> Any:
    """Reads the value of an option from its text; a setting of type text takes the text as it is."""
    if check_value("", kind, text) == []:
        return None if text in ("null", "~") and NoneType in get_args(kind) else text
    try:
        value = read_yaml(text)
    except YamlError:
        return text
    return text if value is None and text.strip() not in ("null", "~") else value


def _read_file(name: str) -> tuple[Any, str, list[str]]:
    """Content of a file or preset, its path for messages, and the problem of reading it."""
    preset = PRESETS / f"{name.removesuffix('.yaml')}.yaml"
    shown = printable(name)
    try:
        if os.path.basename(name) == name and not os.path.isfile(name) and preset.is_file():
            name = str(preset)
        return read_yaml_file(name), name, []
    except FileNotFoundError:
        of_preset = (PRESETS / os.path.basename(preset)).is_file()  # configs/NAME.yaml, without the checkout
        hint = (
            f"the preset is named {preset.stem}" if of_preset else "`llm-pretrain configs` lists the presets"
        )
        return None, name, [f"--config {shown}: no such file; {hint}"]
    except YamlError as error:
        place = f"{shown}:{error.line}" if error.line else shown
        return None, name, [f"--config {place}: not a valid YAML file: {error.text}"]
    except (OSError, ValueError) as error:
        return None, name, [f"--config {shown}: cannot be read: {reason_of(error)}"]


def _merge(tree: _Tree, other: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces settings of `tree` by the settings in `other`; a list is replaced as a whole. The later of
    `max_steps` and `max_tokens` replaces the other."""
    for section, fields in other.items():
        mine = tree.setdefault(section, {})
        if section == "training" and any(fields.get(name) is not None for name in _LENGTHS):
            for name in _LENGTHS:
                mine.pop(name, None)
        mine.update(fields)


def _resolve_length(tree: _Tree, problems: list[str]) -> Iterator[str]:
    """Replaces `training.max_tokens` in `tree` by the steps that hold so many; yields a note if it does.
    One source of settings that gives both is one of the `problems`."""
    training = tree.get("training", {})
    tokens, steps = training.get("max_tokens"), training.get("max_steps")
    if tokens is None:
        return
    a_step = build(Config, tree).training.tokens_per_step
    if steps is not None:
        problems.append(f"training.max_tokens: expected none with max_steps {steps}, found {tokens}")
    elif min(tokens, a_step) > 0:  # else a problem that is reported below
        training |= {"max_tokens": None, "max_steps": -(-tokens // a_step)}
        yield f"training.max_steps: {training['max_steps']} steps of {a_step} hold the {tokens} max_tokens"


def _names(tree: _Tree) -> set[str]:
    """The settings in a tree, as `section.field`."""
    return {f"{section}.{field}" for section, fields in tree.items() for field in fields}


def _shorten_schedule(tree: _Tree, preset: _Tree, own: set[str]) -> list[str]:
    """Shortens a preset's warm-up and decay in `tree` if the run is too short for them; returns a note each.

    Args:
        tree: All settings.
        preset: The settings in presets.
        own: Names of the settings whose value does not come from a preset.
    """
    usual = preset.get("training", {}).get("max_steps", Config().training.max_steps)
    wanted = tree.get("training", {}).get("max_steps", usual)
    lengths = {f"schedule.{field}": field for field in ("warmup_steps", "decay_steps")}
    found = {line.partition(":")[0] for line in build(Config, tree).check_schedule()}
    if not 0 < wanted < usual or found.isdisjoint(lengths):
        return []
    notes = []
    for name, field in lengths.items():
        steps = preset.get("schedule", {}).get(field)
        if steps and name not in own:
            shorter = tree["schedule"][field] = steps * wanted // usual
            notes.append(
                f"{name}: {shorter} instead of the preset's {steps}, since training.max_steps is {wanted}"
            )
    return notes


def _help_text(prog: str) -> str:
    usage = "%(prog)s [--config FILE ...] [--section.field VALUE ...]\n  [--print_config]"
    parser = argparse.ArgumentParser(prog=prog, usage=usage, description=Config.__doc__)
    parser.add_argument(
        "--config", metavar="FILE",
        help="YAML file of settings or name of a preset; may be given several times, and the later file wins",
    )  # fmt: skip
    parser.add_argument(
        "--print_config", action="store_true",
        help="check the settings, print them resolved as YAML, which --config reads back, and exit",
    )  # fmt: skip
    defaults = to_dict(Config())
    for section, cls in field_types(Config).items():
        summary, docs = documentation(cls)
        group = parser.add_argument_group(summary.rstrip("."))
        for name, kind in field_types(cls).items():
            default = defaults[section][name]
            shown = f"{describe(kind)}; default: {setting_text(default)}"
            text = f"{docs.get(name, '')} ({shown})".replace("%", "%%")
            group.add_argument(f"--{section}.{name}", metavar=name.upper(), help=text)
    return parser.format_help().rstrip()
