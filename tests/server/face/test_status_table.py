from __future__ import annotations

from typing import Any

from lmcache_qserver.face.status_table import table

REPORT: dict[str, Any] = {
    "server": {
        "release": "1.2.3",
        "ready": True,
        "pid": 42,
        "uptime_s": 3700.0,
        "url": "tcp://127.0.0.1:5555",
        "http_url": "http://127.0.0.1:8080",
        "lifeline": "/run/x.sock",
        "chunk_size": 256,
        "features": ["transfer_query"],
        "clients": 2,
        "sessions": 1,
    },
    "pool": {"capacity_bytes": 1 << 30, "free_bytes": 1 << 29, "leased_bytes": 0, "evictions": 3},
    "totals": {
        "submitted_stores": 9,
        "finished_stores": 8,
        "stored": 7,
        "duplicate": 6,
        "refused": {"pool_full": 2, "copy_failed": 0},
        "stored_bytes": 3 << 20,
    },
    "l2": {
        "url": "file:///x/l2",
        "state": "ready",
        "objects": 12,
        "bytes": 8 << 20,
        "indexing": True,
        "written": 3,
        "already_there": 2,
        "waiting": 2,
        "writing": 1,
        "waiting_bytes": 1 << 20,
        "lost": {"evicted": 4, "failed": 0},
        "errors": {"full": 2, "refused": 0},
        "quarantined": 1,
        "brought": 6,
        "brought_bytes": 3 << 20,
    },
    "q_context_meta": {
        "7": {
            "model_name": "org/model",
            "world_size": 2,
            "q_ring_layout": {
                "num_layers": 30,
                "num_blocks": 1024,
                "block_size": 16,
                "hidden_dim": 576,
                "dtype": "bfloat16",
            },
        }
    },
    "models": [
        {
            "model_name": "org/model##query",
            "kv_rank": 0x01000100,
            "layout_id": "00112233445566778899aabbccddeeff",
            "chunks": 5,
            "chunk_size": 256,
            "bytes": 5 << 20,
            "persisted": 6,
        }
    ],
    "coverage": {
        "computed": 1000,
        "captured": 900,
        "pending": 40,
        "lost": {"ring_full": 10, "preempted": 50, "unmatched": 0},
        "features": {
            "transfer_query": {
                "computed": 1000,
                "captured": 900,
                "pending": 40,
                "lost": {"ring_full": 10, "preempted": 50, "unmatched": 0},
            }
        },
        "waited_s": 2.5,
    },
    "rings": {"blocks": 1024, "used": 100, "highest_ratio": 0.75},
}


def test_the_table() -> None:
    assert table(REPORT).splitlines() == [
        "server     1.2.3, ready, pid 42, up 1 h 1 min",
        "           tcp://127.0.0.1:5555  http://127.0.0.1:8080",
        "           lifeline /run/x.sock",
        "           chunks of 256 tokens; transfer_query",
        "           clients: 2, with a session: 1",
        "pool       512.0 MiB of 1.0 GiB used (50 %), 0 B leased, 3 evictions",
        "stores     8 of 9 finished",
        "           chunks: 7 stored (3.0 MiB), 6 duplicate, refused: pool_full 2",
        "persists   file:///x/l2, ready: 12 objects (8.0 MiB) known there, being looked through",
        "           3 written, 2 there before, 3 waiting (1.0 MiB), lost: evicted 4",
        "           6 read back (3.0 MiB), trouble: full 2, corrupt 1",
        "instances  id  model      world  ring (layers x blocks x tokens x hidden)",
        "           7   org/model  2      30 x 1024 x 16 x 576 bfloat16",
        "models     model             rank      layout        chunks  tokens at most  bytes    persisted",
        "           org/model##query  01000100  001122334455  5       1280            5.0 MiB  6",
        "coverage   900 of 1000 computed tokens captured (90.0 %), 40 pending",
        "           lost: preempted 50, ring_full 10",
        "rings      100 of 1024 blocks in use, 75 % of the fullest one ever",
        "           engines waited 2.5 s for ring blocks",
    ]


def test_a_server_without_a_persistent_tier_says_so() -> None:
    assert "persists   nothing (--l2 none)" in table({**REPORT, "l2": None}).splitlines()


def test_several_features_have_a_line_each() -> None:
    query = {"computed": 600, "captured": 600, "pending": 0, "lost": {"ring_full": 0}}
    key = {"computed": 400, "captured": 300, "pending": 40, "lost": {"ring_full": 60}}
    features = {"transfer_query": query, "transfer_key": key}
    coverage = {**REPORT["coverage"], "features": features}
    lines = table({**REPORT, "coverage": coverage}).splitlines()
    begin = lines.index("           lost: preempted 50, ring_full 10") + 1
    assert lines[begin : begin + 3] == [
        "features   feature         computed  captured  pending  lost",
        "           transfer_query  600       600       0        none",
        "           transfer_key    400       300       40       ring_full 60",
    ]


def test_what_clients_have_named_cannot_drive_the_terminal() -> None:
    hostile = "org/\x1b[2Jm\nrings      none\u009b1m\u202e"
    instance = {**REPORT["q_context_meta"]["7"], "model_name": hostile}
    models = [{**REPORT["models"][0], "model_name": hostile}]
    report = {**REPORT, "q_context_meta": {hostile: instance}, "models": models}
    text = table(report)
    assert text.count(r"org/\x1b[2Jm\nrings      none\x9b1m\u202e") == 3
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("\n") == table(REPORT).count("\n")
