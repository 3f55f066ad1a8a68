"""datago: batches of JPEG files of one size from the local disk."""

import itertools
import json
import pathlib
import time

import numpy as np
from datago import DatagoClient
from measuring import job, tell


def images():
    """Yield decoded images in passes over the files."""
    count = len(list(pathlib.Path(job['folder']).glob('*.jpg')))
    source = {'root_path': job['folder'], 'random_sampling': False}
    settings = {'source_type': 'file', 'source_config': source, 'limit': count, 'samples_buffer_size': 8 * job['batch']}
    client = DatagoClient(json.dumps(settings))
    while True:
        client.start()
        while (sample := client.get_sample()) is not None:
            yield sample.image.to_numpy_array()


if __name__ == '__main__':
    decoded = images()
    batches = (np.stack([*itertools.islice(decoded, job['batch'])]) for _ in itertools.count())
    for _ in range(10):
        shape = next(batches).shape
    if shape[0] != job['batch'] or shape[-1] != 3:
        raise RuntimeError(f'expected RGB images, got {shape}')
    used = time.process_time()
    for _ in range(job['batches']):
        next(batches)
    tell(cpu=(time.process_time() - used) / (job['batches'] * job['batch']) * 1e6)
