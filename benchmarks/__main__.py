"""Run the benchmarks: ``python -m benchmarks [--quick] [--only NAME ...] [--write]``."""

import argparse
import compileall
import pathlib
import sys
import tempfile

from benchmarks import (
    accelerator,
    arrayrecord,
    caching,
    clusters,
    curves,
    episodes,
    indexing,
    local_rivals,
    mixing,
    opening,
    parquet,
    pipelines,
    planning,
    remote,
    requests,
    rest,
    rewriting,
    sharding,
    training,
)  # fmt: skip
from benchmarks.bars import ROOT, Bar, Figures, machine, write
from benchmarks.data import Data
from benchmarks.nginx import serving

BENCHMARKS = {
    fn.__name__: fn
    for fn in (
        requests.requests, remote.medium, remote.many, remote.small, remote.large, remote.tls, remote.tail,
        remote.faults,
        pipelines.streams, pipelines.blocks, pipelines.overhead, pipelines.workers, pipelines.labels, pipelines.torch,
        mixing.mixing, planning.planning, planning.padding, planning.tokens, episodes.episodes,
        caching.blockcache, caching.shared,
        local_rivals.local_rivals,
        rest.local, rest.batch, rest.opening, rest.memory, rest.first, rest.images, rest.processes,
        arrayrecord.arrayrecord, parquet.parquet, clusters.ray, indexing.index, sharding.sharding,
        opening.shard_opening, rewriting.rewriting,
        training.training,
        accelerator.accelerator,
    )
}  # fmt: skip
CURVES = {fn.__name__: fn for fn in (curves.inflight, curves.gap, curves.request)}


def main() -> None:
    """Print every bar with its figures. The exit status is 0 if all bars are reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--quick', action='store_true', help='a tenth of the data, and no curves')
    parser.add_argument('--only', nargs='+', choices=BENCHMARKS | CURVES, metavar='NAME')
    parser.add_argument('--write', action='store_true', help='put the results into bars.md, the page and the README')
    parser.add_argument(
        '--keep', type=pathlib.Path, help='a folder whose data is used again (by default it is made anew)'
    )
    args = parser.parse_args()
    bars: list[Bar] = []
    tables: list[Figures] = []
    print(machine())
    # As pip does: otherwise each process would compile it anew where PYTHONDONTWRITEBYTECODE is set.
    compileall.compile_dir(ROOT / 'granular', quiet=1)
    with tempfile.TemporaryDirectory(prefix='granular-bench-') as temporary:
        folder = args.keep or pathlib.Path(temporary)
        data = Data(folder.resolve(), args.quick)
        with serving(data.folder, pathlib.Path(temporary) / 'nginx') as server:
            for name in args.only or (BENCHMARKS if args.quick else BENCHMARKS | CURVES):
                found, figures = (BENCHMARKS | CURVES)[name](data, server)
                bars += found
                tables += figures
                print(*figures, *found, sep='\n', flush=True)
    if args.write:
        write(bars, tables)
    sys.exit(not all(bar.reached for bar in bars))


if __name__ == '__main__':
    main()
