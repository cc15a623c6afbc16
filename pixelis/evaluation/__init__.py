"""How good a policy is: summaries of episodes, intervals and paired differences."""
