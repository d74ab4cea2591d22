"""Reads and writes weights and configs in the formats of other libraries."""
