"""A function that asks the iterator for which it computes gets an error instead of waiting for itself."""

import pytest

import granular
from granular import GranularError, aio, sources

MESSAGE = 'an iterator was used by a function that computes its elements'


def stream(count=100):
    return granular.MapDataset.range(count).to_iter_dataset()


def loader(fn):
    return granular.Loader(sources.Transform(sources.Epochs([{'x': 1}] * 10), lambda point, seed: fn(point)), 2)


def fail(element):
    raise KeyError(element)


ITERATORS = {
    'map': lambda fn: iter(granular.MapDataset.range(100).map(fn)),
    'stream.map': lambda fn: iter(stream().map(fn)),
    'batch.map': lambda fn: iter(stream().batch(2).map(fn)),
    'batch.filter': lambda fn: iter(stream().batch(2).filter(fn)),
    'batch_fn': lambda fn: iter(stream().batch(2, batch_fn=fn)),
    'flat_map': lambda fn: iter(stream().flat_map(fn)),
    'prefetch': lambda fn: iter(stream().batch(2).map(fn).prefetch(2)),
    'on_error': lambda fn: iter(
        granular.MapDataset.range(9).map(fail).to_iter_dataset(on_error=lambda index, error: fn(index))
    ),
    'DataLoader': lambda fn: iter(
        granular.grain.DataLoader(
            data_source=range(10), sampler=granular.grain.samplers.SequentialSampler(10), operations=[fn]
        )
    ),
    'Loader': loader,
}


@pytest.mark.parametrize('make', ITERATORS.values(), ids=ITERATORS)
def test_next_in_its_own_function(make):
    own = []
    with make(lambda element: next(own[0])) as iterator:
        own.append(iterator)
        for _ in range(2):
            with pytest.raises(GranularError, match=MESSAGE):
                next(iterator)


@pytest.mark.parametrize('name', sorted(ITERATORS.keys() - {'on_error'}))  # called on the loop
def test_another_iterator_may_be_used(name):
    used = []
    with iter(stream()) as other, ITERATORS[name](lambda element: used.append(next(other)) or {'x': 1}) as iterator:
        next(iterator)
        assert 0 in used


def test_two_iterators_whose_functions_ask_each_other():
    pair = []
    with iter(stream().map(lambda i: next(pair[1]))) as first, iter(stream().map(lambda i: next(pair[0]))) as second:
        pair += [first, second]
        with pytest.raises(GranularError, match=MESSAGE):
            next(first)


def test_set_state_in_its_own_function():
    own = []
    with iter(stream().batch(2).map(lambda batch: own[0].set_state(own[0].get_state()))) as iterator:
        own.append(iterator)
        with pytest.raises(GranularError, match=MESSAGE):
            next(iterator)


def test_the_spec_of_a_loader_in_its_own_function():
    own = []
    with loader(lambda point: own[0].spec) as batches:
        own.append(batches)
        with pytest.raises(GranularError, match=MESSAGE):
            next(batches)


def test_the_iterator_goes_on_after_the_error():
    own, first = [], []

    def ask_once(element):
        if not first:
            first.append(element)
            return next(own[0])
        return element

    with iter(granular.MapDataset.range(4).map(ask_once)) as iterator:
        own.append(iterator)
        with pytest.raises(GranularError, match=MESSAGE):
            next(iterator)
        assert list(iterator) == [0, 1, 2, 3]


class Asks:
    """A source whose fetch awaits an element of the iterator that reads it."""

    def __len__(self):
        return 10

    async def fetch(self, indices):
        return [await anext(self.iterator) for _ in indices]


async def test_anext_in_its_own_source():
    source = Asks()
    for dataset in aio.MapDataset.source(source), aio.Loader(source, 2):
        source.iterator = aiter(dataset)
        with pytest.raises(GranularError, match=MESSAGE):
            await anext(source.iterator)
        await source.iterator.aclose()


FORKING = """
import faulthandler, sys, warnings
import granular
from granular import MapDataset, ReadOptions
from granular.grain import MultiprocessingOptions

warnings.simplefilter('ignore', DeprecationWarning)  # of forks, from Python 3.12 on
faulthandler.dump_traceback_later(60, exit=True)  # the parent waits for a worker that waits for ever
name, operation = sys.argv[1:]
own = []

def ask(x):
    if x == 5:
        OPERATIONS[operation](own[0])
    return {'x': x}

OPERATIONS = {
    'close': lambda iterator: iterator.close(),
    'state': lambda iterator: iterator.save() if name == 'Loader' else iterator.get_state(),
    'next': next,
}
workers, dataset = MultiprocessingOptions(1, start_method='fork'), MapDataset.range(40).map(ask)
ITERATORS = {
    'stream': lambda: iter(dataset.to_iter_dataset().mp_prefetch(workers)),
    'unbuffered': lambda: iter(dataset.to_iter_dataset(ReadOptions(prefetch_buffer_size=0)).mp_prefetch(workers)),
    'DataLoader': lambda: iter(granular.grain.DataLoader(
        data_source=range(40), sampler=granular.grain.samplers.IndexSampler(40, num_epochs=1), operations=[ask],
        worker_count=1, start_method='fork',
    )),
    'Loader': lambda: granular.Loader(dataset, 1, mp='fork', workers=1),
}
with ITERATORS[name]() as iterator:
    own.append(iterator)
    try:
        print(sum(1 for _ in iterator))
    except granular.GranularError as error:
        print(error)
"""


@pytest.mark.parametrize('name', ['stream', 'unbuffered', 'DataLoader', 'Loader'])
@pytest.mark.parametrize('operation', ['close', 'state', 'next'])
def test_forked_worker_uses_the_iterator_of_its_parent(name, operation, interpreter):
    done = interpreter.run(FORKING, name, operation)
    assert done.stderr == ''
    assert MESSAGE in done.stdout if operation == 'next' else done.stdout == '40\n'
