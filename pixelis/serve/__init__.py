"""The Ray Serve application: an OpenAI-shaped gateway, the agent behind it, and the work that turns its
traffic into updates."""
