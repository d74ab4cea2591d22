"""`llm-pretrain COMMAND`: finds the command's module, runs it, and turns errors into one line and a code.

Only the command that runs is imported.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module

from llm_pretrain import __version__
from llm_pretrain.errors import CheckpointError, ConfigError, PretrainError

COMMANDS = {
    "tokenizer": "train a tokenizer on jsonl or text files",
    "prepare": "tokenise jsonl or text files into a token store",
    "convert": "turn token files of nanoGPT or Megatron into a token store, or back",
    "inspect": "show what is in a token store: lengths, masks, packing, samples",
    "configs": "list the presets; write other frameworks' configurations as ours",
    "estimate": "what a configuration needs: parameters, memory by part, time and cost",
    "doctor": "look for what on this machine would surprise a run",
    "parity": "launch a configuration in every way, and compare the runs bit for bit",
    "chaos": "kill a run again and again; it must end as the run that nobody killed, bit for bit",
    "generate": "continue a prompt with trained weights",
    "chat": "talk to trained weights in the terminal",
    "evaluate": "loss, perplexity and bits per byte on a token store, on files, or lm-eval's tasks",
    "export": "write weights for llama.cpp (GGUF) or transformers",
    "report": "write an HTML page about a run, or compare several",
    "top": "watch a run, or several, in the terminal",
    "verify": "check from a run's files that it is what it says; that packed documents are alone",
}
"""Module of `llm_pretrain.commands` and its line of help."""

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may not fit the terminal's encoding
    if arguments[:1] == ["--version"]:
        print(__version__)
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else _EXIT_USAGE
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(
            f"llm-pretrain: error: expected a command ({known}), found {name!r}; see llm-pretrain --help",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    parsed = argparse.Namespace()
    try:
        command = import_module(f"llm_pretrain.commands.{name}")
        parser = argparse.ArgumentParser(prog=f"llm-pretrain {name}", description=command.HELP)
        command.add_arguments(parser)
        parsed, unknown = parser.parse_known_args(rest)
        if unknown:
            if refuse := parser.get_default("refuse"):  # of a command that takes settings
                refuse(unknown)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        exit_code = command.run(parsed)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # its reader, `head` or a pager, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's flush at exit
        return _EXIT_BROKEN_PIPE
    except PretrainError as error:
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        text = "\n".join(map(_printable, problems))
        print(f"llm-pretrain {name}: error: {text}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder without permission
        place = error.filename or getattr(parsed, "output", None) or "output"
        reason = f"{place}: {error.strerror or error}"
        print(f"llm-pretrain {name}: error: {_printable(reason)}", file=sys.stderr)
        return CheckpointError.exit_code
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _printable(text: str) -> str:
    """One line: what stood in a file, or is a file's name, must neither break it nor steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: llm-pretrain COMMAND …",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            "  llm-pretrain tokenizer --input stdlib --vocab_size 6400 --output data/tokenizers/stdlib",
            "  llm-pretrain prepare --input stdlib --tokenizer data/tokenizers/stdlib "
            "--output data/stores/stdlib",
            "  llm-pretrain COMMAND --help",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
