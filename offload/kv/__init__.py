"""The host KV store: pages, the sequences that own them, and copies to and from a device.

Imports `system` only; `ranks` stands beside it, and neither knows the other.
"""
