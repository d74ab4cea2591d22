"""Predicts a training's time, memory and loss: simulated steps, ladders of small models, plans."""
