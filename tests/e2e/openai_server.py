"""vLLM's OpenAI server as a subprocess on a free port, for tests: `running_server` starts it, `ask` sends a request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Two threads wait for each other at every layer: on a busy machine that takes a hundred times as long.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
START_S = 200.0
ANSWER_S = 100.0
STOP_S = 60.0


@dataclass(frozen=True)
class OpenAIServer:
    """A server that answers.

    Attributes:
        url: of its root.
        model: the name it serves.
    """

    url: str
    model: str

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a POST; token ids come with it.

        Raises:
            urllib.error.HTTPError: it is not a 2xx.
        """
        content = {"model": self.model, "return_token_ids": True, **body}
        request = urllib.request.Request(
            self.url + path,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer


@contextlib.contextmanager
def running_server(
    model: str, transfer_config: dict[str, Any], log: Path, cwd: Path, *more: str
) -> Iterator[OpenAIServer]:
    """`python -m vllm.entrypoints.openai.api_server`, in fp32 and eager; SIGTERM ends it.

    Args:
        model: folder, relative to `cwd`; also the name that is served.
        transfer_config: for `--kv-transfer-config`.
        log: file for what it prints.
        more: arguments.

    Raises:
        AssertionError: it does not come up; its log is in the message.
    """
    port = _free_port()
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    argv += ["--max-model-len", "2048", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.3"]
    argv += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer_config)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*argv, *more],
            cwd=cwd,
            stdout=output,
            stderr=output,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,
        )
    try:
        _wait_for(process, f"http://127.0.0.1:{port}/health", log)
        yield OpenAIServer(f"http://127.0.0.1:{port}", model)
        process.terminate()
        process.wait(STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its engine is a process of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the server ended:\n{log.read_text()[-6000:]}"
        assert time.monotonic() < end, f"no answer at {url}:\n{log.read_text()[-6000:]}"
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
