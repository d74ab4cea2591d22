"""Builds the model of a configuration: kernels, `torch.compile`, FP8 and initial weights.

Initial weights are random, or come from a folder (continued pretraining, upcycling to experts).
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from llm_pretrain.config.loading import compiles
from llm_pretrain.config.model_config import VOCAB_MULTIPLE, ModelConfig
from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.initial_values import copy_into, draw_normal, materialize
from llm_pretrain.errors import CheckpointError, ConfigError
from llm_pretrain.export.config_json import model_config_from_huggingface
from llm_pretrain.export.huggingface import read_config, read_parts
from llm_pretrain.model.decoder import Decoder, DecoderLayer, compile_layer
from llm_pretrain.model.kernels import (
    DTYPES,
    configured_kernels,
    describe_kernels,
    experts_requirement,
    is_gpu,
)
from llm_pretrain.optim.param_groups import initial_factor
from llm_pretrain.text import reason_of, setting_text


def build_model(config: Config, device: torch.device | None = None, world_size: int = 1) -> Decoder:
    """The decoder with the configured kernels, compiled if configured; its weights are not initialised.

    Args:
        config: Resolved.
        device: The device it will train on, for a check of the kernels; None for no check.
        world_size: Ranks of the run.

    Raises:
        ConfigError: a configured kernel cannot run on the device.
    """
    training, kernels = config.training, configured_kernels(config)
    if device is not None:
        refuse_kernels(config, device)
    model = Decoder(config.model, activation_checkpointing=training.activation_checkpointing, kernels=kernels)
    if training.float8:
        use_float8(model)
    compile_layers(model, config, world_size)
    return model


def kernels_in_use(config: Config, device: torch.device, world_size: int) -> str:
    """The kernels that training takes, for the console."""
    dtype = DTYPES[config.training.precision]
    chosen = describe_kernels(config.model, configured_kernels(config), device, dtype)
    is_compiled = compiles(config, world_size, on_gpu=is_gpu(device))
    return f"kernels: {chosen}; {'compiled' if is_compiled else 'not compiled'}"


def refuse_kernels(config: Config, device: torch.device) -> None:
    """Raise ConfigError for a kernel that was chosen by name and cannot run on the device."""
    kernels, dtype = configured_kernels(config), DTYPES[config.training.precision]
    if needed := experts_requirement(config.model, kernels, device, dtype):
        raise ConfigError(
            "training.experts_implementation: expected auto, streamed or reference, found "
            f"{kernels.experts}, which needs {needed}"
        )
    if kernels.attention == "varlen" and not is_gpu(device):
        raise ConfigError(
            f"training.attention_implementation: expected auto or sdpa on {device.type}, found varlen, which "
            "needs CUDA"
        )


def missing_compiler() -> str | None:
    """What `torch.compile` lacks on a GPU for the code that it generates, in words; None if nothing."""
    if not torch.cuda.is_available():
        return None
    if find_spec("triton") is None:
        return "the package triton"
    names = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    return None if any(map(shutil.which, names)) else "a C compiler (gcc or clang, or CC)"


def compile_layers(model: Decoder, config: Config, world_size: int = 1) -> None:
    """Compile the layers of a model that is not wrapped or sharded yet, if configured.

    Layers of one kind share compiled code.
    """
    if not compiles(config, world_size, on_gpu=torch.cuda.is_available()):
        return
    from torch import _dynamo

    _dynamo.config.optimize_ddp = False  # it would split layers' graphs at DDP's buckets
    _dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        compile_layer(layer)


RECOMPILE_LIMIT = 32
"""Graphs of a layer before it runs uncompiled. Dense layers, experts, training, evaluation, checkpointing,
and batches with and without document offsets need a graph each; torch's limit of 8 is too low."""


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run compiled layers eagerly inside the context; `set_stance` would import torch's compiler for it."""
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    calls = [module._compiled_call_impl for module in compiled]
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


FP8_MIN_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with FP8 matrix products (Ada, Hopper)."""
FP8_MULTIPLE = 16
"""All dimensions of an FP8 matrix product must be multiples of this."""


def check_repeatable(config: Config, device: torch.device) -> None:
    """Raise ConfigError if a step that is computed again may have other bits on sound hardware."""
    if config.training.check_every and is_gpu(device) and not config.training.deterministic:
        raise ConfigError(
            "training.check_every: expected 0 without training.deterministic, found "
            f"{config.training.check_every}: on a GPU a step then has other bits each time; set "
            "training.deterministic true"
        )


def check_float8(config: Config) -> None:
    """Stop if FP8 is configured and unavailable.

    Raises:
        ConfigError: no GPU, one without FP8, or no torchao.
    """
    if not config.training.float8:
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "training.float8: expected false on a CPU, found true, which needs a GPU with FP8 products "
            "(compute capability 8.9 or more)"
        )
    if (found := torch.cuda.get_device_capability()) < FP8_MIN_CAPABILITY:
        raise ConfigError(
            f"training.float8: expected false on a GPU of compute capability {found[0]}.{found[1]}, found "
            "true, which needs 8.9 or more"
        )
    if find_spec("torchao") is None:
        raise ConfigError(
            "training.float8: expected the package torchao, found none; pip install 'llm_pretrain[float8]', "
            "or set it false"
        )


def use_float8(model: Decoder, *, emulate: bool = False) -> None:
    """Make the layers' linear modules multiply in FP8; call it before they are compiled or sharded.

    Args:
        model: Not wrapped yet.
        emulate: Round to FP8 but multiply in the inputs' type, on any device; for tests.

    Raises:
        ConfigError: a side of a matrix is not a multiple of 16.
    """
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear) and any(side % FP8_MULTIPLE for side in module.weight.shape):
            raise ConfigError(
                f"training.float8: expected matrices with sides that are multiples of {FP8_MULTIPLE}, found "
                f"layers.{name} with {tuple(module.weight.shape)}; change the model's sizes, or set it false"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torchao's kernels that are not used here
        from torchao.float8 import (  # pyright: ignore[reportMissingImports] (an extra)
            Float8LinearConfig,
            convert_to_float8_training,
        )

        convert_to_float8_training(model.model.layers, config=Float8LinearConfig(emulate=emulate))


_COMPARED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("attention_head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "qk_norm", "hidden_act"),
)
_COMPARED_WITH_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "expert_intermediate_size", "norm_topk_prob"),
    *("n_shared_experts", "scoring_func", "routed_scaling_factor"),
)
"""Fields and properties of ModelConfig that must equal those of the folder; see `_compared_fields`."""
_SETTING_OF = {
    "attention_head_dim": "head_dim",
    "expert_intermediate_size": "moe_intermediate_size",
    "rope_original_context": "original_max_position_embeddings",
}
"""Properties of ModelConfig that resolve a default -> the field that sets them."""


def load_initial_weights(model: Decoder, config: Config) -> list[str]:
    """Replace the initial weights of `model` by the weights in the folder `model.init_from`, if it is set.

    Every rank reads the folder, one layer after another, and keeps its own shards. Values are converted to
    fp32. Dense weights initialise a mixture of experts by upcycling. Rows that pad the vocabulary to a
    multiple of 64 keep their random values; any other difference in the number of rows is an error.

    Args:
        model: Initialised; whole or sharded.
        config: Resolved.

    Returns:
        One line for the console about each thing that was done.

    Raises:
        ConfigError: an architecture that the decoder lacks, another tokenizer, or every field that differs
            from the folder's, with both values.
        CheckpointError: the folder's files are missing, broken or do not belong together.
    """
    if config.model.init_from is None:
        return []
    folder = Path(config.model.init_from)
    with _as_init_from_errors():
        source_config = model_config_from_huggingface(read_config(folder))
    _check_tokenizer(folder, config)  # first: a store of the right tokenizer also has its vocab_size
    _check_shape(folder, source_config, config.model)
    notes, own = [f"started from the weights in {folder}"], model.state_dict()
    with torch.device("meta"):  # `own` lacks what other stages of a pipeline have
        whole = Decoder(config.model).state_dict()
    is_upcycled = bool(config.model.moe_layers and not source_config.moe_layers)
    if is_upcycled:
        notes.append(_upcycling(config.model, source_config))
    rows, all_rows = source_config.vocab_size or 0, len(whole["lm_head.weight"])
    if rows != all_rows:
        notes.append(f"vocabulary padded from {rows} to {all_rows} rows; the new ones are random")

    def initial(name: str) -> Tensor:
        value = torch.empty(whole[name].shape)
        _set_initial(name, value, config.model, config.run.seed, config.optimizer.base_hidden_size)
        return value

    differing = set(whole)
    with _as_init_from_errors():
        for part in read_parts(folder, source_config):
            source = {name: tensor.float() for name, tensor in part.items()}
            if is_upcycled:
                upcycle(source, config.model, source_config, whole, initial)
            differing ^= source.keys()
            for name in source.keys() & own.keys():
                copy_into(own[name], source[name])
    if config.model.router_bias_update_rate > 0:  # a missing bias starts at zero
        differing = {name for name in differing if not name.endswith("e_score_correction_bias")}
    if differing:
        names = ", ".join(sorted(differing)[:3])
        raise CheckpointError(
            f"model.init_from: expected the model's tensors in {folder}, found a difference in {names}"
        )
    return notes


@contextmanager
def _as_init_from_errors() -> Iterator[None]:
    """Prefix errors of reading the folder with `model.init_from`, in one line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"model.init_from: {problem}" for problem in error.problems)) from error
    except CheckpointError as error:
        raise CheckpointError(f"model.init_from: {reason_of(error)}") from error


def _check_shape(folder: Path, source_config: ModelConfig, target_config: ModelConfig) -> None:
    """Raise ConfigError with every field that must be equal and is not."""
    problems = [
        f"model.{_SETTING_OF.get(name, name)}: expected {setting_text(getattr(source_config, name))}, found "
        f"{setting_text(getattr(target_config, name))}"
        for name in _compared_fields(source_config, target_config)
        if getattr(source_config, name) != getattr(target_config, name)
    ]
    rows = source_config.vocab_size or 0
    if target_config.vocab_size not in (rows, -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE):
        problems.append(
            f"model.vocab_size: expected {rows}, or that rounded up to a multiple of "
            f"{VOCAB_MULTIPLE}, found {target_config.vocab_size}"
        )
    if source_config.router_bias_update_rate > 0 and target_config.router_bias_update_rate == 0:
        problems.append("model.router_bias_update_rate: expected more than 0, for the bias, found 0.0")
    if target_config.moe_layers and not source_config.moe_layers:
        problems += upcycling_problems(source_config, target_config)
    if problems:
        command = f"llm-pretrain configs --from_pretrained {folder} --output FILE"
        advice = f"as in {folder} (model.init_from); `{command}` writes the section that fits"
        raise ConfigError(*(f"{problem}; {advice}" for problem in problems))


def _compared_fields(source_config: ModelConfig, target_config: ModelConfig) -> Iterator[str]:
    """Fields and properties that decide shapes or arithmetic, if both models use them."""
    yield from _COMPARED
    if source_config.rope_type != "default":  # continued pretraining may add RoPE scaling
        yield from ("rope_type", "rope_factor")
        yield from ("rope_original_context",) if source_config.rope_type == "yarn" else ()
    if all(len(each.moe_layers) < each.num_hidden_layers for each in (source_config, target_config)):
        yield "intermediate_size"
    if source_config.moe_layers:
        yield from _COMPARED_WITH_EXPERTS if target_config.moe_layers else ("num_experts",)
        if target_config.moe_layers and target_config.moe_layers != source_config.moe_layers:
            yield from ("first_k_dense_replace", "decoder_sparse_step")


def _check_tokenizer(folder: Path, config: Config) -> None:
    """Raise ConfigError if the folder's tokenizer maps ids to other tokens than the store's."""
    if not config.data.sources or not (folder / "tokenizer.json").exists():
        return
    store = Path(config.data.sources[0].store)
    theirs, ours = _vocabulary(folder), _vocabulary(store / "tokenizer")
    differing = sorted(id for id in theirs.keys() & ours.keys() if theirs[id] != ours[id])
    if differing:
        first = differing[0]
        raise ConfigError(
            f"model.init_from: expected the tokenizer of {folder}, found another in {store}: "
            f"{len(differing)} ids differ, the first is {first}, {theirs[first]!r} there and "
            f"{ours[first]!r} here; prepare the store with --tokenizer {folder}"
        )


def _vocabulary(folder: Path) -> dict[int, str]:
    """Token by id of a tokenizer.json; empty if it cannot be read."""
    import tokenizers

    try:
        tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    except Exception:  # the library raises no other type
        return {}
    return {id: token for token, id in tokens.items()}


def upcycling_problems(source_config: ModelConfig, target_config: ModelConfig) -> list[str]:
    """One line for each reason why the experts cannot be made from the dense layers of `source_config`."""
    dense, expert = source_config.intermediate_size, target_config.expert_intermediate_size
    chosen, experts = target_config.num_experts_per_tok, target_config.num_experts
    if dense % expert:
        return [
            f"model.moe_intermediate_size: expected {dense}, the dense width, or a divisor of it, found "
            f"{expert}"
        ]
    slices, problems = dense // expert, []
    if chosen % slices or experts % slices:
        problems.append(
            f"model.num_experts_per_tok, model.num_experts: expected multiples of {slices}, the "
            f"experts that make up the dense width ({dense} / {expert}), found {chosen} and {experts}"
        )
    if not target_config.norm_topk_prob and (chosen < experts or target_config.scoring_func != "softmax"):
        problems.append(
            "model.norm_topk_prob: expected true, since otherwise the experts' weights do not sum to one "
            "and the model would not start as the dense one, found false"
        )
    return problems


@torch.no_grad()
def upcycle(
    source: dict[str, Tensor],
    target_config: ModelConfig,
    source_config: ModelConfig,
    names: Iterable[str],
    initial: Callable[[str], Tensor],
) -> None:
    """Turn dense tensors, in place, into tensors of a mixture of experts that computes the same logits.

    I is an expert's width, and G = dense width ÷ I. Expert e is slice e mod G of the dense units. The G
    experts of a set, one per slice, have equal router rows, so the top K = t·G experts are the t best sets
    ("virtual groups", arXiv:2410.07524). The weights of the chosen experts sum to `routed_scaling_factor`,
    and each slice gets 1/G of its set's weight; so `down_proj` is multiplied by G ÷ routed_scaling_factor.
    With G = 1 every expert is a copy, and the router stays as initialised. Shared experts have a `down_proj`
    of zero: they add nothing at first.

    Args:
        source: The tensors of some layers of a dense decoder, in fp32.
        target_config: The mixture's configuration, which has passed `upcycling_problems`.
        source_config: The dense model's configuration.
        names: Names of the mixture's tensors.
        initial: Returns the initial value of the tensor with this name.
    """
    slices = source_config.intermediate_size // target_config.expert_intermediate_size
    scale = slices / target_config.routed_scaling_factor
    for layer in target_config.moe_layers:
        prefix = f"model.layers.{layer}.mlp."
        if f"{prefix}gate_proj.weight" not in source:
            continue
        gate, up, down = (source.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
        halves = zip(gate.chunk(slices), up.chunk(slices), strict=True)
        pairs = torch.stack([torch.cat(pair) for pair in halves])
        downs = torch.stack(down.chunk(slices, dim=1)) * scale
        sets = target_config.num_experts // slices
        source[f"{prefix}experts.gate_up_proj"] = pairs.repeat(sets, 1, 1)
        source[f"{prefix}experts.down_proj"] = downs.repeat(sets, 1, 1)
        rows = initial(f"{prefix}gate.weight")
        source[f"{prefix}gate.weight"] = rows[::slices].repeat_interleave(slices, dim=0)
        for name in names:
            if name.startswith(prefix) and "shared_expert" in name:
                source[name] = initial(name)
                if name.endswith("down_proj.weight"):
                    source[name].zero_()


def _upcycling(target_config: ModelConfig, source_config: ModelConfig) -> str:
    """What upcycling does, for the console."""
    slices = source_config.intermediate_size // target_config.expert_intermediate_size
    what = f"a slice of 1/{slices} of" if slices > 1 else "a copy of"
    experts, layers = target_config.num_experts, len(target_config.moe_layers)
    return f"upcycled: each of {experts} experts in {layers} layers is {what} the dense layer's network"


_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
"""Endings of the names of matrices that write into the residual stream."""


@torch.no_grad()
def initialize_weights(
    model: Decoder, seed: int, base_hidden_size: int | None = None, *, device: torch.device | None = None
) -> None:
    """Set every parameter and buffer (in a sharded model, this rank's shard of it) to its initial value.

    Norms are one and router biases zero. Matrices are normal(0, initializer_range). Matrices that write into
    the residual stream (o_proj, down_proj) are divided by sqrt(2 · num_hidden_layers), so that the stream's
    variance does not grow with depth (GPT-2, section 2.3); with `zero_init_residual` they are zero. Values
    are drawn on the CPU. Each is a function of seed, name and position alone (`draw_normal`).

    Args:
        model: On any device, in any floating type.
        seed: Decides all values.
        base_hidden_size: Width at which the learning rates were tuned. All initial values, also the final
            norm's, then scale by µP (`llm_pretrain.optim.param_groups`). None for no scaling.
        device: Device on which a model on the meta device gets memory.
    """
    if device is not None:
        materialize(model, device)
    for name, parameter in model.named_parameters():
        _set_initial(name, parameter, model.config, seed, base_hidden_size)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()


@torch.no_grad()
def initialize_zeros(model: Decoder, device: torch.device) -> None:
    """Give a model on the meta device (or this rank's shards of it) memory for a checkpoint's values."""
    materialize(model, device)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.zero_()


def _set_initial(
    name: str, parameter: Tensor, config: ModelConfig, seed: int, base_hidden_size: int | None
) -> None:
    factor = initial_factor(name, parameter, config.hidden_size, base_hidden_size)
    is_output = name.endswith(_RESIDUAL_OUTPUTS)
    if parameter.dim() == 1:
        parameter.fill_(factor)
    elif is_output and config.zero_init_residual:
        parameter.zero_()
    else:
        depth_factor = math.sqrt(2 * config.num_hidden_layers) if is_output else 1.0
        std = factor * config.initializer_range / depth_factor
        draw_normal(parameter, std, seed=seed, name=name)
