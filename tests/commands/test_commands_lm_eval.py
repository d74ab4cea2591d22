"""lm-eval on our decoder: the adapter's answers, and the figures that lm-eval gets through transformers."""

import json
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.corpora import make_texts, write_jsonl
from support.launching import ROOT, environment

from llm_pretrain.__main__ import main
from llm_pretrain.commands import _lm_eval
from llm_pretrain.commands._lm_eval import DecoderScores
from llm_pretrain.commands._source import Source
from llm_pretrain.config import Config, TrainingConfig

needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the package lm-eval")
LENGTH = 32


@pytest.fixture
def source(trained_run) -> Source:
    import argparse

    from llm_pretrain.commands._source import add_source_arguments, open_source

    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    return open_source(parser.parse_args([str(trained_run.folder)]))


@pytest.fixture
def scores(source: Source) -> DecoderScores:
    model = DecoderScores()
    model.prepare(
        source, Config(training=TrainingConfig(sequence_length=LENGTH, micro_batch_size=3, precision="fp32"))
    )
    return model


def asked(*arguments) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def log_probability(source: Source, ids: list[int], count: int) -> float:
    """Of the last `count` ids, one forward pass."""
    with torch.inference_mode():
        logits = source.model(torch.tensor([ids[:-1]])).logits[0].double()
    return float(logits.log_softmax(-1)[-count:].gather(1, torch.tensor(ids[-count:])[:, None]).sum())


def test_a_continuation_is_scored_after_its_context_and_bos(source, scores):
    context, continuation = scores.tok_encode("one two"), scores.tok_encode(" three")
    [(score, _)] = scores._loglikelihood_tokens([(None, context, continuation)])
    whole = [source.start_id, *context, *continuation]
    assert score == pytest.approx(log_probability(source, whole, len(continuation)), abs=1e-5)
    [(empty, _)] = scores._loglikelihood_tokens([(None, [source.start_id], continuation)])
    expected = log_probability(source, [source.start_id, *continuation], len(continuation))
    assert empty == pytest.approx(expected, abs=1e-5), "lm-eval gives an empty context the prefix token"


def test_a_context_that_is_too_long_loses_its_beginning(source, scores):
    context, continuation = scores.tok_encode("ab " * 40), scores.tok_encode("xyz")
    [(score, _)] = scores._loglikelihood_tokens([(None, context, continuation)])
    whole = [*context, *continuation][-(LENGTH + 1) :]
    assert score == pytest.approx(log_probability(source, whole, 3), abs=1e-5)
    [(all_of_it, _)] = scores._loglikelihood_tokens([(None, [], context)])
    assert all_of_it == pytest.approx(log_probability(source, context[-(LENGTH + 1) :], LENGTH), abs=1e-5)


def test_whole_texts_are_those_of_evaluate(scores, trained_run, tmp_path, capsys):
    texts = [*make_texts(4, seed=5), "x"]
    totals = scores.loglikelihood_rolling([asked(text) for text in texts])
    file = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    options = ("--windows", "rolling", "--sequence_length", str(LENGTH), "--json")
    assert main(["evaluate", str(trained_run.folder), "--input", str(file), *options]) == 0
    size = sum(len(text.encode()) for text in texts)
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert -math.fsum(totals) / size / math.log(2) == pytest.approx(bits, rel=1e-6)


def test_answers_end_before_their_stop_text(scores):
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    contexts = ["one", "two three " * 20, "naïve"]
    whole = scores.generate_until([asked(text, settings) for text in contexts])
    assert all(0 < len(text) <= 12 for text in whole)
    stop = whole[0][3]
    cut = scores.generate_until([asked(text, settings | {"until": [stop]}) for text in contexts])
    assert cut == [text.partition(stop)[0] for text in whole]
    mixed = scores.generate_until([asked("one", settings), asked("one", settings | {"until": stop})])
    assert mixed == [whole[0], cut[0]]


def test_without_the_package_one_line_says_how_to_get_it(trained_run, capsys, monkeypatch):
    monkeypatch.setattr(_lm_eval, "find_spec", lambda name: None)
    assert main(["evaluate", str(trained_run.folder), "--tasks", "any"]) == 2
    err = capsys.readouterr().err
    assert "pip install 'llm_pretrain[eval]'" in err
    assert err.count("\n") == 1


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Three tasks on local data: rolling log-likelihood, multiple choice, generation."""
    texts = [*make_texts(6, seed=3), " ".join(make_texts(8, seed=4))]
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_jsonl(tmp_path / "rolling.jsonl", [{"text": text} for text in texts])
    choices = [
        {"text": text[:9], "choices": [" one", " two"], "answer": i % 2} for i, text in enumerate(texts)
    ]
    write_jsonl(tmp_path / "choice.jsonl", choices)
    write_jsonl(tmp_path / "generate.jsonl", [{"text": text[:9], "answer": "one"} for text in texts])
    parts = {
        "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]\n",
        "choice": 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: choices\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "generate": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: answer\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n',
        "broken": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: answer\n',
    }
    for name, text in parts.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / name}.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: own_{name}\n{data}test_split: test\n{text}")
    return folder


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, argv)]
    offline = environment() | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True, check=False)


def add_bos(file: Path) -> None:
    """Let the tokenizer put BOS before every text, as those of `llm-pretrain tokenizer` do."""
    content = json.loads(file.read_text())
    bos = next(token for token in content["added_tokens"] if token["content"] == "<s>")["id"]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(content))


@needs_lm_eval
@pytest.mark.slow
def test_tasks_give_what_lm_eval_gives_through_transformers(trained_run, tasks, tmp_path):
    weights = shutil.copytree(trained_run.folder / "weights" / "step-00000006", tmp_path / "weights")
    add_bos(weights / "tokenizer.json")
    names = "own_rolling,own_choice,own_generate"
    own = ("--include_path", tasks, "--sequence_length", str(LENGTH), "--json")
    done = run("llm_pretrain", "evaluate", weights, "--tasks", names, *own)
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout)
    assert 0 <= ours["own_generate"]["exact_match"] <= 1
    assert 0 <= ours["own_choice"]["acc"] <= 1

    theirs_file = tmp_path / "theirs"
    settings = f"max_length={LENGTH},dtype=float32,add_bos_token=False"  # its windows have their own BOS
    theirs_done = run(
        *("lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "own_rolling"),
        *("--model_args", f"pretrained={weights},{settings}"),
        *("--include_path", tasks, "--output_path", theirs_file),
    )
    assert theirs_done.returncode == 0, theirs_done.stderr
    theirs = json.loads(next(theirs_file.rglob("*.json")).read_text())["results"]
    for metric in ("bits_per_byte", "byte_perplexity"):
        found = ours["own_rolling"][metric]
        assert found == pytest.approx(theirs["own_rolling"][f"{metric},none"], rel=1e-4), metric

    rolling = ("--windows", "rolling", "--sequence_length", str(LENGTH), "--json")
    done = run("llm_pretrain", "evaluate", weights, "--input", tasks.parent / "rolling.jsonl", *rolling)
    assert json.loads(done.stdout)["bits_per_byte"] == pytest.approx(
        ours["own_rolling"]["bits_per_byte"], rel=1e-6
    )


@needs_lm_eval
@pytest.mark.slow
def test_wrong_tasks_are_one_line(trained_run, tasks):
    for name, expected in (
        ("own_rollin", "found own_rollin; did you mean own_rolling"),
        ("own_broken", "expected task files and data that load"),
        (",", "expected names of tasks"),
    ):
        done = run("llm_pretrain", "evaluate", trained_run.folder, "--tasks", name, "--include_path", tasks)
        assert done.returncode in (2, 65)
        assert done.stdout == ""
        assert expected in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    nowhere = ("--tasks", "own_rolling", "--include_path", tasks / "nowhere")
    assert (
        "--include_path: expected a folder"
        in run("llm_pretrain", "evaluate", trained_run.folder, *nowhere).stderr
    )
