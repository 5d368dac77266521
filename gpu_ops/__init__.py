"""GPU operators of a decode step: Triton kernels, each with its checks and its torch reference.

Importing them works without Triton and without a GPU; `launch.py` says which code a call runs. They
write into tensors they are given, do not synchronise and allocate nothing, so that a CUDA graph can
capture them; the first call with operands of a new kind compiles, and must come before the capture.
"""
