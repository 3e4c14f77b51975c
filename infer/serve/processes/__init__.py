"""The processes beside the web process: a run of the engine, encoders of prompts, and what they share."""
