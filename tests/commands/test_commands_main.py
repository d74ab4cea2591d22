"""The command line: help with examples, one line per error, quiet interruption, nothing imported early."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpora import make_tokenizer, write_jsonl
from support.documents import ROOT

from llm_pretrain.__main__ import main
from llm_pretrain.commands import prepare as prepare_command
from llm_pretrain.files import replace_text


@pytest.mark.parametrize("command", ["tokenizer", "prepare"])
def test_help_ends_in_examples(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"llm-pretrain {command} --input" in capsys.readouterr().out.strip().splitlines()[-1]


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("tokenizer", "prepare", "generate"))
    assert main([]) == 2
    assert main(["pretrain"]) == 2
    assert "expected a command" in capsys.readouterr().err


def test_own_files_become_a_tokenizer_and_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    texts = [" ".join(words[k % 5 :] + words[: k % 5] + [str(k)]) for k in range(200)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    (tmp_path / "notes.txt").write_text("notes in a text file\n")
    inputs = ["--input", str(corpus), str(tmp_path / "notes.txt")]
    folder, store = str(tmp_path / "tokenizer"), str(tmp_path / "store")
    assert main(["tokenizer", *inputs, "--vocab_size", "300", "--output", folder]) == 0
    assert "bytes per token" in capsys.readouterr().out
    assert main(["prepare", *inputs, "--tokenizer", folder, "--output", store]) == 0
    output = capsys.readouterr().out
    assert "train " in output
    assert "zlib -9" in output
    assert main(["prepare", *inputs, "--tokenizer", folder, "--output", store]) == 65
    assert main(["prepare", *inputs, "--tokenizer", folder, "--output", store, "--overwrite"]) == 0


def test_an_error_is_one_line_and_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--tokenizer", str(tmp_path), "--output", str(tmp_path / "s")]
    assert main(["prepare", "--input", str(tmp_path / "missing.jsonl"), *arguments]) == 65
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "missing.jsonl" in line


@pytest.mark.parametrize("field", ["a\nb", "\x1b[31m", "\x9b2J", "\u202e", "\u2028"])
def test_what_a_file_says_neither_breaks_a_line_nor_steers_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
):
    corpus = write_jsonl(tmp_path / f"c{field}.jsonl", [{field: 1}])
    tokenizer, output = make_tokenizer(tmp_path / "tokenizer"), tmp_path / "s"
    arguments = ["--input", str(corpus), "--tokenizer", str(tokenizer), "--output", str(output)]
    assert main(["prepare", *arguments]) == 65
    error = capsys.readouterr().err
    assert error.removesuffix("\n").isprintable()
    is_space = field.split() != [field]  # the file's name stays what it is, the field's loses line breaks
    assert error.count(field.encode("unicode_escape").decode()) == (1 if is_space else 2)


@pytest.mark.parametrize("encoding", ["ascii:strict", "utf-8:strict"])
def test_a_name_that_the_terminal_cannot_show_ends_no_command(tmp_path: Path, encoding: str):
    names = [os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), str(tmp_path / "é")]
    for name in names:
        Path(name).write_text(f"text {name!a}")
    tokenizer, output = make_tokenizer(tmp_path / "tokenizer"), tmp_path / "s"
    arguments = ["--input", *names, "--tokenizer", str(tokenizer), "--output", str(output)]
    command = [sys.executable, "-m", "llm_pretrain", "prepare", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\udcff" in done.stdout


def test_an_interruption_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_command, "run", interrupt)
    assert main(["prepare", "--input", "a", "--tokenizer", "b", "--output", "c"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_an_output_that_cannot_be_written_is_one_line(option: str):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "llm_pretrain", option],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert found.returncode == 74
    assert found.stderr == f"llm-pretrain {option}: error: output: No space left on device\n"


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_memory_that_runs_out_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(prepare_command, "run", fail)
    assert main(["prepare", "--input", "a", "--tokenizer", "b", "--output", "c"]) == 71
    line = capsys.readouterr().err
    assert line.startswith(f"llm-pretrain prepare: error: out of memory: {error}; use a smaller")
    assert line.count("\n") == 1


def test_commands_and_workers_start_without_torch():
    code = "import sys, llm_pretrain.__main__, llm_pretrain.data.preparation; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_reader_that_has_seen_enough_is_no_error():
    run = f"{sys.executable} -m llm_pretrain configs --folder configs"
    piped = subprocess.run(
        ["bash", "-c", f"{run} | true; echo ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert piped.stdout.split() == ["141"]
    assert piped.stderr == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr", "stdin"])
def test_a_closed_stream_is_the_null_device(stream: str, tmp_path: Path):
    """`>&-`: no traceback, and no file that is opened later gets what is printed."""
    number = ("stdin", "stdout", "stderr").index(stream)
    code = f"""
import os, sys
os.close({number})
sys.{stream} = None  # as Python starts with a closed one
from llm_pretrain.__main__ import main
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


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("prepare", "input"),
        ("tokenizer", "input"),
        ("convert", "input"),
        ("evaluate", "input"),
        ("evaluate", "store"),
    ],
)
def test_what_an_option_names_twice_is_taken_twice(command: str, option: str):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"llm_pretrain.commands.{command}").add_arguments(parser)
    for action in parser._actions:
        action.required = False
    source = ["run"] if command == "evaluate" else []
    read = parser.parse_args([*source, f"--{option}", "a", "b", f"--{option}", "c"])
    assert getattr(read, option) == ["a", "b", "c"]


def test_a_file_on_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not the temporary one beside it, whose removal is refused too."""

    def refuse(file: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(OSError, match="Read-only") as caught:
        replace_text(tmp_path / "plan.yaml", "text")
    assert caught.value.filename == str(tmp_path / "plan.yaml")
