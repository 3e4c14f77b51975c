"""An agent that works on a programming task until its tests pass."""
