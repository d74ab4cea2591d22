"""Packed sequences in a reproducible order, assembled into micro batches for training and evaluation."""
