"""Content keys of pages: chained SHA-256 over tagged, length-prefixed fields.

A key covers everything that decides a page's keys and values: all tokens up to the end of the page
(through the parent's key), the adapter and the salt. Fields carry a tag and a length, so that a salt
can never be read as an adapter name or as tokens. There is no per-process randomness: the same content
has the same key in every run, so stores on disk can be shared. Collision resistance is SHA-256's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Ids


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def can_hash(ids: Ids[int]) -> bool:
    """Whether :func:`page_key` takes these ids."""
    try:
        array("q", ids)
    except (TypeError, OverflowError):
        return False
    return True


def root_key(salt: str | None = None, adapter: str | None = None) -> bytes:
    """The parent of a sequence's first page: 32 bytes that name the adapter and the salt."""
    parts = [_field(b"paxkv-page", b"1")]
    if adapter is not None:
        parts.append(_field(b"adapter", adapter.encode("utf-8", "surrogatepass")))
    if salt is not None:
        parts.append(_field(b"salt", salt.encode("utf-8", "surrogatepass")))
    return hashlib.sha256(b"".join(parts)).digest()


def page_key(parent: bytes, ids: Ids[int]) -> bytes:
    """The key of a full page with token ``ids`` whose predecessor has key ``parent``.

    Raises:
        OverflowError: an id outside the signed 64-bit range (see :func:`can_hash`).
    """
    tokens = array("q", ids)
    return hashlib.sha256(_field(b"parent", parent) + _field(b"tokens", tokens.tobytes())).digest()


def page_keys(ids: Ids[int], page_size: int, root: bytes, known: Ids[bytes] = ()) -> list[bytes]:
    """Keys of all full pages of ``ids``; ``known`` are those computed before, taken as they are."""
    keys = list(known)
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_size, len(ids) - page_size + 1, page_size):
        parent = page_key(parent, ids[start : start + page_size])
        keys.append(parent)
    return keys
