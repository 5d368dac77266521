"""One decode step: the protocol of decoders, the native one, and in `gpu/` the pipeline with a device.

Imports `policies` and what is below; `loading` stands beside it, and neither knows the other.
"""
