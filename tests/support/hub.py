"""A server with the endpoints of the Hugging Face Hub that are read, and its content server."""

import asyncio
import hashlib
import itertools
import json
import pathlib
import urllib.parse
from typing import Any

from tests.support.loop_server import LoopServer, read_head

Files = dict[str, bytes]
Answer = tuple[int, dict[str, str], bytes]

SMALL = 100  # bytes up to which a file is in the repository itself, and is not redirected


class _Server(LoopServer):
    """Answers each request by ``answer``, and records its method, path and headers in ``requests``."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.faults: list[Answer] = []  # answered before anything else, one for each request

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            method, target, headers = await read_head(reader)
            body = await reader.readexactly(int(headers.get('content-length', 0)))
            self.requests.append((method, target, headers))
            answer = self.faults.pop(0) if self.faults else self.answer(method, target, headers, body)
            status, extra, content = answer
            head = [f'HTTP/1.1 {status} X', f'Content-Length: {len(content)}', *map(': '.join, extra.items()), '', '']
            writer.write('\r\n'.join(head).encode() + (b'' if method == 'HEAD' else content))
            await writer.drain()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        raise NotImplementedError


class _Contents(_Server):
    """The content server: signed addresses, GET only, no other credentials."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[str, bytes] = {}

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        path, _, query = target.partition('?')
        if method != 'GET' or query != 'X-Amz-Signature=signed-secret' or 'authorization' in headers:
            return 403, {}, b'<Code>SignatureDoesNotMatch</Code>'
        return ranged(self.contents[path[1:]], headers)


class HubServer(_Server):
    """Datasets with commits.

    Attributes:
      page: the entries of a page of a listing.
      tokens: the tokens that read gated repositories.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repositories: dict[str, dict[str, Files]] = {}
        self._branches: dict[tuple[str, str], str] = {}
        self._gated: set[str] = set()
        self._numbers = itertools.count()
        self.contents = _Contents()
        self.page = 3
        self.tokens = {'hf_permitted'}

    def __enter__(self) -> 'HubServer':
        self.contents.__enter__()
        super().__enter__()
        return self

    def stop(self) -> None:
        super().stop()
        self.contents.stop()

    def commit(self, repository: str, source: pathlib.Path | Files, branch: str = 'main', gated: bool = False) -> str:
        """Make a commit with exactly these files, and return its hash."""
        files = (
            source
            if isinstance(source, dict)
            else {str(path.relative_to(source)): path.read_bytes() for path in source.rglob('*') if path.is_file()}
        )
        commit = hashlib.sha1(f'{repository} {next(self._numbers)}'.encode()).hexdigest()
        self._repositories.setdefault(repository, {})[commit] = files
        self._branches[repository, branch] = commit
        if gated:
            self._gated.add(repository)
        return commit

    def calls(self) -> list[str]:
        """Return the requests since the last call: methods and paths, with the content server as ``contents``."""
        calls = [f'{method} {target}' for method, target, _ in self.requests]
        calls += [f'{method} contents' for method, _, _ in self.contents.requests]
        self.requests.clear()
        self.contents.requests.clear()
        return calls

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        path, _, query = target.partition('?')
        parts = path.strip('/').split('/')
        api = parts[0] == 'api'
        kind, owner, name, operation, revision, *rest = [*parts[api:], '', '', '', ''][:5] + parts[api + 5 :]
        repository, revision = f'{owner}/{name}', urllib.parse.unquote(revision)
        commits = self._repositories.get(repository)
        token = headers.get('authorization', '').removeprefix('Bearer ')
        if kind != 'datasets' or commits is None:
            return failure(404 if token in self.tokens else 401, 'RepoNotFound', 'Repository not found')
        commit = self._branches.get((repository, revision), revision)
        if commit not in commits:
            return failure(404, 'RevisionNotFound', f'Invalid rev id: {revision}')
        if operation == 'revision':
            return reply({'id': repository, 'sha': commit})
        if repository in self._gated and token not in self.tokens:
            return failure(403 if token else 401, 'GatedRepo', f'Access is restricted; you sent {token}')
        key = urllib.parse.unquote('/'.join(rest))
        match operation:
            case 'resolve':
                status, extra, content = self._resolve(commits[commit], key, headers)
                return status, {'X-Repo-Commit': commit, **extra}, content
            case 'paths-info' if method == 'POST':
                asked = urllib.parse.parse_qs(body.decode())['paths']
                return reply([entry for entry in tree(commits[commit]) if entry['path'] in asked])
            case 'tree':
                return self._tree(commits[commit], key, path, dict(urllib.parse.parse_qsl(query)))
        return failure(404, 'NotFound', 'no such endpoint')

    def _resolve(self, files: Files, key: str, headers: dict[str, str]) -> Answer:
        if key not in files:
            return failure(404, 'EntryNotFound', 'Entry not found')
        content = files[key]
        if len(content) <= SMALL:
            return ranged(content, headers)
        name = hashlib.sha256(content).hexdigest()
        self.contents.contents[name] = content
        location = f'{self.contents.endpoint}/{name}?X-Amz-Signature=signed-secret'
        return 302, {'Location': location, 'X-Linked-Size': f'{len(content)}'}, b''

    def _tree(self, files: Files, key: str, path: str, query: dict[str, str]) -> Answer:
        folder = f'{key}/' if key else ''
        entries = [entry for entry in tree(files) if entry['path'].startswith(folder)]
        if query.get('recursive') != 'true':
            entries = [entry for entry in entries if '/' not in entry['path'][len(folder) :]]
        if not entries:
            return failure(404, 'EntryNotFound', f'{key} does not exist')
        start = int(query.get('cursor', 0))
        status, headers, content = reply(entries[start : start + self.page])
        if start + self.page < len(entries):
            following = urllib.parse.urlencode({**query, 'cursor': start + self.page})
            headers['Link'] = f'<{self.endpoint}{path}?{following}>; rel="next"'
        return status, headers, content


def tree(files: Files) -> list[dict[str, Any]]:
    """Return the entries of a tree, as the Hub describes them."""
    folders = {str(parent) for path in files for parent in pathlib.PurePosixPath(path).parents} - {'.'}
    entries: list[dict[str, Any]] = [{'type': 'directory', 'oid': 'x', 'size': 0, 'path': path} for path in folders]
    for path, content in files.items():
        oid = hashlib.sha1(content).hexdigest()
        entries.append({'type': 'file', 'oid': oid, 'size': len(content), 'path': path})
    return sorted(entries, key=lambda entry: entry['path'])


def reply(value: Any) -> Answer:
    return 200, {'Content-Type': 'application/json'}, json.dumps(value).encode()


def failure(status: int, code: str, message: str) -> Answer:
    return status, {'X-Error-Code': code, 'X-Error-Message': message}, json.dumps({'error': message}).encode()


def ranged(content: bytes, headers: dict[str, str]) -> Answer:
    """Return the answer to a read of content, or of a range of it."""
    etag = {'ETag': f'"{hashlib.sha256(content).hexdigest()}"', 'Accept-Ranges': 'bytes'}
    unit, _, text = headers.get('range', '').partition('=')
    if unit != 'bytes':
        return 200, etag, content
    first, last = text.split('-')
    start = int(first) if first else max(0, len(content) - int(last))
    stop = min(len(content), int(last) + 1) if first and last else len(content)
    if start >= len(content):
        return 416, {**etag, 'Content-Range': f'bytes */{len(content)}'}, b''
    return 206, {**etag, 'Content-Range': f'bytes {start}-{stop - 1}/{len(content)}'}, content[start:stop]
