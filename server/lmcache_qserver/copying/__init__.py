"""Moving bytes: the thread that does it, the memory they come from, and the copy itself."""

from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault, copy_chunks
from lmcache_qserver.copying.crew import Crew
from lmcache_qserver.copying.lane import Job, Lane, LaneClosed, LaneError, LaneHung, LaneTimeout
from lmcache_qserver.copying.ring_geometry import RingGeometry
from lmcache_qserver.copying.ring_source import RingSource
from lmcache_qserver.copying.shm import RingMemory

__all__ = [
    "ChunkCopy",
    "Crew",
    "Job",
    "Lane",
    "LaneClosed",
    "LaneError",
    "LaneHung",
    "LaneTimeout",
    "RingGeometry",
    "RingMemory",
    "RingSource",
    "StampFault",
    "copy_chunks",
]
