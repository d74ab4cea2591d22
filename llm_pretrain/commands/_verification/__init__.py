"""What `llm-pretrain verify` checks: a run's folder, and the isolation of packed documents."""

from llm_pretrain.commands._verification.checks import Check, Checks
from llm_pretrain.commands._verification.isolation import verify_isolation
from llm_pretrain.commands._verification.run import verify_run

__all__ = ["Check", "Checks", "verify_isolation", "verify_run"]
