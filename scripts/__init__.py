"""Chores: tokenizing, converting, plotting, checking a machine."""
