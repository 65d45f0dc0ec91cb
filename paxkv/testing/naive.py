"""Paged memory as a few dictionaries: obvious, slow, and the oracle of the real one.

Pages are numbers that are never used again, so nothing can alias by accident. Owners are counted by looking at every
block table. There is no free list, no due list and no running sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class NaivePages:
    """Block tables of running and of swapped sequences.

    Attributes:
        tables, host_tables: sequence → its pages, on the device and in the host pool.
        stored: sequence → tokens that have a slot.
        promised: page → slots that hold a token or will hold one of a prompt in prefill.
        filled: page → slots whose token is computed.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tables: dict[int, list[int]] = {}
        self.host_tables: dict[int, list[int]] = {}
        self.stored: dict[int, int] = {}
        self.promised: dict[int, int] = {}
        self.filled: dict[int, int] = {}

    def _new(self, promised: int, filled: int = 0) -> int:
        page = len(self.promised)
        self.promised[page], self.filled[page] = promised, filled
        return page

    # --- what may happen to a group ---------------------------------------------------------------

    def admit(self, seqs: Sequence[int], known: int, prompt: int, hits: Sequence[int] = ()) -> None:
        """Pages for ``known`` tokens of each sequence, the first ``hits`` taken as they are.

        A group that has generated nothing shares all its pages; after that, its sequences share what the prompt
        fills completely.
        """
        common = -(-known // self.page_size) if known == prompt else prompt // self.page_size
        shared = list(hits)
        for seq in seqs:
            table = shared[:]
            while len(table) * self.page_size < known:
                table.append(self._new(min(self.page_size, known - len(table) * self.page_size)))
            shared = table[:common]
            self.tables[seq], self.stored[seq] = table, known

    def compute(self, seq: int, start: int, count: int) -> None:
        """Prompt tokens from position ``start`` on are computed."""
        for position in range(start, start + count):
            page = self.tables[seq][position // self.page_size]
            self.filled[page] = max(self.filled[page], position % self.page_size + 1)

    def append(self, seq: int) -> bool:
        """One more token, computed. True if a shared page was copied for it."""
        table, slot = self.tables[seq], self.stored[seq] % self.page_size
        copied = slot > 0 and self.owners(table[-1]) > 1
        if slot == 0:
            table.append(self._new(0))
        elif copied:
            table[-1] = self._new(slot, slot)
        self.promised[table[-1]] = self.filled[table[-1]] = slot + 1
        self.stored[seq] += 1
        return copied

    def reorder(self, seqs: Sequence[int], parents: Sequence[int]) -> None:
        """Each sequence continues the one that ``parents`` names by index."""
        tables = [list(self.tables[seqs[parent]]) for parent in parents]
        self.tables.update(zip(seqs, tables, strict=True))

    def drop(self, seqs: Iterable[int]) -> None:
        """The sequences leave, from wherever they are."""
        for seq in list(seqs):
            self.tables.pop(seq, None)
            self.host_tables.pop(seq, None)
            self.stored.pop(seq, None)

    def swap_out(self, seqs: Iterable[int]) -> int:
        """Moves a group's tables to the host; returns the pages moved, shared ones once."""
        return self._move(seqs, self.tables, self.host_tables)

    def swap_in(self, seqs: Iterable[int]) -> int:
        """Moves a group's tables back; returns the pages moved."""
        return self._move(seqs, self.host_tables, self.tables)

    def _move(self, seqs: Iterable[int], source: dict[int, list[int]], target: dict[int, list[int]]) -> int:
        copies: dict[int, int] = {}  # sharing inside the group stays, sharing with other groups ends
        for seq in seqs:
            pages = source.pop(seq)
            for page in pages:
                if page not in copies:
                    copies[page] = self._new(self.promised[page], self.filled[page])
            target[seq] = [copies[page] for page in pages]
        return len(copies)

    # --- what can be asked ------------------------------------------------------------------------

    def owners(self, page: int) -> int:
        """Entries of device block tables that name ``page``."""
        return sum(table.count(page) for table in self.tables.values())

    @property
    def num_pages(self) -> int:
        """Device pages in use."""
        return len({page for table in self.tables.values() for page in table})

    @property
    def num_host_pages(self) -> int:
        """Host pages in use."""
        return len({page for table in self.host_tables.values() for page in table})

    def usage(self) -> dict[str, int]:
        """Slots of the pages in use, under the names of :class:`paxkv.sched.waste.Usage`."""
        owners = Counter(page for table in self.tables.values() for page in table)
        return {
            "live": sum(self.filled[page] for page, count in owners.items() if count == 1),
            "shared": sum(self.filled[page] for page, count in owners.items() if count > 1),
            "reserved": sum(self.promised[page] - self.filled[page] for page in owners),
            "internal": sum(self.page_size - self.promised[page] for page in owners),
            "pages": len(owners),
            "logical_pages": sum(owners.values()),
        }

    def compare(self, tables: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Checks that real device ``tables`` are these up to the pages' names; returns real → naive.

        Raises:
            AssertionError: a sequence or page too many or too few, or another sharing than here.
        """
        if set(tables) != set(self.tables):
            raise AssertionError(f"sequences {sorted(tables)} hold pages, must be {sorted(self.tables)}")
        naive_of: dict[int, int] = {}
        real_of: dict[int, int] = {}
        for seq, table in tables.items():
            naive = self.tables[seq]
            if len(table) != len(naive):
                raise AssertionError(f"sequence {seq} has {len(table)} pages, must have {len(naive)}")
            for index, (real, page) in enumerate(zip(table, naive, strict=True)):
                if naive_of.setdefault(real, page) != page or real_of.setdefault(page, real) != real:
                    raise AssertionError(f"page {index} of sequence {seq}: sharing must be {self.tables}, got {tables}")
        return naive_of
