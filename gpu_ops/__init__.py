"""GPU operators of a decode step: Triton kernels, each beside its checks and its torch reference.

Importing them works without Triton and without a GPU; `launch.py` says which code a call runs.
"""
