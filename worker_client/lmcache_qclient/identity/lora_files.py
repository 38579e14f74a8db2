"""A LoRA adapter by its content: one digest over the files that an engine loads it from.

    digest = "blake3:" ‖ hex of derive(LORA_CONTEXT, msgpack [[file name, blake3 of its bytes], ...])

over those of `FILES` that are there, in this order. The same adapter has the same digest on every machine, whatever
its path is there; two adapters of one name never share one. The configuration counts too: it scales the weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from blake3 import blake3

LORA_CONTEXT = "lmcache-qserver 2026-11 lora files v1"
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
FILES = (CONFIG, *WEIGHTS, "new_embeddings.safetensors", "new_embeddings.bin")

Signature = tuple[tuple[str, int, int, int, int, int], ...]
"""(file name, bytes, modification and change time in nanoseconds, inode, device) of every file that is there.

The change time, because a copy that keeps times and sizes gives other files the same of all the rest.
"""


def lora_signature(path: str | os.PathLike[str]) -> Signature:
    """What changes when the adapter's files do; cheap.

    Raises:
        OSError: this is no folder with an adapter's configuration and weights, or it can't be read.
    """
    folder = Path(path).expanduser()
    found = []
    for name in FILES:
        try:
            stat = (folder / name).stat()
        except FileNotFoundError:
            continue
        times = stat.st_mtime_ns, stat.st_ctime_ns
        found.append((name, stat.st_size, *times, stat.st_ino, stat.st_dev))
    names = {name for name, *_ in found}
    if CONFIG not in names or not names.intersection(WEIGHTS):
        raise FileNotFoundError(
            f"no LoRA adapter in {folder}: {CONFIG} and {WEIGHTS[0]} belong there"
        )
    return tuple(found)


def lora_digest(path: str | os.PathLike[str]) -> str:
    """The digest of an adapter's folder; reads all of its files (some GB/s).

    Raises:
        OSError: as `lora_signature`, or the files changed meanwhile.
    """
    folder, before = Path(path).expanduser(), lora_signature(path)
    contents = []
    for name, size, *_ in before:
        content = blake3()
        if size:  # an empty file can't be mapped
            content.update_mmap(folder / name)
        contents.append((name, content.digest()))
    if lora_signature(path) != before:
        raise OSError(f"the adapter in {folder} is being written: wait until it is whole")
    files = msgspec.msgpack.encode(contents)
    return "blake3:" + blake3(files, derive_key_context=LORA_CONTEXT).hexdigest()
