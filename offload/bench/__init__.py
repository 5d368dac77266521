"""Measurements that both the `offload bench` command and perf/ make."""
