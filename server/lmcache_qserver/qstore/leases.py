"""Who is reading what. An object that is leased stays where and what it is.

A lease ends by release, by its time, or with its client. One client's leases are capped, so that no reader can make
the pool unevictable. Bytes count as the pool counts them (slots rounded up to pages), and per lease: an object that is
leased twice counts twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.pool import Pool, Slot
from lmcache_qserver.status_report import LeasesReport


@dataclass(frozen=True, slots=True)
class Lease:
    """Slots held for one answer to one client."""

    lease_id: int
    client: Hashable
    slots: tuple[Slot, ...]
    nbytes: int
    """Spans of the slots."""
    expires_at: float


class Leases:
    """All leases of this server.

    Args:
        pool: whose slots are leased.
        cap_bytes: what one client may hold at a time.
        timeout_s: seconds after which a lease ends by itself.
    """

    def __init__(self, pool: Pool, cap_bytes: int, timeout_s: float) -> None:
        self.cap_bytes = cap_bytes
        self.timeout_s = timeout_s
        self._pool = pool
        self._leases: dict[int, Lease] = {}
        """By id. All have the same time to live, so the order of ids is the order of expiry."""
        self._of_client: dict[Hashable, set[int]] = {}
        self._held_bytes: dict[Hashable, int] = {}
        self._last_id = 0
        self._expired = 0

    def room(self, client: Hashable) -> int:
        """Bytes that the client may still lease."""
        return max(0, self.cap_bytes - self._held_bytes.get(client, 0))

    def affordable(self, client: Hashable, slots: Sequence[Slot]) -> int:
        """How many of the first slots the client may lease now.

        A client that holds nothing gets at least one, else an object larger than the cap could never be read.
        """
        room = self.room(client)
        count = 0
        for slot in slots:
            room -= slot.span
            if room < 0 and (count or client in self._of_client):
                break
            count += 1
        return count

    def grant(self, client: Hashable, slots: Sequence[Slot], now: float) -> int:
        """Lease these slots under a new id, unique in this server; 0 when there are none."""
        if not slots:
            return 0
        for slot in slots:
            self._pool.lease(slot)
        self._last_id += 1
        nbytes = sum(slot.span for slot in slots)
        lease = Lease(self._last_id, client, tuple(slots), nbytes, now + self.timeout_s)
        self._leases[lease.lease_id] = lease
        self._of_client.setdefault(client, set()).add(lease.lease_id)
        self._held_bytes[client] = self._held_bytes.get(client, 0) + nbytes
        return lease.lease_id

    def release(self, client: Hashable, lease_ids: Iterable[int]) -> None:
        """Give leases back.

        Raises:
            RequestError(unknown_lease): some of them are over, or are not this client's; the others are released.
        """
        unknown = []
        for lease_id in lease_ids:
            if lease_id in self._of_client.get(client, ()):
                self._end(self._leases[lease_id])
            else:
                unknown.append(lease_id)
        if unknown:
            raise RequestError(
                ErrorCode.UNKNOWN_LEASE,
                f"you hold no lease {unknown[0]} ({len(unknown)} unknown): if it has expired, what was read under it "
                "may have changed meanwhile: retrieve again",
            )

    def slot(self, client: Hashable, lease_id: int, place: int, now: float) -> Slot:
        """The slot at this place of a lease that holds.

        Raises:
            RequestError: unknown_lease when it is over, or is not this client's; bad_payload beyond its end.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client or lease.expires_at <= now:
            raise RequestError(
                ErrorCode.UNKNOWN_LEASE, f"you hold no lease {lease_id} any more: retrieve again"
            )
        if 0 <= place < len(lease.slots) and lease.slots[place].doomed:
            raise RequestError(
                ErrorCode.UNKNOWN_LEASE,
                f"chunk {place} of lease {lease_id} has been dropped meanwhile: retrieve again",
            )
        if not 0 <= place < len(lease.slots):
            raise RequestError(
                ErrorCode.BAD_PAYLOAD,
                f"lease {lease_id} has {len(lease.slots)} chunks, none at place {place}",
            )
        return lease.slots[place]

    def client_gone(self, client: Hashable) -> int:
        """End all leases of a client; how many there were."""
        lease_ids = tuple(self._of_client.get(client, ()))
        for lease_id in lease_ids:
            self._end(self._leases[lease_id])
        return len(lease_ids)

    def expire(self, now: float) -> int:
        """End the leases whose time is over; how many there were."""
        over = []
        for lease in self._leases.values():
            if lease.expires_at > now:
                break
            over.append(lease)
        for lease in over:
            self._end(lease)
        self._expired += len(over)
        return len(over)

    def summary(self) -> LeasesReport:
        """For `/status`."""
        return LeasesReport(
            count=len(self._leases),
            bytes=sum(self._held_bytes.values()),
            clients=len(self._of_client),
            expired=self._expired,
            cap_bytes_per_client=self.cap_bytes,
        )

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        self._of_client[lease.client].remove(lease.lease_id)
        self._held_bytes[lease.client] -= lease.nbytes
        if not self._of_client[lease.client]:
            del self._of_client[lease.client], self._held_bytes[lease.client]
        # Last to first: the beginning of a sequence becomes the most recently used.
        for slot in reversed(lease.slots):
            self._pool.release(slot)
