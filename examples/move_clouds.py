"""Move a dataset from one cloud to another, here from S3 to Google Cloud Storage, and check every record there.

Files stream from one store to the other, several at a time, without the local disk. Files that exist already are not
copied again, so an interrupted copy resumes.
"""

import argparse
import asyncio
import contextlib
import time

from digits import write

import granular
from granular import testing


async def move(source: granular.aio.Path, target: granular.aio.Path, keep: bool) -> None:
    """Copy and verify a dataset, then delete the source."""
    moved, start = 0, time.perf_counter()

    def progress(count: int) -> None:
        nonlocal moved
        moved += count

    await source.copy(target, progress=progress)
    print(f'copied {moved:,} bytes to {target} in {time.perf_counter() - start:.2f} s')
    report = await granular.aio.verify(target)
    if report.problems:
        raise SystemExit(f'{target} is incomplete, {source} is not deleted: {report.problems[0]}')
    print(f'verified {report.datapoints:,} datapoints: {report.checked:,} records have the checksums of their writer')
    if not keep:
        await source.rmtree()
        print(f'deleted {source}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--source', help='a dataset (default: digits on an S3 server that this program starts)')
    parser.add_argument(
        '--target', help='a folder in another store (default: on a GCS server that this program starts)'
    )
    parser.add_argument('--keep', action='store_true', help='do not delete the source')
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.source is None:
            bucket = granular.Path('s3://examples', **stack.enter_context(testing.s3_server()))
            bucket.mkdir()
            write(bucket / 'digits')
            source = bucket / 'digits'
        else:
            source = granular.Path(args.source)
        if args.target is None:
            bucket = granular.Path('gs://examples', **stack.enter_context(testing.gcs_server()))
            bucket.mkdir()
            target = bucket / 'digits'
        else:
            target = granular.Path(args.target)
        asyncio.run(move(granular.aio.Path(source), granular.aio.Path(target), args.keep))


if __name__ == '__main__':
    main()
