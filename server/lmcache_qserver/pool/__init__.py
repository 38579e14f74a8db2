"""L1: one shared memory arena, and the account of who has which bytes of it."""

from lmcache_qserver.pool.memory import PoolMemory
from lmcache_qserver.pool.pool import Pool, PoolUsage, Reservation
from lmcache_qserver.pool.slot import PoolStateError, Slot, SlotState

__all__ = [
    "Pool",
    "PoolMemory",
    "PoolStateError",
    "PoolUsage",
    "Reservation",
    "Slot",
    "SlotState",
]
