"""What a step will take: a machine's profile, predicted time and bytes, and the chosen placement.

Imports `decode` and what is below; `runtime`, `bench` and the command line ask it.
"""
