"""The paper's figures as runnable experiments: one file per claim, ``python -m experiments.reproduce`` for all."""
