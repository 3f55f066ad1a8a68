"""Crawl a dataset in a bucket with hundreds of reads in flight, in an asyncio program.

There are no batches and no loader: each task takes the next index and awaits its datapoint.
"""

import argparse
import asyncio
import collections
import contextlib
import time

from digits import write

import granular
from granular import testing


async def crawl(path: granular.aio.Path, inflight: int) -> None:
    """Read every datapoint once, and print the average ink of each digit."""
    ink, peak = collections.defaultdict(list), 0
    async with granular.aio.DatasetReader(path, granular.decoders, cache_keys=('refs', 'label')) as reader:
        todo, waiting = iter(range(len(reader))), 0

        async def visit() -> None:
            nonlocal waiting, peak
            for index in todo:
                waiting += 1
                peak = max(peak, waiting)
                datapoint = await reader.get(index)
                waiting -= 1
                ink[datapoint['label']].append(datapoint['image'].mean() / 255)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(inflight):
                group.create_task(visit())
        seconds = time.perf_counter() - start
    print(f'{sum(map(len, ink.values())):,} datapoints in {seconds:.2f} s, up to {peak} in flight')
    for label, shares in sorted(ink.items()):
        print(f'  {label}: {sum(shares) / len(shares):.1%} ink')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--url', help='a dataset with images and labels (default: digits on a server that this program starts)'
    )
    parser.add_argument('--inflight', type=int, default=500)
    args = parser.parse_args()
    config = granular.IOConfig(concurrency=args.inflight)
    with contextlib.ExitStack() as stack:
        if args.url is None:
            path = granular.Path('gs://examples', config=config, **stack.enter_context(testing.gcs_server()))
            path.mkdir()
            write(path / 'digits')
            path = path / 'digits'
        else:
            path = granular.Path(args.url, config=config)
        asyncio.run(crawl(granular.aio.Path(path), args.inflight))


if __name__ == '__main__':
    main()
