"""Datasets of fields: loading of selected fields in bulk, over methods and readers, through wrappers."""

import asyncio
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular import MapDataset, aio
from granular.errors import ClosedError, DatapointError, InvalidArgumentError, OutOfRangeError, UnknownKeyError
from granular.kappadata import (
    ClassFilterWrapper,
    KDConcatDataset,
    KDDataset,
    KDWrapper,
    ModeWrapper,
    OversamplingWrapper,
    PercentFilterWrapper,
    RepeatWrapper,
    ShuffleWrapper,
    SubsetWrapper,
)

LABELS = [0, 1, 1, 1, 2, 2, 1, 0, 1, 1, 1]


class Numbers(KDDataset):
    """A dataset whose field x is ten times the index."""

    class_names = ('a', 'b', 'c')

    def __init__(self, labels=LABELS):
        self.labels = labels
        self.called = []

    def __len__(self):
        return len(self.labels)

    def getitem_x(self, idx, ctx=None):
        self.called.append(('x', idx))
        return idx * 10

    def getitem_class(self, idx, ctx=None):
        self.called.append(('class', idx))
        if ctx is not None:
            ctx['class'] = self.labels[idx]
        return self.labels[idx]


class Shifted(KDWrapper):
    """A wrapper that shifts x by a random number."""

    def __init__(self, dataset, shift=1):
        super().__init__(dataset)
        self.shift = shift

    def getitem_x(self, idx, ctx=None):
        ctx['shift'] = self.shift
        return self.dataset.getitem_x(idx, ctx) + self.shift


# --- modes; most expected values were checked with the ModeWrapper and KDWrapper of kappadata 1.4.15


def test_modes_select_fields():
    dataset = Numbers()
    assert ModeWrapper(dataset, 'x')[3] == 30
    assert ModeWrapper(dataset, 'class x')[-1] == (1, 100)
    assert ModeWrapper(dataset, 'index x index')[-2] == (9, 90, 9)
    assert ModeWrapper(dataset, ['index'])[4] == 4
    assert ModeWrapper(dataset, 'class')[5:-3:2] == [2, 0]
    assert ModeWrapper(dataset, 'x class')[9:2:-4] == [(90, 1), (50, 2)]
    assert list(ModeWrapper(dataset, 'class')) == ModeWrapper(dataset, 'class')[:] == LABELS
    assert [x for x, _ in ModeWrapper(dataset, 'x class')] == list(range(0, 110, 10))
    wrapper = ModeWrapper(dataset, '  x   index ')
    assert wrapper.mode == 'x index'
    assert len(wrapper) == 11
    expected = [(100, 10), (0, 0), (0, 0)]
    for fetch in (wrapper.fetch, wrapper.__getitems__, wrapper._getitems):
        assert fetch([-1, 0, 0]) == expected
    assert wrapper.fetch(np.array([10, 0, 0])) == expected


def test_each_sample_gets_its_own_ctx():
    dataset = Shifted(Numbers())
    assert ModeWrapper(dataset, 'x', return_ctx=True)[-1] == (101, {'shift': 1})
    assert ModeWrapper(dataset, 'x class ctx.shift', return_ctx=True)[-2] == ((91, 1, 1), {'shift': 1, 'class': 1})
    pairs = ModeWrapper(dataset, 'class', return_ctx=True).fetch([0, 0, 4])
    assert pairs == [(0, {'class': 0}), (0, {'class': 0}), (2, {'class': 2})]
    assert pairs[0][1] is not pairs[1][1]
    with pytest.raises(UnknownKeyError, match=r"ctx\.flip: .* 'flip' .*\['class'\]"):
        ModeWrapper(dataset, 'class ctx.flip')[0]


def test_only_selected_loaders_are_called():
    dataset = Numbers()
    ModeWrapper(dataset, 'class')[:]
    assert {name for name, _ in dataset.called} == {'class'}
    assert len(dataset.called) == 11


@pytest.mark.parametrize('mode', ['x z', 'x,class', 'getitem_x'])
def test_unknown_fields_are_named_with_the_available_ones(mode):
    with pytest.raises(UnknownKeyError, match=r"unknown field '.*': there are 'class', 'x', 'index'"):
        ModeWrapper(Numbers(), mode)


def test_invalid_modes_and_loaders_are_rejected():
    for mode in ('', ' ', [], [3], None):
        with pytest.raises(InvalidArgumentError, match='mode: expected'):
            ModeWrapper(Numbers(), mode)
    with pytest.raises(InvalidArgumentError, match='list has no fields'):
        ModeWrapper([1, 2], 'x')
    wrapper = ModeWrapper(Numbers(), 'x')
    for index in (11, -12):
        with pytest.raises(OutOfRangeError, match=f'index {index} is out of range'):
            wrapper[index]
    with pytest.raises(OutOfRangeError):
        wrapper.fetch([0, 11])


WITHOUT_ELEMENTS = {
    'KDDataset': Numbers,
    'KDWrapper': lambda: Shifted(Numbers()),
    'SubsetWrapper': lambda: SubsetWrapper(Numbers(), [1, 2]),
    'PercentFilterWrapper': lambda: PercentFilterWrapper(Numbers(), 0.0, 0.5),
    'RepeatWrapper': lambda: RepeatWrapper(Numbers(), 2),
    'ShuffleWrapper': lambda: ShuffleWrapper(Numbers(), seed=1),
    'ClassFilterWrapper': lambda: ClassFilterWrapper(Numbers(), [1]),
    'OversamplingWrapper': lambda: OversamplingWrapper(Numbers()),
    'KDConcatDataset': lambda: KDConcatDataset([Numbers(), Numbers()]),
    'aio': lambda: aio.kappadata.RepeatWrapper(Numbers(), 2),
}
USES = {
    'index': lambda d, _: d[0],
    'loop': lambda d, _: list(d),
    'Loader': lambda d, _: granular.Loader(d, 1),
    'MapDataset': lambda d, _: MapDataset.source(d),
    'DataLoader': lambda d, _: granular.grain.DataLoader(
        data_source=d, sampler=granular.grain.samplers.SequentialSampler(2)
    ),
    'sources': lambda d, _: granular.sources.Epochs(d),
    'convert': lambda d, path: granular.convert(d, path / 'ds'),
}


@pytest.mark.parametrize('use', USES)
@pytest.mark.parametrize('name', WITHOUT_ELEMENTS)
def test_datasets_of_fields_name_the_mode_wrapper_where_elements_are_expected(name, use, tmp_path):
    with pytest.raises(InvalidArgumentError, match="has fields, but no elements: .*ModeWrapper.*mode='class x'"):
        USES[use](WITHOUT_ELEMENTS[name](), tmp_path)


def test_dataset_of_fields_with_elements_of_its_own_is_a_source():
    class Both(Numbers):
        def __getitem__(self, index):
            return {'x': index}

    assert MapDataset.source(Both()).fetch([3, 1]) == [{'x': 3}, {'x': 1}]


def test_errors_name_field_and_sample():
    class Broken(Numbers):
        def getitem_x(self, idx, ctx=None):
            return 1 // (idx - 3)

    with pytest.raises(ZeroDivisionError) as caught:
        ModeWrapper(Broken(), 'x').fetch([1, 3])
    assert any("field 'x' of datapoint 3" in note for note in caught.value.__notes__)
    stream = MapDataset.source(ModeWrapper(Broken(), 'index x')).to_iter_dataset(on_error='skip')
    assert [i for i, _ in stream] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    datapoints = MapDataset.range(11).map(lambda i: {'x': 1 // (i - 3)})
    stream = MapDataset.source(ModeWrapper(datapoints, 'index x')).to_iter_dataset(on_error='skip')
    assert [i for i, _ in stream] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


# --- methods for a batch, and coroutines


class Bulk(Numbers):
    def getitems_x(self, indices, ctxs):
        self.called.append(('bulk', len(indices)))
        for ctx in ctxs:
            ctx['bulk'] = True
        return np.array(indices) * 10


class Own(Bulk):
    def getitem_x(self, idx, ctx=None):
        return -idx


class Waiting(KDDataset):
    peak = now = 0

    def __len__(self):
        return 50

    async def getitem_x(self, idx, ctx=None):
        self.now += 1
        self.peak = max(self.peak, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return idx


def test_batch_methods_load_many_samples():
    dataset = Bulk()
    assert ModeWrapper(dataset, 'x ctx.bulk').fetch([3, 1]) == [(30, True), (10, True)]
    assert dataset.called == [('bulk', 2)]
    assert ModeWrapper(Own(), 'x').fetch([3, 1]) == [-3, -1]

    class Short(Numbers):
        def getitems_x(self, indices, ctxs):
            return [1]

    with pytest.raises(DatapointError, match='getitems_x returned 1 value for 2 datapoints'):
        ModeWrapper(Short(), 'x').fetch([1, 2])

    class Lazy(Numbers):
        def getitems_x(self, indices, ctxs):
            return map(str, indices)

    class Unordered(Numbers):
        def getitems_x(self, indices, ctxs):
            return set(indices)

    class Named(Numbers):
        def getall_x(self):
            return dict.fromkeys(range(len(self)), 1)

    with pytest.raises(DatapointError, match='getitems_x returned a map for 2 datapoints'):
        ModeWrapper(Lazy(), 'x').fetch([1, 2])
    with pytest.raises(DatapointError, match='getitems_x returned a set for 2 datapoints'):
        ModeWrapper(Unordered(), 'x').fetch([1, 2])
    with pytest.raises(DatapointError, match='getall_x returned a dict for'):
        ShuffleWrapper(Named(), seed=0).getall_x()


def test_coroutine_loaders_run_concurrently():
    dataset = Waiting()
    assert ModeWrapper(dataset, 'x')[:] == list(range(50))
    assert dataset.peak == 50
    assert ModeWrapper(SubsetWrapper(dataset, [7]), 'x')[0] == SubsetWrapper(dataset, [7]).getitem_x(0) == 7


# --- wrappers


def test_wrappers_delegate_other_attributes():
    dataset = Shifted(Shifted(Numbers()), 5)
    assert dataset.fields == ('class', 'x')
    assert ModeWrapper(dataset, 'x class index')[2] == (26, 1, 2)
    assert dataset.getitem_x(2, {}) == 26
    assert dataset.getitem_class(2) == 1
    assert dataset.dataset.dataset.class_names == ('a', 'b', 'c')
    assert dataset.dataset.getitems_x([1, 2], [{}, {}]) == [11, 21]
    assert not hasattr(dataset, 'getitem_z')
    assert dataset.getitems_x([1, 2], [{}, {}]) == [16, 26]
    assert not hasattr(dataset, 'other')


def test_subset_percent_repeat_shuffle_and_concatenation():
    dataset = Numbers()
    subset = SubsetWrapper(Shifted(dataset), [3, -1, 0])
    assert ModeWrapper(subset, 'x class index')[:] == [(31, 1, 0), (101, 1, 1), (1, 0, 2)]
    assert ModeWrapper(SubsetWrapper(subset, slice(None, None, -1)), 'x')[:] == [1, 101, 31]
    with pytest.raises(OutOfRangeError):
        SubsetWrapper(dataset, [11])
    part = PercentFilterWrapper(dataset, 0.25, 0.75)
    assert ModeWrapper(part, 'x')[:] == [20, 30, 40, 50, 60, 70]
    assert len(PercentFilterWrapper(Numbers([0] * 100), to_percent=0.29)) == 29  # 28 with kappadata
    empty = PercentFilterWrapper(dataset, to_percent=0)
    assert len(empty) == 0  # all of them with kappadata
    assert ModeWrapper(empty, 'x')[:] == list(ModeWrapper(empty, 'x')) == []
    assert ModeWrapper(RepeatWrapper(part, repetitions=2), 'x')[5:8] == [70, 20, 30]
    assert len(RepeatWrapper(dataset, min_size=25)) == 33
    with pytest.raises(InvalidArgumentError):
        RepeatWrapper(dataset, 2, 3)
    assert ModeWrapper(ShuffleWrapper(dataset, seed=5), 'x')[:4] == [100, 70, 10, 30]
    both = KDConcatDataset([dataset, Shifted(dataset), SubsetWrapper(dataset, [])])
    assert ModeWrapper(both, 'x class').fetch([0, 10, 11, 21, -1]) == [(0, 0), (100, 1), (1, 0), (101, 1), (101, 1)]
    assert both.getitem_x(21, {}) == 101
    assert both.getitems_class([0, 4]) == [0, 2]
    assert KDConcatDataset(iter([dataset, Shifted(dataset)])).root_dataset is dataset
    with pytest.raises(InvalidArgumentError, match='one dataset or more'):
        KDConcatDataset([])


OPERATIONS = st.one_of(
    st.tuples(st.just('subset'), st.lists(st.integers(-1, 0), max_size=5)),
    st.tuples(st.just('part'), st.tuples(st.integers(0, 4), st.integers(4, 8))),
    st.tuples(st.just('repeat'), st.integers(1, 3)),
    st.tuples(st.just('twice'), st.none()),
    st.tuples(st.just('classes'), st.sets(st.integers(0, 2))),
)


@given(st.lists(OPERATIONS, max_size=4))
def test_nested_wrappers_equal_lists_of_samples(operations):
    dataset, model = Shifted(Numbers()), [(10 * i + 1, label) for i, label in enumerate(LABELS)]
    for name, argument in operations:
        if name == 'subset' and model:
            dataset, model = SubsetWrapper(dataset, argument), [model[i] for i in argument]
        elif name == 'part':
            start, stop = (len(model) * eighths // 8 for eighths in argument)
            dataset, model = PercentFilterWrapper(dataset, argument[0] / 8, argument[1] / 8), model[start:stop]
        elif name == 'repeat' and model:
            dataset, model = RepeatWrapper(dataset, argument), model * argument
        elif name == 'twice':
            dataset, model = KDConcatDataset([dataset, dataset]), model + model
        elif name == 'classes':
            dataset = ClassFilterWrapper(dataset, argument, field='class')
            model = [sample for sample in model if sample[1] in argument]
    wrapper = ModeWrapper(dataset, 'x class')
    assert len(wrapper) == len(model)
    assert wrapper[:] == model
    assert wrapper[::-2] == model[::-2]


def test_filters_read_labels_once():
    dataset = Numbers()
    chosen = ClassFilterWrapper(Shifted(dataset), valid_classes=[0, 2], field='class')
    assert dataset.called == [('class', i) for i in range(11)]
    dataset.called.clear()
    assert len(chosen) == 4
    balanced = OversamplingWrapper(ShuffleWrapper(RepeatWrapper(chosen, 2), seed=1), 'exact', field='class')
    assert dataset.called == []
    classes = ModeWrapper(balanced, 'class')[:]
    assert classes == sorted(classes) == [0] * 4 + [2] * 4
    assert ModeWrapper(chosen, 'x index')[1:3] == [(41, 1), (51, 2)]
    expected = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 7, 0, 7, 4, 5, 4, 5]
    assert ModeWrapper(OversamplingWrapper(dataset, field='class'), 'x')[:] == [10 * i for i in expected]
    assert len(ClassFilterWrapper(dataset, [1])) == 7  # of the field class, as there is no label
    with pytest.raises(UnknownKeyError, match="unknown field 'target'"):
        ClassFilterWrapper(dataset, [1], field='target')
    with pytest.raises(InvalidArgumentError, match='either'):
        ClassFilterWrapper(dataset, field='class')


@pytest.mark.parametrize('known', [False, True])
def test_labels_that_are_integers_in_one_dataset_and_texts_in_another_never_match(known):
    numbers, texts = Numbers(), Numbers(list(map(str, LABELS)))
    if known:
        numbers = ClassFilterWrapper(numbers, invalid_classes=[], field='class')
        texts = ClassFilterWrapper(texts, invalid_classes=[], field='class')
    both = KDConcatDataset([numbers, texts])
    assert len(ModeWrapper(both, 'class')[:]) == 22
    with pytest.raises(InvalidArgumentError, match='int, str'):
        ClassFilterWrapper(both, valid_classes=['1'], field='class')


# --- over readers


def write(path, kind=granular.DatasetWriter, start=0, **options):
    spec = {'data': 'bytes', 'image': 'png', 'label': 'int'}
    with kind(path, spec, granular.encoders, layout='columns', **options) as writer:
        for i in range(start, start + 200):
            image = np.full((4, 4, 3), i % 256, np.uint8)
            writer.append({'data': i.to_bytes(2, 'big') * 500, 'image': image, 'label': i % 7})


@pytest.fixture(scope='module')
def bucket(request):
    path = request.getfixturevalue('fakegcs').place()
    write(path / 'one')
    write(path / 'two', start=200)
    write(path / 'shards', granular.ShardedDatasetWriter, shardlen=60)
    return path


@pytest.fixture
def fetched(monkeypatch):
    """Record the number of datapoints and the mask of each fetch of a reader."""
    calls = []
    for kind in (aio.DatasetReader, aio.ShardedDatasetReader):

        async def fetching(self, indices, mask=None, fetch=kind.fetch):
            calls.append((len(indices), None if mask is None else list(mask)))
            return await fetch(self, indices, mask)

        monkeypatch.setattr(kind, 'fetch', fetching)
    return calls


@pytest.mark.parametrize(('kind', 'name'), [(granular.DatasetReader, 'one'), (granular.ShardedDatasetReader, 'shards')])
def test_fields_of_a_reader_become_its_mask(bucket, fetched, kind, name):
    with kind(bucket / name, granular.decoders) as reader:
        before = granular.io_stats()
        assert ModeWrapper(reader, 'label')[:] == [i % 7 for i in range(200)]
        after = granular.io_stats()
        assert after['bytes'] - before['bytes'] == 200  # each of these integers takes a byte
        assert after['requests'] - before['requests'] == (1 if name == 'one' else 4)
        image, label, index = ModeWrapper(reader, 'image label index')[-3]
        assert (image[0, 0, 0], label, index) == (197, 197 % 7, 197)
        assert ModeWrapper(reader, 'label label').fetch([8, 0]) == [(1, 1), (0, 0)]
        assert fetched == [(200, ['label']), (1, ['image', 'label']), (2, ['label'])]
        fetched.clear()
        assert ModeWrapper(reader, 'index')[2:4] == [2, 3]
        assert fetched == []
        with pytest.raises(UnknownKeyError, match="unknown field 'class': there are 'data', 'image', 'label', 'index'"):
            ModeWrapper(reader, 'class')


def test_batch_through_wrappers_is_one_fan_out_per_reader(bucket, fetched):
    one, two = (granular.DatasetReader(bucket / name, granular.decoders) for name in ('one', 'two'))
    with one, two:
        both = ShuffleWrapper(ClassFilterWrapper(KDConcatDataset([one, two]), invalid_classes=[0, 1]), seed=0)
        assert fetched == [(200, ['label']), (200, ['label'])]
        fetched.clear()
        datapoints = ModeWrapper(both, 'data label')[:64]
        assert {label for _, label in datapoints} == {2, 3, 4, 5, 6}
        assert all(int.from_bytes(data[:2], 'big') % 7 == label for data, label in datapoints)
        assert [mask for _, mask in fetched] == [['data', 'label']] * 2
        assert sum(count for count, _ in fetched) == 64


class Brighter(KDWrapper):
    """Load an image of the wrapped dataset, decoded in a thread while this method occupies another."""

    def getitem_image(self, idx, ctx=None):
        ctx['thread'] = threading.current_thread().name
        return self.dataset.getitem_image(idx, ctx) + 1

    def getitems_brightness(self, indices, ctxs):
        return [int(image.max()) for image in self.dataset.getitems_image(indices, ctxs)]


def test_reader_can_be_wrapped(bucket, fetched):
    with granular.DatasetReader(bucket / 'one', granular.decoders) as reader:
        dataset = Brighter(reader)
        assert dataset.fields == ('brightness', 'data', 'image', 'label')
        assert ModeWrapper(dataset, 'label brightness data index')[3:5] == [
            (i % 7, i, i.to_bytes(2, 'big') * 500, i) for i in (3, 4)
        ]
        assert fetched == [(2, ['label', 'data']), (2, ['image'])]
        images = ModeWrapper(dataset, 'image')[:100]
        assert [image[0, 0, 0] for image in images] == list(range(1, 101))


async def test_threads_waiting_for_decoders_do_not_deadlock(bucket):
    async with aio.DatasetReader(bucket / 'one', granular.decoders) as reader:
        wrapper = aio.kappadata.ModeWrapper(Brighter(Brighter(reader)), 'image')
        async with asyncio.timeout(20):
            caught = await asyncio.gather(*(wrapper.fetch(range(64)) for _ in range(4)))
        assert [image[0, 0, 0] for image in caught[3]] == list(range(2, 66))


def test_mapdataset_and_masked_sources_can_be_wrapped():
    datapoints = MapDataset.source([{'x': i, 'label': i % 2, 'y': -i} for i in range(6)])
    odd = datapoints.filter_classes(valid_classes=[1])
    assert ModeWrapper(odd, 'y index')[:] == [(-1, 0), (-3, 1), (-5, 2)]
    with pytest.raises(UnknownKeyError, match="unknown field 'z'"):
        ModeWrapper(odd, 'z')[0]
    assert ModeWrapper(granular.sources.Epochs(datapoints, shuffle=False), 'y')[-1] == -5
    with pytest.raises(InvalidArgumentError, match='removed by a filter'):
        ModeWrapper(datapoints.filter(bool), 'x')
    with pytest.raises(InvalidArgumentError, match='wrapping: the dataset is repeated infinitely'):
        ModeWrapper(datapoints.repeat(), 'x')

    class Table:
        def __len__(self):
            return 5

        def fetch(self, indices, mask=None):
            calls.append((indices, mask))
            return [{key: (key, i) for key in mask} for i in indices]

    calls = []
    assert ModeWrapper(Table(), 'b a').fetch([4, 1]) == [(('b', 4), ('a', 4)), (('b', 1), ('a', 1))]
    assert calls == [([4, 1], ('b', 'a'))]
    assert list(MapDataset.source(Table()).select(['a']))[4] == {'a': ('a', 4)}


class Foreign:
    """Delegates fields to the wrapped dataset, as the wrappers of KappaData do."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return 2

    def __getattr__(self, name):
        if name.startswith('getitem_'):
            return lambda idx, ctx=None: getattr(self.dataset, name)(10 - idx, ctx)
        raise AttributeError(name)


def test_foreign_datasets_can_be_wrapped():
    assert ModeWrapper(Foreign(Numbers()), 'x class index')[:] == [(100, 1, 0), (90, 1, 1)]
    assert ModeWrapper(Shifted(Foreign(Numbers())), 'x class')[1] == (91, 1)
    assert len(ClassFilterWrapper(Foreign(Numbers()), valid_classes=[1], field='class')) == 2


# --- as a source; pickling; printing


def as_dict(sample, seed):
    return {'label': sample[1]}


def test_dataset_feeds_pipelines(bucket):
    with granular.DatasetReader(bucket / 'one', granular.decoders) as reader:
        chosen = ClassFilterWrapper(reader, valid_classes=range(2))
        wrapper = ModeWrapper(chosen, 'data label')
        dataset = MapDataset.source(wrapper).shuffle(seed=1).batch(8)
        assert set(dataset[0][1].tolist()) == {0, 1}
        stages = [line.rsplit(maxsplit=1) for line in str(dataset).splitlines()]
        assert [(stage.strip(), length) for stage, length in stages] == [
            (repr(reader), '200'),
            ("ClassFilterWrapper(valid_classes=[0, 1], field='label')", '58'),
            ("ModeWrapper('data label')", '58'),
            ('shuffle(seed=1, Index())', '58'),
            ('batch(8)', '8'),
        ]
        assert str(wrapper).splitlines()[-1].startswith("ModeWrapper('data label')")
        assert repr(wrapper) == "ModeWrapper(ClassFilterWrapper(valid_classes=[0, 1], field='label'), 'data label')"
        with granular.Loader(granular.sources.Transform(wrapper, as_dict), 4) as loader:
            assert next(loader)['label'].tolist() == [0, 1, 0, 1]


def test_dataset_pickles(tmp_path):
    write(tmp_path / 'ds')
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        chosen = OversamplingWrapper(ClassFilterWrapper(Brighter(reader), valid_classes=[3, 6]), 'exact')
        both = KDConcatDataset([chosen, SubsetWrapper(chosen, [1])])
        wrapper = ModeWrapper(PercentFilterWrapper(both, 0.5), 'index label image')
        expected = wrapper.fetch([0, -1])
        assert [label for _, label, _ in expected] == [6, 3]
        sent, core = pickle.dumps(wrapper), pickle.dumps(wrapper.aio)
        with granular.Loader(granular.sources.Transform(wrapper, as_dict), 2, mp='spawn', workers=1) as loader:
            assert next(loader)['label'].tolist() == [6, 6]
    twin = pickle.loads(sent)
    assert len(twin) == len(wrapper)
    for caught in (twin.fetch([0, -1]), asyncio.run(pickle.loads(core).fetch([0, -1]))):
        for left, right in zip(caught, expected, strict=True):
            assert left[:2] == right[:2]
            assert (left[2] == right[2]).all()


# --- async API


class Dimmed(aio.kappadata.KDWrapper):
    async def getitem_image(self, idx, ctx=None):
        ctx['dimmed'] = True
        return await self.dataset.getitem_image(idx, ctx) // 2


async def test_async_api(bucket, fetched):
    async with aio.DatasetReader(bucket / 'one', granular.decoders) as reader:
        dataset = await aio.kappadata.ClassFilterWrapper.open(Dimmed(reader), invalid_classes=[0])
        assert fetched == [(200, ['label'])]
        wrapper = aio.kappadata.ModeWrapper(dataset, 'label image ctx.dimmed')
        assert len(wrapper) == 171
        label, image, dimmed = await wrapper.get(-1)
        assert (label, image[0, 0, 0], dimmed) == (3, 99, True)
        assert [label async for label in aio.kappadata.ModeWrapper(dataset, 'label')][:3] == [1, 2, 3]
        assert await aio.kappadata.ModeWrapper(aio.kappadata.SubsetWrapper(dataset, [3]), 'label').get(slice(None)) == [
            4
        ]
        assert await dataset.getitem_label(0) == 1
        with pytest.raises(ClosedError, match='not open yet'):
            len(aio.kappadata.OversamplingWrapper(reader))


class Pairs(granular.kappadata.KDDataset):
    """Fields by each kind of method: of one datapoint, of many, and coroutine functions."""

    def __len__(self):
        return 9

    def getitem_one(self, index, ctx=None):
        return index

    def getitems_many(self, indices, ctxs):
        return [10 * index for index in indices]


class Awaiting(Pairs):
    async def getitem_waits(self, index, ctx=None):
        return 100 * index


class Doubled(granular.kappadata.KDWrapper):
    def getitem_one(self, index, ctx=None):
        return 2 * self.dataset.getitem_one(index, ctx)

    def getitems_many(self, indices, ctxs):
        return [2 * value for value in self.dataset.getitems_many(indices, ctxs)]


@pytest.mark.parametrize(
    'wrap',
    [lambda dataset: dataset, lambda dataset: granular.kappadata.SubsetWrapper(dataset, range(9)),
     granular.kappadata.KDWrapper, Doubled,
     lambda dataset: granular.kappadata.KDConcatDataset([dataset])],
)  # fmt: skip
@pytest.mark.parametrize('make', [Pairs, Awaiting])
def test_wrapped_dataset_is_the_one_that_was_passed(make, wrap):
    dataset = wrap(make())
    wrapper = Doubled(dataset)
    assert wrapper.root_dataset is dataset.root_dataset
    if type(dataset) is not Awaiting:  # which is given methods that block
        assert wrapper.dataset is dataset
    for other in (granular.kappadata.SubsetWrapper(dataset, [1]), granular.kappadata.RepeatWrapper(dataset, 2)):
        assert other.dataset is other.parents[0] is dataset
    assert granular.kappadata.ModeWrapper(dataset, 'one').dataset is dataset
    times = 4 if type(dataset) is Doubled else 2
    assert wrapper.getitem_one(3) == wrapper.getitems_one([3])[0] == 3 * times
    assert wrapper.getitem_many(3) == wrapper.getitems_many([3], [{}])[0] == 30 * times
    assert granular.kappadata.ModeWrapper(wrapper, 'one many')[2] == (2 * times, 20 * times)
    assert pickle.loads(pickle.dumps(wrapper)).getitems_one([1, 2]) == [times, 2 * times]
    if make is Awaiting:
        assert wrapper.getitem_waits(3) == 300


def test_parents_of_a_map_dataset_are_those_it_was_made_of():
    one, two = MapDataset.range(3), MapDataset.range(4)
    assert one.map(str).parents[0] is one.shuffle(seed=1).parents[0] is one
    assert MapDataset.concatenate([one, two]).parents == [one, two]
    assert one.map(str).batch(2).parents[0].parents[0] is one
    twin = granular.aio.MapDataset.range(3)
    assert twin.map(str).parents[0] is twin
