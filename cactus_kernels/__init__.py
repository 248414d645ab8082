"""Speculative sampling for large language models: Cactus and SpS verification in one launch, and the loop around it."""

__version__ = "0.1.0"
