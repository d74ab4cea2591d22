"""Collectives, meshes, and the sharding of parameters, sequences, experts and layers over meshes."""
