"""The objects of a simulated bucket, and its answers in the JSON API of Google Cloud Storage or as a web server."""

import base64
import json
import pathlib
import re
import urllib.parse
from typing import Any

from granular.formats.checksums import crc32c

_RANGE = re.compile(rb'\r\nRange: bytes=(\d*)-(\d*)\r\n')
_API = re.compile(r'(?:/download|/upload)?/storage/v1/b/([^/]+)/o(?:/(.*))?')
_UPDATED = '2026-01-01T00:00:00Z'
_MISSING = b'{"error": {"code": 404}}'
_PAGE = 1000

Reply = tuple[bytes, memoryview]
"""Status line and headers of a reply without the line that differs in every reply, and its body."""


class Objects:
    """Objects by path, ``/bucket/key``. Each has one generation, '1'.

    Args:
      folder: the bucket: its files are the objects.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        files = (path for path in folder.rglob('*') if path.is_file())
        self.data = {f'/{folder.name}/{path.relative_to(folder)}': path.read_bytes() for path in files}
        self._sorted: list[str] | None = None

    def key(self, target: str) -> str:
        """Return the path of the object, or the bucket, that a request is for."""
        path = urllib.parse.unquote(target.partition('?')[0])
        match = _API.fullmatch(path)
        return path if match is None else f'/{match[1]}/{match[2] or ""}'

    def reply(self, method: str, target: str, request: bytes) -> Reply:
        """Answer a request."""
        key = self.key(target)
        if method == 'POST':
            return self._uploaded(key, request)
        if target.startswith('/storage/'):
            if key.endswith('/'):
                return self._page(key, dict(urllib.parse.parse_qsl(target.partition('?')[2])))
            return _document(self._resource(key)) if key in self.data else _head('404 Not Found', _MISSING)
        data = self.data.get(key)
        if data is None:
            return _head('404 Not Found', _MISSING)
        versions = 'ETag: "1"\r\nX-Goog-Generation: 1\r\n'
        size, match = len(data), _RANGE.search(request)
        if match is None:
            return _head('200 OK', data, versions)
        first, last = match.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            return _head('416 Range Not Satisfiable', b'', f'{versions}Content-Range: bytes */{size}\r\n')
        more = f'{versions}Content-Range: bytes {start}-{stop - 1}/{size}\r\n'
        return _head('206 Partial Content', memoryview(data)[start:stop], more)

    def _resource(self, key: str) -> dict[str, Any]:
        data = self.data[key]
        digest = base64.b64encode(crc32c(data).to_bytes(4, 'big')).decode()
        item = {'kind': 'storage#object', 'name': key.split('/', 2)[2], 'generation': '1', 'updated': _UPDATED}
        return {**item, 'size': str(len(data)), 'crc32c': digest}

    def _page(self, bucket: str, query: dict[str, str]) -> Reply:
        """Return a page of a listing. The token is the last name of the page before."""
        if self._sorted is None:
            self._sorted = sorted(self.data)
        prefix, delimiter, after = (query.get(name, '') for name in ('prefix', 'delimiter', 'pageToken'))
        items: list[dict[str, Any]] = []
        folders: list[str] = []
        last = token = ''
        for path in self._sorted:
            name = path.removeprefix(bucket)
            if not path.startswith(bucket + prefix):
                continue
            before, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, '', '')
            shown = prefix + before + found if found else name
            if shown <= after or shown == last:
                continue
            if len(items) + len(folders) == min(_PAGE, int(query.get('maxResults', _PAGE))):
                token = last
                break
            last = shown
            if found:
                folders.append(shown)
            else:
                resource = {'kind': 'storage#object', 'name': name, 'generation': '1', 'updated': _UPDATED}
                items.append({**resource, 'size': str(len(self.data[path]))})
        page: dict[str, Any] = {'kind': 'storage#objects', 'items': items, 'prefixes': folders}
        return _document({**page, 'nextPageToken': token} if token else page)

    def _uploaded(self, bucket: str, request: bytes) -> Reply:
        """Store the object of a multipart upload: its description, and its data."""
        body = request.partition(b'\r\n\r\n')[2]
        edge = body[: body.index(b'\r\n')]
        _, description, data, _ = body.split(edge)
        text = json.loads(description.partition(b'\r\n\r\n')[2])
        key = bucket + text['name']
        self.data[key], self._sorted = data.partition(b'\r\n\r\n')[2][:-2], None
        return _document({**self._resource(key), 'metadata': text['metadata']})


def _document(value: dict[str, Any]) -> Reply:
    return _head('200 OK', json.dumps(value).encode())


def _head(status: str, body: bytes | memoryview, more: str = '') -> Reply:
    return f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}'.encode(), memoryview(body)
