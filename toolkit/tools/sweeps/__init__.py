"""Sweeps: many runs with different settings, described in one file."""
