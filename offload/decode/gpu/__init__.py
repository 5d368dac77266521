"""A decode step on the GPU, the KV cache on the host: the step, its heads, pages and handshake."""
