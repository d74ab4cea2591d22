"""Pipeline parallelism: the layers are divided over stages, which hand hidden states and gradients on.

torch's schedules decide the order in which a rank computes the micro batches of its stages. Every rank reads
the micro batches itself, so only hidden states and the routers' sums travel. The last stage thus has what a
single process has, and computes the objective as a single process does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llm_pretrain.config.tree import Config
from llm_pretrain.distributed.mesh import Place
from llm_pretrain.errors import ConfigError
from llm_pretrain.model.decoder import Decoder, DecoderOutput
from llm_pretrain.model.moe import RouterSums

T = TypeVar("T")
Batch = Any
"""A micro batch, `llm_pretrain.data.assembly.Batch`."""
Loss = Callable[[DecoderOutput, Batch], Tensor]
"""The part of the objective of one micro batch, 0-dim, scaled."""


class OtherStage(nn.Module):
    """Stands for a part of the model that another stage has, and returns its input.

    Args:
        weight: The part's weight, if a matrix of this stage is tied to it.
    """

    def __init__(self, weight: nn.Parameter | None = None):
        super().__init__()
        self.register_parameter("weight", weight)

    def forward(self, x_BSH: Tensor, *inputs: Any) -> Any:
        """[B, S, H] unchanged; if called with a layer's `inputs`, also None in place of router sums."""
        return (x_BSH, None) if inputs else x_BSH


def keep_stages(model: Decoder, config: Config, stages: Collection[int]) -> None:
    """Replace the parts that other stages have; the other parts keep their names in the whole model."""
    stack: Any = model.model
    has_first, has_last = 0 in stages, config.distributed.num_stages - 1 in stages
    tied: Any = model.lm_head.weight if config.model.tie_word_embeddings else None
    own = {layer for stage in stages for layer in config.stage_layers(stage)}
    for layer in range(len(stack.layers)):
        if layer not in own:
            stack.layers[layer] = OtherStage()
    head: Any = model
    # the rank's model and a stage's view share the `OtherStage` that holds a tied weight
    if not has_first and not (has_last and isinstance(stack.embed_tokens, OtherStage)):
        stack.embed_tokens = OtherStage(tied if has_last else None)
    if not has_last:
        stack.norm = OtherStage()
        if not (has_first and isinstance(head.lm_head, OtherStage)):
            head.lm_head = OtherStage(tied if has_first else None)


def _view(model: Decoder, config: Config, stage: int) -> Decoder:
    """A decoder that shares the modules of `model`, reduced to one of its stages."""

    def copied(module: Any) -> Any:
        view = copy.copy(module)
        for name, value in vars(module).items():  # hooks too: FSDP registers hooks of a stage on its view
            if isinstance(value, dict):
                vars(view)[name] = copy.copy(value)
        return view

    view = copied(model)
    view.model = copied(model.model)
    view.model.layers = copied(model.model.layers)
    keep_stages(view, config, [stage])
    return view


class Pipeline:
    """The stages of this rank, and the schedule that all ranks follow.

    Args:
        model: The whole model, on the meta device; it keeps the parts of this rank's stages.
        config: The run's configuration.
        place: Place of this rank.
        group: Group of the ranks of this pipeline.
        device: Device of this rank.
        autocast: Context of the forward passes.

    Raises:
        ConfigError: this torch is too old.
    """

    def __init__(
        self,
        model: Decoder,
        config: Config,
        place: Place,
        group: Any,
        device: torch.device,
        autocast: AbstractContextManager[Any],
    ):
        if torch.__version__ < "2.13":  # older ones wait for gradients that routers' counts lack
            raise ConfigError(
                f"distributed.pp_size: expected 1 with torch {torch.__version__}, found {place.sizes.pp}; a "
                "pipeline needs torch 2.13"
            )
        self.model, self.config, self.device, self.autocast = model, config, device, autocast
        self.group, self.rank, self.size = group, place.pp, place.sizes.pp
        self.names = [name for name, _ in model.named_parameters()]
        """Names of the whole model's parameters, in its order."""
        self.order = list(model.state_dict())
        """Names of the whole model's parameters and buffers, in its order."""
        distributed = config.distributed
        self.owners = {
            stage: rank for rank in range(distributed.pp_size) for stage in distributed.stages(rank)
        }
        """The rank of each stage."""
        own = distributed.stages(self.rank)
        keep_stages(model, config, own)
        self.modules = {stage: model if len(own) == 1 else _view(model, config, stage) for stage in own}
        """A decoder for each stage of this rank."""
        for stage, module in self.modules.items():
            module.forward = self._forward_of(stage)  # type: ignore[method-assign]
        self._schedule: Any = None
        self._batches: dict[int, Iterator[Batch]] = {}
        """Stage -> the micro batches that it has yet to compute; every schedule takes them in this order."""
        self._loss: Loss | None = None
        self._output: DecoderOutput | None = None
        self._counted: tuple[list[Tensor], Tensor] | None = None
        """This rank's parameters in the gradient norm, without tied copies, and their indices in `names`."""
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL: all ranks before any two exchange

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.owners) - 1

    def backward(self, micro_batches: Sequence[Batch], loss: Loss) -> None:
        """Accumulate the gradients of all micro batches.

        Args:
            micro_batches: All of one shape, and equally many in every call.
            loss: Called in the last stage, for one micro batch after the other.
        """
        if self._schedule is None:
            self._schedule = self._build_schedule(micro_batches)
        self._loss, self._batches = loss, {stage: iter(micro_batches) for stage in self.modules}
        self._schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        self._loss, self._output = None, None
        self._add_tied_gradients()

    @torch.no_grad()
    def forward(self, batch: Batch) -> DecoderOutput:
        """The output of one micro batch; ranks without the last stage return no losses, and counts of 0."""
        self._batches = {stage: iter([batch]) for stage in self.modules}
        passed: Any = ()
        for stage, module in self.modules.items():
            if stage and self.owners[stage - 1] != self.rank:
                passed = [torch.empty_like(each, device=self.device) for each in self._inputs(stage, batch)]
                for each in passed:
                    dist.recv(each, group=self.group, group_src=self.owners[stage - 1])
            passed = module(*passed)
            if stage < self.last and self.owners[stage + 1] != self.rank:
                for each in passed:
                    dist.send(each.contiguous(), group=self.group, group_dst=self.owners[stage + 1])
        output, self._output = self._output, None
        if output is not None:
            return output
        layers, experts = len(self.config.model.moe_layers), self.config.model.num_experts
        counts = torch.zeros((layers, experts if layers else 0), dtype=torch.int64, device=self.device)
        entropy = torch.zeros(layers, device=self.device)
        return DecoderOutput(None, None, None, None, None, counts, None, entropy)

    def clip_grad_norm(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """torch's `clip_grad_norm_` over the parameters of all stages.

        The norm of the norms is taken in the order of the whole model's parameters, as without stages.

        Returns:
            The norm before clipping, 0-dim.
        """
        from llm_pretrain.distributed.fsdp import clip_to_norm, gradient_norms

        if self._counted is None:
            numbers = {name: number for number, name in enumerate(self.names)}
            own = {name: each for name, each in self.model.named_parameters() if not self.is_tied_copy(name)}
            places = torch.tensor([numbers[name] for name in own]).to(self.device)
            self._counted = list(own.values()), places
        counted, places = self._counted
        norms = gradient_norms(counted)
        whole = norms.new_zeros(len(self.names)).index_copy(0, places, norms)
        dist.all_reduce(whole, group=self.group)
        total = torch.linalg.vector_norm(whole)
        clip_to_norm(parameters, max_norm, total)
        return total

    def gather(self, value: T) -> list[T]:
        """The values of all ranks of the pipeline, on every rank."""
        gathered = [value] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def merged(self, values: Mapping[str, T]) -> dict[str, T]:
        """Tensor name -> value, of all ranks of the pipeline together, in the order of the whole model."""
        whole = {name: value for each in self.gather(dict(values)) for name, value in each.items()}
        return {name: whole[name] for name in self.ordered(whole)}

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Tensor names without repetition, in the order of the whole model; names that it lacks come last."""
        numbers = {name: number for number, name in enumerate(self.order)}
        return sorted(dict.fromkeys(names), key=lambda name: numbers.get(name, len(numbers)))

    def whole_parameters(self, whole: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """The parameters of all stages in the order of the model, on each rank (collective).

        Args:
            whole: Gathers a sharded tensor.
        """
        own = dict(self.model.named_parameters())
        shapes = self.merged({name: (self.rank, list(own[name].shape), own[name].dtype) for name in own})
        for name, (rank, shape, dtype) in shapes.items():
            empty = torch.empty(shape, dtype=dtype, device=self.device)
            tensor = whole(own[name].detach()) if rank == self.rank else empty
            dist.broadcast(tensor, group=self.group, group_src=rank)
            yield tensor

    def is_tied_copy(self, name: str) -> bool:
        """Whether `name` is the last stage's copy of the tied matrix, or optimizer state of this copy."""
        tied = ("model.embed_tokens.weight", "lm_head.weight")
        is_foreign = isinstance(self.model.model.embed_tokens, OtherStage)
        return is_foreign and self.config.model.tie_word_embeddings and any(each in name for each in tied)

    def _add_tied_gradients(self) -> None:
        """Add the gradients of a tied matrix: the first stage embeds by it, the last stage predicts by it."""
        first, last = self.owners[0], self.owners[self.last]
        if not self.config.model.tie_word_embeddings or first == last or self.rank not in (first, last):
            return
        gradient: Any = self.model.lm_head.weight.grad
        own = getattr(gradient, "_local_tensor", gradient)
        other, peer = torch.empty_like(own), last if self.rank == first else first
        exchange = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own.add_(other)

    def _forward_of(self, stage: int) -> Callable[..., Any]:
        """The `forward` of a stage's decoder; each call computes the next micro batch of the stage."""
        module, last = self.modules[stage], self.last

        def forward(*received: Tensor) -> Any:
            batch = next(self._batches[stage])
            inputs = batch.model_inputs()
            labels, mask = inputs.pop("labels"), inputs.pop("loss_mask")
            if received:
                inputs["input_ids"] = received[0]
            module.training = module.model.training = self.model.training  # a view has its own flag
            with self.autocast:
                hidden_BSH, sums = module.model(**inputs, mask=mask)
                sums = [*_unpacked(received[1:]), *sums]
                if stage < last:
                    return (module.lm_head(hidden_BSH), *_packed(sums, self.config))
                output = module.output(hidden_BSH, sums, labels, mask)
            if self._loss is not None:
                return self._loss(output, batch)
            self._output = output
            return ()

        return forward

    def _inputs(self, stage: int, batch: Batch) -> list[Tensor]:
        """The tensors that a stage receives from the stage before, on the meta device."""
        if not stage:
            return []
        model, begin = self.config.model, self.config.stage_layers(stage).start
        earlier = sum(layer < begin for layer in model.moe_layers)
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        with torch.device("meta"):
            shape = (*batch.input_ids.shape, model.hidden_size)
            tensors = [torch.empty(shape, dtype=dtype, requires_grad=True)]
            if earlier:
                has_grad = bool(model.router_aux_loss_coef or model.router_z_loss_coef)
                tensors.append(torch.empty((earlier, 2), dtype=dtype, requires_grad=has_grad))
                tensors.append(torch.empty((earlier, 1 + model.num_experts), dtype=torch.float64))
            return tensors

    def _build_schedule(self, micro_batches: Sequence[Batch]) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        batch, count = micro_batches[0], len(micro_batches)
        stages = []
        for stage, module in self.modules.items():
            with torch.device("meta"):
                loss = [torch.empty((), requires_grad=True)]
            outputs = loss if stage == self.last else self._inputs(stage + 1, batch)
            stages.append(
                PipelineStage(
                    module,
                    stage,
                    len(self.owners),
                    self.device,
                    input_args=tuple(self._inputs(stage, batch)),
                    output_args=tuple(outputs),
                    group=self.group,
                )
            )
        chosen: Any = get_schedule_class(self.config.distributed.pp_schedule.replace("_", ""))
        return chosen(
            stages if len(stages) > 1 else stages[0],
            count,
            loss_fn=lambda loss, target: loss,
            scale_grads=False,
        )


def _packed(sums: Sequence[RouterSums], config: Config) -> list[Tensor]:
    """The sums of routers as two tensors: losses [layers, 2]; entropy and counts, float64 [layers, 1 + E].

    A loss that is not in the objective is sent without gradient: its gradient would be zeros.
    """
    if not sums:
        return []
    losses = [torch.stack([each.aux_loss for each in sums]), torch.stack([each.z_loss for each in sums])]
    coefficients = config.model.router_aux_loss_coef, config.model.router_z_loss_coef
    used = [each if coef else each.detach() for each, coef in zip(losses, coefficients, strict=True)]
    statistics = [torch.cat([each.entropy[None].double(), each.counts.double()]) for each in sums]
    return [torch.stack(used, dim=1), torch.stack(statistics)]


def _unpacked(tensors: Sequence[Tensor]) -> Iterator[RouterSums]:
    """The sums that `_packed` has packed into two tensors."""
    if not tensors:
        return
    losses, statistics = tensors
    for (aux_loss, z_loss), row in zip(losses, statistics, strict=True):
        yield RouterSums(aux_loss, z_loss, row[1:].long(), row[0].to(losses.dtype))
