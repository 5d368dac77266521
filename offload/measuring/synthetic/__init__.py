"""Caches, keys and models with the statistics of real ones."""
