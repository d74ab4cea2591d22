"""Our weights in transformers and transformers' weights in ours: logits, files, traps."""

import dataclasses
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.corpora import make_tokenizer
from support.launching import ROOT

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.data.tokenizer_training import CHAT_TEMPLATE
from llm_pretrain.errors import CheckpointError, ConfigError, DivergedError
from llm_pretrain.export.config_json import (
    HF_ARCHITECTURES,
    huggingface_config,
    match_hf_architecture,
    model_config_from_huggingface,
    native_config,
)
from llm_pretrain.export.huggingface import from_huggingface, load_pretrained, to_huggingface
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.training.model_setup import initialize_weights

BASE = ModelConfig(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # not hidden_size / heads: a config that drops it must fail
    max_position_embeddings=64,
    initializer_range=0.1,  # far from uniform logits, so that a difference shows
    rope_theta=5000.0,  # no architecture's default
    rms_norm_eps=1e-5,
)
MOE = dataclasses.replace(BASE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40)
FINE = dataclasses.replace(  # fine-grained, as DeepSeek-V3 routes
    MOE,
    scoring_func="sigmoid",
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    router_bias_update_rate=0.01,
)
SHAPES = {
    "qwen3": BASE,
    "qwen3-untied": dataclasses.replace(BASE, tie_word_embeddings=False),
    "llama": dataclasses.replace(BASE, qk_norm=False),
    "mistral": dataclasses.replace(BASE, qk_norm=False, num_attention_heads=5, num_key_value_heads=1),
    "qwen3_moe": MOE,
    "qwen3_moe-some-dense": dataclasses.replace(
        MOE, first_k_dense_replace=1, norm_topk_prob=False, tie_word_embeddings=False
    ),
    "qwen3_moe-every-other": dataclasses.replace(MOE, decoder_sparse_step=2),
    "mixtral": dataclasses.replace(MOE, qk_norm=False),
    "glm4_moe": FINE,
    "glm4_moe-plain": dataclasses.replace(
        FINE, qk_norm=False, norm_topk_prob=False, router_bias_update_rate=0.0, n_shared_experts=2
    ),
    "glm4_moe-no-shared": dataclasses.replace(FINE, n_shared_experts=0, first_k_dense_replace=0),
    "hy_v3": dataclasses.replace(FINE, decoder_sparse_step=2, first_k_dense_replace=0),
    "ernie4_5_moe": dataclasses.replace(MOE, qk_norm=False, n_shared_experts=1),
    "ernie4_5_moe-bias": dataclasses.replace(
        MOE, qk_norm=False, decoder_sparse_step=2, router_bias_update_rate=0.01, routed_scaling_factor=1.5
    ),
    "qwen2_moe": dataclasses.replace(
        MOE, qk_norm=False, norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=1
    ),
    "qwen2_moe-no-shared": dataclasses.replace(
        MOE, qk_norm=False, norm_topk_prob=False, routed_scaling_factor=3.0, decoder_sparse_step=2
    ),
}
YARN = {"rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 16}
SHAPES |= {f"{name}-yarn": dataclasses.replace(SHAPES[name], **YARN) for name in ("qwen3", "glm4_moe")}
SHAPES |= {
    f"{name}-{hidden_act}": dataclasses.replace(SHAPES[name], hidden_act=hidden_act)
    for hidden_act, names in {
        "gelu_pytorch_tanh": ("llama", "glm4_moe", "ernie4_5_moe"),
        "relu2": ("qwen3", "mixtral", "qwen2_moe"),
    }.items()
    for name in names
}
SHAPES["llama-linear"] = dataclasses.replace(SHAPES["llama"], rope_type="linear", rope_factor=3.0)
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
TOKENS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(3))
HEAD_DIM = "transformers' own layers, vLLM and mlx-lm read it; their default is hidden_size / heads"
UNDECLARED_KEYS = {
    "llm_pretrain": "settings of ours that the architecture has no key for",
    "rope_theta": "transformers 4, mlx-lm and llama.cpp do not read rope_parameters",
    "rope_scaling": "the same",
    "torch_dtype": "transformers before 4.56, mlx-lm and vLLM do not read dtype",
    "tokenizer_class": "transformers 4's AutoTokenizer, where a tokenizer has no configuration of its own",
    "glm4_moe.partial_rotary_factor": "the default of transformers 4, mlx-lm and vLLM is a half",
    "glm4_moe.head_dim": HEAD_DIM,
    "qwen3_moe.head_dim": HEAD_DIM,
    "qwen2_moe.head_dim": HEAD_DIM,
    "ernie4_5_moe.head_dim": HEAD_DIM,
}
"""Keys that are written although transformers' class declares none of that name, with their reason."""


def make(config: ModelConfig) -> Decoder:
    model = Decoder(config).eval()
    initialize_weights(model, 1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms away from one, so that a missing one shows
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(("gate_up_proj", "mlp.gate.weight")):
            parameter.data.mul_(2)
    for buffer in model.buffers():  # biases that change choices
        torch.nn.init.uniform_(buffer, -0.3, 0.3)
    return model


def scales_down_proj(config: ModelConfig) -> bool:
    return config.scoring_func == "softmax" and config.routed_scaling_factor != 1


def write(folder, model: Decoder, dtype=torch.float32, name="fp32") -> None:
    folder.mkdir(exist_ok=True)
    save_file(
        to_huggingface(model.state_dict(), model.config, dtype),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = huggingface_config(model.config, dtype=name, **IDS)
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_opens_our_files_with_equal_logits_and_we_open_its(shape, tmp_path):
    """The experts are written one by one, a tied head not at all; config and state come back as they were."""
    from transformers import AutoModelForCausalLM

    model = make(SHAPES[shape])
    write(tmp_path, model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits_of(model), expected, atol=1e-5, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(logits_of(ours), expected, atol=1e-5, rtol=1e-5)
    written = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("lm_head.weight" in written) != model.config.tie_word_embeddings
    assert not any("gate_up_proj" in name for name in written)
    experts = [name for name in written if ".experts." in name]
    assert len(experts) == len(model.config.moe_layers) * model.config.num_experts * 3
    assert config["model_type"] != "mixtral" or "block_sparse_moe.experts.5.w3.weight" in "".join(written)
    assert_same_config(model_config_from_huggingface(config), model.config, config["model_type"])
    assert_same_state(from_huggingface(written, model.config), model)
    if not scales_down_proj(model.config):
        assert_same_state(from_huggingface(model.state_dict(), model.config), model)


def assert_same_config(back: ModelConfig, expected: ModelConfig, model_type: str) -> None:
    same = dataclasses.replace(back, moe_intermediate_size=expected.moe_intermediate_size)
    if model_type == "mixtral":  # has no dense layer, so no width of one
        same = dataclasses.replace(same, intermediate_size=expected.intermediate_size)
    assert same == expected


def assert_same_state(back: dict[str, torch.Tensor], model: Decoder) -> None:
    """Bit for bit, but for what is multiplied, then divided."""
    state = model.state_dict()
    assert back.keys() == state.keys()
    for name in state:
        scaled = scales_down_proj(model.config) and name.endswith("experts.down_proj")
        torch.testing.assert_close(back[name], state[name], rtol=2e-7 if scaled else 0, atol=0)


def test_config_holds_the_keys_that_older_readers_need():
    config = huggingface_config(MOE, dtype="bf16", **IDS)
    expected = {
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "num_experts": 6,
        "head_dim": 16,
        "torch_dtype": "bfloat16",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("model_type", sorted(HF_ARCHITECTURES))
def test_a_config_has_only_keys_that_its_class_knows(model_type):
    """TRL, for one, takes a `router_aux_loss_coef` of any class for its own auxiliary loss."""
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(model_type))
    known = {"model_type", *(field.name for field in dataclasses.fields(kind))}
    known |= {*kind.attribute_map, *kind.attribute_map.values()}
    configs = [config for config in SHAPES.values() if match_hf_architecture(config) == model_type]
    assert configs
    written = {key for config in configs for key in huggingface_config(config, dtype="bf16", **IDS)}
    own = {key for key in UNDECLARED_KEYS if key.startswith(f"{model_type}.")}
    assert {f"{model_type}.{key}" for key in written - known - UNDECLARED_KEYS.keys()} == own


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe", "hy_v3", "ernie4_5_moe", "qwen2_moe"])
def test_settings_without_a_key_survive_the_round_trip(name):
    settings = {"attention_dropout": 0.25, "router_aux_loss_coef": 0.0125}
    written = huggingface_config(dataclasses.replace(SHAPES[name], **settings), dtype="bf16", **IDS)
    back = model_config_from_huggingface(written)
    assert {field: getattr(back, field) for field in settings} == settings


def test_a_coefficient_at_the_top_of_an_older_export_is_read():
    written = huggingface_config(FINE, dtype="bf16", **IDS)
    del written["llm_pretrain"]
    assert model_config_from_huggingface(written | {"router_aux_loss_coef": 0.5}).router_aux_loss_coef == 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("model_type", sorted(HF_ARCHITECTURES))
@pytest.mark.parametrize("package", ["trl", "peft"])
def test_one_step_of_fine_tuning(package, model_type, tmp_path, capsys, monkeypatch):
    pytest.importorskip(package, reason=f"needs the package {package}")
    folder = make_tokenizer(tmp_path / "weights")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shape = next(config for config in SHAPES.values() if match_hf_architecture(config) == model_type)
    write(folder, make(dataclasses.replace(shape, vocab_size=259, max_position_embeddings=128)))
    script = ROOT / "examples" / "readers" / f"check_{package}.py"
    monkeypatch.setattr(sys, "argv", [script.name, str(folder)])
    runpy.run_path(str(script))
    assert f"ok  {package} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "value", "error", "found"),
    [
        (torch.float16, 7e4, CheckpointError, "70000"),
        (torch.bfloat16, 3.4e38, CheckpointError, r"3\.4e\+38"),
        (torch.bfloat16, float("nan"), DivergedError, "nan"),
    ],
)
def test_a_value_that_overflows_is_refused_by_name_and_value(dtype, value, error, found):
    model = make(BASE)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    with pytest.raises(error, match=rf"layers\.1\.mlp\.up_proj\.weight.*found {found}"):
        to_huggingface(model.state_dict(), BASE, dtype)


def test_only_floating_tensors_are_cast():
    state = {"counter": torch.tensor([2**20 + 1]), "weight": torch.tensor([1.5])}
    written = to_huggingface(state, BASE, torch.bfloat16)
    assert written["counter"].dtype == torch.int64
    assert written["counter"].item() == 2**20 + 1
    assert written["weight"].dtype == torch.bfloat16


def test_written_tensors_share_no_memory_with_the_model():
    model = make(MOE)
    written = to_huggingface(model.state_dict(), MOE, torch.float32)
    ours = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert not ours & {tensor.untyped_storage().data_ptr() for tensor in written.values()}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"router_bias_update_rate": 0.001}, "model.router_bias_update_rate"),
        ({"n_shared_experts": 1}, "model.n_shared_experts"),
        (
            {"scoring_func": "sigmoid", "decoder_sparse_step": 2},
            "model.decoder_sparse_step.*n_shared_experts 1 or more would export",
        ),
        ({"scoring_func": "sigmoid", "num_experts": 1, "num_experts_per_tok": 1}, "model.num_experts"),
    ],
)
def test_a_model_without_an_architecture_is_refused_by_field(changes, field):
    with pytest.raises(ConfigError, match=field):
        huggingface_config(dataclasses.replace(MOE, **changes), dtype="bf16", **IDS)


def test_weights_in_our_own_format_open(tmp_path):
    model = make(
        dataclasses.replace(
            MOE,
            router_bias_update_rate=0.01,
            first_k_dense_replace=1,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            **YARN,
        )
    )
    bias = model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias.copy_(torch.linspace(-1, 1, 6))
    save_file(to_huggingface(model.state_dict(), model.config, torch.float32), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(native_config(model.config, dtype="fp32", **IDS)))
    ours = load_pretrained(tmp_path).eval()
    assert ours.config == model.config
    assert torch.equal(logits_of(ours), logits_of(model))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 4}}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 2.0}}, "beta_slow"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "x"}, "model.vocab_size"),
        ({"num_key_value_heads": 3}, "model.num_attention_heads"),
        ({"rope_parameters": [1]}, "rope_scaling"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "config.json: .* int too large"),
        ({"mlp_only_layers": 3, "layer_types": 3}, "not iterable"),
    ],
)
def test_an_unsupported_feature_or_value_is_refused_by_name(changes, name):
    config = huggingface_config(MOE, dtype="bf16", **IDS) | changes
    with pytest.raises(ConfigError, match=name) as caught:
        model_config_from_huggingface(config)
    assert "\n" not in str(caught.value)


QUERY = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
CHANGED_TENSORS = {
    "missing tensor": (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight"),
    "missing expert": (lambda tensors: tensors.pop(EXPERT), "experts"),
    "int8": (lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.int8)}), f"{QUERY}.*found int8"),
    "not finite": (lambda tensors: tensors[QUERY].div_(0), f"{QUERY}.*found -?(nan|inf)"),
    "beyond fp32": (
        lambda tensors: tensors.update({QUERY: tensors[QUERY].double() * 1e300}),
        rf"{QUERY}.*found -?\d.*e\+29\d",
    ),
}
"""Quantised values without their scales, and values that are not finite, would compute something."""


@pytest.mark.parametrize("damage", CHANGED_TENSORS)
def test_weights_that_mean_nothing_are_refused(tmp_path, damage):
    write(tmp_path, make(MOE))
    change, message = CHANGED_TENSORS[damage]
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


INDEX = "model.safetensors.index.json"


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def index(content: object) -> Callable[[Path], object]:
    """In place of the single file, which would count."""
    text = json.dumps(content)
    return lambda folder: (folder / "model.safetensors").rename(folder / INDEX).write_text(text)


BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "cut": (cut, r"model\.safetensors"),
    **{
        f"config {text[:3]}": (
            lambda folder, text=text: (folder / "config.json").write_text(text),
            r"config\.json: expected",
        )
        for text in ("[]", "[" * 100_000)
    },
    **{
        f"index {content}": (index(content), r"expected an? ")
        for content in ([], {}, {"weight_map": []}, {"weight_map": {"a": 3}})
    },
    "file outside": (
        index({"weight_map": {"a": "../model.safetensors"}}),
        "expected names of files beside it, found",
    ),
    "surrogate": (index({"weight_map": {"a": "\ud800"}}), "expected a safetensors file, found"),
}
"""name: how a folder of weights is damaged, and what is said of it."""


def test_a_single_file_is_read_whatever_an_index_says(tmp_path):
    """As transformers does."""
    write(tmp_path, make(BASE))
    names = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "part-0.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    load_pretrained(tmp_path)


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_folder_is_one_line_that_names_it(tmp_path, damage):
    folder = tmp_path / "weights"
    write(folder, make(MOE))
    change, message = BROKEN[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"vocab_size": 200_000_000}, r"embed_tokens\.weight: .* instead of \(200000000, "),
        ({"num_hidden_layers": 4096}, "found 83 for 4096 layers"),
        ({"model_type": "hy_v3", "num_shared_experts": 1, "num_hidden_layers": 10**8}, "at most 4096"),
    ],
    ids=["vocabulary", "layers", "too many layers"],
)
def test_sizes_are_compared_before_a_model_of_them_is_made(tmp_path, changes, found):
    write(tmp_path, make(MOE))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    begin = time.process_time()
    with pytest.raises((CheckpointError, ConfigError), match=found):
        load_pretrained(tmp_path)
    assert time.process_time() - begin < 2


def test_weights_with_an_index_open(tmp_path):
    model, files = make(MOE), ["part-0.safetensors", "part-1.safetensors"]
    write(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    index = {name: files[number % len(files)] for number, name in enumerate(tensors)}
    for file in files:
        held = {name: tensors[name] for name in tensors if index[name] == file}
        save_file(held, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert torch.equal(logits_of(load_pretrained(tmp_path).eval()), logits_of(model))
