"""Measurements that `offload bench`, `offload eval` and perf/ make."""
