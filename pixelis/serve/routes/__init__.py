"""HTTP routes of the gateway beside chat and agent: experiences and evolution."""
