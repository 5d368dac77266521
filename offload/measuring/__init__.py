"""How a machine is measured, for plans: synthetic caches, timed decode steps, and the profile.

Imports every room below; `bench` times with it, too, and `offload plan` asks it.
"""
