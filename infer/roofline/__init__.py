"""Projected speed of a model on hardware that you do not have."""
