"""Measuring a machine: the profile that plans are made from."""
