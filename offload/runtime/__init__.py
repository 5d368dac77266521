"""`OffloadedModel`: opening a model, its cache, both phases, the token loop, and statistics.

Imports every room below; `measuring`, `bench` and `cli` are its only callers inside the package.
"""
