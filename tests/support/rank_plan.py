"""The cases that `rank_cases.py` runs: our code on either path, and one mistake each."""

from __future__ import annotations

from support.mutation import Edit
from support.rank_cases import Case

TORCHRUN, ACCELERATE = "train_pretrain.py", "train_pretrain_accelerate.py"
ENGINE, OBJECTIVE = "llm_pretrain/training/engine.py", "llm_pretrain/training/objective.py"
OPTIMIZERS, LOOP = "llm_pretrain/training/optimizers.py", "llm_pretrain/training/loop.py"
COUNTING = "llm_pretrain/training/expert_counting.py"
BATCHES, DECODER = "llm_pretrain/data/batches.py", "llm_pretrain/model/decoder.py"

BF16 = {"training": {"precision": "bf16"}}
DROPOUT = {"model": {"hidden_dropout": 0.2}}
UNCLIPPED = {"training": {"max_grad_norm": 0.0, "max_steps": 1}}
ROUTER_BIAS = {"model": {"router_bias_update_rate": 0.125}}
GLOBAL_BALANCE = {
    "model": {"router_aux_loss_scope": "global_batch", "router_aux_loss_coef": 1.0},
    "training": {"max_grad_norm": 0.0, "activation_checkpointing": True},
}
FEW_TOKENS_PER_EXPERT = {"model": {"num_experts": 32, "num_experts_per_tok": 1}}

ONE_MICRO_BATCH = {"training": {"global_batch_size": 6, "max_steps": 2}}

WAITING = Edit("llm_pretrain/training/books.py", 'DEVICES = ("cuda",)', 'DEVICES = ("cuda", "cpu")')
SKIP_BY_OWN_LOSS = {
    name: Edit(file, "if not result.skipped:\n", "if math.isfinite(loss.item()):\n")
    for name, file in (("torchrun", TORCHRUN), ("accelerate", ACCELERATE))
}
ONE_RANK_NAN = {
    name: Edit(
        file,
        "        self.objective = Objective(config, self.world_size)\n",
        "        plain = Objective(config, self.world_size)\n"
        "        factor = math.nan if self.rank == 1 else 1.0\n"
        "        self.objective = lambda output, tokens: factor * plain(output, tokens)\n",
    )
    for name, file in (("torchrun", TORCHRUN), ("accelerate", ACCELERATE))
}
OWN_BUFFERS = {
    name: Edit(
        file,
        "        settle_buckets(self)\n",
        "        settle_buckets(self)\n"
        "        for buffer in model.buffers():\n            buffer.fill_(self.rank)\n",
    )
    for name, file in (("torchrun", TORCHRUN), ("accelerate", ACCELERATE))
}
MEAN_PER_RANK = (
    Edit(OBJECTIVE, "= sum_integers(whole)", "= whole"),
    Edit(
        OBJECTIVE,
        "world_size * config.gradient_accumulation_steps(world_size)",
        "config.gradient_accumulation_steps(world_size)",
    ),
)
PREPARED_SCHEDULE = (
    Edit(
        ACCELERATE,
        "self.model, self.optimizer, own = self.accelerator.prepare(model, optimizer, batches)",
        "from llm_pretrain.training.schedule import learning_rate\n"
        "        config = self.config\n"
        "        schedule = torch.optim.lr_scheduler.LambdaLR(\n"
        "            optimizer, lambda n: learning_rate(config, n) / config.optimizer.learning_rate\n"
        "        )\n"
        "        self.model, self.optimizer, own, self.schedule = self.accelerator.prepare(\n"
        "            model, optimizer, batches, schedule\n"
        "        )",
    ),
    Edit(
        ACCELERATE,
        "self.optimizer.step()  # with a scaler: its step and its update",
        "self.optimizer.step(); self.schedule.step()",
    ),
    Edit(LOOP, "set_learning_rate(optimizer, rate)", "pass"),
)
FILLED_UP = (
    Edit(BATCHES, "training.max_steps * per_step)", "training.max_steps * per_step - 2)"),
    Edit(ACCELERATE, "even_batches=False", "even_batches=True"),
)
SHARDED_TWICE = (
    Edit(ACCELERATE, "from llm_pretrain.data import Batch", "from llm_pretrain.data import Batch, shard"),
    Edit(
        ACCELERATE,
        "prepare(model, optimizer, batches)",
        "prepare(model, optimizer, shard(batches, self.rank, self.world_size))",
    ),
)
EVERY_MICRO_BATCH = Edit(
    TORCHRUN, "with nullcontext() if is_last else self.no_sync():", "with nullcontext():"
)
STATIC_GRAPH = Edit(ENGINE, '"bucket_cap_mb": 25', '"bucket_cap_mb": 25, "static_graph": True')

CASES: dict[str, Case] = {}
for path in ("torchrun", "accelerate"):
    CASES[f"{path} fp32"] = Case(path)
    CASES[f"{path} bf16"] = Case(path, changes=BF16)
    CASES[f"{path} dropout"] = Case(path, changes=DROPOUT)
    CASES[f"{path} unclipped"] = Case(path, changes=UNCLIPPED)
    CASES[f"{path} global balance"] = Case(path, changes=GLOBAL_BALANCE)
    CASES[f"{path} buffers"] = Case(path, (OWN_BUFFERS[path],), ROUTER_BIAS)
    CASES[f"{path} waiting verdict"] = Case(path, (WAITING,), ROUTER_BIAS)
    CASES[f"{path} read verdict"] = Case(path, (), ROUTER_BIAS)
    CASES[f"{path} waiting NaN"] = Case(path, (WAITING, ONE_RANK_NAN[path]), ROUTER_BIAS)
    CASES[f"{path} counted"] = Case(path, counted=True)
    CASES[f"{path} counted, one micro batch"] = Case(path, changes=ONE_MICRO_BATCH, counted=True)
    CASES[f"{path} one rank NaN"] = Case(path, (ONE_RANK_NAN[path],))
    CASES[f"{path} skip by own loss"] = Case(path, (ONE_RANK_NAN[path], SKIP_BY_OWN_LOSS[path]))
CASES |= {
    "counts of one rank": Case(
        "torchrun",
        (Edit(COUNTING, "total = engine.reduce_sum(counts)", "total = counts"),),
        GLOBAL_BALANCE,
    ),
    "few tokens per expert": Case("torchrun", changes=FEW_TOKENS_PER_EXPERT),
    "another optimizer": Case("torchrun", (Edit(OPTIMIZERS, "fused=True", "fused=False"),)),
    "another bucket size": Case("torchrun", (Edit(ENGINE, '"bucket_cap_mb": 25', '"bucket_cap_mb": 0.05'),)),
    "divided elsewhere": Case(
        "torchrun",
        (
            Edit(
                TORCHRUN,
                "loss = loss / self.accumulation_steps",
                "loss = self.objective(output, counts.num_loss_tokens * self.accumulation_steps)",
            ),
        ),
    ),
    "every micro batch reduced": Case(
        "torchrun",
        (EVERY_MICRO_BATCH,),
    ),
    "every micro batch reduced, counted": Case("torchrun", (EVERY_MICRO_BATCH,), counted=True),
    "dropout by rank": Case(
        "torchrun",
        (Edit(ENGINE, "{batch.step}/{batch.micro_batch}", "{batch.step}/{torch.distributed.get_rank()}"),),
        DROPOUT,
    ),
    "mean per rank": Case("torchrun", MEAN_PER_RANK, UNCLIPPED),
    "sharded twice": Case("accelerate", SHARDED_TWICE),
    "filled up": Case("accelerate", FILLED_UP),
    "not sharded": Case(
        "torchrun", (Edit(TORCHRUN, "shard(batches, self.rank, self.world_size)", "batches"),)
    ),
    "prepared schedule": Case("accelerate", PREPARED_SCHEDULE),
    "broadcast buffers": Case(
        "torchrun",
        (Edit(ENGINE, '"broadcast_buffers": False', '"broadcast_buffers": True'), OWN_BUFFERS["torchrun"]),
        ROUTER_BIAS,
    ),
    "no_sync kept": Case(
        "torchrun",
        (
            Edit(
                TORCHRUN,
                "del self.model, self.no_sync, self.unwrapped_model, self.optimizer",
                "del self.model, self.unwrapped_model, self.optimizer",
            ),
        ),
    ),
    "no barrier": Case("torchrun", (Edit(TORCHRUN, "            dist.barrier()\n", ""),)),
    "model kept": Case(
        "accelerate",
        (Edit(ACCELERATE, "        del self.model, self.unwrapped_model, self.optimizer\n", ""),),
    ),
    "no wait": Case("accelerate", (Edit(ACCELERATE, "        self.accelerator.wait_for_everyone()\n", ""),)),
    "experts in a list": Case(
        "torchrun",
        (
            Edit(
                DECODER,
                "from llm_pretrain.model.experts import Experts\n",
                "from support.list_experts import ListExperts as Experts\n",
            ),
        ),
        FEW_TOKENS_PER_EXPERT,
    ),
    "static graph": Case("torchrun", (STATIC_GRAPH,)),
    "static graph, first pass unreduced": Case(
        "torchrun", (STATIC_GRAPH, Edit(TORCHRUN, "        settle_buckets(self)\n", ""))
    ),
    "no accumulate": Case(
        "accelerate", (Edit(ACCELERATE, "with self.accelerator.accumulate(self.model):", "if True:"),)
    ),
}
