"""A decode step on the GPU, the KV cache on the host: step, heads, pages, who waits for whom."""
