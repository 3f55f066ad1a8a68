"""Datapoints of every type, made the same by us and, as text, by the published releases."""

import numpy as np


def datapoint(i, sequences):
    image = (np.arange(48).reshape(4, 4, 3) * 5 + i).astype(np.uint8)
    point = {
        'array': np.arange(i + 1, dtype=np.float32).reshape(1, -1),
        'bytes': bytes([i]) * (i + 1),
        'int': i,
        'i64': -i,
        'jpg': np.full((8, 8, 3), 10 * i, np.uint8),
        'msgpack': {'a': [i, 'x', None, 1.5]},
        'png': image,
        'tree': {'t': [np.arange(i), {'u': np.float64(i) * np.ones(2)}], 'v': 'text'},
        'u64': 2**63 + i,
        'utf8': f'text {i}',
    }
    if sequences:
        n = (3 * i) % 4
        point.update(frames=[image + j for j in range(n)], texts=[str(j) for j in range(n)], times=list(range(n)))
    return point


def digest(x):
    if isinstance(x, np.ndarray):
        return [x.dtype.str, list(x.shape), x.tolist()]
    if isinstance(x, bytes):
        return x.hex()
    if isinstance(x, dict):
        return {k: digest(v) for k, v in sorted(x.items())}
    if isinstance(x, (list, tuple)):
        return [digest(v) for v in x]
    return x
