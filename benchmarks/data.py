"""The datasets of the benchmarks, written once into a folder."""

import io
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

import granular
from granular.aio.bags.reader import bag_of

SPEC = {'data': 'bytes', 'label': 'int', 'text': 'utf8'}


class Data:
    """A folder of datasets.

    Args:
      folder: of the datasets.
      quick: write a tenth of the data.
    """

    def __init__(self, folder: pathlib.Path, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        folder.mkdir(parents=True, exist_ok=True)

    def count(self, full_count: int) -> int:
        """Return the number of records, given that of a full run."""
        return full_count // 10 if self.quick else full_count

    def runs(self, full_count: int = 5) -> int:
        """Return the number of runs whose median counts, given that of a full run."""
        return 1 if self.quick else full_count

    def once(self, name: str, write: Any) -> pathlib.Path:
        """Return the folder of a name; write it on first use."""
        target = self.folder / f'{name}{"-quick" if self.quick else ""}'
        if not (target / 'done').exists():
            write(target)
            (target / 'done').touch()
        return target

    def records(self, name: str, count: int, low: int, high: int) -> pathlib.Path:
        """Return a dataset of random bytes of the given sizes, each with a label and a text."""

        def write(target: pathlib.Path) -> None:
            rng = np.random.default_rng(0)
            block = rng.bytes(64 << 20)
            with granular.DatasetWriter(target, SPEC, granular.encoders, layout='columns') as writer:
                for i in range(self.count(count)):
                    size = int(rng.integers(low, high + 1))
                    at = int(rng.integers(0, len(block) - size))
                    point = {'data': block[at : at + size], 'label': i % 1000, 'text': f'text number {i}'}
                    writer.append(point, flush=False)

        return self.once(name, write)

    def medium(self) -> pathlib.Path:
        """10,000 records of 50 to 150 kB: 1 GB."""
        return self.records('medium', 10_000, 50_000, 150_000)

    def repeated(self) -> pathlib.Path:
        """The records of ``medium``, eight times, as shards that share its files."""

        def write(target: pathlib.Path) -> None:
            files = [file for file in self.medium().iterdir() if file.name != 'done']
            for number in range(8):
                shard = target / f'{number:06}'
                shard.mkdir(parents=True)
                for file in files:
                    os.link(file, shard / file.name)

        return self.once('repeated', write)

    def small(self) -> pathlib.Path:
        """200,000 records of 4 kB."""
        return self.records('small', 200_000, 4000, 4000)

    def large(self) -> pathlib.Path:
        """300 records of 16 MB."""
        return self.records('large', 300, 16_000_000, 16_000_000)

    def local(self, size: int) -> pathlib.Path:
        """A dataset for the local disk, in a layout that granular 0.24 also reads."""
        return self.records(f'local{size}', 200_000_000 // size * 2, size, size)

    def shards(self, layout: Any) -> pathlib.Path:
        """1,000 shards of 20 datapoints."""

        def write(target: pathlib.Path) -> None:
            writer = granular.ShardedDatasetWriter(target, SPEC, granular.encoders, shardlen=20, layout=layout)
            with writer:
                for i in range(self.count(1000) * 20):
                    writer.append({'data': b'x' * 100, 'label': i, 'text': str(i)}, flush=False)
            set_times_apart(target)

        return self.once(f'shards-{layout}', write)

    def images(self, width: int = 320, height: int = 240) -> pathlib.Path:
        """2,000 jpg images of one size."""

        def write(target: pathlib.Path) -> None:
            from PIL import Image

            rng = np.random.default_rng(0)
            with granular.DatasetWriter(target, {'image': 'jpg', 'label': 'int'}, granular.encoders) as writer:
                for i in range(self.count(2000)):
                    small = rng.integers(0, 255, (height // 10, width // 10, 3), np.uint8)
                    image = np.asarray(Image.fromarray(small).resize((width, height)))
                    writer.append({'image': image, 'label': i % 10}, flush=False)

        return self.once('images' if (width, height) == (320, 240) else f'images-{width}', write)

    def tokens(self) -> pathlib.Path:
        """10,000 rows of 4,096 tokens."""

        def write(target: pathlib.Path) -> None:
            rng = np.random.default_rng(0)
            with granular.DatasetWriter(target, {'tokens': 'array'}, granular.encoders) as writer:
                for _ in range(self.count(10_000)):
                    writer.append({'tokens': rng.integers(0, 50_000, 4096, np.int32)}, flush=False)

        return self.once('tokens', write)

    def job(self, name: str, **what: Any) -> str:
        """Write the job of a rival to a file."""
        target = self.folder / f'{name}.json'
        beside = target.with_suffix(f'.{threading.get_ident()}')
        beside.write_text(json.dumps(what))
        beside.replace(target)  # at once, as jobs of several processes may be the same
        return str(target)


def set_times_apart(folder: pathlib.Path) -> None:
    """Let the shards of a dataset be written minutes apart, as larger ones are.

    With the same time and size, files have the same ETag in nginx, and replies that repeat byte for byte are refused.
    """
    shards = sorted(shard for shard in folder.iterdir() if shard.is_dir())
    first = time.time() - 60 * len(shards)
    for i, shard in enumerate(shards):
        for file in shard.iterdir():
            os.utime(file, (first + 60 * i,) * 2)


def ranges_of(target: pathlib.Path, count: int, name: str = 'data.bag') -> list[tuple[int, int]]:
    """Return the byte ranges of random records of a bag, drawn from shuffled epochs."""
    with granular.BagReader(target / name) as bag:
        limits = bag_of(bag.aio).limits(np.arange(len(bag)))
    assert limits is not None
    rng = np.random.default_rng(1)
    epochs: Iterable[Any] = (rng.permutation(len(limits[0])) for _ in range(-(-count // len(limits[0]))))
    order = np.concatenate(list(epochs))[:count]
    return list(zip(limits[0][order].tolist(), limits[1][order].tolist(), strict=True))


def wrk_script(target: pathlib.Path, path: str, ranges: list[tuple[int, int]]) -> str:
    """Write a Lua script with the requests of wrk."""
    out = io.StringIO()
    out.write('local r = {\n')
    out.writelines(f'"bytes={a}-{b - 1}",\n' for a, b in ranges)
    out.write('}\nlocal i = 0\nrequest = function() i = i % #r + 1; ')
    out.write(f'return wrk.format("GET", "/{path}", {{Range = r[i]}}) end\n')
    target.write_text(out.getvalue())
    return str(target)
