"""Which bytes of the arena are free: extents, best fit, merged at once.

An extent is a half-open range [start, start + nbytes) of whole alignment units. Free extents never
touch each other (a freed range is merged with its free neighbours at once), and used extents keep
the bounds they were allocated with.

Best fit, because the sizes of a pool come in few classes: one whole chunk per layout, and smaller
pieces. A piece then goes into a hole that a piece left, and chunk-sized holes stay whole. Of
equally good holes the one freed last is taken: its pages are real and may still be in the CPU's
cache. A larger hole is cut at its low end.

Cost: free extents are found by either end in dicts, and by size in bins: a sorted list of the
*distinct* sizes and one dict of starts per size. `allocate` and `free` take O(log k) comparisons,
and move O(k) list entries only when a size appears or disappears, with k distinct sizes: a handful
in practice, and below sqrt(2 n) for an arena of n units (23,000 for 1 TiB) whatever happens.

Not thread-safe: one thread (the event loop) calls it.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """The free list of an arena.

    Args:
        nbytes: size of the arena, a positive multiple of alignment.
        alignment: every extent begins and ends at a multiple of it; 4096 fits pages and O_DIRECT.

    Raises:
        ValueError: alignment is not positive, or nbytes is not a positive multiple of it.
    """

    def __init__(self, nbytes: int, alignment: int = 4096) -> None:
        if alignment <= 0:
            raise ValueError(f"alignment must be positive, not {alignment}")
        if nbytes <= 0 or nbytes % alignment:
            raise ValueError(
                f"the arena must be a positive multiple of {alignment} bytes, not {nbytes}"
            )
        self.nbytes = nbytes
        self.alignment = alignment
        self._used: dict[int, int] = {}  # start -> nbytes of what is allocated
        self._end_of: dict[int, int] = {}  # free extents, start -> end
        self._start_of: dict[int, int] = {}  # free extents, end -> start
        self._bins: dict[
            int, dict[int, None]
        ] = {}  # size -> starts of the free extents, freed last at the end
        self._sizes: list[int] = []  # the keys of _bins, ascending
        self._free_bytes = 0
        self._add_free(0, nbytes)

    @property
    def free_bytes(self) -> int:
        """Bytes in free extents."""
        return self._free_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free extent: the most that one `allocate` can get."""
        return self._sizes[-1] if self._sizes else 0

    def span(self, nbytes: int) -> int:
        """The bytes that an allocation of nbytes takes: rounded up to whole alignment units."""
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `span(nbytes)` bytes, now the caller's; None when no hole is that large.

        Raises:
            ValueError: nbytes is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"an extent needs a positive number of bytes, not {nbytes}")
        wanted = self.span(nbytes)
        index = bisect_left(self._sizes, wanted)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        start = next(reversed(self._bins[size]))
        self._remove_free(start, start + size)
        if size > wanted:
            self._add_free(start + wanted, start + size)
        self._used[start] = wanted
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Give back exactly what one `allocate(nbytes)` gave.

        Raises:
            ValueError: this is no allocated extent: outside the arena, free already, or with other
                bounds. Nothing has changed.
        """
        wanted = self.span(nbytes)
        if nbytes <= 0 or offset < 0 or offset + wanted > self.nbytes:
            raise ValueError(f"[{offset}, +{nbytes}) is outside the arena of {self.nbytes} bytes")
        used = self._used.get(offset)
        if used is None:
            raise ValueError(f"no extent is allocated at {offset}: freed twice, or never allocated")
        if used != wanted:
            raise ValueError(f"the extent at {offset} has {used} bytes, not {wanted}")
        del self._used[offset]
        start, end = self.hole_around(offset, offset + wanted)
        if start < offset:
            self._remove_free(start, offset)
        if end > offset + wanted:
            self._remove_free(offset + wanted, end)
        self._add_free(start, end)

    def hole_around(self, start: int, end: int) -> tuple[int, int]:
        """(start, end) of the free extent that [start, end) would belong to if it were freed."""
        return self._start_of.get(start, start), self._end_of.get(end, end)

    def allocated(self) -> dict[int, int]:
        """A copy of what is allocated: start -> span in bytes. O(n)."""
        return dict(self._used)

    def validate(self) -> None:
        """Assert that extents tile the arena, no free ones touch, all indexes agree. O(n log n)."""
        tiles = sorted(
            [(start, start + nbytes, False) for start, nbytes in self._used.items()]
            + [(start, end, True) for start, end in self._end_of.items()]
        )
        position, previous_is_free = 0, False
        for start, end, is_free in tiles:
            assert start == position, (
                f"gap or overlap at {position}: the next extent starts at {start}"
            )
            assert end > start, f"empty extent at {start}"
            assert end % self.alignment == 0, f"extent ends between units at {end}"
            assert not (is_free and previous_is_free), f"free neighbours are not merged at {start}"
            position, previous_is_free = end, is_free
        assert position == self.nbytes, f"extents end at {position} of {self.nbytes}"
        free = {(start, end - start) for start, end in self._end_of.items()}
        assert self._start_of == {start + size: start for start, size in free}
        assert free == {(start, size) for size, starts in self._bins.items() for start in starts}
        assert all(self._bins.values()), "an empty bin is left"
        assert self._sizes == sorted(self._bins)
        assert self._free_bytes == sum(size for _, size in free)

    def _add_free(self, start: int, end: int) -> None:
        size = end - start
        self._end_of[start] = end
        self._start_of[end] = start
        starts = self._bins.get(size)
        if starts is None:
            self._bins[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None
        self._free_bytes += size

    def _remove_free(self, start: int, end: int) -> None:
        size = end - start
        del self._end_of[start]
        del self._start_of[end]
        starts = self._bins[size]
        del starts[start]
        if not starts:
            del self._bins[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self._free_bytes -= size
