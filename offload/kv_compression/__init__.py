"""A bound on the host memory of one sequence, at any length: tokens that its attention has left
behind are condensed into few. Read `base.py`, then `by_reconstruction.py`.
"""
