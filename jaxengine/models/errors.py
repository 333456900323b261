"""Errors of finding and reading a model. Each is one sentence naming the file, field or tensor."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """The model's files are missing, damaged, or contradict its configuration."""


class UnsupportedModelError(ModelLoadError):
    """The model is intact, but something it asks for is not implemented."""
