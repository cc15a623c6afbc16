"""OpenAI's shapes that training and serving share: requests, replies, streams and errors. Pure, without Ray."""
