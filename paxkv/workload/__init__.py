"""Workloads: what requests arrive when, from real traces, embedded statistics or distributions.

Standard library and NumPy only, and no global random state: one seed gives one content hash on every machine.
"""

from paxkv.workload.arrivals import arrival_times, build_workload, translation_workload
from paxkv.workload.chat import Conversations, chat_workload
from paxkv.workload.datasets import (
    embedded_conversations,
    embedded_lengths,
    load_conversations,
    load_lengths,
    real_conversations,
    real_lengths,
)
from paxkv.workload.distributions import sample_lengths
from paxkv.workload.readers import read_lengths, read_mooncake, read_timestamped, workload_from_trace
from paxkv.workload.sharegpt import read_sharegpt
from paxkv.workload.validate import WorkloadError
from paxkv.workload.workload import Lengths, Workload
from paxkv.workload.workload_file import read_workload, write_workload

__all__ = [
    "Conversations",
    "Lengths",
    "Workload",
    "WorkloadError",
    "arrival_times",
    "build_workload",
    "chat_workload",
    "embedded_conversations",
    "embedded_lengths",
    "load_conversations",
    "load_lengths",
    "real_conversations",
    "real_lengths",
    "read_lengths",
    "read_mooncake",
    "read_sharegpt",
    "read_timestamped",
    "read_workload",
    "sample_lengths",
    "translation_workload",
    "workload_from_trace",
    "write_workload",
]
