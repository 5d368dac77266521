"""The prompt: many new tokens at once, layer by layer, while each layer's K/V leave for the store.

Imports `models` and what is below it; `policies` may see its queries and keys, `runtime` calls it.
"""
