"""Evaluation of policies: episode summaries, intervals and paired differences."""
