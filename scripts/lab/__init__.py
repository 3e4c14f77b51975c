"""The laboratory: comparisons with other engines, and checks of a GPU. In clones only, not in the wheel."""
