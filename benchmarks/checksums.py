"""The processor time that checksums cost, in writing and in reading: ``python -m benchmarks.checksums``."""

import functools
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

import granular

SIZES = {1_000: 20_000, 100_000: 1_000}
REPEATS = 15


def write(folder: pathlib.Path, record: bytes, count: int, checksums: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with granular.DatasetWriter(folder, {'x': 'bytes'}, checksums=checksums) as writer:
        for _ in range(count):
            writer.append({'x': record}, flush=False)


def read(reader: granular.DatasetReader, indices: np.ndarray) -> None:
    for start in range(0, len(indices), 256):
        reader.fetch(indices[start : start + 256])


def measure(calls: Sequence[Callable[[], object]], count: int) -> list[float]:
    """Return the microseconds of the process per record, the least of alternating runs."""
    least = [float('inf')] * len(calls)
    for _ in range(REPEATS):
        for i, call in enumerate(calls):
            began = time.process_time()
            call()
            least[i] = min(least[i], (time.process_time() - began) / count * 1e6)
    return least


def main() -> None:
    print('| records | | without | with checksums | difference |\n| --- | --- | ---: | ---: | ---: |')
    shared = pathlib.Path('/dev/shm')
    with tempfile.TemporaryDirectory(dir=shared if shared.exists() else None) as temporary:
        folder = pathlib.Path(temporary) / 'data'
        for size, count in SIZES.items():
            record = np.random.default_rng(0).bytes(size)
            calls = [functools.partial(write, folder, record, count, checksums) for checksums in (False, True)]
            show(size, 'written', *measure(calls, count))
            write(folder, record, count, True)
            indices = np.random.default_rng(0).permutation(count)
            readers = [granular.DatasetReader(folder, verify=verify) for verify in (False, True)]
            show(size, 'read', *measure([functools.partial(read, reader, indices) for reader in readers], count))
            for reader in readers:
                reader.close()


def show(size: int, what: str, without: float, with_checksums: float) -> None:
    difference = with_checksums - without
    print(
        f'| {size // 1000} kB | {what} | {without:.2f} us | {with_checksums:.2f} us | '
        f'{difference:.2f} us, {difference / without:.0%} |',
        flush=True,
    )


if __name__ == '__main__':
    main()
