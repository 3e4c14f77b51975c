"""Checks, measures and trains everything that one GPU allows: scripts/gpu_check.sh, python -m scripts.gpu_check."""
