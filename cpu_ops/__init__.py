"""CPU operators of offload: checked calls (`native`) and float64 references (`reference`)."""
