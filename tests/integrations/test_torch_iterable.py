"""The part of a stream that each process of torch reads, and the place where it continues."""

import itertools
import json
import logging
import multiprocessing
import os
import pickle
import re
import traceback

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset, ShardByTorchRank, ShardOptions
from granular.errors import InvalidArgumentError, StateError, UnsupportedError
from granular.grain.sharding import NoSharding
from tests.support.late import imported

DataLoader = imported('torch.utils.data', 'DataLoader')
StatefulDataLoader = imported('torchdata.stateful_dataloader', 'StatefulDataLoader')
Resumable = imported('granular.integrations.lightning', 'Resumable')
Batches, IterableDataset = (imported('granular.integrations.torch', name) for name in ('Batches', 'IterableDataset'))

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata
    pytest.mark.filterwarnings('ignore:Neither dataset nor'),
]
COUNT = 24


def numbers(count=COUNT):
    return MapDataset.range(count)


def tokens(x):
    return {'t': np.full(2, x + 1)}


def per_file(shard):
    return lambda i: MapDataset.range(i * 6, i * 6 + 6).to_iter_dataset(shard_options=shard)


def ids(batches):
    return [int(x) for batch in batches for x in np.ravel(batch)]


# --- who divides the data


STREAMS = {
    'MapDataset': lambda _: numbers(),
    'shuffled batches': lambda _: numbers().shuffle(seed=1).batch(2),
    'shard of its own': lambda shard: numbers().to_iter_dataset(shard_options=shard),
    'pack of rows of its own': lambda shard: (
        numbers().map(tokens).to_iter_dataset().pack({'t': 2}, shard_options=shard).map(lambda x: x['t'][:1] - 1)
    ),
    'interleave of shards': lambda shard: IterDataset.interleave(MapDataset.range(4).map(per_file(shard)), 2),
    'interleave': lambda _: IterDataset.interleave(MapDataset.range(4).map(per_file(None)), cycle_length=2),
    'list of shards': lambda shard: IterDataset.interleave([per_file(shard)(i) for i in range(4)], cycle_length=2),
    'mix of shards': lambda shard: IterDataset.mix([numbers(12).to_iter_dataset(shard_options=shard)] * 2).map(
        lambda x: x
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', STREAMS)
@pytest.mark.parametrize('workers', [0, 2])
def test_each_element_comes_once_over_ranks_and_workers(name, workers):
    divides_itself = 'shard of' in name or 'shards' in name or 'its own' in name
    parts = []
    for rank in range(2):
        shard = ShardOptions(rank, 2)
        stream = STREAMS[name](shard if divides_itself else None)
        iterable = IterableDataset(stream, None if divides_itself else shard)
        parts += ids(DataLoader(iterable, batch_size=None, num_workers=workers, multiprocessing_context=fork(workers)))
    assert sorted(parts) == sorted(ids(STREAMS[name](None)))


def fork(workers):
    return 'fork' if workers else None


@pytest.mark.parametrize('name', [name for name in STREAMS if 'its own' in name or 'shards' in name])
def test_what_divides_itself_is_not_divided_again(name):
    with pytest.raises(InvalidArgumentError, match='the stream has a shard already: pass shard_options once'):
        iter(IterableDataset(STREAMS[name](ShardOptions(0, 2)), ShardOptions(0, 2)))


def test_streams_that_are_divided_differently_are_refused():
    def files(i):
        return per_file(ShardOptions(0, 2) if i == 2 else None)(i)

    mixed = IterDataset.mix([numbers().to_iter_dataset(shard_options=ShardOptions(0, 2)), numbers().to_iter_dataset()])
    with pytest.raises(InvalidArgumentError, match='some of the streams are divided into 2 shards, others into 1'):
        iter(IterableDataset(mixed, ShardOptions(0, 2)))
    later = IterDataset.interleave(MapDataset.range(4).map(files), cycle_length=2)
    with pytest.raises(InvalidArgumentError, match='divided into 2 shards, those before it into 1'):
        list(IterableDataset(later, ShardOptions(0, 2)))


def test_a_subclass_that_cannot_say_is_refused():
    class Own(IterDataset):
        def __iter__(self):
            return iter(self._parent)

    with pytest.raises(InvalidArgumentError, match='Own cannot be divided into 2 shards'):
        iter(IterableDataset(Own(numbers().to_iter_dataset()), ShardOptions(0, 2)))
    assert list(IterableDataset(Own(numbers().to_iter_dataset()))) == list(range(COUNT))


def test_a_rank_is_asked_for_where_it_is_used(monkeypatch):
    shard = ShardByTorchRank(drop_remainder=True)
    assert repr(shard) == 'ShardByTorchRank(drop_remainder=True)'
    assert repr(pickle.loads(pickle.dumps(shard))) == repr(shard)
    iterable = IterableDataset(numbers(), shard)
    monkeypatch.setenv('WORLD_SIZE', '2')
    sampler, stream = (
        granular.grain.samplers.SequentialSampler(COUNT, shard),
        numbers().to_iter_dataset(shard_options=shard),
    )
    for use in (lambda: iter(iterable), lambda: len(sampler), lambda: list(stream)):
        with pytest.raises(InvalidArgumentError, match='call torch.distributed.init_process_group'):
            use()
    monkeypatch.delenv('WORLD_SIZE')
    assert list(iterable) == list(stream) == list(range(COUNT))
    assert len(sampler) == COUNT
    with pytest.raises(InvalidArgumentError, match='are those of a mesh: pass mesh='):
        ShardByTorchRank(dims=('dp',))


def _rank(rank, port, queue):
    import torch.distributed.device_mesh

    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.distributed.init_process_group('gloo', rank=rank, world_size=4)
    mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    group = mesh['dp'].get_group()
    found = {
        name: ids(DataLoader(IterableDataset(numbers(), shard), batch_size=None))
        for name, shard in {
            'mesh': ShardByTorchRank(mesh=mesh, dims=('dp',)),
            'dims': ShardByTorchRank(mesh=mesh, dims='dp'),
            'group': ShardByTorchRank(group=group),
            'pickled': pickle.loads(pickle.dumps(ShardByTorchRank(mesh=mesh, dims=('dp',)))),
            'whole mesh': ShardByTorchRank(mesh=mesh),
            'all': ShardByTorchRank(),
        }.items()
    }
    try:
        ShardByTorchRank(mesh=mesh, dims=('pp',))
    except InvalidArgumentError as error:
        found['unknown'] = str(error)
    queue.put((rank, found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_peers_of_a_replica_have_equal_elements(unused_tcp_port):
    context = multiprocessing.get_context('spawn')
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, unused_tcp_port, queue), daemon=True) for rank in range(4)]
    for process in processes:
        process.start()
    parts = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    halves = [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))]
    for rank, found in parts.items():
        for name in ('mesh', 'dims', 'group', 'pickled'):
            assert found[name] == halves[rank // 2], (rank, name)
        for name in ('whole mesh', 'all'):
            assert found[name] == list(range(rank, COUNT, 4)), (rank, name)
        assert "unknown dimensions ['pp']" in found['unknown']


def test_data_that_no_one_divides_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr('granular.aio.pipeline.shards.warned', [])
    monkeypatch.setenv('WORLD_SIZE', '4')
    assert list(IterableDataset(numbers(), NoSharding())) == list(range(COUNT))
    assert list(numbers().to_iter_dataset(shard_options=ShardOptions(0, 2))) == list(range(0, COUNT, 2))
    with granular.Loader(numbers().map(lambda x: {'x': x}), 4, num_shards=2) as divided:
        next(divided)
    assert not caplog.records
    for _ in range(2):
        with granular.Loader(numbers().map(lambda x: {'x': x}), 4) as whole:
            next(whole)
        next(iter(numbers().to_iter_dataset()))
    (record,) = caplog.records
    assert 'has no shard, and this is one of 4 ranks: each of them reads everything' in record.getMessage()


# --- epochs, positions and lengths


def shuffled(batch=2):
    return numbers().shuffle(seed=5).batch(batch)


def test_persistent_workers_see_the_epoch():
    iterable = IterableDataset(shuffled())
    options = {'num_workers': 1, 'persistent_workers': True, 'multiprocessing_context': 'spawn'}
    loader = DataLoader(iterable, batch_size=None, **options)
    for epoch in (0, 1, 3, 1):
        iterable.set_epoch(epoch)
        other = IterableDataset(shuffled())
        other.set_epoch(epoch)
        assert ids(loader) == ids(other)


def nodes_over(iterable):
    from torchdata import nodes

    return nodes.Loader(nodes.IterableWrapper(iterable))


def consumers():
    yield 'iterable', lambda iterable: iterable
    yield 'nodes', nodes_over
    for workers in (0, 2):
        yield (
            f'StatefulDataLoader, {workers} workers',
            lambda iterable, workers=workers: StatefulDataLoader(
                iterable, batch_size=None, num_workers=workers, multiprocessing_context=fork(workers)
            ),
        )


def program(iterable, loader, taken, first=0, state=None, save=lambda *_: None):
    """Train three epochs, as a program that counts them itself; ``save`` is called with what would be saved."""
    if state is not None:
        loader.load_state_dict(state)
    for epoch in range(first, 3):
        iterable.set_epoch(epoch)
        for batch in loader:
            taken += ids([batch])
            save(epoch, loader, taken)
        save(epoch + 1, loader, taken)


@pytest.mark.parametrize(('name', 'make'), list(consumers()), ids=[name for name, _ in consumers()])
def test_a_program_resumed_wherever_it_saves_is_the_uninterrupted_one(name, make):
    whole, states = [], []
    iterable = IterableDataset(shuffled(8 if 'workers' in name else 4))
    program(iterable, make(iterable), whole, save=lambda *at: states.append((at[0], at[1].state_dict(), len(at[2]))))
    assert len(whole) == 3 * COUNT
    for epoch, state, count in states:
        if count == len(whole) or (name == 'nodes' and count == COUNT * (epoch + 1)):  # whose loops are never empty
            continue
        rest = []
        iterable = IterableDataset(shuffled(8 if 'workers' in name else 4))
        program(iterable, make(iterable), rest, epoch, pickle.loads(pickle.dumps(state)))
        assert whole[:count] + rest == whole, (epoch, count)


@pytest.mark.parametrize('taken', [0, 3, 5])
def test_states_of_a_stateful_loader_are_described_as_those_of_its_iterator(taken):
    stream = MapDataset.range(10).to_iter_dataset().batch(2)
    loader = StatefulDataLoader(IterableDataset(stream), batch_size=None)
    with iter(stream) as iterator:
        batches = iter(loader)
        for _ in range(taken):
            assert next(batches).tolist() == next(iterator).tolist()
        state = loader.state_dict()
        assert granular.describe_state(state) == granular.describe_state(iterator.get_state())
    with pytest.raises(StateError, match='has the states of 2 worker processes'):
        granular.describe_state({'worker_0': state, 'worker_1': state})


def test_states_of_worker_processes_are_described_one_by_one():
    iterable = IterableDataset(shuffled(4))
    loader = StatefulDataLoader(iterable, batch_size=None, num_workers=2, multiprocessing_context='fork')
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    with pytest.raises(
        StateError, match='has the states of 2 worker processes: describe each, such as state'
    ) as caught:
        granular.describe_state(state)
    place = re.search(r'such as state((\[[^]]*\])+):', str(caught.value))
    part = state
    for key in re.findall(r"\['([^']*)'\]", place[1]):
        part = part[key]
    assert granular.describe_state(part).saved_on == 2


def test_states_tell_epoch_and_position():
    iterable = IterableDataset(shuffled())
    iterable.set_epoch(2)
    assert iterable.state_dict()['epoch'] == 2
    with pytest.raises(StateError, match='from before the first element of epoch 2, and has no sources'):
        granular.describe_state(iterable.state_dict())
    iterator = iter(iterable)
    taken = ids(itertools.islice(iterator, 5))
    state = json.loads(json.dumps(iterable.state_dict()))
    rest = ids(iterator)
    assert iterable.state_dict() == {'version': state['version'], 'epoch': 2}  # ended: the next iteration begins
    assert sorted(taken + rest) == list(range(COUNT))
    for look in (False, True):
        other = IterableDataset(shuffled())
        other.load_state_dict(state)
        assert other.state_dict() == state
        if look:
            assert ids([next(iter(other))]) == rest[:2]
        assert ids(other) == rest
        assert len(ids(other)) == COUNT


@pytest.mark.parametrize('taken', [10, 11])
@pytest.mark.parametrize(
    'wrap', [lambda iterable: iterable, lambda iterable: StatefulDataLoader(iterable, batch_size=None)]
)
def test_a_look_at_the_rest_of_an_epoch_leaves_it(wrap, taken):
    iterable = IterableDataset(shuffled())
    loader = wrap(iterable)
    iterable.set_epoch(1)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = ids(iterator)
    for sets in (True, False):
        iterable = IterableDataset(shuffled())
        loader = wrap(iterable)
        loader.load_state_dict(state)
        assert ids([next(iter(loader))]) == rest[:2]
        if sets:
            iterable.set_epoch(1)
            assert ids(loader) == rest
        elif taken == 11:  # what was the look was the rest: a loop that is bounded by the length asks for no more
            assert len(ids(loader)) == COUNT


def test_the_later_of_two_epochs_begins(caplog):
    iterable = IterableDataset(shuffled())
    iterable.set_epoch(1)
    iterator = iter(iterable)
    next(iterator)
    state = iterable.state_dict()
    rest = ids(iterator)
    later = IterableDataset(shuffled())
    later.set_epoch(2)
    later.load_state_dict(state)
    assert 'the state is in epoch 1, epoch 2 was set, which begins' in caplog.text
    assert len(ids(later)) == COUNT
    earlier = IterableDataset(shuffled())
    earlier.set_epoch(0)
    earlier.load_state_dict(state)
    assert ids(earlier) == rest


def workers_refuse(loader, match):
    with pytest.raises(StateError, match=match) as refused:
        list(loader)
    # An error from a worker refers to itself through torch's frames: left to the garbage collector, the locks of the
    # iterator would vanish while its other worker still starts.
    traceback.clear_frames(refused.tb)


def test_states_of_workers_fit_as_many_ranks_and_workers_only():
    def stateful(rank, ranks):
        iterable = IterableDataset(numbers(), ShardOptions(rank, ranks))
        return StatefulDataLoader(iterable, batch_size=None, num_workers=2, multiprocessing_context='spawn')

    loader = stateful(0, 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    other = stateful(0, 1)
    other.load_state_dict(state)
    workers_refuse(other, 'saved with 2 ranks and 2 workers each, this is one of 1 ranks and 2 workers')
    iterable = IterableDataset(numbers())
    next(iter(iterable))
    iterable.load_state_dict({**iterable.state_dict(), 'epoch': 0})
    elements = iter(IterableDataset(numbers(), ShardOptions(1, 2)))
    elements.load_state_dict({'state': {'at': 4, 'hosts': 1}, 'version': 5, 'pipeline': None})
    assert next(elements) == 5


def test_a_state_of_this_process_is_not_that_of_workers():
    iterable = IterableDataset(numbers())
    iterator = iter(iterable)
    next(iterator)
    iterable.load_state_dict(iterable.state_dict())
    loader = DataLoader(iterable, batch_size=None, num_workers=2, multiprocessing_context='spawn')
    workers_refuse(loader, 'workers do not advance equally: continue with as many of both, or save')


def test_composer_asks_for_a_number_of_samples():
    iterable = IterableDataset(shuffled())
    with pytest.raises(UnsupportedError, match='Composer has taken 8 samples.*pass num_workers=0'):
        iterable.state_dict(8, True)
    iterator = iter(iterable)
    taken = ids(itertools.islice(iterator, 4))
    state = iterable.state_dict(8, True)
    other = IterableDataset(shuffled())
    other.load_state_dict(state)
    assert taken + ids(other) == ids(IterableDataset(shuffled()))


def test_lengths_of_batches_are_known_and_those_of_elements_on_request():
    batches = IterableDataset(numbers(25).batch(4), ShardOptions(1, 2))
    assert len(batches) == len(list(batches)) == 3
    assert len(DataLoader(batches, batch_size=None)) == 3
    assert len(IterableDataset(numbers(25).batch(1), ShardOptions(0, 2))) == 13
    assert len(IterableDataset(numbers(25), ShardOptions(0, 2), sized=True)) == 13
    assert len(IterableDataset(numbers(25).to_iter_dataset(shard_options=ShardOptions(0, 2)), sized=True)) == 13
    for unknown in (numbers(), numbers().batch(4).filter(bool), numbers().to_iter_dataset().batch(4)):
        iterable = IterableDataset(unknown)
        assert iterable
        remedy = 'filter' if 'filter' in f'{unknown!r}' else r'only a batched MapDataset has, as .*dataset\.batch\(64\)'
        for loader in (iterable, DataLoader(iterable, batch_size=None)):
            with pytest.raises(TypeError, match=f'IterableDataset has no length: .*{remedy}'):
                len(loader)


@pytest.mark.parametrize(
    'endless', [lambda d: d.repeat(), lambda d: d.repeat().batch(3), lambda d: d.batch(3).repeat()], ids=[0, 1, 2]
)
def test_epochs_of_an_endless_dataset_are_refused_and_those_of_its_stream_are_not(endless):
    dataset = IterableDataset(endless(numbers().shuffle(seed=0)))
    dataset.set_epoch(0)
    with pytest.raises(
        InvalidArgumentError, match=r'epoch 1: .* repeated infinitely: leave out repeat.* of the stream'
    ):
        dataset.set_epoch(1)
    with pytest.raises(InvalidArgumentError, match='epoch 1: the dataset is repeated infinitely'):
        Batches(endless(numbers().map(tokens)).to_iter_dataset()).set_epoch(1)
    stream = IterableDataset(numbers().shuffle(seed=0).batch(3).to_iter_dataset().repeat())
    first = next(iter(stream))
    stream.set_epoch(1)
    assert first.tolist() != next(iter(stream)).tolist()


def test_resumable_tells_epochs_and_has_the_states_of_its_loader():
    loader = Resumable(StatefulDataLoader(IterableDataset(shuffled()), batch_size=None))
    loader.batch_sampler.sampler.set_epoch(1)
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), ids(iterator)
    other = Resumable(StatefulDataLoader(IterableDataset(shuffled()), batch_size=None))
    other.load_state_dict(state)
    other.set_epoch(1)
    assert ids(other) == rest
    assert len(other) == 12
    with pytest.raises(InvalidArgumentError, match='expected a StatefulDataLoader of an IterableDataset'):
        Resumable(DataLoader(IterableDataset(shuffled()), batch_size=None))
    with pytest.raises(InvalidArgumentError, match='has no length: .* pass length=, the number of batches'):
        Resumable(StatefulDataLoader(IterableDataset(shuffled().to_iter_dataset().filter(bool)), batch_size=None))


def test_a_selection_behind_a_shuffle_stays_in_all_epochs(caplog):
    caplog.set_level(logging.WARNING)
    whole = numbers().shuffle(seed=0)
    train, held = IterableDataset(whole[6:]), set(whole[:6])
    for epoch in range(3):
        train.set_epoch(epoch)
        assert not set(train) & held
    assert 'slice before shuffle' in caplog.text
