"""The commands of `llm-pretrain`: each module except `options` is one.

A command has `EXAMPLES` (the end of its help), `add_arguments`, and `run`, which returns the exit code.
"""
