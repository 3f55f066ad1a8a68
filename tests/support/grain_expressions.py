"""Expressions over the common names of Grain and granular, evaluated by the module of either, for comparison.

The text of this file also runs in the environment of Grain, which has no ``tests``.
"""

import collections
import functools

import numpy as np

SOURCES = {
    'none': 'M.range(0)',
    'one': 'M.range(1)',
    'some': 'M.range(11)',
    'steps': 'M.range(20, 2, -3)',
    'texts': 'M.source(["a", "bcd", "", "\\x00e\\x00", "ä€"])',
    'bytes': 'M.source([b"a", b"bc\\x00", b"", b"\\x00\\x00", b"\\xff"])',
    'nones': 'M.source([None, 1, None, None, 4, 5, None])',
    'arrays': 'M.source([np.full((2, 3), i, np.uint8) for i in range(5)])',
    'ragged': 'M.source([np.arange(i) for i in range(5)])',
    'floats': 'M.source([0.5, float("nan"), float("inf"), -0.0, 1e300])',
    'dicts': 'M.source([{"x": np.float32(i), "y": {"z": (i, [i, str(i)])}} for i in range(6)])',
    'tuples': 'M.source([Pair(i, np.arange(3) + i) for i in range(5)])',
    'mixed': 'M.source([1, 2.5, True, 3])',
    'keys': 'M.source([{"a": 1}, {"a": 2}, {"b": 3}])',
}

OPERATIONS = {
    'list': 'd',
    'shuffle': 'd.shuffle(seed=3)',
    'shuffle twice, repeat': 'd.shuffle(seed=3).shuffle(seed=4).repeat(2)',
    'slice, repeat': 'd[1:].repeat(3, reseed_each_epoch=False)',
    'backwards': 'd[::-2]',
    'number': 'd.map_with_index(lambda i, x: (i, x))',
    'random': 'd.random_map(lambda x, rng: (x, int(rng.integers(1000))), seed=7)',
    'batch': 'd.batch(2)',
    'batch, drop': 'd.batch(2, drop_remainder=True)',
    'batch, more than there are': 'd.batch(100)',
    'batch, list': 'd.batch(3, batch_fn=list)',
    'mix': 'M.mix([d, d.map(lambda x: (x,))], weights=[1, 2])',
    'concatenate': 'M.concatenate([d, M.range(2), d]).shuffle(seed=1)',
    'zip': 'zipped([d, d.shuffle(seed=1)])',
    'select': 'M.select_from_datasets([d, d], [(0, 0), (1, 0), (0, 0)])',
    'window': 'windows(d, 3, 5)',
    'truth': 'd.filter(lambda x: x is not None and np.size(x) != 1)',
    'stream': 'd.to_iter_dataset()',
    'stream, nones': 'd.to_iter_dataset(allow_nones=True)',
    'stream, batch': 'd.to_iter_dataset().batch(2)',
    'stream, batch, drop': 'd.to_iter_dataset().batch(2, drop_remainder=True)',
    'stream, number': 'd.to_iter_dataset().map_with_index(lambda i, x: (i, x))',
    'stream, limit, repeat': 'repeated(limited(d.to_iter_dataset(), 3), 2)',
    'stream, pad': 'd.to_iter_dataset().batch(2, batch_fn=functools.partial(pad, batch_size=2))',
    'stream, window': 'stream_windows(d.to_iter_dataset(), 3, 5)',
    'stream, mix': 'I.mix([d.to_iter_dataset(), d.to_iter_dataset()], [1, 3])',
    'stream, interleave': 'interleaved([d.to_iter_dataset(), M.range(2).to_iter_dataset()], 2)',
    'stream, zip': 'stream_zipped([d.to_iter_dataset(), d.to_iter_dataset().map(lambda x: [x])])',
    'stream, rebatch': 'rebatched(d.to_iter_dataset().batch(2), 3)',
    'stream, cache': 'repeated(cached(d.to_iter_dataset()), 2)',
    'stream, prefetch': 'prefetched(d.to_iter_dataset().map(lambda x: [x]), 2)',
}

ARGUMENTS = r"""
M.range(5).batch(0)
M.range(5).batch(-1)
M.range(5).repeat(0)
M.range(5).repeat(-2)
M.range(5).repeat().repeat()
M.range(5).repeat()[3:9]
M.range(5).repeat()[::2][:4]
M.range(5).shuffle()
M.range(5).shuffle(seed=-1)
M.range(5).shuffle(seed=2**32)
M.range(5).shuffle(seed=2**32 - 1)
M.range(5).random_map(lambda x, r: x)
M.range(5).seed(-1)
M.range(5).seed("a")
M.range(5)[9:]
M.range(5)[-2:]
M.range(5)[3:1]
M.range(5).slice(slice(0, 4, 2))
M.range(5).map(3)
M.range(5).filter(None)
M.mix([])
M.mix([M.range(3)])
M.mix([M.range(3), M.range(3)], [1])
M.mix([M.range(3), M.range(3)], [0, 1])
M.mix([M.range(3), M.range(3)], [1, -1])
M.concatenate([])
M.concatenate([M.range(3).repeat(), M.range(2)])
M.concatenate([M.range(3)])
M.select_from_datasets([M.range(3)], [(0, 1), (1, 0)])
M.select_from_datasets([M.range(3)], [])
zipped([M.range(3), M.range(4)])
zipped([])
windows(M.range(5), 0, 1)
windows(M.range(5), 9, 1)
windows(M.range(0), 2, 1)
limited(M.range(5).to_iter_dataset(), 0)
limited(M.range(5).to_iter_dataset(), -1)
limited(M.range(5).to_iter_dataset(), 9)
repeated(M.range(5).to_iter_dataset(), 0)
repeated(M.range(0).to_iter_dataset(), 3)
M.range(5).to_iter_dataset().batch(0)
M.range(3).filter(bool).batch(2)
rebatched(M.range(5).to_iter_dataset().batch(2), 0)
rebatched(M.range(5).to_iter_dataset(), 2)
stream_windows(M.range(5).to_iter_dataset(), 0, 1)
interleaved([], 2)
interleaved([M.range(3).to_iter_dataset()], 0)
I.mix([])
I.mix([M.range(3).to_iter_dataset()], [0])
stream_zipped([])
stream_zipped([M.range(3).to_iter_dataset(), M.range(4).to_iter_dataset()])
prefetched(M.range(3).to_iter_dataset(), -1)
prefetched(M.range(3).to_iter_dataset(), 0)
M.range(3).to_iter_dataset(ReadOptions(num_threads=-1))
ReadOptions(prefetch_buffer_size=-1)
M.range(3).to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))
M.range(np.int64(7)).shuffle(seed=np.int32(3)).repeat(np.int16(2)).batch(np.uint8(4))
M.range(5).map(lambda x: 1 // (x - 3))
M.range(5).filter(lambda x: 1 // (x - 3))
M.range(5).random_map(lambda x, r: 1 // (x - 3), seed=1)
M.range(5).map_with_index(lambda i, x: 1 // (i - 3))
M.range(5).batch(2, batch_fn=lambda b: 1 // (b[0] - 2))
M.source(range(4)).map(lambda x: [3, 4][x])
M.range(5).to_iter_dataset().map(lambda x: {}[x])
M.range(5).to_iter_dataset().batch(2).map(lambda b: {}[len(b)])
M.range(5).to_iter_dataset().filter(lambda x: {}[x])
M.range(7).to_iter_dataset().batch(2).filter(lambda b: len(b) > 1)
M.range(5).map(lambda x: None)
M.range(5).map(lambda x: None if x % 2 else x).batch(2)
M.range(5).to_iter_dataset().map(lambda x: None)
M.range(5).map(lambda x: None).to_iter_dataset().batch(2)
M.range(5).map(lambda x: {"x": x, "n": None}).batch(2)
M.range(5).map(lambda x: (x, None)).to_iter_dataset().batch(3)
M.range(6).map(lambda x: {"x": None if x == 2 else x}).batch(3)
M.range(4).map(lambda x: ()).batch(2)
M.range(4).map(lambda x: {}).batch(2)
M.range(4).map(lambda x: [[x], {"y": (x,)}]).batch(3)
M.range(4).map(lambda x: [x] * x).batch(2)
M.range(4).map(lambda x: {"a": x} if x else {"b": x}).batch(2)
M.range(4).map(lambda x: np.zeros((x, 2))).batch(2)
M.range(4).map(lambda x: np.zeros((0, 2))).batch(2)
M.range(4).map(lambda x: "ab"[:x]).batch(4)
M.range(4).map(lambda x: b"ab"[:x] * 0).batch(4)
M.range(4).map(lambda x: np.array(x > 1)).batch(2)
M.range(4).map(lambda x: 2.0 ** x).batch(2)
M.range(4).map(lambda x: np.datetime64("2020-01-01") + np.timedelta64(x, "D")).batch(2)
M.range(4).map(lambda x: 1j * x).batch(2)
flat(M.range(5), lambda x: [x] * x, 4)
flat(M.range(5), lambda x: [x] * x, 3)
flat(M.range(0), lambda x: [x], 3)
flat(M.range(5), lambda x: None, 3)
flat(M.range(5), lambda x: [None, x], 3)
flat(M.range(5), lambda x: [x] * x, 4).to_iter_dataset().batch(3)
stream_flat(M.range(5).to_iter_dataset(), lambda x: [x] * x)
stream_flat(M.range(5).to_iter_dataset(), lambda x: [])
stream_flat(M.range(5).to_iter_dataset(), lambda x: 3)
pad([1, 2], batch_size=4)
pad([1, 2, 3], batch_size=2)
pad([{"a": np.ones((2, 2), np.int8)}], batch_size=3, pad_value=-1)
pad([True], batch_size=2)
M.range(3).apply([Double(), Even()])
M.range(6).apply(Even()).to_iter_dataset().apply([Double()])
M.range(3).apply([])
M.range(3).pipe(lambda d, n: d.batch(n), 2)
M.range(6).to_iter_dataset().pipe(list)
loader(list(range(7)), 7, 2)
loader(list(range(7)), 7, 2, shuffle=True, seed=3)
loader(["a", "bc", ""], 3, 2)
loader([np.arange(2)] * 3, 3, 3)
loader(list(range(4)), 4, 0)
M.range(5).to_iter_dataset().map(lambda x: x if x % 2 else None).filter(lambda x: x is not None)
M.range(5).to_iter_dataset().map(lambda x: x if x % 2 else None).map(lambda x: x + 1)
M.range(5).to_iter_dataset().map(lambda x: x if x % 2 else None).map_with_index(lambda i, x: (i, x))
M.range(5).to_iter_dataset().map(lambda x: x if x % 2 else None).filter(lambda x: x > 1)
M.range(5).map(lambda x: x if x % 2 else None).to_iter_dataset().map_with_index(lambda i, x: (i, x))
M.range(6).to_iter_dataset().batch(2).map(lambda b: None).filter(lambda b: b is None)
M.range(5).to_iter_dataset().random_map(lambda x, r: None if r.random() < 0.5 else x, seed=1)
M.range(5).to_iter_dataset().map_with_index(lambda i, x: None if i == 2 else x)
repeated(M.range(3).to_iter_dataset().map(lambda x: None), 2)
M.range(4).to_iter_dataset(allow_nones=True).map(lambda x: None)
""".strip().splitlines()

# Grain takes milliseconds to shuffle an index.
SHUFFLES = ('shuffle', 'shuffle twice, repeat', 'concatenate', 'zip', 'window', 'stream, window')
SHUFFLED = ('none', 'one', 'some', 'bytes')

Pair = collections.namedtuple('Pair', ['left', 'right'])


def expressions():
    """Return each expression by name."""
    out = {
        f'{source}: {operation}': (SOURCES[source], OPERATIONS[operation])
        for source in SOURCES
        for operation in OPERATIONS
        if operation not in SHUFFLES or source in SHUFFLED
    }
    return {**out, **{text: ('None', text) for text in ARGUMENTS}}


def show(element):
    """Return an element as JSON that also holds its types, dtypes and shapes."""
    if isinstance(element, dict):
        return {'dict': {key: show(value) for key, value in element.items()}}
    if isinstance(element, list | tuple):
        return {type(element).__name__: [show(value) for value in element]}
    if isinstance(element, np.ndarray):
        return {'array': f'{element.dtype} {element.shape}', 'values': show(element.tolist())}
    if isinstance(element, np.generic):
        return {'number': str(element.dtype), 'value': show(element.item())}
    if isinstance(element, bytes):
        return {'bytes': list(element)}
    if isinstance(element, float | complex):
        return {'float': repr(element)}
    return element if element is None or isinstance(element, int | str) else {type(element).__name__: str(element)}


def outcome(source, text, names):
    """Return what an expression evaluates to, and its elements by index, or the class and message of its error."""
    names = {**names, 'np': np, 'functools': functools, 'Pair': Pair}
    try:
        names['d'] = eval(source, names)
        value = eval(text, names)
        out = {}
        if hasattr(value, '__getitem__') and hasattr(value, '__len__') and not isinstance(value, list | np.ndarray):
            length = out['length'] = len(value)
            if not isinstance(value, dict) and length < 1000:
                out['epochs'] = show([value[i] for i in range(2 * length)])
        out['elements'] = show(list(value) if hasattr(value, '__iter__') and not isinstance(value, dict) else value)
    except Exception as error:
        return {'error': type(error).__name__, 'message': str(error)[:300]}
    return out
