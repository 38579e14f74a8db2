"""What is known to lie in the persistent tier: hints, so that a store need not ask for everything it has never seen.

A name stands for itself by its hash in this process, 8 bytes; a hundred thousand names take some megabytes. Another
server, or a person, may have deleted what is held here: who relies on a hint looks first.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qserver.qstore.inventory import Kind
from lmcache_qserver.qstore.stored_object import Description
from lmcache_qserver.tier.format import Header
from lmcache_qserver.tier.paths import Address


@dataclass(slots=True)
class Holding:
    """Objects of one model, layout and rank.

    Attributes:
        kind, description: None until one of them has been looked at.
    """

    kind: Kind | None = None
    description: Description | None = None
    objects: int = 0
    nbytes: int = 0


class Held:
    """Names, and what they amount to."""

    def __init__(self) -> None:
        self._names: set[int] = set()
        self.holdings: dict[str, Holding] = {}
        """By the folder of their layout."""
        self._fresh: Held | None = None

    def __len__(self) -> int:
        """Names."""
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return hash(name) in self._names

    @property
    def nbytes(self) -> int:
        """Bytes of all, headers included."""
        return sum(holding.nbytes for holding in self.holdings.values())

    def add(self, name: str, address: Address, nbytes: int) -> None:
        """It lies there; nothing if that is known.

        Args:
            nbytes: header included.
        """
        if self._fresh is not None:
            self._fresh.add(name, address, nbytes)
        if hash(name) in self._names:
            return
        self._names.add(hash(name))
        holding = self.holdings.setdefault(address.layout_folder, Holding())
        holding.objects += 1
        holding.nbytes += nbytes

    def remove(self, name: str, address: Address, nbytes: int) -> None:
        """It does not lie there any more; nothing if it was not known to."""
        if self._fresh is not None:
            self._fresh.remove(name, address, nbytes)
        if hash(name) not in self._names:
            return
        self._names.remove(hash(name))
        holding = self.holdings[address.layout_folder]
        holding.objects -= 1
        holding.nbytes -= nbytes

    def begin_anew(self) -> Held:
        """An empty one, to be filled by whoever goes through the store; what is added here is added there, too."""
        self._fresh = Held()
        return self._fresh

    def take(self, fresh: Held) -> None:
        """Know from now on what `fresh` does, and no more; descriptions stay."""
        if self._fresh is not fresh:
            return  # somebody else has begun anew since
        self._fresh = None
        for folder, holding in fresh.holdings.items():
            if before := self.holdings.get(folder):
                holding.kind, holding.description = before.kind, before.description
        self._names, self.holdings = fresh._names, fresh.holdings

    def forget(self, name: str) -> None:
        """It does not lie there any more, whatever its length was."""
        self._names.discard(hash(name))

    def describe(self, header: Header) -> None:
        """An object's header has been seen: it tells of all that lie in its folder."""
        holding = self.holdings.setdefault(header.address.layout_folder, Holding())
        if holding.kind is None:
            holding.kind = (header.model_name, header.world_size, header.kv_rank, header.layout_id)
            holding.description = Description(header.layout, header.block_size, header.chunk_size)

    def kinds(self) -> dict[Kind, Holding]:
        """What has been described."""
        return {
            holding.kind: holding for holding in self.holdings.values() if holding.kind is not None
        }
