"""What tests of paxkv, and of anything built on it, need: naive oracles, scripted runs, force policies.

This package ships. The modules here so far need no jax.
"""
