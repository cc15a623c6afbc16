"""Questions and turns <-> text <-> tokens: dialects, chat rendering, pixel budgets, the agent loop. No ray, no torch model."""
