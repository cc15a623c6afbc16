"""The Ray Serve application: an OpenAI-shaped gateway, the agent behind it, and the way its traffic becomes updates."""
