"""Hugging Face configs, weights and reference models for tests."""
