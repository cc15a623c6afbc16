"""Chain-of-Thought-Action samples from annotated media, whose observations come from executed operations."""
