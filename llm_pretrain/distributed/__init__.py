"""Collectives, meshes, and what is sharded over them: parameters, sequences, experts, layers."""
