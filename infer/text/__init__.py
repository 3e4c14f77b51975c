"""Text: tokenizer, chat templates, stop strings, tool calls, and grammars."""
