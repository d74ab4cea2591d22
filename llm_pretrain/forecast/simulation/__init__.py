"""A training step of one rank of any number, without a GPU: its memory, its collectives, its least time.

`worker` and `verify` run in processes of their own; `device` changes all of torch there.
"""
