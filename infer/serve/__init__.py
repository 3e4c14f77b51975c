"""The OpenAI-compatible HTTP server and its playground."""
