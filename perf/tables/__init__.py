"""Tables and plots of README and docs, made from `perf/results`."""
