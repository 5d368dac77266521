"""What decoding is compared with: the same weights, run by others or with all of the KV on the GPU.

`offload bench decode` and `perf.bench_gpu` run these in their own process. Engines that need an
environment of their own are in perf/baselines/.
"""
