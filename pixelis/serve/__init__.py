"""The Ray Serve application: a gateway with OpenAI's API, its agent, and the work after a reply."""
