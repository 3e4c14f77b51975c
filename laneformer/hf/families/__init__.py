"""The supported families of Hugging Face checkpoints: how config.json is read, and the names of the tensors."""
