"""Published quantized weights: the schemes of config.json, and the packings of their tensors, read and written."""
