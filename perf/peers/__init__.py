"""Engines that offload is compared with, each in a process of its own (see `perf.engines.engines`)."""
