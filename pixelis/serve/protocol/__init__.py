"""Request and response bodies of the HTTP API, and its error format."""
