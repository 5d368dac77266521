"""Benchmarks. `make bench` runs all; `perf.report` writes what README and docs show of them."""
