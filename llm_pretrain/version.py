"""The package's version, which pyproject.toml and every manifest, store and report state."""

__version__ = "0.1.0"
