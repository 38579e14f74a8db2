"""What `/status` says, as types: the one place that names its fields, their units and their meaning.

docs/status.md and docs/status.schema.json are made from this file: after a change, `python docs/generate_status.py`.

Every count since the start only grows. Every map over a closed set (reasons, causes, codes) has all of its keys from
the start, unless its field says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

STATUS_VERSION = 1
"""Fields are added without a change of this; it grows when one goes, or changes its type, unit or meaning."""


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The process."""

    release: Annotated[str, Meta(description="release of lmcache-qserver")]
    boot_id: Annotated[str, Meta(description="hex of 16 random bytes; another one: restarted")]
    pid: Annotated[int, Meta(description="process id")]
    uptime_s: Annotated[float, Meta(description="seconds since the start")]
    url: Annotated[str, Meta(description="where workers and SDKs connect, as bound")]
    http_url: Annotated[str, Meta(description="where this page is, as bound")]
    lifeline: Annotated[str, Meta(description="path of the Unix socket")]
    chunk_size: Annotated[int, Meta(description="tokens per chunk")]
    features: Annotated[list[str], Meta(description="kinds of tensors that are stored")]
    ready: Annotated[bool, Meta(description="what `/readyz` says")]
    clients: Annotated[int, Meta(description="clients by routing identity")]
    sessions: Annotated[int, Meta(description="clients that said hello")]


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a device."""

    device: Annotated[
        str, Meta(description="as that process numbers it (cuda:0); empty while it starts")
    ]
    pid: Annotated[int, Meta(description="process id; 0 while it starts")]
    state: Annotated[str, Meta(description="starting, ready, or lost: it is being killed")]


class RingLayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's ring, as registered."""

    num_layers: Annotated[int, Meta(description="attention layers of this rank")]
    num_blocks: Annotated[int, Meta(description="ring blocks")]
    block_size: Annotated[int, Meta(description="tokens per ring block")]
    hidden_dim: Annotated[
        int, Meta(description="elements of a row: heads of this rank times head_dim")
    ]
    dtype: Annotated[str, Meta(description="type of the elements")]
    layout_id: Annotated[str, Meta(description="hex, as in the object keys")]
    layout: Annotated[dict[str, Any], Meta(description="`Layout` of PROTOCOL.md")]


class RingUseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Use of rings, in ring blocks, by their workers' last reports."""

    blocks: Annotated[int, Meta(description="ring blocks in all")]
    used: Annotated[int, Meta(description="in use when the worker reported")]
    high_water: Annotated[int, Meta(description="most ever in use; over several workers the sum")]
    highest_ratio: Annotated[
        float, Meta(description="largest high_water / blocks of one worker, 0 to 1")
    ]


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker."""

    model_name: Annotated[str, Meta(description="as registered, without the feature's suffix")]
    world_size: Annotated[int, Meta(description="ranks")]
    transport: Annotated[
        str,
        Meta(
            description="how its bytes come: `shm`, `inline`, or the kind of device that they lie on (`cuda`)"
        ),
    ]
    device: Annotated[str, Meta(description="where its ring lies: cpu, or a device (cuda:0)")]
    q_ring_layout: Annotated[RingLayoutReport, Meta(description="its ring, as registered")]
    ring: Annotated[
        RingUseReport, Meta(description="its ring's use; all 0 before its first report")
    ]


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of one model, rank and layout."""

    model_name: Annotated[str, Meta(description="as in the keys, with the feature's suffix")]
    world_size: Annotated[int, Meta(description="ranks")]
    kv_rank: Annotated[int, Meta(description="which of them, as in the keys")]
    layout_id: Annotated[str, Meta(description="hex, as in the keys; empty from legacy clients")]
    layout: Annotated[dict[str, Any], Meta(description="`Layout` of PROTOCOL.md")]
    chunk_size: Annotated[int, Meta(description="tokens per chunk")]
    chunks: Annotated[int, Meta(description="whole chunks in host memory")]
    pieces: Annotated[int, Meta(description="pieces of chunks in host memory")]
    bytes: Annotated[int, Meta(description="bytes of both")]
    persisted: Annotated[
        int,
        Meta(
            description="objects that are known to lie in the persistent tier; of a bucket those that this server has "
            "written or read"
        ),
    ] = 0
    persisted_bytes: Annotated[int, Meta(description="their bytes, headers included")] = 0


class TotalsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Stores since the start."""

    submitted_stores: Annotated[int, Meta(description="stores that passed the checks")]
    finished_stores: Annotated[int, Meta(description="of these, stores that are over")]
    stored: Annotated[int, Meta(description="chunks stored")]
    duplicate: Annotated[int, Meta(description="chunks that were there before")]
    refused: Annotated[dict[str, int], Meta(description="chunks refused, by `LossReason`")]
    stored_bytes: Annotated[int, Meta(description="bytes of the chunks stored")]
    nonfinite_objects: Annotated[int, Meta(description="objects stored that hold NaN or Inf")]
    nonfinite_rows: Annotated[
        int, Meta(description="their rows (of one token in one layer) that hold some")
    ]
    rejected_stores: Annotated[
        dict[str, int],
        Meta(description="stores that failed the checks, by `ErrorCode`; only codes that occurred"),
    ]
    copied_bytes: Annotated[
        int,
        Meta(
            description="bytes that finished copies moved, proven or not; a failed copy counts none"
        ),
    ]
    copy_s: Annotated[
        float,
        Meta(description="seconds that these took, added up over workers that copy side by side"),
    ]


class ReadsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Lookups and retrieves since the start; the keys of maps are operations."""

    hits: Annotated[dict[str, int], Meta(description="objects found")]
    misses: Annotated[
        dict[str, dict[str, int]],
        Meta(description="chunks not found, and gaps within a chunk, by `MissReason`"),
    ]
    retrieved_chunks: Annotated[int, Meta(description="objects leased to readers")]
    retrieved_bytes: Annotated[int, Meta(description="their bytes")]
    capped: Annotated[
        int, Meta(description="retrieves that were cut off: the reader held as much as it may")
    ]


class LifecycleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Workers since the start."""

    registered: Annotated[
        int, Meta(description="registrations; one that only refreshes counts not")
    ]
    released: Annotated[
        dict[str, int], Meta(description="releases, by cause; `reaped`: was silent for too long")
    ]


class RequestsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Ended requests, by how much was captured of what they computed."""

    whole: Annotated[int, Meta(description="all of it")]
    partial: Annotated[int, Meta(description="some of it")]
    none: Annotated[int, Meta(description="nothing")]


class RecentRequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request, in tokens."""

    request_id: Annotated[str, Meta(description="the engine's id")]
    computed: Annotated[int, Meta(description="captured + lost")]
    captured: Annotated[int, Meta(description="stored")]
    lost: Annotated[
        dict[str, int], Meta(description="not stored, by `LossReason`; only those that occurred")
    ]


class FeatureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the workers account for them, of one feature."""

    computed: Annotated[int, Meta(description="tokens whose tensors were computed")]
    captured: Annotated[int, Meta(description="of these, tokens stored, now or before")]
    pending: Annotated[
        int, Meta(description="of these, tokens in open chunks and stores under way")
    ]
    lost: Annotated[
        dict[str, int], Meta(description="of these, tokens not stored, by `LossReason`")
    ]


class CoverageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as all workers account for them, those that have left too: computed = captured + lost + pending."""

    computed: Annotated[
        int, Meta(description="tokens computed, once for each feature that an engine captures")
    ]
    captured: Annotated[int, Meta(description="of these, tokens stored, now or before")]
    pending: Annotated[
        int, Meta(description="of these, tokens in open chunks and stores under way")
    ]
    lost: Annotated[
        dict[str, int], Meta(description="of these, tokens not stored, by `LossReason`")
    ]
    features: Annotated[
        dict[str, FeatureReport],
        Meta(description="by feature; a token counts once in each that an engine captures"),
    ]
    waited_s: Annotated[
        float,
        Meta(description="seconds that engines waited for ring blocks (`lmcache.q.on_full=wait`)"),
    ]
    requests: Annotated[RequestsReport, Meta(description="ended requests")]
    recent_requests: Annotated[
        dict[str, list[RecentRequestReport]],
        Meta(
            description="by instance id, of the workers heard of last: the requests that ended last"
        ),
    ]


class ChecksumsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Checksums of objects."""

    made: Annotated[int, Meta(description="checksums made since the start")]
    verified: Annotated[
        int, Meta(description="times that bytes agreed with theirs since the start")
    ]
    corrupt: Annotated[
        int, Meta(description="objects dropped since the start, because theirs did not")
    ]
    failed: Annotated[
        int,
        Meta(description="objects since the start that could not be looked at behind their store"),
    ]
    waiting: Annotated[int, Meta(description="objects that wait for theirs")]


class LeasesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of readers."""

    count: Annotated[int, Meta(description="leases that are held")]
    bytes: Annotated[int, Meta(description="pool bytes under lease, counted once per lease")]
    clients: Annotated[int, Meta(description="readers that hold any")]
    expired: Annotated[int, Meta(description="leases ended by time since the start")]
    cap_bytes_per_client: Annotated[int, Meta(description="what one reader may hold")]


class UploadsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Stores whose bytes come in messages."""

    open: Annotated[int, Meta(description="uploads that are not over")]
    bytes: Annotated[int, Meta(description="their objects' bytes, reserved in the pool")]
    given_up: Annotated[
        int, Meta(description="uploads since the start that ended before they were complete")
    ]
    cap_bytes_per_client: Annotated[int, Meta(description="what one client may reserve")]


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory: free + reserved + committed + leased = capacity, to the byte."""

    capacity_bytes: Annotated[int, Meta(description="size of the pool")]
    free_bytes: Annotated[int, Meta(description="not in use")]
    reserved_bytes: Annotated[int, Meta(description="being written")]
    committed_bytes: Annotated[
        int, Meta(description="stored and not leased: what eviction could free")
    ]
    leased_bytes: Annotated[int, Meta(description="stored and leased")]
    padding_bytes: Annotated[
        int, Meta(description="part of the last three that rounds up to pages")
    ]
    slots: Annotated[int, Meta(description="slots that are not free")]
    evictions: Annotated[int, Meta(description="slots evicted since the start")]
    evicted_bytes: Annotated[int, Meta(description="their bytes")]


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """The persistent tier. submitted = written + already_there + lost + waiting + writing, in objects."""

    url: Annotated[str, Meta(description="where it is")]
    state: Annotated[
        str,
        Meta(
            description="opening; ready; or failing: it is tried again from time to time, and until then nothing is "
            "written or read there"
        ),
    ]
    submitted: Annotated[int, Meta(description="objects stored since the start")]
    written: Annotated[int, Meta(description="of these, objects written")]
    written_bytes: Annotated[int, Meta(description="their bytes, headers included")]
    already_there: Annotated[int, Meta(description="of these, objects that were there before")]
    waiting: Annotated[int, Meta(description="of these, objects that wait for their turn")]
    waiting_bytes: Annotated[int, Meta(description="their bytes")]
    writing: Annotated[int, Meta(description="of these, objects that are being written")]
    pinned_bytes: Annotated[
        int,
        Meta(description="pool bytes, counted as leased, that wait to be written or are written"),
    ]
    lost: Annotated[
        dict[str, int],
        Meta(
            description="of these, objects that left host memory before they were written, or can't be: `evicted`, "
            "`expired`, `purged`, `corrupt` (their bytes had changed in memory), `failed` (see the log)"
        ),
    ]
    errors: Annotated[
        dict[str, int],
        Meta(
            description="attempts to write that failed: `unavailable`, `full`, `refused` (rights), `failed` (the log "
            "says why)"
        ),
    ]
    brought: Annotated[int, Meta(description="objects read back into host memory since the start")]
    brought_bytes: Annotated[int, Meta(description="their bytes")]
    fetching: Annotated[int, Meta(description="objects that are being read")]
    absent: Annotated[
        int, Meta(description="objects asked for since the start that are not there either")
    ]
    missed: Annotated[
        dict[str, int],
        Meta(
            description="objects that are there, or may be, and could not be given: `corrupt`, `expired`, `pool_full`, "
            "`unavailable` (these count questions)"
        ),
    ]
    quarantined: Annotated[
        int, Meta(description="corrupt objects put aside since the start; a person looks at them")
    ]
    objects: Annotated[
        int, Meta(description="objects that are known to lie there, see `models[].persisted`")
    ]
    bytes: Annotated[int, Meta(description="their bytes, headers included")]
    indexing: Annotated[
        bool, Meta(description="it is still being looked through; reading does not wait for that")
    ]
    index_s: Annotated[float, Meta(description="seconds that this took")]
    foreign: Annotated[int, Meta(description="files found there that are none of ours")]
    swept: Annotated[
        dict[str, int],
        Meta(
            description="objects deleted there since the start: `expired` (too old), `surplus` (unused for the longest "
            "time, because there was too much)"
        ),
    ]
    swept_bytes: Annotated[int, Meta(description="their bytes")]


NO_TIER = TierReport(
    url="",
    state="none",
    submitted=0,
    written=0,
    written_bytes=0,
    already_there=0,
    waiting=0,
    waiting_bytes=0,
    writing=0,
    pinned_bytes=0,
    lost={"evicted": 0, "expired": 0, "purged": 0, "corrupt": 0, "failed": 0},
    errors={"unavailable": 0, "full": 0, "refused": 0, "failed": 0},
    brought=0,
    brought_bytes=0,
    fetching=0,
    absent=0,
    missed={"corrupt": 0, "expired": 0, "pool_full": 0, "unavailable": 0},
    quarantined=0,
    objects=0,
    bytes=0,
    indexing=False,
    index_s=0.0,
    foreign=0,
    swept={"expired": 0, "surplus": 0},
    swept_bytes=0,
)
"""What a server without one would say; what has labels has all of them."""


class LanesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that hang."""

    hung: Annotated[int, Meta(description="of registered workers")]
    stuck_after_release: Annotated[int, Meta(description="of workers that have gone")]


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """All but the process."""

    registered_q_ids: Annotated[
        list[int | str], Meta(description="instance ids of registered workers")
    ]
    q_context_meta: Annotated[
        dict[str, InstanceReport], Meta(description="the same workers, by id")
    ]
    models: Annotated[list[ModelReport], Meta(description="what is stored")]
    totals: Annotated[TotalsReport, Meta(description="stores")]
    reads: Annotated[ReadsReport, Meta(description="lookups and retrieves")]
    instances: Annotated[LifecycleReport, Meta(description="workers that came and went")]
    coverage: Annotated[CoverageReport, Meta(description="the workers' accounts")]
    rings: Annotated[RingUseReport, Meta(description="rings of all registered workers")]
    checksums: Annotated[ChecksumsReport, Meta(description="checksums of objects")]
    leases: Annotated[LeasesReport, Meta(description="readers' leases")]
    uploads: Annotated[UploadsReport, Meta(description="stores that come in messages")]
    pool: Annotated[PoolReport, Meta(description="host memory")]
    lanes: Annotated[LanesReport, Meta(description="copies that hang")]
    draining: Annotated[bool, Meta(description="no new stores and registrations are taken")]
    l2: Annotated[TierReport | None, Meta(description="the persistent tier; null without one")] = (
        None
    )


class StatusReport(StoreReport, frozen=True, kw_only=True):
    """The body of `/status`."""

    version: Annotated[int, Meta(description=f"of this page's meaning: {STATUS_VERSION}")]
    server: Annotated[ServerReport, Meta(description="the process")]
    devices: Annotated[
        list[DeviceReport], Meta(description="processes that copy out of devices; most hosts: none")
    ]
