"""The commands of `python -m infer`, one file each; nothing imports this folder."""
