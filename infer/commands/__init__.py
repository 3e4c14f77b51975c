"""The commands of `python -m infer`, one file each. No other folder imports this one."""
