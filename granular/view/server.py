"""The web server of ``granular view``: its page, and the data for it."""

import asyncio
import contextlib
import importlib.resources
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from aiohttp import web

from granular._support.redact import hidden
from granular._support.text import logger
from granular.aio.paths.path import Path
from granular.aio.runtime.pools import CORES, Threads
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import call_in, offload
from granular.config import MiB
from granular.errors import (
    AccessDeniedError,
    CorruptError,
    DatapointError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    SpecError,
    UnsupportedError,
)
from granular.view.guard import HEADERS, Guard
from granular.view.kinds import MAGIC, media_type
from granular.view.library import Library
from granular.view.names import Names
from granular.view.pictures import MOST, as_decoded, picture, plane_of, show_plane
from granular.view.previews import LINE, TEXT
from granular.view.search import Condition, search
from granular.view.sources import Source, Value, reason
from granular.view.statistics import histograms

ROWS: Final = 200
"""Datapoints, values of a sequence or pictures in a reply."""

_TURNS: Final = 10  # of the loop, within which every callback that is due has run
_CHUNK: Final = MiB  # bytes of a medium that are read at a time
_PLANE: Final = 32 * MiB  # bytes of a plane of an array
_SIDES: Final = (32, 1024)  # pixels of a picture
_WHOLE: Final = slice(None, None, 1)  # what aiohttp makes of no Range header
_TYPES: Final = {'.html': 'text/html', '.css': 'text/css', '.js': 'text/javascript', '.svg': 'image/svg+xml'}
_STATUS: Final[tuple[tuple[type[Exception], int], ...]] = (
    (NotFoundError, 404), (OutOfRangeError, 404), (AccessDeniedError, 502), (InvalidArgumentError, 400),
    (SpecError, 400), (CorruptError, 422), (DatapointError, 422), (UnsupportedError, 422),
)  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(root: Path, port: int, announce: Callable[[str], object], names: Names | None = None) -> None:
    """Serve a path, as ``serve`` does, until the program is interrupted; ``announce`` is called with the link."""

    async def main() -> None:
        async with serve(root, port, names) as link:
            announce(link)
            await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def serve(root: Path, port: int = 0, names: Names | None = None) -> AsyncIterator[str]:
    """Serve a path on 127.0.0.1. Yields the link, which has the token.

    Memory: below 100 MB for ten million small datapoints; docs/view.md has figures.

    ::

        async with granular.view.serve(granular.aio.Path('s3://bucket/train')) as link:
            print(link)
            await asyncio.Event().wait()

    Args:
      root: the path. Nothing outside of it is served, except what links on a disk lead to.
      port: a port; 0 for one that is free.
      names: the names of classes, and tokenizers.

    Raises:
      NotFoundError: if there is nothing at the path.
      UnknownKeyError: if the path is a dataset or file without a key that is named.
    """
    async with contextlib.aclosing(_Server(root, names or Names())) as server:
        await server.library.check()
        try:
            listening = socket.create_server(('127.0.0.1', port))
        except OSError as error:
            raise InvalidArgumentError(f'port {port} of 127.0.0.1 cannot be used: {error.strerror}') from error
        runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1, handler_cancellation=True)
        try:
            await runner.setup()
            await web.SockSite(runner, listening).start()
            yield f'http://127.0.0.1:{listening.getsockname()[1]}/?token={server.guard.token}'
        finally:
            # asyncio loses a connection that it accepts while it closes a server: accept none, and wait for the last.
            asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            await runner.cleanup()
            listening.close()


class _Server:
    def __init__(self, root: Path, names: Names) -> None:
        self.library = Library(root, names)
        self.guard = Guard()
        self._names = names
        # Few threads make pictures, as each holds the pixels of one image.
        self._artists = Threads(min(4, CORES), 'granular-view')
        self._lists = asyncio.Semaphore(1)  # each list holds the bytes of a fan-out
        self._static = {
            entry.name: entry.read_bytes()
            for entry in (importlib.resources.files('granular.view') / 'static').iterdir()
            if entry.name.endswith(tuple(_TYPES))
        }

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check])
        app.router.add_get('/', self._page)
        app.router.add_get('/static/{name}', self._file)
        for handler in (
            self._folder, self._dataset, self._rows, self._datapoint, self._values, self._pictures, self._plane,
            self._media, self._histograms, self._search,
        ):  # fmt: skip
            app.router.add_get(f'/api/{handler.__name__.removeprefix("_")}', handler)
        return app

    async def aclose(self) -> None:
        await self.library.aclose()
        await asyncio.to_thread(self._artists.shutdown, cancel_futures=True)

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if reason := self.guard.refuse(request):
            response: web.StreamResponse = web.Response(status=403, text=f'{reason}\n')
        else:
            response = await self._answer(request, handler)
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=error.reason)
        except GranularError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 502)
            return _json({'error': hidden(str(error))}, status)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception('granular view: a request for %s failed', request.path)
            return _json({'error': 'the server failed; its log has the reason'}, 500)

    # --- the page

    async def _page(self, request: web.Request) -> web.StreamResponse:
        response = self._static_response('index.html')
        self.guard.admit(request, response)
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return self._static_response(request.match_info['name'])

    def _static_response(self, name: str) -> web.Response:
        if name not in self._static:
            raise web.HTTPNotFound
        kind = _TYPES[name[name.rindex('.') :]]
        return web.Response(body=self._static[name], content_type=kind, charset='utf-8')

    # --- folders and datasets

    async def _folder(self, request: web.Request) -> web.StreamResponse:
        folder = await self.library.folder(_path(request))
        return _json({**folder, 'root': f'{self.library.root}'})

    async def _dataset(self, request: web.Request) -> web.StreamResponse:
        return _json(await self.library.describe(_path(request)))

    async def _histograms(self, request: web.Request) -> web.StreamResponse:
        async with self._lists, self.library.use(_path(request)) as source:
            return _json(await histograms(source, self._names))

    async def _search(self, request: web.Request) -> web.StreamResponse:
        """Look at the next datapoints: at those that meet all conditions, sorted or counted by a key."""
        query = request.query
        fields = [query.getall(name, []) for name in ('key', 'relation', 'text')]
        if len({len(field) for field in fields}) > 1:
            raise InvalidArgumentError('filter: expected a key, a relation and a text for each condition')
        async with self._lists, self.library.use(_path(request)) as source:
            found = await search(
                source, self._names, [Condition(*condition) for condition in zip(*fields, strict=True)],
                _integer(request, 'from'), _integer(request, 'to', source.length),
                sort=query.get('sort', ''), count=query.get('count', ''),
            )  # fmt: skip
            return _json(found)

    # --- datapoints

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        async with self.library.use(_path(request)) as source:
            keys = request.query.getall('key', list(source.spec))
            indices = _indices(request, source.length)
            located = await source.locate(keys, indices, head=LINE)
            firsts = [(key, row.values[0] if row.values else None) for key in keys for row in located[key]]
            lines = iter(await self._lines(source, firsts, LINE, self._names.line))
            columns = {key: [{**next(lines), **_length(row.length)} for row in located[key]] for key in keys}
            return _json({'indices': indices, 'columns': columns})

    async def _datapoint(self, request: web.Request) -> web.StreamResponse:
        async with self.library.use(_path(request)) as source:
            index = _integer(request, 'index')
            located = await source.locate(list(source.spec), [index])
            firsts = [(key, rows[0].values[0] if rows[0].values else None) for key, rows in located.items()]
            details = await self._lines(source, firsts, TEXT, self._names.detail)
            values = [
                {'key': key, **described, **_length(rows[0].length)}
                for (key, rows), described in zip(located.items(), details, strict=True)
            ]
            return _json({'index': index, 'values': values})

    async def _values(self, request: web.Request) -> web.StreamResponse:
        async with self.library.use(_path(request)) as source:
            key, first = request.query.get('key', ''), _integer(request, 'from')
            count = min(_integer(request, 'count', ROWS), ROWS)
            row = (await source.locate([key], [_integer(request, 'index')], first, count))[key][0]
            values = await self._lines(source, [(key, value) for value in row.values], LINE, self._names.line)
            return _json({'from': first, 'values': values})

    async def _lines(
        self,
        source: Source,
        values: Sequence[tuple[str, Value | None]],
        most: int,
        show: Callable[[str, Value, bytes], dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Return what is shown of values with their keys, whose first bytes are read in one fan-out."""
        there = [(key, value) for key, value in values if value is not None]
        heads = iter(await source.read([(value, 0, self._names.head_size(key, value, most)) for key, value in there]))

        def show_all() -> list[dict[str, Any]]:
            return [{} if value is None else show(key, value, next(heads)) for key, value in values]

        return await offload(show_all)

    # --- pictures and media

    async def _pictures(self, request: web.Request) -> web.StreamResponse:
        """Return pictures of a key of many datapoints, or of many values of a sequence, in one reply.

        It is the length of a list (4 bytes, little-endian), the list in JSON, and the files one after the other.
        """
        async with self._lists, self.library.use(_path(request)) as source:
            key, side = request.query.get('key', ''), _integer(request, 'side', 160)
            side = min(max(side, _SIDES[0]), _SIDES[1])
            if 'from' in request.query:
                first, count = _integer(request, 'from'), min(_integer(request, 'count', 1), ROWS)
                values = list((await source.locate([key], [_integer(request, 'index')], first, count))[key][0].values)
                names, drawn = list(range(first, first + len(values))), await self._draw_all(source, values, side)
            else:
                indices, names, drawn = _indices(request, source.length), [], []
                for start in range(0, len(indices), source.portion):
                    some = indices[start : start + source.portion]
                    rows = (await source.locate([key], some))[key]
                    names += [index for index, row in zip(some, rows, strict=True) if row.values]
                    drawn += await self._draw_all(source, [row.values[0] for row in rows if row.values], side)
            entries = [{'name': name, **facts} for name, (facts, _) in zip(names, drawn, strict=True)]
            return _framed(entries, [file for _, file in drawn])

    async def _draw_all(self, source: Source, values: Sequence[Value], side: int) -> list[tuple[dict[str, Any], bytes]]:
        too_large = '{:,} bytes are too many for a thumbnail'
        drawn: list[tuple[dict[str, Any], bytes]] = [
            ({'error': value.error or too_large.format(value.size)}, b'') for value in values
        ]
        small = [i for i, value in enumerate(values) if value.size <= MOST and not value.error]
        async for batch in source.read_batches([values[i] for i in small]):
            # The next fan-out begins when the pictures of this one are made, and its bytes are released.
            positions = [small[j] for j, _ in batch]
            draws = [self._draw(values[small[j]].kind, data, side) for j, data in batch]
            batch.clear()
            for position, one in zip(positions, await gather(draws), strict=True):
                drawn[position] = one
            draws.clear()
        return drawn

    async def _draw(self, kind: str, data: bytes, side: int) -> tuple[dict[str, Any], bytes]:
        try:
            image = await call_in(self._artists, picture, kind, data, side)
        except Exception as error:
            return {'error': reason(error)}, b''
        return {'media': image.media, 'width': image.width, 'height': image.height, 'note': image.note}, image.data

    async def _plane(self, request: web.Request) -> web.StreamResponse:
        """Return a plane of an array as a picture, with its numbers, in the form of ``_pictures``."""
        async with self._lists, self.library.use(_path(request)) as source:
            value = await self._value(request, source)
            (head,) = await source.read([(value, 0, min(value.size, LINE))])
            plane = plane_of(head, value.size, _integer(request, 'plane'))
            if plane.stop - plane.start > _PLANE:
                raise UnsupportedError(f'a plane of {plane.stop - plane.start:,} bytes is too large to be shown')
            (data,) = await source.read([(value, plane.start, plane.stop)])
            drawn, facts = await call_in(self._artists, show_plane, plane, data, _SIDES[1])
            if drawn is not None:
                facts.update(media=drawn.media)
            return _framed([facts], [b'' if drawn is None else drawn.data])

    async def _media(self, request: web.Request) -> web.StreamResponse:
        """Return the bytes of a value, or a range of them. Only media have a type that a browser shows."""
        async with self.library.use(_path(request)) as source:
            value = await self._value(request, source)
            (head,) = await source.read([(value, 0, min(value.size, MAGIC))])
            start, stop = _range_of(request, value.size)
            response = web.StreamResponse(status=200 if request.http_range == _WHOLE else 206)
            media = '' if 'download' in request.query else media_type(head, value.size)
            if media == 'image/jpeg' and value.size <= MOST:
                (data,) = await source.read([(value, 0, value.size)])
                if (decoded := await call_in(self._artists, as_decoded, data)) is not None:
                    return web.Response(body=decoded, content_type='image/png')
            response.content_type = media or 'application/octet-stream'
            for name, text in HEADERS.items():
                response.headers[name] = text
            response.headers['Content-Security-Policy'] = "default-src 'none'; sandbox"
            if not media:
                name = f'{_integer(request, "index")}-{_safe(request.query.get("key", ""))}'
                response.headers['Content-Disposition'] = f'attachment; filename="{name}"'
            response.headers['Accept-Ranges'] = 'bytes'
            if response.status == 206:
                response.headers['Content-Range'] = f'bytes {start}-{stop - 1}/{value.size}'
            response.content_length = stop - start
            await response.prepare(request)
            if request.method == 'HEAD':
                return response
            try:
                while start < stop:
                    end = min(start + _CHUNK, stop)
                    await response.write((await source.read([(value, start, end)]))[0])
                    start = end
            except GranularError as error:
                # The head is sent already: an incomplete body is how the browser learns of it.
                logger.warning('granular view: a medium ended early: %s', error)
                if request.transport is not None:
                    request.transport.abort()
            return response

    async def _value(self, request: web.Request, source: Source) -> Value:
        key = request.query.get('key', '')
        return await source.value(key, _integer(request, 'index'), _integer(request, 'position'))


# --- requests and replies


def _path(request: web.Request) -> str:
    return request.query.get('path', '')


def _integer(request: web.Request, name: str, default: int = 0) -> int:
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidArgumentError(f'{name}: expected an integer >= 0, got {text!r:.80}')
    return int(text)


def _indices(request: web.Request, length: int) -> list[int]:
    """Return the ascending indices that a request names: a list ``at``, or ``count`` from ``start`` on."""
    if 'at' in request.query:
        texts = request.query['at'].split(',')
        if not all(text.isascii() and text.isdigit() and len(text) <= 18 for text in texts):
            raise InvalidArgumentError('at: expected indices with commas')
        indices = sorted({int(text) for text in texts})
    else:
        start = _integer(request, 'start')
        indices = list(range(start, min(start + min(_integer(request, 'count', ROWS), ROWS), length)))
    if len(indices) > ROWS:
        raise InvalidArgumentError(f'expected at most {ROWS} datapoints, got {len(indices)}')
    return indices


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    """Return the bytes that a Range header asks for."""
    try:
        wanted = request.http_range
    except ValueError:
        raise web.HTTPRequestRangeNotSatisfiable from None
    start, stop, _ = wanted.indices(size)
    if (start >= stop and wanted != _WHOLE) or (wanted.start or 0) > size:
        raise web.HTTPRequestRangeNotSatisfiable
    return start, stop


def _length(length: int | None) -> dict[str, int]:
    return {} if length is None else {'length': length}


def _safe(name: str) -> str:
    return ''.join(char if char.isascii() and (char.isalnum() or char in '._-') else '_' for char in name)[:80]


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors='backslashreplace')


def _framed(entries: Sequence[dict[str, Any]], files: Sequence[bytes]) -> web.Response:
    """Return a list of facts and of files, each with the number of its bytes among its facts."""
    head = _dump([{**entry, 'bytes': len(file)} for entry, file in zip(entries, files, strict=True)])
    body = b''.join((len(head).to_bytes(4, 'little'), head, *files))
    return web.Response(body=body, content_type='application/octet-stream')


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_dump(value), status=status, content_type='application/json', charset='utf-8')
