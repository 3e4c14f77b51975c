"""The errors a user can cause. Their text names the input and the remedy; command lines print it without a traceback."""


class LaneformerError(Exception):
    """Base of every error that is about the user's input, not about a bug."""


class ConfigError(LaneformerError, ValueError):
    """A configuration value that cannot work."""


class CheckpointError(LaneformerError, ValueError):
    """A checkpoint folder or file that is missing, damaged or does not fit its config."""


class InputError(LaneformerError, ValueError):
    """Token ids, prompts or data that the model cannot take."""
