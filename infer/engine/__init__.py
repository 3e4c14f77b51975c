"""Engines: a model, the backend that runs it, and generations."""
