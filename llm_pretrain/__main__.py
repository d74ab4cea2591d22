"""`llm-pretrain COMMAND`: imports and runs one command, and reports errors by one line and an exit code."""

from __future__ import annotations

import argparse
import shutil
import sys
from difflib import get_close_matches
from importlib import import_module

from llm_pretrain.errors import CheckpointError, PretrainError, ResourceError, printable
from llm_pretrain.files import expand_paths, flush_streams, prepare_streams
from llm_pretrain.text import reason_of
from llm_pretrain.version import __version__

COMMANDS = {
    "tokenizer": "train a tokenizer on texts: jsonl, parquet, csv and others",
    "prepare": "tokenize texts (jsonl, parquet, csv and others) into a token store",
    "convert": "turn token files of nanoGPT or llm.c into a token store",
    "inspect": "show what is in a token store, or what a run read at a step",
    "configs": "list the presets; write minimind's options or a config.json as a configuration",
    "estimate": "estimate parameters, memory by part, time and cost of a configuration",
    "simulate": "simulate a step of one rank of any number: memory, collectives, time; find a mesh",
    "plan": "from a ladder and a budget to the configuration that is predicted to end best",
    "ladder": "train small models of one family within a budget, from which larger runs are predicted",
    "train": "train on this machine's GPUs, or on its CPU, through torchrun or accelerate",
    "doctor": "check this machine for settings that would break or slow down a run",
    "parity": "launch a configuration in every way, and compare the runs bit for bit",
    "chaos": "kill a run repeatedly; it must end as an uninterrupted run, bit for bit",
    "generate": "continue a prompt with trained weights",
    "chat": "talk to trained weights in the terminal",
    "evaluate": "loss, perplexity and bits per byte on a token store or on files",
    "export": "write weights for llama.cpp (GGUF) or transformers",
    "report": "write an HTML page about a run, or compare several",
    "top": "a table of runs in the terminal, while they train",
    "replay": "execute a run's steps again from its checkpoints, and compare them bit for bit",
    "verify": "check a run by its files and its data",
}
"""Module in `llm_pretrain.commands` → one line of help."""

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    prepare_streams()
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    parsed = argparse.Namespace()
    try:
        if name in ("", "-h", "--help", "--version"):
            print(__version__ if name == "--version" else _usage(), flush=True)
            return 0 if name else _EXIT_USAGE
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, 1, 0.5)
            hint = f"did you mean {near[0]}? Or " if near else ""
            found = f"expected a command, found {name!r}; {hint}see llm-pretrain --help"
            print(f"llm-pretrain: error: {found}", file=sys.stderr)
            return _EXIT_USAGE
        from llm_pretrain.commands.options import HelpFormatter

        command = import_module(f"llm_pretrain.commands.{name}")
        parser = argparse.ArgumentParser(
            prog=f"llm-pretrain {name}",
            description=COMMANDS[name],
            epilog=command.EXAMPLES,
            formatter_class=HelpFormatter,
        )
        command.add_arguments(parser)
        parsed, unknown = parser.parse_known_args(rest)
        if hasattr(parsed, "script_options"):  # a command that passes options on to a script
            parsed.script_options = unknown
        elif unknown:
            if refuse := parser.get_default("refuse"):  # a command that takes settings
                refuse(unknown)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        exit_code = command.run(argparse.Namespace(**expand_paths(vars(parsed))))
        parsed = argparse.Namespace(output="standard output")  # only this output can still fail
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # `head` or a pager has closed the pipe
        flush_streams()
        return _EXIT_BROKEN_PIPE
    except PretrainError as error:
        print(f"llm-pretrain {name}: error: " + "\n".join(error.lines()), file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder without permission
        place = error.filename or getattr(parsed, "output", None) or "output"
        reason = f"{place}: {reason_of(error)}"
        print(f"llm-pretrain {name}: error: {printable(reason)}", file=sys.stderr)
        return CheckpointError.exit_code
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        reason = printable(" ".join(str(error).split()) or "no memory is left")
        advice = "use a smaller batch, a smaller model, or a machine with more memory"
        print(f"llm-pretrain {name}: error: out of memory: {reason}; {advice}", file=sys.stderr)
        return ResourceError.exit_code


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # to import torch takes seconds, and memory
        return isinstance(error, MemoryError)
    from llm_pretrain.launch.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


def _usage() -> str:
    from llm_pretrain.commands.options import wrapped

    width, columns = max(map(len, COMMANDS)), shutil.get_terminal_size().columns
    lines = [
        "usage: llm-pretrain COMMAND …",
        "",
        "commands:",
        *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
        "",
        "examples:",
        "  llm-pretrain tokenizer --input stdlib --vocab_size 6400 --output data/tokenizers/stdlib",
        "  llm-pretrain prepare --input stdlib --tokenizer data/tokenizers/stdlib "
        "--output data/stores/stdlib",
        "  llm-pretrain train --config quickstart",
        "  llm-pretrain COMMAND --help",
    ]
    return "\n".join(wrapped(line, columns) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
