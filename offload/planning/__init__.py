"""A machine's profile, a step's predicted time and bytes, and the placement that they choose.

Imports `decode` and what is below; `runtime`, `bench` and the command line ask it. What measures
the machine opens models, so that it is above `runtime`: `measuring`.
"""
