"""Random MapDatasets and streams over sources whose datapoints name themselves, for what is told from lengths alone."""

import random
from collections.abc import Iterator
from typing import Any

from granular import MapDataset

Name = tuple[int, int]  # the number of the source, and the index in it


def identity(x: Any) -> Any:
    return x


def source(number: int, length: int) -> Any:
    return MapDataset.source([(number, i) for i in range(length)])


def random_dataset(rng: random.Random, first: int = 0, depth: int = 0) -> tuple[Any, int]:
    """Return a dataset of sources with the numbers from one on, and the number after the last."""
    kind = rng.choice(['source', 'source', 'mix', 'concatenate', 'zip']) if depth < 2 else 'source'
    dataset: Any
    if kind == 'source':
        dataset, following = source(first, rng.randint(5, 40)), first + 1
    else:
        parts, following = [], first
        for _ in range(rng.randint(2, 3)):
            part, following = random_dataset(rng, following, depth + 1)
            parts.append(part)
        if kind == 'mix':
            dataset = MapDataset.mix(parts, [rng.choice([1, 2, 3.5]) for _ in parts])
        elif kind == 'concatenate':
            dataset = MapDataset.concatenate(parts)
        else:
            length = min(map(len, parts))
            dataset = MapDataset.zip([part[:length] for part in parts])
    for _ in range(rng.randint(0, 2)):
        operation = rng.choice(['shuffle', 'window', 'slice', 'map', 'batch'])
        if operation == 'shuffle':
            dataset = dataset.shuffle(rng.randint(0, 9))
        elif operation == 'window':
            dataset = dataset.window_shuffle(rng.randint(2, 6), 1)
        elif operation == 'slice' and len(dataset) > 4:
            dataset = dataset[rng.randint(0, 2) : rng.randint(3, len(dataset)) : rng.choice([1, 1, 2])]
        elif operation == 'map':
            dataset = dataset.map(identity)
        elif operation == 'batch' and not depth and len(dataset) > 4:
            dataset = dataset.batch(rng.randint(1, 4), drop_remainder=rng.random() < 0.5, batch_fn=list)
    return dataset, following


def random_stream(rng: random.Random) -> tuple[Any, int]:
    """Return a stream of such a dataset, and the number of its sources."""
    dataset, sources = random_dataset(rng)
    if rng.random() < 0.5:
        dataset = dataset.repeat(rng.choice([2, 3, None]))
    stream = dataset.to_iter_dataset()
    if rng.random() < 0.3:
        stream = stream.batch(3, batch_fn=list)
    if rng.random() < 0.2 and len(dataset) < 1 << 40:
        stream = stream.repeat(3)
    return stream, sources


def names_of(element: Any) -> Iterator[Name]:
    """Yield the names of the datapoints that an element is made of, in order."""
    if isinstance(element, list) or not isinstance(element[0], int):
        for part in element:
            yield from names_of(part)
    else:
        yield element
