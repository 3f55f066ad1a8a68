"""Datasets of LeRobot: Parquet files of states, and an MP4 file of each camera, in its versions 2 and 3."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, cut_into, grouped, indices_of, integers_of, placed
from granular._support.lazy import import_extra
from granular._support.typing import Datapoint_co
from granular.aio.datasets.clips import Clips, FrameTables, frames_of
from granular.aio.datasets.steps import Steps, Values
from granular.aio.datasources.arguments import names_in
from granular.aio.datasources.indexed_files import read_files
from granular.aio.datasources.parquet.source import ParquetDataSource
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.data_source import Mask, MaskedSource
from granular.aio.runtime.lifecycle import ensure_open
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_threads
from granular.aio.stores import Request, Stat
from granular.errors import ClosedError, CorruptDatasetError, DecodeError, NotFoundError, UnsupportedError
from granular.formats import decode_image
from granular.formats.frames import FrameTable

T = TypeVar('T')

INFO: Final = 'meta/info.json'
_VERSIONS: Final = ('v2.', 'v3.')
_TASK: Final = 'task'


class LeRobotDataSource(MaskedSource[tuple[str, ...], Datapoint_co]):
    """Random access to the episodes of a dataset of LeRobot, version 2 or 3, on a disk or in a bucket.

    ::

        async with granular.aio.open('s3://bucket/pusht') as episodes:
            windows = granular.aio.Windows(episodes, {'observation.state': (-1, 1), 'observation.images.left': [0]})

    An episode is a dict with a value for each step: an array for each feature of numbers, uint8 of shape (steps,
    height, width, 3) for each camera, and lists of texts, with ``task`` beside the features. Frames of videos are those
    that are shown at the times of the steps. :class:`Windows` read the parts of the videos that have their frames, and
    the row groups of Parquet that have their states.

    Opening takes a request for each Parquet file. Memory: 40 bytes per episode and camera, and that of
    :class:`ParquetDataSource`.

    Args:
      folder: the folder that has ``meta/info.json``.

    Raises:
      NotFoundError: if a file of the dataset does not exist.
      UnsupportedError: for another version of the format.
      CorruptDatasetError: if its tables contradict each other.
    """

    def __init__(self, folder: AnyPath) -> None:
        import_extra('pyarrow', 'parquet')
        super().__init__()
        self.folder: Path = Path(folder)
        self._name = f'{self.folder}'
        self._info: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}  # of each key: a dtype, 'video', 'image' or 'string'
        self._rows: ParquetDataSource[Any] | None = None
        self._starts: Ints = np.zeros(1, np.int64)  # rows before each episode
        self._tasks: dict[int, str] = {}
        self._videos: dict[
            str, tuple[list[Path], Ints, Any]
        ] = {}  # files; of each episode the file, and its start there
        self._stats: dict[Path, Stat] = {}
        self._tables = FrameTables()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    def identity(self) -> tuple[Any, ...]:
        return self.folder.store.fingerprint, self._name, json.dumps(self._info, sort_keys=True), len(self)

    def nbytes(self, mask: Mask | None = None) -> int | None:
        return None if self._rows is None else self._rows.nbytes()

    def _file_bytes(self, mask: Any) -> int | None:
        return self.nbytes()

    # --- opening

    async def _open(self) -> None:
        await self.folder.store.ready()
        try:
            self._info = json.loads(await self._file(INFO).read_bytes())
            version, features = self._info['codebase_version'], self._info['features']
            self._kinds = {key: feature['dtype'] for key, feature in features.items()}
            self._fps = float(self._info['fps'])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptDatasetError(
                f'{self.folder / INFO}: not the description of a dataset: {error!r:.200}'
            ) from error
        if not str(version).startswith(_VERSIONS):
            raise UnsupportedError(f'{self._name}: expected LeRobot v2 or v3, got {version!r:.100}')
        await (self._open_v3() if version.startswith('v3.') else self._open_v2())

    def _file(self, name: str) -> Path:
        if name.startswith('/') or '..' in name.split('/'):
            raise CorruptDatasetError(f'{self._name}: expected names of files in it, got {name!r:.200}')
        return self.folder / name

    def _files(self, template: str, numbers: Sequence[Mapping[str, Any]]) -> list[Path]:
        try:
            return [self._file(self._info[template].format_map(own)) for own in numbers]
        except (KeyError, ValueError, AttributeError, IndexError) as error:
            raise CorruptDatasetError(f'{self.folder / INFO}: {template}: {error!r:.200}') from error

    async def _open_v3(self) -> None:
        cameras = [key for key, kind in self._kinds.items() if kind == 'video']
        names = [
            'episode_index',
            'length',
            'dataset_from_index',
            *(f'data/{part}' for part in ('chunk_index', 'file_index')),
        ]
        names += [f'videos/{key}/{part}' for key in cameras for part in ('chunk_index', 'file_index', 'from_timestamp')]
        episodes = await self._table('meta/episodes', names)
        self._check(episodes['episode_index'], np.arange(len(episodes['length'])), 'episodes')
        own = [{'chunk_index': c, 'file_index': f} for c, f in self._distinct(episodes, 'data')[0]]
        await self._open_rows(self._files('data_path', own), integers_of(episodes['length'], self._name))
        self._check(episodes['dataset_from_index'], self._starts[:-1], 'rows of episodes')
        for key in cameras:
            distinct, numbers = self._distinct(episodes, f'videos/{key}')
            files = self._files(
                'video_path', [{'video_key': key, 'chunk_index': c, 'file_index': f} for c, f in distinct]
            )
            self._videos[key] = files, numbers, np.array(episodes[f'videos/{key}/from_timestamp'], np.float64)
        tasks = await self._table('meta/tasks.parquet', None)
        texts = next((name for name in tasks if name != 'task_index'), None)
        self._tasks = dict(zip(map(int, tasks['task_index']), tasks[texts], strict=True)) if texts else {}

    @staticmethod
    def _distinct(episodes: Mapping[str, list[Any]], name: str) -> tuple[list[tuple[int, int]], Ints]:
        """Return the chunk and number of each file, and the position of the file of each episode."""
        pairs = np.stack([np.array(episodes[f'{name}/{part}'], np.int64) for part in ('chunk_index', 'file_index')], 1)
        distinct, numbers = np.unique(pairs, axis=0, return_inverse=True)
        return [(int(c), int(f)) for c, f in distinct], numbers.reshape(-1)

    async def _open_v2(self) -> None:
        episodes = sorted(await self._lines('meta/episodes.jsonl'), key=lambda row: row['episode_index'])
        self._check([row['episode_index'] for row in episodes], np.arange(len(episodes)), 'episodes')
        size = int(self._info.get('chunks_size', 1000))
        numbers = [{'episode_chunk': i // size, 'episode_index': i} for i in range(len(episodes))]
        lengths = integers_of([row['length'] for row in episodes], self._name)
        await self._open_rows(self._files('data_path', numbers), lengths)
        for key, kind in self._kinds.items():
            if kind == 'video':
                files = self._files('video_path', [{'video_key': key, **own} for own in numbers])
                self._videos[key] = files, np.arange(len(files)), np.zeros(len(files))
        self._tasks = {row['task_index']: row['task'] for row in await self._lines('meta/tasks.jsonl')}

    async def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (await self._file(name).read_text()).splitlines() if line.strip()]
        except ValueError as error:
            raise CorruptDatasetError(f'{self.folder / name}: expected JSON in each line: {error}') from error

    async def _table(self, name: str, columns: list[str] | None) -> dict[str, list[Any]]:
        """Return the columns of a Parquet file, or of those in a folder."""
        path = self._file(name)
        files = [path] if name.endswith('.parquet') else sorted([file async for file in path.rglob('*.parquet')])
        if not files:
            raise NotFoundError(f'{path}: expected Parquet files, got none')
        async with ParquetDataSource(files, columns) as table:
            return await table.get(slice(None))

    async def _open_rows(self, files: list[Path], lengths: Ints) -> None:
        numbers = [key for key, kind in self._kinds.items() if kind != 'video']
        self._rows = ParquetDataSource(files, numbers)
        await ensure_open(self._rows)
        self._starts = np.append(0, np.cumsum(lengths))
        if len(self._rows) != self._starts[-1]:
            raise CorruptDatasetError(
                f'{self._name}: its episodes have {self._starts[-1]} steps, its Parquet files {len(self._rows)} rows'
            )

    def _check(self, got: Any, expected: Ints, what: str) -> None:
        if not np.array_equal(np.array(got, np.int64), expected):
            raise CorruptDatasetError(f'{self._name}: expected {what} in order, without a gap, got {got!s:.200}')

    async def _close(self) -> None:
        if self._rows is not None:
            await self._rows.aclose()
            self._rows = None
        self._tables = FrameTables()

    # --- facts

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys of an episode."""
        self._check_open()
        return self._fields

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*self._kinds, _TASK) if self._tasks and _TASK not in self._kinds else tuple(self._kinds)

    @property
    def fps(self) -> float:
        """Steps in a second."""
        self._check_open()
        return self._fps

    @property
    def size(self) -> int:
        """Bytes of the Parquet files."""
        self._check_open()
        return self.nbytes() or 0

    def __len__(self) -> int:
        self._check_open()
        return len(self._starts) - 1

    async def sizes(self, key: str) -> Ints:
        """Return the number of steps of each episode, int64 of shape ``(len(source),)``, for any key."""
        await self._ensure_open()
        names_in((key,), self._fields, 'fields', self._name)
        return np.diff(self._starts)

    def copy(self) -> Self:
        """Return an independently closable source of the same files."""
        return self._copied(_rows=None if self._rows is None else self._rows.copy(), _tables=FrameTables())

    # --- episodes

    def _chosen(self, mask: Mask) -> tuple[str, ...]:
        return self._fields if mask is None else names_in(mask, self._fields, 'fields', self._name)

    async def _read_columns(self, positions: Ints, fields: tuple[str, ...]) -> dict[str, list[Any]]:
        episodes = await self._read_rows(positions, fields)
        return {key: [episode[key] for episode in episodes] for key in fields}

    async def _read_rows(self, positions: Ints, fields: tuple[str, ...]) -> list[Any]:
        if not len(positions):
            return []
        once, again = np.unique(positions, return_inverse=True)
        values = await self.read([Steps(key, once, np.diff(self._starts)[once]) for key in fields])
        return [{key: copy.copy(own[i]) for key, own in zip(fields, values, strict=True)} for i in again.tolist()]

    async def _fetch_stored(self, positions: Ints, keys: Sequence[str]) -> list[dict[str, Any]]:
        once, again = np.unique(positions, return_inverse=True)
        columns = await gather([self._stored(key, once) for key in keys]) if len(once) else []
        return [{key: copy.copy(own[i]) for key, own in zip(keys, columns, strict=True)} for i in again.tolist()]

    async def _stored(self, key: str, episodes: Ints) -> Values:
        """Return the value of each episode, as it is stored."""
        kind = self._kinds.get(key)
        if kind == 'video':
            return await self._stored_videos(key, episodes)
        wanted = Steps(key, episodes, np.diff(self._starts)[episodes])
        return await (self._stored_images(wanted) if kind == 'image' else self._read_key(wanted))

    async def _stored_images(self, wanted: Steps) -> list[Any]:
        counts = wanted.lengths
        datapoints, steps = wanted._replace(begins=np.zeros_like(counts), stops=counts).each()
        rows = self._starts[datapoints] + steps
        values = [row[wanted.key] for row in await self._table_of_rows().fetch(rows, (wanted.key,))]
        for row, value in zip(rows.tolist(), values, strict=True):
            if not isinstance(value, Mapping) or not isinstance(value.get('bytes'), bytes):
                raise UnsupportedError(
                    f'{self._name}: row {row}, key {wanted.key!r}: expected the bytes of an image in the table, got '
                    f'{value!r:.100}'
                )
        return cut_into([value['bytes'] for value in values], counts.tolist())

    async def read(self, wanted: Sequence[Steps]) -> list[Values]:
        """Return values of keys by their steps, or whole, in the order of the steps, or of the episodes."""
        names_in([own.key for own in wanted], self._fields, 'fields', self._name)
        return await gather([self._read_key(own) for own in wanted])

    async def _read_key(self, wanted: Steps) -> Values:
        if wanted.begins is None:
            counts = wanted.lengths
            values: Any = await self._read_key(wanted._replace(begins=np.zeros_like(counts), stops=counts))
            ends = np.cumsum(counts)
            parts = [values[start:end] for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)]
            return [np.stack(part) if self._kinds.get(wanted.key) == 'video' and len(part) else part for part in parts]
        if self._kinds.get(wanted.key) == 'video':
            return await self._read_frames(wanted)
        datapoints, steps = wanted.each()
        return await self._read_values(wanted.key, self._starts[datapoints] + steps)

    async def _read_values(self, key: str, rows: Ints) -> Values:
        name = 'task_index' if key not in self._kinds else key
        values = [row[name] for row in await self._table_of_rows().fetch(rows, (name,))]
        if key not in self._kinds:
            if unknown := {int(value) for value in values} - self._tasks.keys():
                raise CorruptDatasetError(f'{self._name}: no text for the tasks {sorted(unknown)!s:.100}')
            return [self._tasks[int(value)] for value in values]
        kind = self._kinds[key]
        if kind == 'string':
            return values
        if kind == 'image':
            return await map_threads(lambda i: self._decoded(values[i], key, int(rows[i])), len(values))
        shape = tuple(self._info['features'][key].get('shape') or ())
        array = np.array([np.array(value.tolist() if isinstance(value, np.ndarray) else value) for value in values])
        array = array.astype(kind, copy=False)
        return array.reshape(-1, *shape) if array.ndim > 2 else array

    def _table_of_rows(self) -> ParquetDataSource[Any]:
        if (source := self._rows) is None:
            self._check_open()
            raise ClosedError(f'{self._name} is closed')
        return source

    def _decoded(self, value: Any, key: str, row: int) -> Any:
        try:
            return decode_image(value['bytes'])
        except (DecodeError, TypeError, KeyError) as error:
            name = f'{self._name}: row {row}, key {key!r}'
            raise DecodeError(
                f'{name}: not decoded as an image in the table: {error!r:.200}', path=self._name
            ) from error

    # --- frames

    async def _read_frames(self, wanted: Steps) -> Values:
        episodes, steps, lengths = wanted.once()
        videos = await self._open_videos(wanted.key, episodes)
        clips = Clips(videos.tables, [videos.frames(i, *own) for i, own in enumerate(zip(steps, lengths, strict=True))])
        owners, begins, ends = clips.spans
        parts = await videos.read(owners, begins, ends)
        decoded = await videos.in_threads(lambda i: clips.decode(i, parts))
        return [frame for clip in decoded for frame in clip]

    async def _stored_videos(self, key: str, episodes: Ints) -> list[bytes]:
        """Return the video of each episode, as a file with its frames as they are stored."""
        videos = await self._open_videos(key, episodes)
        lengths = np.diff(self._starts)[episodes].tolist()
        frames = [videos.frames(i, np.arange(length), length) for i, length in enumerate(lengths)]
        spans = [videos.span(i, own) for i, own in enumerate(frames)]
        parts = await videos.read(np.arange(len(episodes)), *np.array(spans, np.int64).T)
        return await videos.in_threads(lambda i: videos.cut(i, frames[i], parts[i]))

    async def _open_videos(self, key: str, episodes: Ints) -> '_Videos':
        files, numbers, starts = self._videos[key]
        own = numbers[episodes]
        distinct, again = np.unique(own, return_inverse=True)
        paths = [files[i] for i in distinct.tolist()]
        await gather([self._stat(path) for path in paths if path not in self._stats])
        names = [f'{self._name}: episode {episode}, key {key!r}' for episode in episodes.tolist()]
        alone = (np.bincount(numbers)[own] == 1) & (starts[episodes] == 0)
        videos = _Videos(key, paths, again, [self._stats[path] for path in paths], starts[episodes], alone, names)
        await videos.open(self._tables, self._fps)
        return videos

    async def _stat(self, path: Path) -> None:
        self._stats[path] = await path.stat()


class _Videos:
    """The video of each of some episodes: a file of its own, or a part of one.

    ``paths`` are the files, ``files`` the number of the file of each episode, ``starts`` the seconds at which it begins
    there; ``alone`` is True for an episode that has its file alone.
    """

    def __init__(
        self,
        key: str,
        paths: Sequence[Path],
        files: Ints,
        stats: Sequence[Stat],
        starts: NDArray[np.float64],
        alone: NDArray[np.bool_],
        names: Sequence[str],
    ) -> None:
        self._key = key
        self._paths = paths
        self._files = files
        self._stats = stats
        self._starts = starts
        self._alone = alone
        self._names = names
        self.tables: list[FrameTable] = []  # by episode

    async def open(self, tables: FrameTables, fps: float) -> None:
        """Read the tables of the files that are not known."""
        self._fps = fps
        sizes = [stat.size for stat in self._stats]
        names = [f'{path}' for path in self._paths]
        of_files = await tables.of(
            self._paths, sizes, self._read_files, lambda call, files: self._in_threads(call, files, names)
        )
        self.tables = [of_files[i] for i in self._files.tolist()]

    def frames(self, i: int, steps: Ints, length: int) -> Ints:
        """Return the frames of the file of an episode that are shown at some of its steps."""
        return frames_of(self.tables[i], steps + self._starts[i] * self._fps, length, self._fps, self._names[i])

    async def read(self, episodes: Ints, begins: Ints, ends: Ints) -> list[bytes]:
        """Return byte ranges of the files of episodes, by the number of each episode."""
        return await self._read_files(self._files[episodes], begins, ends)

    async def in_threads(self, call: Callable[[int], T]) -> list[T]:
        """Call a function for the number of each episode."""
        return await self._in_threads(
            call, range(len(self._files)), [f'{self._paths[i]}' for i in self._files.tolist()]
        )

    def span(self, i: int, frames: Ints) -> tuple[int, int]:
        """Return where the bytes of the frames of an episode begin and end in its file."""
        if self._alone[i]:
            return 0, self._stats[self._files[i]].size
        try:
            return self.tables[i].cut_span(int(frames[0]), int(frames[-1]))
        except UnsupportedError as error:
            raise UnsupportedError(
                f'{self._names[i]}: its frames are not cut out of {self._paths[self._files[i]]} as they are stored: '
                f'{error}: pass granular.MapDataset.source(source), of which decoded frames are converted'
            ) from error

    def cut(self, i: int, frames: Ints, part: bytes) -> bytes:
        """Return a file with the frames of an episode, given the bytes of its span."""
        if self._alone[i]:
            return part
        first, last, steps = int(frames[0]), int(frames[-1]), np.arange(len(frames))
        out = self.tables[i].cut(first, last, float(self._starts[i]), part)
        found = frames_of(FrameTable(len(out), [(0, out)]), steps, len(steps), self._fps, self._names[i])
        if not np.array_equal(found, frames - first):
            raise UnsupportedError(f'{self._names[i]}: its frames have other times in a file of their own')
        return out

    async def _read_files(self, files: Ints, begins: Ints, ends: Ints) -> list[bytes]:
        groups = grouped(files)
        requests = [
            (self._paths[i].store, Request(self._paths[i].key, begins[own], ends[own], self._stats[i].version))
            for i, own in groups
        ]
        return placed(groups, await read_files(requests), len(files)) if groups else []

    async def _in_threads(self, call: Callable[[int], T], numbers: Sequence[int], names: Sequence[str]) -> list[T]:
        def named(i: int) -> T:
            number = numbers[i]
            try:
                return call(number)
            except DecodeError as error:
                raise DecodeError(f'{names[number]}: {error}', path=names[number], key=self._key) from error

        return await map_threads(named, len(numbers))


async def fetch_stored(
    source: LeRobotDataSource[Any], indices: Any, keys: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return episodes whose videos and images are files, as they are stored: a video for each camera, an image for each
    step.

    Raises:
      UnsupportedError: for a video that is a part of a file and begins with no key frame, and for images beside the
        table; it names the episode.
    """
    await ensure_open(source)
    return await source._fetch_stored(indices_of(indices, len(source), source._name), source._chosen(keys))


def kinds_of(source: LeRobotDataSource[Any]) -> dict[str, str]:
    """Return the dtype of each key of an open source, or ``'video'``, ``'image'`` or ``'string'``."""
    return {key: source._kinds.get(key, 'string') for key in source.fields}
