"""The parts of `llm-pretrain chaos`: the plan, moments of death, attempts, what must hold, the result."""
