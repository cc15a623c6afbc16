"""Pixelis: train, serve and evolve vision-language models that reason with pixel operations."""

__version__ = "0.1.0"
