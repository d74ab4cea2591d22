"""Optimizers: AdamW and Muon, parameter groups, EMA, the learning-rate schedule and µP."""
