"""A loop of your own: crawl a dataset in a bucket with hundreds of reads in flight, on asyncio alone.

No batches and no loader: some tasks take index after index, and each waits for its own datapoint.
"""

import argparse
import asyncio
import collections
import contextlib
import time

from digits import write

import granular
from granular import testing


async def crawl(place: granular.aio.Path, inflight: int) -> None:
    """Visit every datapoint once, and print how much ink each digit takes."""
    ink, most = collections.defaultdict(list), 0
    async with granular.aio.DatasetReader(place, granular.decoders, cache_keys=('refs', 'label')) as reader:
        todo, waiting = iter(range(len(reader))), 0

        async def visit() -> None:
            nonlocal waiting, most
            for index in todo:
                waiting += 1
                most = max(most, waiting)
                point = await reader.get(index)
                waiting -= 1
                ink[point['label']].append(point['image'].mean() / 255)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(inflight):
                group.create_task(visit())
        seconds = time.perf_counter() - began
    print(f'{sum(map(len, ink.values())):,} datapoints in {seconds:.2f} s, up to {most} in flight')
    for label, shares in sorted(ink.items()):
        print(f'  {label}: {sum(shares) / len(shares):.1%} ink')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--url', help='a dataset with images and labels (by default digits on a server that starts here)'
    )
    parser.add_argument('--inflight', type=int, default=500)
    args = parser.parse_args()
    config = granular.IOConfig(concurrency=args.inflight)
    with contextlib.ExitStack() as stack:
        if args.url is None:
            place = granular.Path('gs://examples', config=config, **stack.enter_context(testing.gcs_server()))
            place.mkdir()
            write(place / 'digits')
            place = place / 'digits'
        else:
            place = granular.Path(args.url, config=config)
        asyncio.run(crawl(granular.aio.Path(place), args.inflight))


if __name__ == '__main__':
    main()
