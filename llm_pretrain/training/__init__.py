"""The training run that both launch paths share: step, loop, evaluation, checkpoints and metrics."""
