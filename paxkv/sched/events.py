"""Reasons: why a request was refused, a victim chosen, a prefix missed, the head of the queue kept waiting."""

from __future__ import annotations

import dataclasses
import enum


class RequestRejected(ValueError):
    """A request that can never be served, refused when it is submitted. Other requests are not touched."""

    def __init__(self, request_id: object, reason: str) -> None:
        super().__init__(f"request {request_id!r} refused: {reason}")
        self.request_id = request_id
        self.reason = reason


class SchedulerStalled(RuntimeError):
    """Waiting work, nothing running and nothing scheduled: a fault of the scheduler, with a dump of its state."""


class Blocked(enum.Enum):
    """Why the head of the waiting queue was not admitted in this step."""

    PAGES = "not enough free pages above the watermark"
    CHUNK = "no free chunk of the reserved size"
    SEQUENCES = "max_num_seqs reached"
    BUDGET = "max_num_batched_tokens reached"
    SWAPPED_FIRST = "swapped groups come first"
    JUST_PREEMPTED = "preempted in this step"
    BATCH = "a static batch is running"


class Miss(enum.Enum):
    """Why a prompt page was not found in the prefix cache."""

    NONE = "every page that could hit did"
    OFF = "prefix caching is off"
    NO_IDS = "the request gives no token ids"
    SHORT = "the prompt has no full page besides its last token"
    NEVER_STORED = "no page with this content, salt and adapter was stored"
    EVICTED = "the page was stored and then evicted"


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A group that entered the running set in this step.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache.
        miss: why not more of them were found.
        resumed: whether the group ran before and is being recomputed.
    """

    request_id: int | str
    cached_tokens: int
    miss: Miss
    resumed: bool


@dataclasses.dataclass(frozen=True)
class Preempted:
    """A group that lost its pages in this step.

    Attributes:
        mode: ``recompute`` or ``swap``.
        cause: what made it necessary.
        tokens_lost: tokens whose keys and values must be computed again (0 when swapped), except those that the
            prefix cache still has then.
        pages_freed: device pages that became free.
    """

    request_id: int | str
    mode: str
    cause: str
    tokens_lost: int
    pages_freed: int
