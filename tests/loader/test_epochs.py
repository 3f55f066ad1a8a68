"""One loop is one epoch, and a resumed program is the uninterrupted one, wherever it saves."""

import contextlib
import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio, sources
from granular.errors import InvalidArgumentError, StateError
from tests.support.late import imported

EPOCHS = 3
Batches = imported('granular.integrations.torch', 'Batches')


def dataset(length=22):
    return granular.MapDataset.range(length).shuffle(seed=3).map(lambda x: {'x': np.int64(x)})


def loader(**options):
    return granular.Loader(dataset(), 4, **{'prefetch': 2, **options})


MAKERS = {
    'Loader': loader,
    'Loader without prefetch': lambda: loader(prefetch=0),
    'Loader of a shard': lambda: loader(shard_id=1, num_shards=2),
    'Loader that recycles': lambda: loader(recycle_after=2),
    'Batches of a Loader': lambda: Batches(loader()),
    'Batches ahead of a Loader': lambda: Batches(loader(), 'cpu', 2),
    'Batches of a stream': lambda: Batches(dataset().to_iter_dataset().batch(4)),
    'Batches ahead of a stream': lambda: Batches(dataset().to_iter_dataset().batch(4), 'cpu', 2),
}


def ids(batch):
    return batch['x'].tolist()


def copied(state):
    return json.loads(json.dumps(state))


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def program(batches, log, save, state=None, peek=False):
    """Train, as the documentation has it; call ``save`` with the place in the program wherever it could save."""
    if state is not None:
        batches.load_state_dict(copied(state))
    for epoch in range(batches.epoch, EPOCHS):
        if peek:
            next(iter(batches))
        batches.set_epoch(epoch)
        save((epoch, 'set'), batches, log)
        for number, batch in enumerate(batches):
            log.append((epoch, ids(batch)))
            save((epoch, number), batches, log)
        save((epoch, 'end'), batches, log)


@pytest.mark.parametrize('peek', [False, True])
def test_a_program_resumed_wherever_it_saves_is_the_uninterrupted_one(make, peek):
    whole, states = [], {}
    with make() as batches:
        program(batches, whole, lambda at, source, log: states.setdefault(at, (source.state_dict(), len(log))))
    assert len({tuple(batch) for _, batch in whole}) > len(whole) * 2 / 3  # epochs have different orders
    assert len(states) == len(whole) + 2 * EPOCHS
    for at, (state, count) in states.items():
        rest = []
        with make() as batches:
            program(batches, rest, lambda *_: None, state, peek)
        assert whole[:count] + rest == whole, at


def test_loops_that_never_ask_for_the_end_are_whole_epochs():
    for kind in (loader, lambda: Batches(loader()), lambda: Batches(loader(), 'cpu', 2)):
        with kind() as whole:
            epochs = [[ids(batch) for batch in whole] for _ in range(EPOCHS)]
        assert [len(epoch) for epoch in epochs] == [5] * EPOCHS
        for bounded in (
            lambda batches: [batch for _, batch in zip(range(len(batches)), batches, strict=False)],
            lambda batches: list(itertools.islice(batches, len(batches))),
            lambda batches: [next(it) for it in [iter(batches)] for _ in range(len(batches))],
            lambda batches: [batch for _ in [iter(batches)] for batch in batches],  # iter twice, as Lightning does
        ):
            with kind() as batches:
                assert [list(map(ids, bounded(batches))) for _ in range(EPOCHS)] == epochs


def test_a_loop_that_is_left_is_not_continued():
    with loader() as batches, loader() as whole:
        epochs = [[ids(batch) for batch in whole] for _ in range(4)]
        assert ids(next(iter(batches))) == epochs[0][0]
        assert batches.epoch == 0
        assert ids(next(iter(batches))) == epochs[1][0]
        assert [ids(batch) for batch in batches] == epochs[2]
        assert batches.epoch == 3
        iter(batches)
        assert [ids(batch) for batch in batches] == epochs[3]


def test_an_endless_source_continues_and_has_one_epoch():
    with granular.Loader(sources.Epochs([{'x': np.int64(x)} for x in range(8)], shuffle=False), 4) as batches:
        assert [ids(next(iter(batches)))[0] for _ in range(3)] == [0, 4, 0]
        batches.set_epoch(5)
        assert batches.epoch == 0
        assert ids(next(batches)) == [4, 5, 6, 7]
        with pytest.raises(TypeError, match='no length: its source is endless'):
            len(batches)


def test_a_dataset_that_is_repeated_without_end_continues():
    for order in (granular.shuffle.Index(), granular.shuffle.Blocks(2, 2)):
        endless = granular.MapDataset.range(8).shuffle(seed=0, order=order).map(lambda x: {'x': np.int64(x)}).repeat()
        with granular.Loader(endless, 3) as batches, granular.Loader(endless, 3) as whole:
            expected = [ids(next(whole)) for _ in range(4)]
            assert [ids(next(iter(batches))) for _ in range(4)] == expected
            batches.set_epoch(2)
            assert (batches.epoch, batches.consumed) == (0, 12)
            with pytest.raises(TypeError, match='its source is endless'):
                len(batches)


@pytest.mark.parametrize('wrap', [lambda one: one, Batches, lambda one: Batches(one, 'cpu', 1)])
def test_another_epoch_can_begin_after_a_failure(wrap):
    broken = [True]

    def fragile(x):
        if x == 7 and broken[0]:
            raise ValueError('not now')
        return {'x': np.int64(x)}

    with wrap(granular.Loader(granular.MapDataset.range(10).map(fragile), 2)) as batches:
        with pytest.raises(ValueError, match='not now'):
            list(batches)
        batches.set_epoch(3)
        assert (batches.epoch, batches.state_dict()['step']) == (3, 30)
        broken[0] = False
        assert ids(next(batches)) == [0, 1]
        assert batches.state_dict()['step'] == 32


def test_a_selection_stays_also_in_epochs_of_batches_of_a_stream(caplog):
    shuffled = granular.MapDataset.range(8).shuffle(seed=2)
    with Batches(shuffled[:4].to_iter_dataset()) as batches:
        expected = list(batches)
        for epoch in range(3):
            batches.set_epoch(epoch)
            assert list(batches) == expected
    assert sum('slice before shuffle' in record.message for record in caplog.records) == 1


def test_a_loop_that_failed_is_tried_again():
    broken = [True]

    def fragile(x):
        if x == 9 and broken.pop():
            broken.append(False)
            raise ValueError('not now')
        return {'x': np.int64(x)}

    data = granular.MapDataset.range(16).map(fragile)
    for wrap in (lambda one: one, Batches, lambda one: Batches(one, 'cpu', 1)):
        broken[:] = [True]
        with wrap(granular.Loader(data, 4, prefetch=0)) as batches:
            taken = []
            with pytest.raises(ValueError, match='not now'):
                taken += (ids(batch) for batch in batches)
            broken[:] = [False] * 9
            assert [ids(batch)[0] for batch in batches] == [8, 12]
            assert batches.epoch == 1


@pytest.mark.parametrize('source', ['list', 'sources', 'subclass', 'reader'])
def test_a_source_without_later_epochs_repeats_itself(source, tmp_path):
    points = [{'x': np.int64(x)} for x in range(9)]

    class Own(granular.MapDataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return points[index]

    with granular.DatasetWriter(tmp_path / 'data', {'x': 'int'}) as writer:
        for point in points:
            writer.append(point)
    made = {
        'list': lambda: points,
        'sources': lambda: sources.Transform(points, lambda x, seed: x),
        'subclass': Own,
        'reader': lambda: granular.open(tmp_path / 'data'),
    }[source]()
    with granular.Loader(made, 4) as batches:
        epochs = [[ids(batch) for batch in batches] for _ in range(EPOCHS)]
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * EPOCHS


def test_random_numbers_of_epochs_differ():
    data = granular.MapDataset.range(8).random_map(lambda x, rng: {'x': rng.integers(1 << 40)}, seed=1)
    with granular.Loader(data, 8) as batches:
        first, second = (ids(batch) for _ in range(2) for batch in batches)
        batches.set_epoch(0)
        (again,) = (ids(batch) for batch in batches)
    assert first == again
    assert not set(first) & set(second)


def test_a_selection_behind_a_shuffle_stays(caplog):
    shuffled = granular.MapDataset.range(40).shuffle(seed=0).map(lambda x: {'x': np.int64(x)})
    train, valid = shuffled[10:], shuffled[:10]
    with granular.Loader(train, 5) as batches, granular.Loader(valid, 5) as held:
        assert sum('slice before shuffle' in record.message for record in caplog.records) == 2
        for _ in range(EPOCHS):
            assert not {x for b in batches for x in ids(b)} & {x for b in held for x in ids(b)}


async def test_the_async_api_has_the_same_loops():
    with loader() as whole:
        epochs = [[ids(batch) for batch in whole] for _ in range(EPOCHS)]
    async with aio.Loader(dataset(), 4) as batches:
        async for batch in batches:
            assert ids(batch) == epochs[0][0]
            break
        assert [ids(batch) async for batch in batches] == epochs[1]
        state = batches.save()
        batches.set_epoch(0)
        assert batches.epoch == 0
        assert [ids(batch) async for batch in batches] == epochs[0]
        batches.load(state)
        assert [ids(batch) async for batch in batches] == epochs[2]


def test_lengths_are_told():
    with loader() as one, Batches(loader(shard_id=1, num_shards=2)) as two:
        assert (len(one), len(two)) == (5, 2)
        assert one
        assert two
    assert len(Batches([1, 2, 3])) == 3
    assert len(Batches(dataset().to_iter_dataset().batch(4))) == 6
    stream = dataset().to_iter_dataset()
    for endless in (Batches(stream.filter(bool)), Batches(stream.repeat()), Batches(iter([1]))):
        with pytest.raises(TypeError, match='no len|not known'):
            len(endless)
    with (
        pytest.raises(InvalidArgumentError, match='expected 30 datapoints or more'),
        granular.Loader(dataset(), 30) as few,
    ):
        len(few)


def test_epochs_are_told_to_what_looks_like_a_sampler():
    for batches in (loader(), Batches(loader())):
        with batches:
            batches.batch_sampler.sampler.set_epoch(2)
            assert batches.epoch == 2
    with Batches(dataset().to_iter_dataset().filter(bool)) as stream:
        assert not hasattr(stream, 'batch_sampler')  # without a length, Lightning calls it after the first batch
        with pytest.raises(InvalidArgumentError, match='epoch: expected an integer >= 0, got -1'):
            stream.set_epoch(-1)
    with pytest.raises(InvalidArgumentError, match='list has no epochs'):
        Batches([1]).set_epoch(1)


def test_states_of_granular_0_21_count_over_epochs_and_others_are_refused():
    with loader() as batches:
        epochs = [[ids(batch) for batch in batches] for _ in range(2)]
        lines = batches.save()['pipeline']
        for state, rest in (
            ({'step': 8, 'seed': 3}, epochs[0][2:]),
            ({'step': 22 + 4, 'seed': 3}, epochs[1][1:]),
        ):
            batches.load(state)
            assert [ids(batch) for batch in batches] == rest
        with pytest.raises(StateError, match='the state has version 2, this release reads version 5'):
            batches.load({'version': 2, 'step': 8, 'seed': 3, 'pipeline': lines})
        with pytest.raises(StateError, match='its step 2 of an epoch is not a multiple'):
            batches.load({'step': 22 + 2, 'seed': 3})
        with pytest.raises(StateError, match="expected the length of an epoch, got 'x'"):
            batches.load({**batches.save(), 'length': 'x'})


def test_a_source_that_has_grown_is_continued_at_the_next_epoch():
    def make(length):
        return granular.MapDataset.source([{'id': i} for i in range(length)]).shuffle(1)

    with granular.Loader(make(22), 4) as batches:
        batches.set_epoch(2)
        state = batches.save()
        next(batches)
        later = batches.save()
    with granular.Loader(make(30), 4) as batches:
        changes = [granular.changes.Grown('list', 30)]
        with pytest.raises(StateError, match=re.escape(f'pass changes=[granular.changes.{changes[0]!r}]')):
            batches.load(state)
        with pytest.raises(StateError, match='4 datapoints of an epoch were taken'):
            batches.load(later, changes)
        batches.load(state, changes)
        assert (batches.epoch, batches.consumed) == (2, 60)
        assert next(batches)['id'].tolist() == [int(x['id']) for x in make(30).fetch(range(60, 64))]


def test_a_loader_told_its_place_beneath_its_batches():
    with loader() as whole:
        epochs = [[ids(batch) for batch in whole] for _ in range(EPOCHS)]
    one = loader()
    with Batches(one, 'cpu', 2) as batches:
        next(batches)
        assert one.consumed == 4  # however many were converted ahead
        one.set_epoch(2)
        assert [ids(batch) for batch in batches] == epochs[2]
        one.load({'step': 22 + 8, 'seed': 3})
        assert [ids(batch) for batch in batches] == epochs[1][2:]


def test_an_empty_rest_of_a_stream_is_followed_by_its_next_loop():
    for buffer in (0, 1):
        batches = Batches(dataset().to_iter_dataset().batch(11), *([None] if not buffer else ['cpu', buffer]))
        with batches:
            for _ in zip(range(2), batches, strict=False):
                pass
            end = batches.state_dict()
        with Batches(dataset().to_iter_dataset().batch(11)) as resumed:
            resumed.load_state_dict(copied(end))
            assert len(list(resumed)) == 2


class Model:
    """What the documentation says of a Loader, over lists of the batches of each epoch."""

    def __init__(self, length):
        self.length, self.epoch, self.place, self.given, self.loaded, self.over = length, 0, 0, 0, None, False

    def iter(self):
        if self.given and self.place:
            self.epoch, self.place = self.epoch + 1, 0
        self.given, self.over = 0, False

    def next(self):
        if self.over or (self.given and not self.place):
            self.over, self.loaded = True, None
            return None
        taken = self.epoch, self.place
        self.given += 1
        if self.given > 1:
            self.loaded = None
        self.place += 1
        if self.place == self.length:
            self.epoch, self.place = self.epoch + 1, 0
        return taken

    def set_epoch(self, epoch):
        at = self.loaded if self.loaded is not None and self.loaded[0] == epoch else (epoch, 0)
        self.epoch, self.place = at
        self.given, self.over = 0, False

    def load(self, at):
        self.epoch, self.place = self.loaded = at
        self.given, self.over = 0, False


operations = st.one_of(
    st.tuples(st.just('iter')),
    st.tuples(st.just('next'), st.integers(1, 7)),
    st.tuples(st.just('set_epoch'), st.integers(0, 3)),
    st.tuples(st.just('save')),
    st.tuples(st.just('load'), st.integers(0, 5)),
    st.tuples(st.just('resume'), st.integers(0, 5)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(operations, max_size=14), st.sampled_from(['Loader', 'Batches of a Loader', 'Batches ahead of a Loader'])
)
def test_any_program_gets_what_the_documentation_says(program, name):
    expected = {None: None}  # by epoch and place; two batches may be equal
    with loader() as whole:
        for epoch in range(30):
            whole.set_epoch(epoch)
            expected |= {(epoch, place): ids(batch) for place, batch in enumerate(whole)}
    model, saved = Model(5), [(copied(loader().save()), (0, 0))]
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(MAKERS[name]())
        for operation, *arguments in program:
            if operation == 'iter':
                iter(batches)
                model.iter()
            elif operation == 'next':
                for _ in range(*arguments):
                    batch = next(batches, None)
                    assert (None if batch is None else ids(batch)) == expected[model.next()]
            elif operation == 'set_epoch':
                batches.set_epoch(*arguments)
                model.set_epoch(*arguments)
            elif operation == 'save':
                saved.append((copied(batches.state_dict()), (model.epoch, model.place)))
            else:
                state, at = saved[arguments[0] % len(saved)]
                if operation == 'resume':
                    batches, model = stack.enter_context(MAKERS[name]()), Model(5)
                batches.load_state_dict(state)
                model.load(at)
            assert batches.epoch == model.epoch
