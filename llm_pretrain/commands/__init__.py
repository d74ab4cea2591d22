"""Each module but `options` is a command.

It has `EXAMPLES`, the end of its help, `add_arguments`, and `run`, which returns the exit code.
"""
