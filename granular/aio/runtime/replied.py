"""Servers that have replied to this process, its workers, or the one that started it: their failures are temporary."""

from typing import Final

from granular._support.lru import LRU

_MOST: Final = 4096

Server = tuple[bool, str, int, tuple[str, int] | None]
"""True if TLS is used, the host and port, and the host and port of the proxy."""

known: Final[LRU[Server, bool]] = LRU(_MOST)


def note_reply(server: Server) -> None:
    """Record a reply of a server; the last 4,096 servers are remembered."""
    known.put(server, True)


def has_replied(server: Server) -> bool:
    return server in known


def replied_servers() -> list[Server]:
    """Return the servers that have replied, for another process."""
    return [server for server, _ in known.items()]


def inherit_replies(servers: list[Server]) -> None:
    """Take over the servers that have replied to another process: the one that started this one, or a worker."""
    for server in servers:
        note_reply(server)
