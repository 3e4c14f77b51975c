"""An agent that works on a task until its tests pass."""
