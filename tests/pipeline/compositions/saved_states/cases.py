"""The states of each pipeline with a name, with what followed when they were saved."""

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import granular
from granular import ShardOptions
from tests.pipeline.compositions.atoms import atoms, plain, read
from tests.pipeline.compositions.saved_states import pipelines

Case = dict[str, Any]

TAKEN: Final = (0, 1, 5, 8)
AT_MOST: Final = 80  # elements of a stream
HOSTS: Final = (2, 3)
BATCH: Final = 4
BATCHES: Final = 12
OTHERS: Final = ({'a': 1.0, 'b': 5.0, 'c': 1.0}, {'a': 1.0, 'c': 3.0})


def all_cases() -> dict[str, list[Case]]:
    """Save the states of all pipelines, by the file which they belong to."""
    iterables = {**pipelines.MAPS, **pipelines.STREAMS, **pipelines.DATA_LOADERS}
    return {
        'maps': [case for name in pipelines.MAPS for case in _of_iterable(name, iterables[name]())],
        'streams': [case for name in pipelines.STREAMS for case in _of_iterable(name, iterables[name]())],
        'data_loaders': [case for name in pipelines.DATA_LOADERS for case in _of_iterable(name, iterables[name]())],
        'weights': [
            case
            for name, make in pipelines.OTHER_WEIGHTS.items()
            for case in _of_iterable(name, make(pipelines.WEIGHTS), emitted=True)
        ],
        'hosts': [
            {**case, 'host': host, 'hosts': hosts}
            for name, make in pipelines.OTHER_HOSTS.items()
            for hosts in HOSTS
            for host in range(hosts)
            for case in _of_iterable(name, make(ShardOptions(host, hosts)), emitted=True)
        ],
        'loaders': [case for name in pipelines.LOADERS for case in _of_loader(name)],
    }


def digest(elements: Iterable[Any]) -> list[int]:
    """Return the number of elements and the checksum of all of them in order."""
    values = [plain(element) for element in elements]
    return [len(values), zlib.crc32(json.dumps(values).encode())]


def _of_iterable(name: str, dataset: Any, emitted: bool = False) -> Iterator[Case]:
    with iter(dataset) as iterator:
        elements = list(itertools.islice(iterator, AT_MOST))
        ended = len(elements) < AT_MOST
    taken = [count for count in TAKEN if count < len(elements)]
    for count in [*taken, len(elements)] if ended and not emitted else taken:
        with iter(dataset) as iterator:
            before = list(itertools.islice(iterator, count))
            state = iterator.get_state()
        yield _case(name, count, elements[count:], state, before if emitted else None)


def _of_loader(name: str) -> Iterator[Case]:
    source = pipelines.LOADERS[name]()
    with granular.Loader(source, BATCH) as loader:
        batches = list(itertools.islice(loader, BATCHES))
    for count in (0, 1, 5):
        with granular.Loader(source, BATCH) as loader:
            list(itertools.islice(loader, count))
            yield _case(name, count, batches[count:], loader.save(), None)


def _case(name: str, taken: int, following: list[Any], state: Any, before: list[Any] | None) -> Case:
    case = {'pipeline': name, 'version': granular.__version__, 'taken': taken, 'following': digest(following)}
    if before is not None:
        case['before'] = [read(atom) for element in before for atom in atoms(element)]
    return {**case, 'state': state}
