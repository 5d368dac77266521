"""Processes that share a model: who they are, what each has, and what happens when one fails.

Imports `system` only; `kv` stands beside it, and neither knows the other.
"""
