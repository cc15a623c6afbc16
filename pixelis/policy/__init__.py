"""The policy: model and adapters, log-probabilities, losses and the train step."""
