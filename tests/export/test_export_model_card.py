"""The model card: its content, what hubs read of it, and that it names no path of the machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

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


def test_it_describes_model_data_training_and_evaluation_and_names_no_license():
    card = model_card(FACTS)
    for expected in (
        "library_name: transformers\n",
        "pipeline_tag: text-generation\n",
        "- qwen3_moe\n",
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
    for absent in ("averaged", "vLLM", "license:"):
        assert absent not in card.split("## Settings")[0], absent


def with_model(**changes: Any) -> dict[str, Any]:
    return {"config": dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, **changes))}


MUON = OptimizerConfig(name="muon", learning_rate=5e-3, muon_learning_rate=0.03, ema_decay=0.99)
OPENS = 'AutoModelForCausalLM.from_pretrained(".")'
CHANGES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "muon": (
        {"config": dataclasses.replace(CONFIG, optimizer=MUON)},
        [
            "| Optimizer | muon, learning rate 0.03, and 0.005 of AdamW for what is no map |",
            "| Weights | bf16, of the parameters averaged over steps (decay 0.99) |",
        ],
        [],
    ),
    "unknown to transformers": (
        with_model(router_bias_update_rate=0.01),
        ["library_name: llm_pretrain\n"],
        ["from_pretrained"],
    ),
    "activation": (
        with_model(hidden_act="relu2"),
        ["The activation is `relu2`; vLLM and mlx-lm refuse it, or compute SiLU instead.", OPENS],
        ["--to gguf"],
    ),
    "started from weights": (
        with_model(init_from="/models/Some-0.6B/"),
        ["It started from the weights `Some-0.6B`, was trained on the data above, and nobody"],
        ["nothing else"],
    ),
    "without a template": ({"has_chat_template": False}, [], ["llm-pretrain chat"]),
    "without an evaluation": ({"evaluation": {}, "evaluation_step": None}, ["None was made."], []),
}
"""name: facts that differ, what the card then has, and what it has not."""


@pytest.mark.parametrize("name", CHANGES)
def test_other_facts_make_another_card(name: str):
    changes, present, absent = CHANGES[name]
    card = model_card(dataclasses.replace(FACTS, **changes))
    assert [text for text in present if text not in card] == []
    assert [text for text in absent if text in card.split("## Settings")[0]] == []


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
