"""Behind `parity` and `chaos`: starting the scripts as a user would, and reading what they wrote."""
