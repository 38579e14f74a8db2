"""Refusals that several operations share."""

from __future__ import annotations

from collections.abc import Hashable

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.qstore.instance import Instance, InstanceId


def check_owner(instance: Instance, client: Hashable) -> None:
    """Whether the instance is this client's.

    Raises:
        RequestError(not_owner): it is not.
    """
    if instance.client != client:
        raise RequestError(
            ErrorCode.NOT_OWNER,
            f"instance {instance.instance_id!r} belongs to another connection: register a ring of your own",
        )


def unknown_instance(instance_id: InstanceId) -> RequestError:
    """Nobody is registered under this id."""
    return RequestError(
        ErrorCode.UNKNOWN_INSTANCE, f"instance {instance_id!r} has no ring here: register it first"
    )


def shutting_down() -> RequestError:
    """The server begins nothing new."""
    return RequestError(
        ErrorCode.SHUTTING_DOWN, "the server is shutting down: try another, or later"
    )
