"""Engines that offload is compared with (`perf.engines.engine_protocol`)."""
