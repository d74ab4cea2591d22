"""Loading: what files and options mean together, and how every mistake is reported."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from llm_pretrain.config.loading import dump_yaml, from_dict, load_config, resolve_model, to_dict
from llm_pretrain.config.tree import Config
from llm_pretrain.errors import ConfigError
from llm_pretrain.files import expand_paths

SOURCES = ("--data.sources", "[{store: data/stores/x, weight: 1}]")


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file and returns its path as an argument."""

    def write_file(text: str, name: str = "settings.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv))
    assert all("\n" not in line for line in caught.value.problems)
    return list(caught.value.problems)


def test_options_alone():
    config = load_config(
        [*SOURCES, "--training.max_steps", "7", "--model.qk_norm=false", "--run.name", "3", "--run.seed=5"]
    )
    assert config.training.max_steps == 7
    assert config.model.qk_norm is False
    assert config.run.name == "3"
    assert config.run.seed == 5
    assert config.data.sources[0].store == "data/stores/x"
    assert isinstance(config.data.sources[0].weight, float)
    assert config.optimizer == Config().optimizer


def test_later_files_win_and_merge_and_options_win_over_files(write):
    first = write("training: {max_steps: 1, micro_batch_size: 4}\nrun: {name: a}\n", "first.yaml")
    second = write("training:\n  max_steps: 2\noptimizer:\n", "second.yaml")
    config = load_config(["--training.max_steps", "3", "--config", first, f"--config={second}", *SOURCES])
    assert (config.training.max_steps, config.training.micro_batch_size, config.run.name) == (3, 4, "a")
    assert load_config(["--config", first, "--config", second, *SOURCES]).training.max_steps == 2


SHORT = ("--training.max_steps", "2")
MOE = ("--config", "tiny-moe")  # 40 steps, 4 of them warm-up; learning rate 3e-3 to 3e-4


def test_a_preset_s_schedule_is_scaled_to_a_short_run(write, capsys, monkeypatch):
    config = load_config([*MOE, *SOURCES, *SHORT])
    assert (config.training.max_steps, config.schedule.warmup_steps) == (2, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("note: schedule.warmup_steps: 0 instead of the preset's 4, since training.max_steps is 2")
    assert load_config([*SOURCES, *MOE, "--config", write("training: {max_steps: 2}")]) == config
    wsd = load_config(["--config", "smol-135m", *SOURCES, "--training.max_steps", "2050"]).schedule
    assert (wsd.warmup_steps, wsd.decay_steps) == (2, 410), "of 2,000 and 400,000"
    capsys.readouterr()
    monkeypatch.setenv("RANK", "1")
    assert load_config([*MOE, *SOURCES, *SHORT]) == config
    load_config([*MOE, *SOURCES, "--training.max_steps", "4"])
    assert capsys.readouterr().err == ""


def test_a_run_has_a_length_in_steps_or_in_tokens(write, capsys):
    size = ("--training.global_batch_size", "8", "--training.sequence_length", "512")
    tokens = ("--training.max_tokens", "1000000")
    config = load_config([*SOURCES, *size, *tokens])
    assert (config.training.max_steps, config.training.max_tokens) == (245, None)
    note = "note: training.max_steps: 245 steps of 4096 hold the 1000000 max_tokens"
    assert capsys.readouterr().err.splitlines() == [note]
    saved = write(dump_yaml(config), "saved.yaml")
    assert load_config(["--config", saved]) == load_config(["--config", saved, *tokens]) == config
    short = load_config([*MOE, *SOURCES, "--training.max_tokens", "4000"])
    assert (short.training.max_steps, short.schedule.warmup_steps) == (3, 0), (
        "steps of 1,536; as of max_steps"
    )
    file = write("training: {max_tokens: 5000}")
    assert load_config(["--config", file, *SOURCES, "--training.max_steps", "7"]).training.max_steps == 7
    both = ("--training.max_tokens", "10", "--training.max_steps", "4")
    assert problems_of(*SOURCES, *both) == ["training.max_tokens: expected none with max_steps 4, found 10"]
    assert problems_of(*SOURCES, "--training.max_tokens", "0")[0].startswith(
        "training.max_tokens: expected more"
    )


def test_a_user_s_schedule_is_not_scaled(write):
    own = write("schedule: {warmup_steps: 4}")
    for options in (["--schedule.warmup_steps", "4"], ["--config", own]):
        (line,) = problems_of(*MOE, *options, *SOURCES, *SHORT)
        assert line.startswith("schedule.warmup_steps: expected at most training.max_steps = 2, found 4;")
    for rate in ("0.0001", "0.0003"):  # with the preset's 3e-4 as the last, the rate would never fall
        (line,) = problems_of(*MOE, *SOURCES, "--optimizer.learning_rate", rate)
        assert line.startswith(
            f"schedule.min_learning_rate: expected less than optimizer.learning_rate = {rate},"
        )
    for value in ("0", "-1"):
        (line,) = problems_of(*MOE, *SOURCES, "--training.max_steps", value)
        assert line.startswith("training.max_steps: expected more than 0")


def test_a_list_of_sources_is_one_setting(write):
    file = write("data:\n  sources:\n    - store: a\n    - {store: b, weight: 2}\n")
    assert [source.weight for source in load_config(["--config", file]).data.sources] == [1.0, 2.0]
    assert [source.store for source in load_config(["--config", file, *SOURCES]).data.sources] == [
        "data/stores/x"
    ]


@pytest.mark.parametrize("text", ["1e-3", "1E-3", ".001", "+1e-3"])
def test_numbers_without_a_point_are_numbers(write, text):
    file = write(f"optimizer: {{learning_rate: {text}}}\n")
    assert load_config(["--config", file, *SOURCES]).optimizer.learning_rate == 1e-3
    assert load_config(["--optimizer.learning_rate", text, *SOURCES]).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model.hidden_size", "512.0"),
        ("model.hidden_size", "true"),
        ("model.hidden_size", "99999999999999999999"),
        ("model.qk_norm", "yes"),
        ("run.name", "3"),
        ("run.output_dir", '"\\ud800"'),
        ("run.output_dir", '"a\\0b"'),
        ("training.precision", "float32"),
        ("optimizer.learning_rate", "fast"),
        ("data.sources", "{store: a}"),
    ],
)
def test_a_wrong_type_names_setting_expectation_and_finding(write, setting, value):
    section, _, field = setting.partition(".")
    file = write(f"{section}:\n  {field}: {value}\n")
    lines = [line for line in problems_of("--config", file) if line.startswith(f"{setting}: expected ")]
    assert len(lines) == 1
    assert "found" in lines[0]
    assert file in lines[0]


@pytest.mark.parametrize(
    ("name", "neighbour"),
    [
        ("training.max_step", "training.max_steps"),
        ("learning_rate", "optimizer.learning_rate"),
        ("training.learning_rate", "optimizer.learning_rate"),
        ("trainin.max_steps", "training.max_steps"),
    ],
)
def test_an_unknown_setting_names_its_nearest_neighbour(write, name, neighbour):
    expected = f"{name}: no such setting; did you mean {neighbour}?"
    assert problems_of(f"--{name}", "3", *SOURCES) == [expected]
    section, _, field = name.rpartition(".")
    file = write(f"{section}: {{{field}: 3}}\n" if section else f"{name}: 3\n")
    if section in ("", "training"):
        assert problems_of("--config", file, *SOURCES) == [f"{expected} ({file})"]


def test_all_problems_are_reported_at_once(write):
    file = write(
        "model: {hidden_size: wide, num_experts: 4, num_experts_per_tok: 8, heads: 2}\n"
        "data: {sources: [{stor: a}, b]}\nnothing: 1\n"
    )
    lines = problems_of(
        "--config", file, "--config", "missing.yaml", "--training.max_stepz", "3", "--run.seed", "x", "word"
    )
    begins = [
        *("model.hidden_size: expected", "model.heads: no such", "data.sources[0].stor: no such"),
        *("data.sources[0].store: expected", "data.sources[1]: expected", "nothing: no such"),
        *("--config missing.yaml: no such file", "training.max_stepz: no such", "run.seed: expected"),
        "word: unexpected argument",
    ]
    for begin in begins:
        assert any(line.startswith(begin) for line in lines), begin
    assert len(lines) == len(begins)


def test_contradictions_are_judged_once_all_settings_are_known():
    sizes = ("--training.global_batch_size", "7", "--training.micro_batch_size", "2", *SOURCES)
    assert [line.partition(":")[0] for line in problems_of("--run.sed", "3", *sizes)] == ["run.sed"]
    assert [line.partition(":")[0] for line in problems_of(*sizes)] == ["training.global_batch_size"]


def test_empty_files_and_sections_change_nothing(write):
    plain = load_config([*SOURCES])
    assert load_config(["--config", write(""), *SOURCES]) == plain
    assert load_config(["--config", write("# nothing\nmodel:\nrun: {}\n"), *SOURCES]) == plain


def test_misuse_of_options():
    assert problems_of("--run.name", *SOURCES)[0].startswith("run.name: expected text, found no value")
    assert problems_of("--run.name", "--run.seed", "1", *SOURCES)[0].startswith("run.name: expected text")
    assert problems_of("--model", "x", *SOURCES)[0].startswith("model: a section has no value")
    assert problems_of("--config")[0].startswith("--config: expected a file")
    assert problems_of("--model.hidden_size", "", *SOURCES)[0].startswith("model.hidden_size: expected")
    assert load_config(["--run.output_dir", "null", *SOURCES]).run.output_dir is None
    assert load_config(["--model.head_dim", "null", *SOURCES]).model.head_dim is None


def test_print_config_can_be_passed_back(capsys, write):
    with pytest.raises(SystemExit) as stop:
        load_config(["--print_config", "--optimizer.learning_rate", "3e-4", "--run.name", "on"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "# Peak learning rate;" in printed
    again = load_config(["--config", write(printed), *SOURCES])
    assert (again.optimizer.learning_rate, again.run.name) == (3e-4, "on")
    for wrong in (("--run.nam", "x"), ("--training.max_steps", "0"), ("--schedule.warmup_steps", "9999")):
        assert problems_of("--print_config", *wrong, *SOURCES)
    assert capsys.readouterr().out == ""


def test_help_documents_every_setting_and_offers_no_other(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help"], prog="train_pretrain.py")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: train_pretrain.py [--config FILE ...]")
    offered = {word for line in text.splitlines() for word in line.split()[:1] if line.startswith("  --")}
    settings = {f"--{section}.{field}" for section, fields in to_dict(Config()).items() for field in fields}
    assert offered == settings | {"--config", "--print_config"}
    assert "--data.sources+" not in text
    assert "(a list of {store: …, weight: …, name: …};" in " ".join(text.split())
    for part in ("Peak learning rate;", "(a number; default: 0.001)", "later file wins"):
        assert part in text


def test_every_field_is_documented():
    text = dump_yaml(Config(), comments=True)
    lines = text.splitlines()
    bare = [line for before, line in itertools.pairwise(lines) if "#" not in before + line]
    assert bare == []


def test_the_tree_stays_frozen_and_plain_values_go_round():
    config = load_config([*SOURCES])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 1  # pyright: ignore[reportAttributeAccessIssue]  # what is tested
    assert from_dict(to_dict(config)) == config
    assert from_dict({}) == Config()
    with pytest.raises(ConfigError, match="did you mean"):
        from_dict({"run": {"nam": "x"}})


def test_world_size_of_the_launch_is_taken_from_the_environment(monkeypatch):
    argv = ["--training.global_batch_size", "8", "--training.micro_batch_size", "4", *SOURCES]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config(argv).gradient_accumulation_steps(2) == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "4 * 3 = 12, found 8" in problems_of(*argv)[0]
    for wrong in ("0", "abc", "-1", ""):
        monkeypatch.setenv("WORLD_SIZE", wrong)
        assert problems_of(*argv) == [
            f"WORLD_SIZE: expected a number from 1 on, found the text {wrong!r}; unset it"
        ]


def test_paths_are_expanded_as_by_a_shell_or_refused(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PART", "a")
    monkeypatch.delenv("UNSET", raising=False)
    (tmp_path / "price$UNSET").mkdir()
    prompts = "evaluation: {sample_prompts: [~/$PART]}"
    write("run: {output_dir: ~/$PART/run}\ndata: {sources: [{store: '${PART}/s'}]}\n" + prompts)
    monkeypatch.chdir(tmp_path)
    config = load_config(["--config", "~/settings.yaml", "--checkpoint.resume", f"{tmp_path}/price$UNSET"])
    assert config.run.output_dir == f"{tmp_path}/a/run"
    assert (config.data.sources[0].store, config.evaluation.sample_prompts) == ("a/s", ["~/$PART"])
    assert config.checkpoint.resume == f"{tmp_path}/price$UNSET"
    for path, name in (
        ("x/$UNSET", "$UNSET"),
        ("${UNSET}/x", "${UNSET}"),
        ("~nobody-here/x", "~nobody-here"),
    ):
        (line,) = problems_of("--run.output_dir", path, *SOURCES)
        assert line == f"run.output_dir: expected a value of {name}, found none for {path}; write it out"
        with pytest.raises(ConfigError, match="input: expected a value of "):
            expand_paths({"input": [path], "prompt": [path]})
    for path in ("s3://bucket/run", "gs://bucket"):
        (line,) = problems_of("--run.output_dir", path, *SOURCES)
        assert line.startswith(f"run.output_dir: expected a path, found an address: {path}")
    assert expand_paths({"input": ["hf://a/b"]}) == {"input": ["hf://a/b"]}
    assert expand_paths({"prompt": "~/$UNSET", "run": Path("~/x")}) == {
        "prompt": "~/$UNSET",
        "run": tmp_path / "x",
    }


def test_a_file_in_another_encoding_is_named(tmp_path):
    for encoding in ("utf-16", "utf-16-le", "latin-1"):
        (tmp_path / "x.yaml").write_bytes("run: {name: é}".encode(encoding))
        (line,) = problems_of("--config", str(tmp_path / "x.yaml"), *SOURCES)
        assert line.endswith("x.yaml: cannot be read: not UTF-8 text, perhaps UTF-16; save it as UTF-8")


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ([], 96),
        (["--model.max_position_embeddings", "200"], 200),
        (["--model.rope_type", "yarn", "--model.rope_factor", "4"], 32768),
    ],
    ids=["default", "set", "yarn"],
)
def test_a_model_supports_the_length_it_is_trained_on_unless_more_is_set(options, longest):
    config = load_config([*SOURCES, "--training.sequence_length", "96", *options])
    assert resolve_model(config, 64).model.longest_sequence == longest


@pytest.mark.parametrize(("ids", "rows"), [(1, 64), (64, 64), (65, 128), (6400, 6400)])
def test_the_vocabulary_defaults_to_the_tokenizers_rounded_up(ids, rows):
    assert resolve_model(Config(), ids).model.vocab_size == rows
    given = load_config([*SOURCES, "--model.vocab_size", str(ids)])
    assert resolve_model(given, ids).model.vocab_size == ids
    with pytest.raises(
        ConfigError, match=rf"model.vocab_size: expected at least.* {ids + 1} ids, found {ids}"
    ):
        resolve_model(given, ids + 1)
