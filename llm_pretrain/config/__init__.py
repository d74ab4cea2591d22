"""The configuration: its tree of dataclasses, and loading and checking it."""
