"""One decode step: the protocol of decoders, the native one, and in `gpu/` that with a device.

Imports `policies` and what is below; `loading` stands beside it, and neither knows the other.
"""
