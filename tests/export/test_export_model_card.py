"""The model card: its content, what hubs read of it, and that it names no path of the machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from llm_pretrain.config.loading import from_dict
from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.config.tree import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    SourceConfig,
)
from llm_pretrain.config.yaml_text import read_yaml
from llm_pretrain.export.model_card import ModelCardData, ModelCardSource, model_card

MODEL = ModelConfig(
    vocab_size=6400,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
)
CONFIG = Config(
    run=RunConfig(name="poems", output_dir="/home/someone/secret-project/runs/poems"),
    model=dataclasses.replace(MODEL, init_from="~/elsewhere/weights"),
    data=DataConfig(sources=[SourceConfig("/data/private/verse", 3.0), SourceConfig("stores/code", 1.0)]),
    checkpoint=CheckpointConfig(resume="/scratch/other/checkpoints/step-00000010"),
    evaluation=EvaluationConfig(sample_prompts=["/* a comment"]),
)
FACTS = ModelCardData(
    config=CONFIG,
    step=1200,
    tokens_seen=3_456_789,
    sources=[ModelCardSource("verse", 300, 5671, 700_000), ModelCardSource("code", 100, 427, 3_400_000)],
    tokenizer_size=6400,
    tokenizer_hash="0123456789abcdef" * 4,
    has_chat_template=True,
    world_size=2,
    versions={"torch": "2.13.0", "python": "3.11.7", "transformers": None},
    evaluation={"eval/loss": 2.5, "eval/bits_per_byte": 1.25},
    evaluation_step=1000,
)


def front_matter(card: str) -> dict[str, Any]:
    empty, header, _ = card.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(header)


def test_it_describes_model_data_training_and_evaluation():
    card = model_card(FACTS)
    for expected in (
        "# poems",
        "`Qwen3MoeForCausalLM`",
        "| verse | 75.0% | 5,671 | 700,000 |",
        "| Tokens trained on | 3,456,789 |",
        "| Processes | 2 |",
        "| torch | 2.13.0 |",
        "at step 1,000",
        "| loss | 2.5000 |",
        "llm-pretrain chat .",
        "export . --to gguf",
        'AutoModelForCausalLM.from_pretrained(".")',
    ):
        assert expected in card, expected


def test_it_gives_the_learning_rates_of_muon_and_the_ema_decay():
    optimizer = OptimizerConfig(name="muon", learning_rate=5e-3, muon_learning_rate=0.03, ema_decay=0.99)
    card = model_card(dataclasses.replace(FACTS, config=dataclasses.replace(CONFIG, optimizer=optimizer)))
    assert "| Optimizer | muon, learning rate 0.03, and 0.005 of AdamW for what is no map |" in card
    assert "| Weights | bf16, of the parameters averaged over steps (decay 0.99) |" in card
    assert "averaged" not in model_card(FACTS).split("## Settings")[0]


def test_hubs_find_library_and_task_and_no_license_that_nobody_chose():
    header = front_matter(model_card(FACTS))
    assert header["library_name"] == "transformers"
    assert header["pipeline_tag"] == "text-generation"
    assert "qwen3_moe" in header["tags"]
    assert "license" not in header


def test_a_model_that_transformers_does_not_know_is_not_sent_there():
    model = dataclasses.replace(MODEL, router_bias_update_rate=0.01)
    card = model_card(dataclasses.replace(FACTS, config=dataclasses.replace(CONFIG, model=model)))
    assert front_matter(card)["library_name"] == "llm_pretrain"
    assert "from_pretrained" not in card


def test_an_activation_that_readers_lack_is_named_and_not_sent_to_llama_cpp():
    model = dataclasses.replace(MODEL, hidden_act="relu2")
    card = model_card(dataclasses.replace(FACTS, config=dataclasses.replace(CONFIG, model=model)))
    assert "--to gguf" not in card
    assert "The activation is `relu2`; vLLM and mlx-lm refuse it, or compute SiLU instead." in card
    assert 'AutoModelForCausalLM.from_pretrained(".")' in card
    assert "vLLM" not in model_card(FACTS)


def test_it_has_no_path_of_the_machine_and_its_settings_load():
    card = model_card(FACTS)
    for private in ("/home", "someone", "secret-project", "/data/private", "/scratch", "elsewhere/"):
        assert private not in card, private
    settings = card.split("```yaml\n")[1].split("```")[0]
    config = from_dict(read_yaml(settings))
    assert config.data.sources[0].store == "verse"
    assert config.data.sources[1].store == "stores/code"
    assert config.evaluation.sample_prompts == ["/* a comment"]
    assert config.training == CONFIG.training


def limits(model: ModelConfig) -> str:
    card = model_card(dataclasses.replace(FACTS, config=dataclasses.replace(CONFIG, model=model)))
    return card.split("## Limits")[1].split("## Settings")[0]


def test_it_names_the_weights_that_training_started_from():
    started = limits(dataclasses.replace(MODEL, init_from="/models/Some-0.6B/"))
    assert "It started from the weights `Some-0.6B`, was trained on the data above, and nobody" in started
    assert "nothing else" not in started
    assert "It was trained on the data above and nothing else, and nobody" in limits(MODEL)


def test_the_same_facts_make_the_same_card():
    assert model_card(FACTS) == model_card(dataclasses.replace(FACTS))


@pytest.mark.parametrize(("chat", "found"), [(True, True), (False, False)])
def test_chat_is_offered_where_there_is_a_template(chat, found):
    card = model_card(dataclasses.replace(FACTS, has_chat_template=chat))
    assert ("llm-pretrain chat" in card) == found


def test_without_an_evaluation_it_states_that():
    card = model_card(dataclasses.replace(FACTS, evaluation={}, evaluation_step=None))
    assert "None was made." in card


def test_a_bar_in_a_name_does_not_break_a_table():
    source = ModelCardSource("a|b", 1, 1, 1)
    assert "| a\\|b | 100.0% | 1 | 1 |" in model_card(dataclasses.replace(FACTS, sources=[source]))
