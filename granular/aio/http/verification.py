"""Verification of what the reply to a range read leaves open: checksum of a whole object, coding and length."""

from collections.abc import Awaitable, Callable
from typing import Final

from granular.aio.http.digests import check_reported, digest, etag_md5
from granular.aio.http.download import Download, Versions
from granular.aio.http.messages import Head, Target
from granular.aio.http.refusals import refusal
from granular.aio.http.reply import Reply
from granular.errors import BadReplyError

_REMEMBERED: Final = 65536

Send = Callable[[Target, Download], Awaitable[Head]]
"""Sends the request of a download and returns the head of its reply."""


class Verifier:
    """Verifies downloads, where necessary by further requests; remembers what these revealed about the store."""

    def __init__(self, send: Send, versions: Versions) -> None:
        self._send, self._versions = send, versions
        self._etags_are_md5: bool | None = None  # for objects that may have such ETags; None until known
        self._stored: dict[tuple[str, str], str] = {}  # the coding that a version of a key is stored with

    async def verify(self, target: Target, download: Download, head: Head, reply: Reply) -> None:
        """Verify the coding and length of a reply, and the checksum of a whole object."""
        data, name = download.content(reply), download.name
        complete = len(data) == reply.size and head.status != 416
        checked = complete and await check_reported(head.headers, data, name, download.ranged)
        if download.unproven and not checked:
            await self._verify_stored(target, download, reply)
        expected = etag_md5(head.headers) if complete and not checked else None
        if expected is None:
            return
        computed = (await digest('md5', data)).hex()
        if computed == expected:
            self._etags_are_md5 = True
            return
        if self._etags_are_md5 is None and await self._arrives_again(target, reply, computed, name):
            self._etags_are_md5 = False  # the ETags of this store are not MD5s
        if self._etags_are_md5 is not False:
            raise BadReplyError(f'{name}: {len(data)} bytes came with MD5 {computed}, the ETag says {expected}')

    async def _arrives_again(self, target: Target, reply: Reply, md5: str, name: str) -> bool:
        """Return whether the whole object, requested in two halves, has the same bytes, by their MD5."""
        if not reply.size:
            return (await self._send(target, self._part(name, reply, 0, 1))).status == 416
        middle, halves = reply.size // 2, []
        for start, stop in ((0, middle), (middle, reply.size)):
            if start == stop:
                continue
            part = self._part(name, reply, start, stop)
            head = await self._send(target, part)
            half = part.take(head)
            if half is None:
                raise refusal(head, part.collected, name)
            if half.size != reply.size:
                return False
            halves.append(half.data)
        return (await digest('md5', b''.join(halves))).hex() == md5

    async def _verify_stored(self, target: Target, download: Download, reply: Reply) -> None:
        """Verify that an object is stored with the Content-Encoding, or the length, that a reply has.

        Data compressed in transit carries the same header as data stored compressed, and may have the length of the
        range by chance. Its last byte, requested alone, is one byte with the same header only if it is stored so: no
        compression turns one byte into one byte.
        """
        coding, name = download.coding, download.name
        identity = download.key, reply.version or ''
        if coding and self._stored.get(identity) == coding:
            return
        data = download.content(reply)
        last = max(0, reply.start + len(data) - 1)
        single = self._part(name, reply, last, last + 1)
        head = await self._send(target, single)
        if head.status == 206:
            byte = single.take(head)
            if byte is not None and (byte.size, byte.data, single.coding) == (reply.size, bytes(data[-1:]), coding):
                if coding and reply.version is not None:
                    if len(self._stored) >= _REMEMBERED:
                        self._stored.clear()
                    self._stored[identity] = coding
                return
        elif head.status == 416 and not data:
            return
        elif head.status != 200:
            raise refusal(head, single.collected, name)
        elif not self._versions.required and not coding:
            return  # a server without ranges
        detail = f'with Content-Encoding {coding[:80]}' if coding else 'without a length'
        raise BadReplyError(f'{name}: {len(data)} bytes came {detail}, but the object is not stored so')

    def _part(self, name: str, reply: Reply, start: int, stop: int) -> Download:
        return Download('', lambda _: name, start, stop, reply.version, self._versions)
