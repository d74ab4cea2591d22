"""Language-model pretraining with two launch paths over one core."""

__version__ = "0.1.0"
