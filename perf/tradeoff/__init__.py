"""Quality and speed of one configuration: parts of `perf.bench_tradeoff`."""
