"""AWS's connector for PyTorch, over its Common Runtime: range readers, kept open, one for each of many threads."""

import concurrent.futures
import itertools
import time

from measuring import job, tell
from s3torchconnector import S3ClientConfig, S3MapDataset, S3ReaderConstructor

bucket, _, key = job['path'].partition('/')
dataset = S3MapDataset.from_objects(
    [f's3://{bucket}/{key}'] * job['inflight'],
    region='us-east-1',
    endpoint=job['url'],
    s3client_config=S3ClientConfig(unsigned=True, force_path_style=True, throughput_target_gbps=100.0),
    # Without a buffer, which would read 8 MiB for each record.
    reader_constructor=S3ReaderConstructor.range_based(buffer_size=0),
)


readers = [*map(dataset.__getitem__, range(job['inflight']))]


def work(number, todo):
    reader = readers[number]
    for start, stop in todo:
        reader.seek(start)
        if len(reader.read(stop - start)) != stop - start:
            raise EOFError(f'{start} to {stop} was cut')


def read(threads, ranges):
    numbers = itertools.count()  # shared by the threads: its next() is atomic

    def todo():
        while (i := next(numbers)) < len(ranges):
            yield ranges[i]

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda number: work(number, todo()), range(threads)))
    return len(ranges) / (time.perf_counter() - started)


# Each number of threads from 16 on, of which the fastest counts.
counts = [threads for threads in (16, 32, 64, 128, 256) if threads <= job['inflight']]
share = max(1, len(job['ranges']) // len(counts))
read(counts[0], job['ranges'][: counts[0]])
tell(rate=max(read(threads, job['ranges'][i * share : (i + 1) * share]) for i, threads in enumerate(counts)))
