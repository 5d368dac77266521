"""A name becomes checked weights: folder, GGUF file, alias or hub id to a stock transformers model.

Imports `models`, `selection` and what is below; `decode` stands beside it, and neither knows the
other.
"""
