"""The command line: help with examples, one line per error, quiet interruption, nothing imported early."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpora import make_tokenizer, write_jsonl
from support.documents import ROOT

from llm_pretrain.__main__ import COMMANDS, main
from llm_pretrain.commands import prepare as prepare_command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal_and_ends_in_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    last = text.replace(" \\\n     ", "").rstrip().splitlines()[-1]
    assert last.startswith("  ")
    assert f"llm-pretrain {command} " in last


def test_usage_lists_every_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["pretrain"]) == 2
    assert "expected a command" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert "found 'trian'; did you mean train? Or see llm-pretrain --help\n" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["a\nb", "\x1b[31m", "\u202e"])
def test_what_a_file_says_neither_breaks_a_line_nor_steers_the_terminal(tmp_path, capsys, field):
    corpus = write_jsonl(tmp_path / f"c{field}.jsonl", [{field: 1}])
    tokenizer, output = make_tokenizer(tmp_path / "tokenizer"), tmp_path / "s"
    arguments = ["--input", str(corpus), "--tokenizer", str(tokenizer), "--output", str(output)]
    assert main(["prepare", *arguments]) == 65
    error = capsys.readouterr().err
    assert error.removesuffix("\n").isprintable()
    is_space = field.split() != [field]  # the file's name stays what it is, the field's loses line breaks
    assert error.count(field.encode("unicode_escape").decode()) == (1 if is_space else 2)


def test_a_name_that_the_terminal_cannot_show_ends_no_command(tmp_path):
    names = [os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), str(tmp_path / "é")]
    for name in names:
        Path(name).write_text(f"text {name!a}")
    tokenizer, output = make_tokenizer(tmp_path / "tokenizer"), tmp_path / "s"
    arguments = ["--input", *names, "--tokenizer", str(tokenizer), "--output", str(output)]
    command = [sys.executable, "-m", "llm_pretrain", "prepare", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\udcff" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_an_output_that_cannot_be_written_is_one_line():
    command = [sys.executable, "-m", "llm_pretrain", "--version"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 74
    assert found.stderr == "llm-pretrain --version: error: output: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError("none left"), 71),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 71),
    ],
)
def test_an_interruption_is_quiet_and_memory_that_runs_out_is_one_line(error, code, monkeypatch, capsys):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(prepare_command, "run", fail)
    assert main(["prepare", "--input", "a", "--tokenizer", "b", "--output", "c"]) == code
    said = capsys.readouterr().err
    if code == 130:
        assert said == ""
    else:
        assert said.startswith(f"llm-pretrain prepare: error: out of memory: {error}; use a smaller")
        assert said.count("\n") == 1


def test_commands_and_workers_start_without_torch():
    code = "import sys, llm_pretrain.__main__, llm_pretrain.data.preparation; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_the_null_device(stream, tmp_path):
    """`>&-`: no traceback, and no file that is opened later gets what is printed."""
    number = 1 if stream == "stdout" else 2
    code = f"""
import os, sys
os.close({number})
sys.{stream} = None  # as Python starts with a closed one
from llm_pretrain.__main__ import COMMANDS, main
code = main(["--version"])
first = open({str(tmp_path / "file")!r}, "w")
os.system("echo printed; echo printed >&2")
print("printed", file=sys.stderr)
sys.exit(code if first.fileno() > 2 else 3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == ""


def test_a_reader_that_has_left_is_no_error():
    """The exit code of the program stays, and Python's flush at exit says nothing."""
    code = "import sys\nfrom llm_pretrain.files import flush_streams\nprint()\nflush_streams()\nsys.exit(7)"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=ROOT, env=buffered, check=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.parametrize("command", ["prepare", "tokenizer", "convert", "evaluate"])
def test_what_an_option_names_twice_is_taken_twice(command):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"llm_pretrain.commands.{command}").add_arguments(parser)
    for action in parser._actions:
        action.required = False
    names = ("input", "store") if command == "evaluate" else ("input",)
    for name in names:
        read = parser.parse_args(["run"] * (len(names) - 1) + [f"--{name}", "a", "b", f"--{name}", "c"])
        assert getattr(read, name) == ["a", "b", "c"]
