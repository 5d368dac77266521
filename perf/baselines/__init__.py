"""Engines that offload is compared with, each in a process of its own (`perf.engines.engines`)."""
