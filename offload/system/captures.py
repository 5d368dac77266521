"""One capture of a CUDA graph at a time, and nothing beside it that torch forbids meanwhile.

Steps are captured by the thread that decodes, or by one beside it. While any thread captures, torch
refuses draws from the GPU's default generator and `torch.cuda.empty_cache` in all of them, and CUDA
`torch.cuda.synchronize`.
"""

from __future__ import annotations

import threading

CAPTURING = threading.RLock()
