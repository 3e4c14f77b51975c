"""Hugging Face files of the tests."""
