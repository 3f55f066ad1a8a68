"""s3fs or gcsfs by their cat_ranges, anonymous, with nginx as the bucket."""

import time

from measuring import job, tell

if job['scheme'] == 's3':
    import s3fs

    fs = s3fs.S3FileSystem(
        anon=True,
        endpoint_url=job['url'],
        config_kwargs={'max_pool_connections': job['inflight']},
        client_kwargs={'region_name': 'us-east-1'},
    )
else:
    from gcsfs.core import GCSFileSystem

    fs = GCSFileSystem(token='anon', endpoint_url=job['url'])
starts, stops = map(list, zip(*job['ranges'], strict=True))
paths = [job['path']] * len(starts)
size = job['inflight']


def run(first, last):
    got = 0
    for i in range(first, last, 4 * size):
        pick = slice(i, min(i + 4 * size, last))
        bodies = fs.cat_ranges(paths[pick], starts[pick], stops[pick], batch_size=size, on_error='raise')
        got += sum(map(len, bodies))
    return got


run(0, size)
started = time.perf_counter()
got = run(0, len(starts))
seconds = time.perf_counter() - started
assert got == sum(stops) - sum(starts)
tell(rate=len(starts) / seconds)
