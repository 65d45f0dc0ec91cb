"""What tests of paxkv, and of anything built on it, need: naive oracles, scripted runs, force policies, a tiny model.

This package ships. What drives the scheduler alone (``scripted``, ``overlapped``, ``naive``, ``force``) needs no jax.
"""
