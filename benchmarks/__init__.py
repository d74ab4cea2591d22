"""Measurements of speed, as `python -m benchmarks NAME`; results are written down in docs/benchmarks.md.

No test asserts a time. Every ratio is the median of interleaved pairs with its minimum and maximum.
"""
