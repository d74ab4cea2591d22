"""Files of transformers: config keys in every spelling, tensors, and what must be refused."""

import dataclasses

import pytest
import torch

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.config_json import huggingface_config, model_config_from_huggingface
from llm_pretrain.export.huggingface import from_huggingface, load_pretrained, to_huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MOE = ModelConfig(
    **SIZES, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, n_shared_experts=1
)
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
TOKENS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(3))


def make(config: ModelConfig) -> Decoder:
    model = Decoder(config).eval()
    initialize_weights(model, 1)
    return model


FOREIGN = {
    "glm4_moe": {
        "n_routed_experts": 6,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    },
    "hy_v3": {"num_experts": 6, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_layer_interval": 2},
    "mistral": {"sliding_window": None, "head_dim": 16},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_with_transformers_defaults_opens_with_equal_logits(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
    settings = (experts if "experts" in str(FOREIGN[name]) else {}) | SIZES | FOREIGN[name]
    if "moe_k" in settings:
        del settings["num_experts_per_tok"]
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).eval()
    for key, tensor in theirs.state_dict().items():
        if key.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(tensor, -0.3, 0.3)
        elif key.endswith(".gate.weight"):  # transformers 5.17 leaves that of ernie4_5_moe uninitialised
            torch.nn.init.normal_(tensor, std=theirs.config.initializer_range)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, ours = theirs(TOKENS).logits, load_pretrained(tmp_path).eval()(TOKENS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


SCALINGS = {
    "version 5": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3}},
    "version 4": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7e3},
    "before 4.43": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e3},
    "both": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3},
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_is_read_in_every_spelling(name):
    config = model_config_from_huggingface({"model_type": "llama", **SIZES, **SCALINGS[name]})
    assert (config.rope_type, config.rope_factor, config.rope_theta) == ("linear", 2.0, 7e3)


def test_a_whole_number_is_read_as_the_float_that_it_stands_for():
    """JSON tools write 2.0 as 2; readers of our exports, such as llama.cpp, require the type."""
    keys = {"n_routed_experts": 6, "moe_intermediate_size": 40, "num_experts_per_tok": 2}
    keys |= {"partial_rotary_factor": 1, "use_qk_norm": True, "attention_dropout": 0}
    keys |= {"routed_scaling_factor": 2, "router_aux_loss_coef": 0}
    config = model_config_from_huggingface({"model_type": "glm4_moe", **SIZES, **keys})
    native = model_config_from_huggingface({"model_type": "llm_pretrain", **SIZES, "rope_theta": 10000})
    found = [config.routed_scaling_factor, config.router_aux_loss_coef, config.attention_dropout]
    assert [*map(repr, found), repr(native.rope_theta)] == ["2.0", "0.0", "0.0", "10000.0"]


@pytest.mark.parametrize(
    ("keys", "original", "factor"),
    [
        ({"factor": 2.0}, 64, 2.0),
        ({"original_max_position_embeddings": 16}, 16, 4.0),
        ({"factor": 4.0, "attention_factor": 1.1386294361119891}, 64, 4.0),
    ],
)
def test_missing_yarn_settings_have_transformers_defaults(keys, original, factor):
    config = model_config_from_huggingface(
        {"model_type": "qwen3", **SIZES, "rope_scaling": {"type": "yarn", **keys}}
    )
    assert (config.rope_original_context, config.rope_factor) == (original, factor)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "hy_v3"])
def test_missing_keys_have_transformers_defaults(name):
    from transformers import AutoConfig

    keys = {"vocab_size": 384, "sliding_window": None}
    found, usual = (
        model_config_from_huggingface({"model_type": name, **keys}),
        AutoConfig.for_model(name, **keys),
    )
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for size in (*sizes, "num_key_value_heads", "max_position_embeddings"):
        assert getattr(found, size) == getattr(usual, size), size
    assert found.num_experts == (getattr(usual, "num_experts", 0) or getattr(usual, "num_local_experts", 0))


@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": None}])
def test_a_llama_without_key_value_heads_has_one_for_each_query_head(keys):
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    config = model_config_from_huggingface({"model_type": "llama", **sizes, **keys})
    assert config.num_key_value_heads == config.num_attention_heads == SIZES["num_attention_heads"]


def test_scaling_is_written_in_every_spelling():
    config = dataclasses.replace(MOE, rope_type="yarn", rope_factor=4.0, qk_norm=False, rope_theta=5e3)
    written = huggingface_config(config, dtype="bf16", **IDS)
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert written["rope_scaling"] == scaling | {"type": "yarn"}
    assert written["rope_parameters"] == scaling | {"rope_theta": 5e3}
    assert written["rope_theta"] == 5e3


@pytest.mark.parametrize(
    ("model_type", "keys", "name"),
    [
        ("glm4_moe", {"n_routed_experts": 6}, "partial_rotary_factor"),  # its default is a half
        ("glm4_moe", {"n_routed_experts": 6, "n_group": 2, "topk_group": 1}, "topk_group"),
        ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_layer_end_index": 1}, "moe_layer_end_index"),
        ("hy_v3", {"num_experts": 6, "mlp_layer_types": ["sparse", "dense", "dense"]}, "mlp_layer_types"),
        ("qwen2_moe", {"num_experts": 6, "moe_intermediate_size": 40}, "shared_expert_intermediate_size"),
        ("mistral", {}, "sliding_window: expected None, .* found 4096"),  # its default
        ("qwen2", {}, "model_type: .*biases of query, key and value"),
        ("olmoe", {"clip_qkv": 8.0}, "norms of query and key over all heads"),
        ("deepseek_v3", {"kv_lora_rank": 512, "n_group": 8, "topk_group": 4}, "latent attention"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "soft caps"),
    ],
)
def test_what_our_decoder_lacks_is_refused_by_name(model_type, keys, name):
    rotary = {} if name == "partial_rotary_factor" else {"partial_rotary_factor": 1.0}
    with pytest.raises(ConfigError, match=name):
        model_config_from_huggingface(
            {"model_type": model_type, "num_experts_per_tok": 2, **SIZES, **rotary, **keys}
        )


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"qk_norm": False, "norm_topk_prob": False}, "model.layers.2.self_attn.k_proj.bias"),
        ({"scoring_func": "sigmoid"}, "model.layers.0.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_nonzero_tensor_that_our_decoder_lacks_is_refused(changes, tensor):
    config = dataclasses.replace(MOE, **changes)
    written = to_huggingface(make(config).state_dict(), config, torch.float32)
    assert not written[tensor].any()
    from_huggingface(written, config)
    written[tensor].flatten()[3] = 0.5
    with pytest.raises(CheckpointError, match=rf"{tensor}: expected zeros.*found up to 0\.5"):
        from_huggingface(written, config)


def test_a_tied_head_of_other_values_is_refused():
    """transformers would compute with that head."""
    config = dataclasses.replace(MOE, tie_word_embeddings=True)
    written = to_huggingface(make(config).state_dict(), config, torch.float32)
    written["lm_head.weight"] = written["model.embed_tokens.weight"].clone()
    assert from_huggingface(written, config).keys() == make(config).state_dict().keys()
    written["lm_head.weight"][5, 7] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the values of model\."):
        from_huggingface(written, config)


def test_layers_for_predicting_further_tokens_are_left_out():
    config = dataclasses.replace(MOE, scoring_func="sigmoid", router_bias_update_rate=0.001)
    state = make(config).state_dict()
    written = to_huggingface(state, config, torch.float32)
    written["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)
    assert from_huggingface(written, config).keys() == state.keys()


@pytest.mark.parametrize(
    ("changes", "bias", "shared"),
    [
        ({}, "gate.e_score_correction_bias", "shared_experts"),
        ({"decoder_sparse_step": 2}, "expert_bias", "shared_mlp"),
        (
            {"scoring_func": "softmax", "qk_norm": False},
            "moe_statics.e_score_correction_bias",
            "shared_experts",
        ),
    ],
)
def test_a_bias_stays_in_fp32_and_names_are_those_of_the_published_checkpoints(changes, bias, shared):
    config = dataclasses.replace(
        MOE, **{"scoring_func": "sigmoid", "router_bias_update_rate": 0.001} | changes
    )
    written = to_huggingface(make(config).state_dict(), config, torch.bfloat16)
    assert written[f"model.layers.1.mlp.{bias}"].dtype == torch.float32
    assert written[f"model.layers.1.mlp.{shared}.up_proj.weight"].dtype == torch.bfloat16
