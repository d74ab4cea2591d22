"""Simulates, without a GPU, a training step of one of many ranks: memory, collectives and least time.

`worker` runs in a separate process, since `device` changes all of torch in its process.
"""
