"""Measures policies: summaries of episodes, intervals and paired differences."""
