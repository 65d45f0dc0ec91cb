"""The scheduler and the memory managers: plain Python, no jax.

Start with :class:`paxkv.sched.scheduler.Scheduler` and the memories of ``block_manager`` (paged),
``reserve`` (Orca's reservations) and ``static`` (one batch at a time).
"""
