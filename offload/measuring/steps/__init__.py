"""Decode steps, timed from outside and traced from inside."""
