"""Chain-of-Thought-Action samples from annotated media: every observation in them comes from executing the
operation.
"""
