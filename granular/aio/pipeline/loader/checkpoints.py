"""Checkpoint files for the states of pipelines: one file per process, written atomically and validated when loaded."""

import json
from collections.abc import Mapping
from typing import Any, Final

from granular._support.other_names import answering
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.position import EARLIER, check_plain, same_position
from granular.aio.pipeline.shards import ShardOptions, as_shard
from granular.errors import NotFoundError, StateError
from granular.formats.checksums import crc32c

_VERSION: Final = 1


def _file(directory: AnyPath, process: ShardOptions | None) -> Path:
    shard = as_shard(process)
    return Path(directory) / f'process_{shard.shard_index}-of-{shard.shard_count}.json'


@answering()
async def save_state(directory: AnyPath, state: Mapping[str, Any], process: ShardOptions | None = None) -> Path:
    """Write the state of a pipeline, as returned by ``state_dict()``.

    The file is written atomically, with a checksum, and replaces an older one::

        await save_state('s3://bucket/run/1000', loader.state_dict())
        loader.load(await load_state('s3://bucket/run/1000'))

    Args:
      directory: directory of the file, on any store.
      state: plain JSON.
      process: index of this process and number of processes, each of which has its own file; by default the only one.

    Returns:
      The file, ``process_{index}-of-{count}.json``.

    Raises:
      StateError: if the state is not plain JSON.
    """
    path = _file(directory, process)
    try:
        text = _text(state)
        json.loads(text, object_pairs_hook=_object)  # refuses what could not be loaded
        check_plain(state)
    except (TypeError, ValueError, RecursionError) as error:
        hint = ': pass what its state_dict() returns' if hasattr(state, 'state_dict') else ''
        raise StateError(f'{path}: the state is not plain JSON: {error}{hint}') from error
    await path.parent.mkdir(parents=True, exist_ok=True)
    await path.write_text(f'{{"version": {_VERSION}, "crc32c": "{_checksum(text)}", "state": {text}}}')
    return path


def _text(state: Any) -> str:
    return json.dumps(state, allow_nan=False)


def _checksum(text: str) -> str:
    return f'{crc32c(text.encode()):08x}'


@answering()
async def load_state(directory: AnyPath, process: ShardOptions | None = None) -> dict[str, Any]:
    """Read a state that :func:`save_state` wrote.

    ::

        await save_state('./checkpoint', loader.state_dict())
        loader.load(await load_state('./checkpoint'))

    If a different number of processes wrote the states, the state of any of them is valid, because the order of a
    pipeline does not depend on the number of its shards. Newer files of another number of processes than this one's
    must be at its position: use a directory for each checkpoint.

    Args:
      directory: directory of the files, on any store.
      process: index of this process and number of processes; by default the only one.

    Returns:
      The state.

    Raises:
      NotFoundError: if there is no state.
      StateError: if the file is not a state or is damaged, or the states of several processes, or numbers of processes,
        have different positions.
    """
    own = _file(directory, process)
    files = sorted([path async for path in Path(directory).glob('process_*-of-*.json')], key=str)
    if not files:
        remedy = ': it is a file: pass the folder that save_state wrote' if await Path(directory).is_file() else ''
        raise NotFoundError(f'{directory}: contains no state: {own.name} is not there{remedy}')
    if own in files:
        count = own.name.partition('-of-')[2]
        others = [path for path in files if path.name.partition('-of-')[2] != count]
        last, *times = [(await path.stat()).modified for path in (own, *others)] if others else [None]
        files = [own, *(path for path, time in zip(others, times, strict=True) if not time or time >= (last or 0))]
    states = [_parse(await path.read_bytes(), path) for path in files]
    for path, state in zip(files, states, strict=True):
        if not same_position(state, states[0]):
            raise StateError(
                f'{path} is at {_outline(state)}, {files[0]} at {_outline(states[0])}: to resume with another '
                f'number of processes, save all of them after the same number of elements, of a pipeline whose states '
                f'fit any number, and remove those of another number that are outdated'
            )
    return states[0]


async def read_state(path: Path) -> dict[str, Any]:
    """Read the state in one file that :func:`save_state` wrote, or in a directory of them."""
    return _parse(await path.read_bytes(), path) if await path.is_file() else await load_state(path)


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(data.decode(), object_pairs_hook=_object)
        check_plain(document, f'{path}')
        text = _text(document)
    except StateError:
        raise
    except (ValueError, RecursionError) as error:
        raise StateError(f'{path}: is not a state: {error}: {EARLIER}') from error
    if (
        not isinstance(document, dict)
        or document.get('version') != _VERSION
        or not isinstance(document.get('state'), dict)
    ):
        raise StateError(f'{path}: is not a state of version {_VERSION}, but {text:.200}: {EARLIER}')
    state: dict[str, Any] = document['state']
    checksum = _checksum(_text(state))
    if document.keys() != {'version', 'state'} and document.get('crc32c') != checksum:
        raise StateError(
            f'{path}: is damaged or was edited: its state has the checksum {checksum}, the file says '
            f'{document.get("crc32c")!r:.100}: {EARLIER}'
        )
    return state


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, of which plain ``json.loads`` would keep the last of equal keys."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f'an object has a key twice: {[key for key, _ in pairs]!r:.200}')
    return result


def _outline(state: Mapping[str, Any]) -> str:
    position = {key: value for key, value in state.items() if key not in ('pipeline', 'stages')}
    return f'{json.dumps(position):.200}'
