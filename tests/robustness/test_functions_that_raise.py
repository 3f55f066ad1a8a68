"""User functions that raise any exception: it reaches the caller, and the next read works."""

import asyncio
import itertools
import json
import os

import pytest

import granular
from granular import MapDataset, aio
from granular.errors import FunctionError, GranularError
from granular.grain import MultiprocessingOptions
from granular.integrations import batches
from tests.support.functions_that_raise import BAD, COUNT, ERRORS, FAMILIES, OPERATIONS, WAYS, Raises
from tests.support.interpreters import Interpreter
from tests.support.tables import FULL_TABLES, each_value, pairwise


@pytest.fixture(scope='module')
def raising_interpreter():
    with Interpreter('tests.support.functions_that_raise', options=['-W', 'error::ResourceWarning']) as interpreter:
        yield interpreter


@pytest.mark.parametrize(
    'arguments',
    ['calls', 'threads', 'async', 'fork', 'spawn map'],
    ids=lambda words: words.replace(' ', '-'),
)
def test_exception_of_a_user_function_reaches_the_caller(arguments, raising_interpreter):
    # In a process of its own, as a fault may take that with it.
    program = 'from tests.support.functions_that_raise import main; main()'
    environment = {**os.environ, 'PYTHONPATH': os.getcwd()}
    done = raising_interpreter.run(program, *arguments.split(), env=environment)
    assert (done.returncode, done.stderr) == (0, '')
    faults = json.loads(done.stdout)
    assert len(faults) >= len(FAMILIES)
    assert {case: fault for case, fault in faults.items() if fault} == {}


def opened(api, fn, method, on_error='raise'):
    """Return the elements of a function, one at a time, and a function that lets them continue at a position."""
    count = 0 if method is None else 1
    if api == 'Loader':
        source = granular.sources.Transform(range(COUNT), fn.dicts)
        loader = granular.Loader(source, 1, 4, count or 4, mp=method, on_error=on_error)
        return loader, lambda position: loader.load({**loader.save(), 'step': position})
    if api == 'stream':
        workers = MultiprocessingOptions(count, start_method=method or 'spawn')
        stream = MapDataset.range(COUNT).map(fn).to_iter_dataset(on_error=on_error)
        iterator = iter(stream.mp_prefetch(workers))
    else:
        sampler = granular.grain.samplers.IndexSampler(COUNT, num_epochs=1)
        iterator = iter(granular.grain.DataLoader(
            data_source=range(COUNT), sampler=sampler, operations=[fn], worker_count=count,
            start_method=method or 'spawn', on_error=on_error,
        ))  # fmt: skip
    return iterator, iterator.set_next_index


APIS = ('Loader', 'stream', 'DataLoader')


def combined(names, spawned):
    """Combine errors, APIs, and threads or forked workers, and few errors with spawned workers, which start slowly."""
    rows = pairwise(itertools.product(names, [None, 'fork'], APIS))
    return rows + each_value(itertools.product(names if FULL_TABLES else spawned, ['spawn'], APIS))


GROUPS = ('OwnError', 'BaseExceptionGroup')  # neither an Exception nor one that ends something
ENDS = [*FAMILIES[1], *FAMILIES[3]]


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize(('name', 'method', 'api'), combined([*ENDS, *GROUPS], ['SystemExit', *GROUPS]))
def test_exception_that_ends_programs_is_an_error_of_its_element(name, method, api):
    # On the main thread: signals, which raise such exceptions there, do not reach functions that run elsewhere.
    elements, go_to = opened(api, Raises(name), method)
    with elements:
        assert len([next(elements) for _ in range(BAD)]) == BAD
        for _ in range(2):
            with pytest.raises(FunctionError if name in ENDS else type(ERRORS[name]())) as caught:
                list(iter(elements.__next__, None))  # without `iter`, which begins the next epoch of a Loader
            if name in ENDS:
                assert type(caught.value.__cause__) is type(ERRORS[name]())
                assert f'raised {type(caught.value.__cause__).__name__}: {ERRORS[name]()}' in str(caught.value)
                assert f'index {BAD}' in caught.value.__notes__[0]
        go_to(BAD + 1)
        assert len(list(elements)) == COUNT - BAD - 1


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize(('name', 'method', 'api'), combined(ERRORS, ['OddError', 'SystemExit', 'OwnError']))
def test_on_error_skip_applies_to_exceptions_only(name, method, api):
    error = ERRORS[name]()
    elements, _ = opened(api, Raises(name), method, on_error='skip')
    with elements:
        if isinstance(error, Exception):
            assert sum(len(one['x']) if api == 'Loader' else 1 for one in elements) == COUNT - 1
            assert [step for step, _ in elements.errors] == [BAD]
            assert type(error).__name__ in elements.errors[0][1]
        else:
            assert len([next(elements) for _ in range(BAD)]) == BAD
            with pytest.raises((type(error), FunctionError)) as caught:
                list(elements)
            assert type(error) in (caught.type, type(caught.value.__cause__))
            assert elements.errors == []


@pytest.mark.parametrize('operation', ['map', 'iter.map', 'prefetch'])
def test_iterator_stays_at_the_failed_element(operation):
    class Once(Raises):
        raised = False

        def __call__(self, value, *args):
            if self.number(value) == BAD and not self.raised:
                self.raised = True
                raise StopAsyncIteration
            return value

    with iter(OPERATIONS[operation](Once('StopAsyncIteration'), WAYS['threads'], '')) as iterator:
        before = [next(iterator) for _ in range(BAD)]
        with pytest.raises(FunctionError, match='StopAsyncIteration'):
            next(iterator)
        assert len(before) + len(list(iterator)) == COUNT


def test_end_of_a_user_iterator_ends_a_conversion(tmp_path):
    done = granular.convert(({'x': i} for i in range(5)), tmp_path / 'data')
    assert done.datapoints == 5


def test_stop_iteration_in_a_batch_conversion_is_an_error():
    class Batches(batches.Batches):
        def _convert(self, batch):
            if batch == 3:
                raise StopIteration
            return batch

    converted = Batches(range(5), 1)
    assert [next(converted) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FunctionError, match='StopIteration'):
        next(converted)
    assert list(converted) == [4]


async def test_cancelled_reader_can_be_read_again(tmp_path):
    class Waits:
        async def fetch(self, indices):
            if not go.is_set():
                asked.set()
                await asyncio.sleep(60)
            return list(indices)

        def __len__(self):
            return 8

    go, asked = asyncio.Event(), asyncio.Event()
    iterator = aiter(aio.MapDataset.source(Waits()).to_iter_dataset())
    task = asyncio.create_task(anext(iterator))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await iterator.aclose()
    go.set()
    assert [item async for item in aio.MapDataset.source(Waits()).to_iter_dataset()] == list(range(8))


def test_function_error_names_the_exception():
    with pytest.raises(
        GranularError, match='a function that was given to granular raised StopIteration: mine'
    ) as caught:
        asyncio.run(aio.MapDataset.range(COUNT).map(Raises('StopIteration')).get(BAD))
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.__notes__ == [f'while transforming the datapoint at index {BAD}, in map(Raises)']
