"""The cases of test_jax.py, run in processes of their own: JAX counts its devices once and cannot be forked.

``python -m tests.support.jax_cases FOLDER [INDEX COUNT PORT]`` prints, in JSON, the failure of each case; in one of
several processes of JAX, those of the cases that need several.
"""

import json
import pathlib
import sys
import traceback

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import granular
from granular import Loader, MapDataset
from granular.errors import DatapointError, InvalidArgumentError, NotFoundError, StateError
from granular.grain.sharding import ShardByJaxProcess
from granular.integrations.jax import Batches, device_put
from granular.integrations.orbax import (
    CheckpointHandler,
    CheckpointRestore,
    CheckpointSave,
)


def sharding():
    return NamedSharding(Mesh(jax.devices(), ('data',)), PartitionSpec('data'))


def source():
    return granular.sources.Epochs([{'i': np.int32(i), 'x': np.full((3, 2), i, np.float32)} for i in range(40)], seed=1)


def case_global_arrays(folder):
    assert jax.device_count() == 4
    with Loader(source(), 8) as loader:
        expected = [next(loader) for _ in range(4)]
    with Batches(Loader(source(), 8), sharding()) as batches:
        for batch in expected:
            found = next(batches)
            assert found['x'].shape == (8, 3, 2) and found['x'].dtype == np.float32
            assert found['x'].sharding == sharding()
            assert [shard.data.shape for shard in found['x'].addressable_shards] == [(2, 3, 2)] * 4
            np.testing.assert_array_equal(found['i'], batch['i'])
            total = jax.jit(lambda batch: batch['x'].sum())(found)
            assert float(total) == batch['x'].sum()


def case_device_put(folder):
    expected = [
        batch['x'] for batch in granular.grain.load(source_rows(), shuffle=True, seed=3, num_epochs=2, batch_size=8)
    ]
    loader = granular.grain.load(source_rows(), shuffle=True, seed=3, num_epochs=2, batch_size=8)
    for device in (jax.devices()[2], sharding()):
        with iter(device_put(loader, device)) as batches:
            for i, batch in enumerate(expected):
                if i == 4:
                    state = batches.get_state()
                found = next(batches)
                assert found['x'].devices() == (set(jax.devices()) if device == sharding() else {device})
                np.testing.assert_array_equal(found['x'], batch)
            assert next(batches, None) is None
            batches.set_state(state)
            np.testing.assert_array_equal(next(batches)['x'], expected[4])
    stream = MapDataset.range(20).to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=1))
    with iter(device_put(stream.map(lambda i: np.full(2, i)), cpu_buffer_size=0, device_buffer_size=0)) as batches:
        assert next(batches).tolist() == [0, 0]
    with iter(device_put(stream.map(str))) as batches, pytest.raises(DatapointError, match='cannot be placed'):
        next(batches)
    with pytest.raises(InvalidArgumentError, match='to_iter_dataset'):
        device_put(MapDataset.range(3))


def source_rows():
    return [{'i': np.int32(i), 'x': np.full((3, 2), i, np.float32)} for i in range(40)]


def case_the_next_batch_is_on_its_way(folder):
    asked = []

    def counted(i):
        asked.append(i)
        return {'i': np.full(4, i, np.int32)}

    for buffer in (0, 1, 2):
        asked.clear()
        found = []
        for batch in Batches(map(counted, range(6)), sharding(), buffer):
            found.append(int(np.asarray(batch['i'])[0]))
            assert len(asked) == min(6, len(found) + buffer)
        assert found == list(range(6))


def case_context_of_the_consumer_applies_to_the_conversion(folder):
    numbers = np.arange(4) + 2**40
    for buffer in (0, 1):
        with jax.enable_x64(True):
            for batch in Batches([{'i': numbers}] * 3, sharding(), buffer):
                assert batch['i'].dtype == np.int64 and batch['i'].tolist() == numbers.tolist()
        assert next(Batches([{'i': np.arange(4)}], sharding(), buffer))['i'].dtype == np.int32
    stream = MapDataset.range(4).map(lambda i: numbers + i).to_iter_dataset()
    with jax.enable_x64(True), jax.default_device(jax.devices()[2]), iter(device_put(stream)) as elements:
        element = next(elements)
        assert element.devices() == {jax.devices()[2]} and element.tolist() == numbers.tolist()


def case_integers_are_not_cut(folder):
    for most, kind in ((2**31 - 1, np.int64), (2**32 - 1, np.uint64)):
        fit = np.array([0, 1, 2, most], kind)
        cut = fit + kind(1)
        assert next(Batches([{'i': fit}], sharding()))['i'].tolist() == fit.tolist()
        message = rf"^\['i'\]: JAX would cut u?int64 from 1 to {most + 1} to 32 bits: set jax_enable_x64, or"
        with Batches([{'i': cut}], sharding()) as batches, pytest.raises(DatapointError, match=message):
            next(batches)
        stream = MapDataset.source([{'i': cut[0]}, {'i': cut[3]}]).to_iter_dataset()
        with iter(device_put(stream)) as elements:
            assert next(elements)['i'] == 1
            with pytest.raises(DatapointError, match='JAX would cut'):
                next(elements)


def case_states(folder):
    with Batches(Loader(source(), 8), sharding()) as batches:
        found = [np.asarray(next(batches)['i']).tolist() for _ in range(5)]
        batches.load_state_dict({'step': 16, 'seed': 1})
        assert np.asarray(next(batches)['i']).tolist() == found[2]
        assert batches.state_dict()['step'] == 24
    stream = MapDataset.range(24).shuffle(seed=1).batch(4).to_iter_dataset()
    with Batches(iter(stream), sharding(), 2) as batches:
        next(batches)
        state = json.loads(json.dumps(batches.state_dict()))
        rest = [batch.tolist() for batch in batches]
        assert len(rest) == 5
        batches.load_state_dict(state)
        assert [batch.tolist() for batch in batches] == rest


def case_what_cannot_be(folder):
    with Loader(source(), 8, recycle_after=2) as loader, pytest.raises(InvalidArgumentError, match='uses memory again'):
        Batches(loader, sharding())
    with (
        Loader(source(), 8) as loader,
        pytest.raises(InvalidArgumentError, match='jax.sharding.Sharding, got int: pass NamedSharding'),
    ):
        Batches(loader, 4)
    with pytest.raises(InvalidArgumentError, match=r'Batches: no .*: for batch_size, pass to_iter_dataset\(\).batch'):
        Batches([], sharding(), batch_size=4)
    count = len(sharding().addressable_devices)
    for value, message in (
        (
            np.zeros(count + 1),
            rf'float64 of .*: choose batch\(n, drop_remainder=True\) .* multiple of {count}$',
        ),
        (np.float32(1), r'float32 of shape \(\) .*: call batch\(...\) of the stream$'),
        (3, r'int of shape \(\) .*: call batch\(...\) of the stream$'),
        (np.array([b'a'] * 4, object), r'object of shape \(4,\) .*: leave it out with select'),
        (np.array(['a'] * 4), r'<U1 of shape \(4,\) .*: leave it out with select'),
        ('a', r'str of shape \(\) .*: leave it out with select'),
    ):
        with Batches([{'x': value}], sharding()) as batches:
            with pytest.raises(DatapointError, match=rf"^\['x'\]: {message}"):
                next(batches)


def case_a_pipeline_beside_a_model(folder):
    params = {'w': np.arange(4.0)}
    dataset = MapDataset.range(60).shuffle(seed=5)
    sampler = granular.grain.samplers.IndexSampler(60, shuffle=True, num_epochs=1, seed=0)
    pipelines = {
        'loader': lambda: Loader(source(), 8),
        'stream': lambda: iter(dataset.to_iter_dataset().batch(4)),
        'dataloader': lambda: iter(
            granular.grain.DataLoader(
                data_source=range(60), sampler=sampler, operations=[granular.grain.transforms.Batch(4)]
            )
        ),
        'batches': lambda: Batches(iter(dataset.batch(4)), sharding()),
    }
    with ocp.CheckpointManager(folder / 'run') as manager:
        for step, (name, make) in enumerate(pipelines.items()):
            with make() as pipeline:
                for _ in range(3):
                    next(pipeline)
                parts = {'model': ocp.args.StandardSave(params), 'data': CheckpointSave(pipeline)}
                expected = [plain(next(pipeline))]  # which the state does not count any more
                manager.save(step, args=ocp.args.Composite(**parts))
                expected += [plain(next(pipeline)) for _ in range(3)]
            manager.wait_until_finished()
            assert (folder / 'run' / str(step) / 'data' / 'process_0-of-1.json').exists()
            with make() as pipeline:
                parts = {'model': ocp.args.StandardRestore(params), 'data': CheckpointRestore(pipeline)}
                found = manager.restore(step, args=ocp.args.Composite(**parts))
                assert found['data'] is pipeline
                np.testing.assert_array_equal(found['model']['w'], params['w'])
                assert [plain(next(pipeline)) for _ in range(4)] == expected, name


def case_a_state_that_does_not_fit(folder):
    stream = MapDataset.range(60).to_iter_dataset()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / 'one', ocp.args.Composite(data=CheckpointSave(iter(stream))))
        other = CheckpointRestore(iter(stream.map(abs)))
        with pytest.raises(StateError, match='another pipeline'):
            checkpointer.restore(folder / 'one', ocp.args.Composite(data=other))
        with pytest.raises(InvalidArgumentError, match='IterDataset has no state'):
            checkpointer.save(folder / 'two', ocp.args.Composite(data=CheckpointSave(stream)))
        asynchronous = granular.aio.MapDataset.range(3).to_iter_dataset()
        with pytest.raises(InvalidArgumentError, match='DatasetIterator has no state'):
            checkpointer.save(folder / 'three', ocp.args.Composite(data=CheckpointSave(aiter(asynchronous))))
        with pytest.raises(InvalidArgumentError, match='NoneType has no state'):
            CheckpointHandler().restore(folder / 'one' / 'data')
        file = folder / 'one' / 'data' / 'process_0-of-1.json'
        file.write_bytes(file.read_bytes()[:-2])
        with pytest.raises(StateError, match='load an earlier state'):
            checkpointer.restore(folder / 'one', ocp.args.Composite(data=other))
        file.unlink()
        with pytest.raises(NotFoundError, match='contains no state'):
            checkpointer.restore(folder / 'one', ocp.args.Composite(data=other))


def several_each_its_part_and_its_file(folder):
    shard = ShardByJaxProcess()
    assert shard.shard_count == jax.process_count() == 2
    with Loader(source(), 40, shard_id=0, num_shards=1) as loader:
        order = next(loader)['i'].reshape(-1, 2, 4)  # of each step, what either process has

    def make():
        return Batches(Loader(source(), 4, shard_id=shard.shard_index, num_shards=shard.shard_count), sharding())

    with make() as batches, ocp.CheckpointManager(folder / 'run') as manager:
        for step in range(2):
            found = next(batches)['i']
            assert found.shape == (8,)
            for part in found.addressable_shards:
                np.testing.assert_array_equal(part.data, order[step].reshape(-1)[part.index])
        manager.save(2, args=ocp.args.Composite(data=granular.grain.python.PyGrainCheckpointSave(batches)))
        manager.wait_until_finished()
        rest = [plain(next(batches)['i'].addressable_data(0)) for _ in range(2)]
        assert len(list((folder / 'run' / '2' / 'data').glob('process_*-of-2.json'))) == 2
        with make() as again:
            manager.restore(2, args=ocp.args.Composite(data=granular.grain.python.PyGrainCheckpointRestore(again)))
            assert [plain(next(again)['i'].addressable_data(0)) for _ in range(2)] == rest


def plain(batch):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch)


def main():
    folder = pathlib.Path(sys.argv[1])
    prefix = 'case_'
    if len(sys.argv) > 2:
        index, count, port = map(int, sys.argv[2:])
        jax.distributed.initialize(f'127.0.0.1:{port}', count, index)
        prefix = 'several_'
    failed = {}
    for name, case in list(globals().items()):
        if name.startswith(prefix):
            try:
                case(folder / name)
            except BaseException:
                failed[name] = traceback.format_exc()
            else:
                failed[name] = ''
    print(json.dumps(failed))


if __name__ == '__main__':
    main()
