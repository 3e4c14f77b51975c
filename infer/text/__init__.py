"""Text: tokenizer, chat templates and stop strings."""
