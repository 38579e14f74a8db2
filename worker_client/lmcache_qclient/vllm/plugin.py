"""Entry point `vllm.general_plugins`: makes `--kv-transfer-config '{"kv_connector": "QServerConnector", ...}'` work.

Every process of vLLM runs it; it registers a name and does nothing else.
"""

from __future__ import annotations

NAME = "QServerConnector"


def register() -> None:
    """Register the connector's name with vLLM, once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmcache_qclient.vllm.connector", NAME)
