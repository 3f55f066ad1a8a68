"""The types of elements, which mypy checks (``make lint``): the same expressions run here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, assert_type

import numpy as np
import pytest

import granular
from granular import aio
from granular.grain import DatasetIterator


class Digit(TypedDict):
    label: int


class Doubled(granular.grain.transforms.Map[int, str]):
    def map(self, element: int) -> str:
        return str(2 * element)


class Untyped(granular.grain.transforms.Map):
    def map(self, element: Any) -> Any:
        return element


class Squares:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return float(index**2)


class Fetched(granular.DataSource):
    def __len__(self) -> int:
        return 3

    def fetch(self, indices: Sequence[int]) -> list[float]:
        return [float(index**2) for index in indices]


class Pairs(granular.MapDataset[tuple[int, int]]):
    def __getitem__(self, index: Any) -> Any:
        return index, 2 * index

    def __len__(self) -> int:
        return 3


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    with granular.DatasetWriter(tmp_path / 'digits', {'label': 'int'}) as writer:
        for label in range(4):
            writer.append({'label': label})
    return tmp_path / 'digits'


def test_constructors_have_the_types_and_names_of_their_async_counterparts(digits: Path) -> None:
    with granular.DatasetReader[Digit](digits, cache_keys=('label',)) as reader:
        assert_type(reader[0], Digit)
        assert_type(granular.Loader(reader, batch=2), granular.Loader)
    with pytest.raises(TypeError, match='batch'):
        granular.Loader(reader)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match='sede'):
        granular.sources.Epochs(reader, sede=0)  # type: ignore[call-arg]
    with pytest.raises(granular.GranularError, match='batch'):
        granular.Loader(reader, batch='2')  # type: ignore[arg-type]


def test_what_open_returns_is_used_as_a_dataset(digits: Path) -> None:
    with granular.open(digits) as reader:
        assert reader.spec == {'label': 'int'}
        assert reader[0]['label'] == 0
        assert [datapoint['label'] for datapoint in reader] == list(range(4))
        labels = granular.MapDataset.source(reader).map(lambda datapoint: datapoint['label'])
        assert labels[3] == 3


def test_datapoints_of_a_reader_are_dicts(digits: Path) -> None:
    with granular.DatasetReader(digits) as reader:
        assert assert_type(reader[0], dict[str, Any]) == {'label': 0}
        assert assert_type(reader[1:3], dict[str, list[Any]]) == {'label': [1, 2]}
        assert assert_type(reader[0, ('label',)], dict[str, Any]) == {'label': 0}
        assert assert_type(reader[1:3, ('label',)], dict[str, list[Any]]) == {'label': [1, 2]}
        assert assert_type(reader.get(0), dict[str, Any]) == {'label': 0}
        assert assert_type(reader.fetch([0]), list[dict[str, Any]]) == [{'label': 0}]
        assert assert_type(reader.take(1), list[dict[str, Any]]) == [{'label': 0}]
        for datapoint in reader:
            assert_type(datapoint, dict[str, Any])


def test_datapoints_of_a_reader_are_of_a_type_of_the_caller(digits: Path) -> None:
    with granular.DatasetReader[Digit](digits) as reader:
        assert assert_type(reader[0], Digit) == {'label': 0}
        assert assert_type(reader[0]['label'], int) == 0
        assert assert_type(reader.fetch([0]), list[Digit]) == [{'label': 0}]
        assert assert_type(reader.fetch([0], ('label',)), list[dict[str, Any]]) == [{'label': 0}]
        source = granular.MapDataset.source(granular.DatasetReader(digits))
        assert assert_type(source[0], dict[str, Any]) == {'label': 0}
        labels = granular.MapDataset.source(reader).map(lambda digit: digit['label'])
        assert assert_type(labels[3], int) == 3


async def test_datapoints_of_async_readers_are_typed_as_well(digits: Path) -> None:
    async with aio.DatasetReader(digits) as reader:
        assert assert_type(await reader.get(0), dict[str, Any]) == {'label': 0}
        assert assert_type(await reader.get(slice(2)), dict[str, list[Any]]) == {'label': [0, 1]}
        assert assert_type(await reader.get(0, ('label',)), dict[str, Any]) == {'label': 0}
        assert assert_type(await reader.fetch([0]), list[dict[str, Any]]) == [{'label': 0}]
        dataset = assert_type(aio.MapDataset.source(reader), aio.MapDataset[dict[str, Any]])
        assert assert_type(await dataset.get(1), dict[str, Any]) == {'label': 1}
        stream = assert_type(dataset.batch(2).to_iter_dataset(), granular.IterDataset[dict[str, Any]])
        assert_type(aiter(stream), aio.DatasetIterator[dict[str, Any]])
        async for batch in stream:
            assert assert_type(batch, dict[str, Any])['label'].shape == (2,)
    async with aio.DatasetReader[Digit](digits) as typed:
        assert assert_type(await typed.get(0), Digit) == {'label': 0}


def test_records_are_bytes(tmp_path: Path) -> None:
    with granular.BagWriter(tmp_path / 'a.bag') as writer:
        writer.append(b'a')
    with granular.BagReader(tmp_path / 'a.bag') as reader:
        assert assert_type(reader[0], bytes) == b'a'
        assert assert_type(reader[:1], list[bytes]) == [b'a']
        assert assert_type(reader.take(1), list[bytes]) == [b'a']
        assert assert_type(granular.MapDataset.source(reader)[0], bytes) == b'a'


def test_operations_follow_the_types_of_elements() -> None:
    numbers = assert_type(granular.MapDataset.range(6), granular.MapDataset[int])
    assert assert_type(numbers.seed(0).shuffle().repeat(2).slice(slice(3)).filter(lambda n: n >= 0)[0], int) >= 0
    assert assert_type(numbers[1:], granular.MapDataset[int])[0] == 1
    assert assert_type(numbers.map(str)[0], str) == '0'
    assert assert_type(numbers.map(lambda number: number / 2)[1], float) == 0.5
    assert assert_type(numbers.map(Doubled())[1], str) == '2'
    assert assert_type(numbers.map(Untyped())[1], Any) == 1
    pairs = numbers.map_with_index(lambda index, number: (index, str(number)))
    assert assert_type(pairs[1], tuple[int, str]) == (1, '1')
    assert assert_type(numbers.random_map(lambda number, rng: rng.random() + number, seed=0)[0], float) < 1
    assert assert_type(numbers.flat_map(lambda number: [str(number)], max_fan_out=1)[0], str) == '0'
    assert assert_type(numbers.batch(2, batch_fn=sum)[0], int) == 1
    assert assert_type(numbers.batch(2)[0], Any).tolist() == [0, 1]
    assert assert_type(numbers.map(lambda n: {'n': n}).batch(2)[0], dict[str, Any])['n'].tolist() == [0, 1]
    both = assert_type(granular.MapDataset.mix([numbers, numbers]), granular.MapDataset[int])
    assert assert_type(granular.MapDataset.concatenate([both, both]), granular.MapDataset[int])[0] == 0
    assert assert_type(granular.MapDataset.zip([both, both]), granular.MapDataset[tuple[Any, ...]])[0] == (0, 0)
    assert assert_type(numbers.fetch([0, 1]), list[int]) == [0, 1]


def test_sources_give_their_types() -> None:
    assert assert_type(granular.MapDataset.source(['a'])[0], str) == 'a'
    assert assert_type(granular.MapDataset.source([(1, 2)])[0], tuple[int, int]) == (1, 2)
    assert assert_type(granular.MapDataset.source(range(3))[0], int) == 0
    assert assert_type(granular.MapDataset.source(Squares())[2], float) == 4.0
    assert assert_type(granular.MapDataset.source(Fetched())[2], float) == 4.0
    assert assert_type(granular.MapDataset.source(granular.MapDataset.range(3))[2], int) == 2
    assert assert_type(granular.MapDataset.source(np.arange(3)), granular.MapDataset[Any])[2] == 2
    assert assert_type(Pairs()[1], Any) == (1, 2)
    assert assert_type(Pairs().shuffle(seed=0).map(sum).fetch([0]), list[int])


def test_streams_follow_the_types_of_elements() -> None:
    stream = assert_type(granular.MapDataset.range(6).to_iter_dataset(), granular.IterDataset[int])
    iterator = assert_type(iter(stream), DatasetIterator[int])
    assert assert_type(next(iterator), int) == 0
    assert assert_type(list(stream.map(str)), list[str])[0] == '0'
    assert assert_type(list(stream.filter(lambda number: number > 3).limit(1)), list[int]) == [4]
    assert assert_type(list(stream.flat_map(lambda number: [str(number)])), list[str])[0] == '0'
    assert assert_type(next(iter(stream.batch(2, batch_fn=sum))), int) == 1
    assert assert_type(list(granular.IterDataset.zip([stream, stream])), list[tuple[Any, ...]])[0] == (0, 0)

    def row(number: int) -> dict[str, Any]:
        return {'tokens': np.arange(number + 1)}

    for packed in stream.map(row).pack({'tokens': 8}).batch(2):
        assert assert_type(packed, dict[str, Any])['tokens'].shape[1] == 8


def test_types_stand_in_annotations() -> None:
    def first(dataset: granular.MapDataset[int], reader: granular.DatasetReader | None = None) -> int:
        return dataset[0]

    def names(stream: granular.IterDataset[str], datasets: Sequence[granular.MapDataset] = ()) -> list[str]:
        return list(stream)

    assert first(granular.MapDataset[int].range(3)) == 0
    assert names(granular.MapDataset.range(2).map(str).to_iter_dataset()) == ['0', '1']
    assert isinstance(granular.MapDataset[int].source([1]), granular.MapDataset)
