"""Engines that benchmarks compare, and the protocol they speak."""
