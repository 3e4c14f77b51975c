"""Reads and writes published quantized weights: the schemes in config.json, and the packings of tensors."""
