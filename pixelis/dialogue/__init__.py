"""Conversion between questions, turns, text and tokens: dialects, chat rendering, the agent loop."""
