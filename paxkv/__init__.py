"""paxkv: the PagedAttention paper (Kwon et al., SOSP 2023) as a JAX research library.

The package root imports nothing heavy. ``paxkv.sched`` and ``paxkv.sim`` work without jax
(a test imports them with jax blocked), so schedules and simulations run anywhere Python runs.
"""

__version__ = "0.1.0"
