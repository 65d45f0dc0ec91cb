"""The simulator: the same scheduler object as the engine, driven by a clock instead of a device.

Imports the standard library, numpy and paxkv's jax-free modules only (a test imports it with jax blocked).
"""
