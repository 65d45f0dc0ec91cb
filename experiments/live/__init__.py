"""The live runs: the systems of the paper through the real engine, on the device that jax has.

::

    setting ──▶ serve (engine, real clock) ──▶ summary ─┐
       │                                                ├─▶ checks, tables ─▶ chapters of fig02, fig12 to fig16
       └─────▶ session.predict (simulator) ──▶ summary ─┘
                    ▲
    clock: step times of this device, timed before any run
"""
