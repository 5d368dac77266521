"""The machine: memory and its limits, huge pages, pinning, threads, interrupts, the cache folder.

The ground floor: it imports `cpu_ops` and `gpu_ops` at most, and every room may import it.
"""
