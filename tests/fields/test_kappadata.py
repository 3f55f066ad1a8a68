"""KappaData's own code over our classes: the same expressions, evaluated by both, have the same results."""

import inspect
import json
import textwrap

import numpy as np
import pytest

import granular

LABELS = [0, 1, 1, 1, 2, 2, 1, 0, 1, 1, 1]


def define(names, labels):
    """Define datasets and wrappers with the base classes of a library, as its users do. It runs in both processes."""

    class Numbers(names['KDDataset']):
        class_names = ['cat', 'dog', 'owl']

        def __init__(self, labels=labels, offset=0):
            super().__init__()
            self.labels, self.offset, self.disposed = labels, offset, 0

        def __len__(self):
            return len(self.labels)

        @property
        def n_classes(self):
            return 3

        def getshape_class(self):
            return (3,)

        def getshape_x(self):
            return (2, 5)

        def getitem_x(self, idx, ctx=None):
            return self.offset + idx * 10

        def getitem_class(self, idx, ctx=None):
            if ctx is not None:
                ctx['class'] = self.labels[idx]
            return self.labels[idx]

        def describe_labels(self, sep):
            return sep.join(map(str, self.labels))

        def dispose(self):
            self.disposed += 1

    class Quick(Numbers):
        def getall_class(self):
            return list(self.labels)

        def getall_x(self):
            return [self.offset + i * 10 for i in range(len(self.labels))]

    names.update(Numbers=Numbers, Quick=Quick, ds=Numbers(), quick=Quick(), few=Numbers(labels[:4], 1000))
    if 'KDWrapper' not in names:
        return

    class Shifted(names['KDWrapper']):
        def __init__(self, dataset, shift=1):
            super().__init__(dataset)
            self.shift = shift

        def getitem_x(self, idx, ctx=None):
            return self.dataset.getitem_x(idx, ctx) + self.shift

    class Marked(names['KDWrapper']):
        def getitem_y(self, idx, ctx=None):
            ctx['mark'] = idx
            return self.dataset.getitem_class(idx, ctx) * 2

    names.update(Shifted=Shifted, Marked=Marked)


# Of both releases. A mode of one field is a tuple of one in 0.0.8.
BOTH = """
ModeWrapper(ds, 'x class')[3]
ModeWrapper(ds, 'x class')[-1]
ModeWrapper(ds, 'class x')[-3]
ModeWrapper(ds, 'index x class')[0]
ModeWrapper(ds, 'index x class')[-2]
ModeWrapper(ds, 'x index x')[4]
ModeWrapper(ds, mode='x class')[2:5]
ModeWrapper(dataset=ds, mode='x class')[:]
ModeWrapper(ds, 'x class')[::-3]
ModeWrapper(ds, 'x class')[9:2:-4]
ModeWrapper(ds, 'x class')[20:]
ModeWrapper(ds, 'x class')[-3:-1]
list(ModeWrapper(ds, 'x class'))
len(ModeWrapper(ds, 'x class'))
ModeWrapper(ds, 'x class').mode
ModeWrapper(ds, 'x class', return_ctx=True).return_ctx
ModeWrapper(ds, 'x class').n_classes
ModeWrapper(ds, 'x class').getitem_x(3)
ModeWrapper(ds, 'x class').dataset is ds
ModeWrapper(PercentFilterWrapper(ds, to_percent=0.5), 'x class').labels
list(ModeWrapper(KDSubset(ds, [4, 0, 4, 10]), 'x class'))
KDSubset(ds, [4, 0, 4]).getitem_x(1)
KDSubset(ds, [4, 0, 4]).n_classes
KDSubset(ds, [4, 0, 4]).describe_labels('-')
KDSubset(KDSubset(ds, [4, 0, 4]), [1, 2]).class_names
KDSubset(ds, [4, 0, 4]).dataset is ds
KDSubset(KDSubset(ds, [4, 0, 4]), [1, 2]).root_dataset is ds
len(KDSubset(ds, [4, 0, 4]))
list(KDSubset(ds, [4, 0, 4]).indices)
list(KDSubset(KDSubset(ds, [4, 0, 4]), [2]).indices)
list(ClassFilterWrapper(ds, valid_classes=[0, 2]).indices)
list(PercentFilterWrapper(ds, to_percent=0.5).indices)
list(OversamplingWrapper(few).indices)
list(RepeatWrapper(few, repetitions=2).indices)
list(ShuffleWrapper(ds, seed=5).indices)
list(ModeWrapper(KDSubset(KDSubset(ds, [4, 0, 7]), [2, 1]), 'x class'))
list(ModeWrapper(PercentFilterWrapper(ds, from_percent=0.25), 'x class'))
list(ModeWrapper(PercentFilterWrapper(ds, to_percent=0.75), 'x class'))
list(ModeWrapper(PercentFilterWrapper(ds, from_percent=0.25, to_percent=0.75), 'x class'))
list(ModeWrapper(PercentFilterWrapper(ds, 0.3, 0.3), 'x class'))
len(PercentFilterWrapper(dataset=ds, to_percent=0.6))
[len(PercentFilterWrapper(ds, to_percent=i / 16)) for i in range(1, 17)]
list(ModeWrapper(ClassFilterWrapper(ds, valid_classes=[0, 2]), 'x class'))
list(ModeWrapper(ClassFilterWrapper(ds, invalid_classes=[0, 2]), 'x class'))
list(ModeWrapper(ClassFilterWrapper(dataset=ds, valid_classes=[5]), 'x class'))
list(ModeWrapper(ClassFilterWrapper(PercentFilterWrapper(ds, to_percent=0.5), invalid_classes=[1]), 'x class'))
ClassFilterWrapper(ds, valid_classes=[1]).labels
list(ModeWrapper(OversamplingWrapper(ds), 'x class'))
list(ModeWrapper(OversamplingWrapper(few), 'x class'))
list(ModeWrapper(OversamplingWrapper(ClassFilterWrapper(quick, invalid_classes=[0])), 'x class'))
list(ModeWrapper(RepeatWrapper(few, repetitions=3), 'x class'))
list(ModeWrapper(RepeatWrapper(few, min_size=9), 'x class'))
len(RepeatWrapper(dataset=few, min_size=8))
RepeatWrapper(few, repetitions=2).getitem_x(5)
list(ModeWrapper(ShuffleWrapper(ds, seed=0), 'x class'))
list(ModeWrapper(ShuffleWrapper(dataset=ds, seed=5), 'x class'))
list(ModeWrapper(ShuffleWrapper(RepeatWrapper(few, repetitions=3), seed=7), 'x class'))
[ShuffleWrapper(ds, seed=seed).getitem_x(0) for seed in range(20)]
list(ModeWrapper(KDConcatDataset([ds, few]), 'x class'))
len(KDConcatDataset([ds, few, ds]))
KDConcatDataset([ds, few]).getitem_x(-1)
KDConcatDataset([few, ds]).getitem_x(4)
KDConcatDataset([few, ds]).getitem_class(3)
KDConcatDataset([few, ds]).labels
KDConcatDataset([few, ds]).root_dataset is few
KDConcatDataset([few, ds]).datasets[1] is ds
list(ModeWrapper(ShuffleWrapper(KDConcatDataset([few, KDSubset(ds, [9])]), seed=1), 'x class'))
dispose(ds, lambda: KDSubset(ds, [1]))
dispose(ds, lambda: ds)
dispose(ds, lambda: KDConcatDataset([KDSubset(ds, [1]), few]))
fails(lambda: ds[0])
fails(lambda: KDSubset(ds, [1])[0])
fails(lambda: KDConcatDataset([ds])[0])
fails(lambda: ModeWrapper(ds, 'x z'))
fails(lambda: KDSubset(ds, [1]).missing)
fails(lambda: ClassFilterWrapper(ds))
fails(lambda: ClassFilterWrapper(ds, valid_classes=[1], invalid_classes=[2]))
fails(lambda: RepeatWrapper(ds))
fails(lambda: RepeatWrapper(ds, repetitions=2, min_size=3))
fails(lambda: RepeatWrapper(ds, repetitions=0))
fails(lambda: PercentFilterWrapper(ds, to_percent=1.5))
fails(lambda: PercentFilterWrapper(ds, from_percent=-0.5))
"""

NEWER = """
ModeWrapper(ds, 'x class').root_dataset is ds
ModeWrapper(ds, 'x')[3]
ModeWrapper(ds, 'x')[[3, -1, 0]]
ModeWrapper(ds, 'index class')[[]]
ModeWrapper(ds, 'x class')[[-1, -11, 5, 5]]
ModeWrapper(ds, 'class ctx.class', return_ctx=True)[4]
ModeWrapper(ds, 'x class', return_ctx=True)[1:3]
ModeWrapper(ds, 'class', return_ctx=True)[[1, 7]]
list(ModeWrapper(PercentFilterWrapper(ds, 0.25, 0.75, ceil_from_index=True), 'x'))
list(ModeWrapper(PercentFilterWrapper(ds, 0.25, 0.75, ceil_to_index=True), 'x'))
list(ModeWrapper(PercentFilterWrapper(ds, 0.25, 0.75, ceil_from_index=True, ceil_to_index=True), 'x'))
[len(PercentFilterWrapper(ds, to_percent=i / 16, ceil_to_index=True)) for i in range(1, 17)]
[len(PercentFilterWrapper(ds, from_percent=i / 16, ceil_from_index=True)) for i in range(1, 17)]
list(ModeWrapper(SubsetWrapper(ds, [3, 0, 3]), 'x class'))
list(ModeWrapper(SubsetWrapper(ds, indices=[-1, 0]), 'class'))
list(ModeWrapper(SubsetWrapper(ds, start_index=4), 'x class'))
list(SubsetWrapper(ds, start_index=4, end_index=6).indices)
list(Shifted(SubsetWrapper(ds, [3, 1])).indices)
list(ModeWrapper(SubsetWrapper(ds, end_index=4), 'x class'))
list(ModeWrapper(SubsetWrapper(ds, start_index=2, end_index=50), 'x class'))
list(ModeWrapper(SubsetWrapper(ds, start_index=3, end_index=3), 'x class'))
list(ModeWrapper(SubsetWrapper(ds, start_percent=0.5), 'x class'))
list(ModeWrapper(SubsetWrapper(ds, end_percent=0.5), 'x class'))
list(ModeWrapper(SubsetWrapper(dataset=ds, start_percent=0.25, end_percent=0.5), 'x class'))
SubsetWrapper(ds, start_index=4).getitem_x(0)
SubsetWrapper(quick, [3, 0, -1]).getall_x()
SubsetWrapper(SubsetWrapper(quick, [3, 0, -1]), [2]).getall_class()
KDConcatDataset([quick, SubsetWrapper(quick, [4])]).getall_class()
ShuffleWrapper(quick, seed=3).getall_x()
Shifted(quick).getall_class()
list(ModeWrapper(ClassFilterWrapper(ds, valid_class_names=['owl', 'cat']), 'x class'))
list(ModeWrapper(ClassFilterWrapper(ds, invalid_class_names=['dog']), 'x class'))
list(ModeWrapper(ClassFilterWrapper(SubsetWrapper(ds, [5, 1, 0]), valid_class_names=['owl']), 'x class'))
list(ModeWrapper(OversamplingWrapper(ds, mode='multiply'), 'x class'))
list(ModeWrapper(OversamplingWrapper(ds, mode='exact'), 'x class'))
list(ModeWrapper(OversamplingWrapper(quick, mode='exact'), 'x class'))
list(ModeWrapper(OversamplingWrapper(SubsetWrapper(quick, [0, 1, 2, 4]), mode='exact'), 'x class'))
[KDConcatDataset([ds, few], balanced_sampling=True).getitem_x(i) for i in range(22)]
[KDConcatDataset([few, ds, few], balanced_sampling=True).getitem_class(i) for i in range(33)]
ds.getshape('class')
ds.getdim('class')
ds.getdim_class()
SubsetWrapper(ds, [1]).getshape_x()
SubsetWrapper(ds, [1]).getdim_class()
Shifted(SubsetWrapper(ds, [1])).getdim('class')
ModeWrapper(Shifted(ds), 'x').getshape_class()
KDConcatDataset([ds, few]).getshape_x()
list(ModeWrapper(Shifted(ds), 'x class'))
list(ModeWrapper(Shifted(SubsetWrapper(Shifted(ds, shift=5), [2, 0])), 'x class'))
Shifted(Shifted(ds)).getitem_x(3)
Shifted(ds, shift=7).shift
SubsetWrapper(Shifted(ds, shift=7), [1]).shift
Shifted(ds).class_names
Shifted(ds).root_dataset is ds
len(Shifted(ds))
list(ModeWrapper(Marked(ds), 'y x ctx.mark', return_ctx=True))
list(ModeWrapper(Marked(Shifted(ds)), 'index y ctx.class'))
kinds(ds)
kinds(Shifted(ds))
kinds(SubsetWrapper(Shifted(ds), [1]))
kinds(Shifted(SubsetWrapper(Shifted(ds), [1])))
kinds(ModeWrapper(Shifted(ds), 'x'))
kinds(KDConcatDataset([Shifted(ds)]))
SubsetWrapper(Shifted(ds), [1]).has_wrapper_type(Shifted)
SubsetWrapper(Shifted(ds), [1]).has_wrapper_type(SubsetWrapper)
SubsetWrapper(Shifted(ds), [1]).has_wrapper_type(ShuffleWrapper)
ds.has_wrapper_type(Numbers)
(lambda inner: SubsetWrapper(inner, [1]).has_wrapper(inner))(Shifted(ds))
(lambda inner: inner.has_wrapper(inner))(Shifted(ds))
SubsetWrapper(Shifted(ds), [1]).has_wrapper(ds)
ds.has_wrapper(ds)
(lambda inner: SubsetWrapper(inner, [1]).get_wrapper_of_type(Shifted) is inner)(Shifted(ds))
SubsetWrapper(ds, [1]).get_wrapper_of_type(Shifted)
len(Shifted(Shifted(ds)).get_wrappers_of_type(Shifted))
dispose(ds, lambda: Shifted(SubsetWrapper(ds, [1])))
dispose(ds, lambda: ShuffleWrapper(Shifted(ds), seed=0))
fails(lambda: Shifted(Shifted(ds)).get_wrapper_of_type(Shifted))
fails(lambda: ds.getdim('x'))
fails(lambda: ds.getshape('y'))
fails(lambda: SubsetWrapper(ds))
fails(lambda: SubsetWrapper(ds, [11]))
fails(lambda: SubsetWrapper(ds, [-12]))
fails(lambda: SubsetWrapper(ds, [1], start_index=2))
fails(lambda: SubsetWrapper(ds, start_index=2, start_percent=0.5))
fails(lambda: SubsetWrapper(ds, start_index=5, end_index=4))
fails(lambda: SubsetWrapper(ds, start_percent=0.5, end_percent=0.25))
fails(lambda: SubsetWrapper(ds, start_percent=2))
fails(lambda: ClassFilterWrapper(ds, valid_classes=[1], valid_class_names=['cat']))
fails(lambda: OversamplingWrapper(ds, mode='other'))
"""


def evaluate(names, expressions):
    """Evaluate expressions over a library's names. It runs in both processes."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(plain, value)]
        return value.item() if hasattr(value, 'item') else value

    def fails(call):
        try:
            call()
        except Exception:
            return True
        return False

    def dispose(root, make):
        before = root.disposed
        with make() as dataset:
            same = root.disposed == before
        dataset.dispose()
        return same, root.disposed - before

    def kinds(dataset):
        shown = {'KDConcatDataset': 'KDConcatDataset'}
        return [shown.get(kind.__name__, kind.__name__) for kind in dataset.all_wrapper_types]

    names.update(fails=fails, dispose=dispose, kinds=kinds)
    return [plain(eval(expression, names)) for expression in expressions]


THEIRS = """
import pkgutil
names = {{**vars(kappadata)}}
for module in 'wrappers', 'datasets':
    names.update(vars(getattr(kappadata, module)))
define(names, {labels})
print(json.dumps(evaluate(names, {expressions})))
"""


def lines(text):
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(('version', 'expressions'), [('0.0.8', lines(BOTH)), ('1.4.15', lines(BOTH + NEWER))])
def test_expressions_equal_those_of_kappadata(kappadata, version, expressions):
    assert len(lines(BOTH)) >= 60
    code = '\n'.join(textwrap.dedent(inspect.getsource(function)) for function in (define, evaluate))
    theirs = kappadata.run(version, code + THEIRS.format(labels=LABELS, expressions=expressions))
    names = dict(vars(granular.kappadata))
    define(names, LABELS)
    ours = json.loads(json.dumps(evaluate(names, expressions)))
    assert dict(zip(expressions, ours, strict=True)) == dict(zip(expressions, theirs, strict=True))


# --- differences that are documented


def numbers(labels=LABELS, base=granular.kappadata.KDDataset):
    names = {'KDDataset': base, 'KDWrapper': granular.kappadata.KDWrapper}
    define(names, labels)
    return names


def test_balanced_concatenation_ends_with_its_longest_dataset():
    names = numbers()
    both = granular.kappadata.KDConcatDataset([names['few'], names['ds']], balanced_sampling=True)
    assert len(both) == 22
    assert granular.kappadata.ModeWrapper(both, 'x')[-2:] == [1020, 100]
    assert granular.kappadata.KDConcatDataset([names['quick'], names['quick']], balanced_sampling=True).getall_x()[
        :4
    ] == [
        0,
        0,
        10,
        10,
    ]
    labels = granular.kappadata.ClassFilterWrapper(names['ds'], [2])
    assert (
        granular.kappadata.ModeWrapper(granular.kappadata.KDConcatDataset([labels, labels], True), 'class')[:]
        == [2] * 4
    )
    with pytest.raises(granular.errors.InvalidArgumentError, match='got none in number 1'):
        granular.kappadata.KDConcatDataset(
            [names['ds'], granular.kappadata.SubsetWrapper(names['ds'], [])], balanced_sampling=True
        )


def test_unknown_class_names_are_errors():
    ds = numbers()['ds']
    with pytest.raises(granular.errors.UnknownKeyError, match=r"unknown classes \['cow'\]: expected some of \['cat'"):
        granular.kappadata.ClassFilterWrapper(ds, valid_class_names=['cow', 'dog'])
    for names in (5, [5], [['cat']]):
        with pytest.raises(granular.errors.UnknownKeyError, match='unknown classes'):
            granular.kappadata.ClassFilterWrapper(ds, valid_class_names=names)
    with granular.DatasetWriter('memory://names', {'label': 'int'}, granular.encoders) as writer:
        writer.append({'label': 1})
    with (
        granular.DatasetReader('memory://names', granular.decoders) as reader,
        pytest.raises(granular.errors.InvalidArgumentError, match='no class_names'),
    ):
        granular.kappadata.ClassFilterWrapper(reader, valid_class_names=['dog'])


def test_label_field_must_be_chosen_where_there_are_two():
    datapoints = granular.MapDataset.source([{'class': i % 2, 'label': i % 3} for i in range(6)])
    assert len(granular.kappadata.ClassFilterWrapper(datapoints, [0])) == 2  # whose fields are unknown: label

    class Two(granular.kappadata.KDDataset):
        def __len__(self):
            return 6

        def getitem_class(self, index, ctx=None):
            return index % 2

        def getitem_label(self, index, ctx=None):
            return index % 3

    assert len(granular.kappadata.ClassFilterWrapper(Two(), [0], field='class')) == 3
    with pytest.raises(granular.errors.InvalidArgumentError, match="fields 'class' and 'label'"):
        granular.kappadata.OversamplingWrapper(Two())


def test_methods_that_load_all_values_are_those_of_the_class_that_loads_one():
    names = numbers()

    class Negated(names['Quick']):
        def getitem_x(self, index, ctx=None):
            return -index

    class Doubled(granular.kappadata.KDWrapper):
        def getitem_x(self, index, ctx=None):
            return 2 * self.dataset.getitem_x(index, ctx)

    class Short(names['Quick']):
        def getall_class(self):
            return [1]

    assert granular.kappadata.SubsetWrapper(Negated(), [3, 1]).getall_x() == [-3, -1]
    assert Doubled(names['quick']).getall_x()[:3] == [0, 20, 40]
    assert names['ds'].getall_x() == names['quick'].getall_x()
    assert granular.kappadata.ModeWrapper(Doubled(names['ds']), 'class').getall_x()[:2] == [0, 20]
    with pytest.raises(granular.errors.DatapointError, match='getall_class returned 1 value for 11 datapoints'):
        granular.kappadata.ClassFilterWrapper(Short(), [1])


def test_methods_of_a_source_do_not_pass_through_a_wrapper(tmp_path):
    class Fetching(granular.kappadata.KDDataset):
        def __len__(self):
            return 3

        def getitem_x(self, index, ctx=None):
            return index

        def fetch(self, indices):
            return ['whole dataset' for _ in indices]

    subset = granular.kappadata.SubsetWrapper(Fetching(), [2])
    assert not hasattr(subset, 'fetch')
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'int'}, granular.encoders) as writer:
        for i in range(3):
            writer.append({'x': i})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        subset = granular.kappadata.SubsetWrapper(reader, [2])
        assert subset.size == reader.size
        assert subset.spec == {'x': 'int'}
        assert subset.root_dataset is subset.dataset is reader
        for name in ('fetch', 'get', 'take', 'head', 'copy', 'close', 'node'):
            assert not hasattr(subset, name)
        assert subset.getall_x() == [2]
    with granular.kappadata.ModeWrapper(subset, 'x') as wrapper:
        assert wrapper.dataset is subset
    assert reader.closed


async def test_async_wrappers_close_their_reader(tmp_path):
    aio = granular.aio
    async with aio.DatasetWriter(tmp_path / 'ds', {'x': 'array'}, granular.encoders) as writer:
        await writer.append({'x': np.arange(3)})

    class Wrapper(aio.kappadata.KDWrapper):
        async def getitem_x(self, index, ctx=None):
            return await self.dataset.getitem_x(index, ctx) + 1

    reader = aio.DatasetReader(tmp_path / 'ds', granular.decoders)
    await reader.take(1)
    async with Wrapper(aio.kappadata.SubsetWrapper(reader, [0])) as wrapper:
        assert (await wrapper.getall_x())[0].tolist() == [1, 2, 3]
        assert (await aio.kappadata.ModeWrapper(wrapper, 'x').get([0]))[0].tolist() == [1, 2, 3]
    assert wrapper.root_dataset is reader
    assert reader.closed
    with pytest.raises(granular.errors.InvalidArgumentError, match='async with'):
        wrapper.__enter__()
