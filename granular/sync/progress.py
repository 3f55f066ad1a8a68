"""A progress bar for loaders and streams that shows whether input or training is the bottleneck."""

import atexit
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from granular._lazy import import_extra
from granular.aio.http.reply import io_stats
from granular.aio.pipeline.describe import times
from granular.aio.pipeline.nodes.source import Source, timing


def progress(items: Iterable[Any], total: int | None = None, summary: bool = False) -> Iterator[Any]:
    """Yield the items unchanged, with a bar that shows their rate.

    ::

        for batch in granular.progress(loader, total=1000):
            train_step(batch)

    The bar shows the number of items, items and megabytes per second, the share of the time in which the consumer
    waited for input (below a few percent, input does not limit training), prefetched items, requests in flight, and
    datapoints that failed to load.

    Args:
      items: a Loader, a DataLoader, an IterDataset or its iterator, or any iterable.
      total: the number of items, if known.
      summary: time the stages, and print a table of them and the totals at the end. Stages that run in worker processes
        are not timed.

    Raises:
      MissingExtraError: if rich is not installed.
    """
    import_extra('rich.progress', 'cli', 'progress needs rich')
    generator = _with_bar(items, total, summary)
    # A loop that ends early leaves the generator open: close it before the interpreter unloads the modules it uses.
    atexit.register(_close, weakref.ref(generator))
    return generator


def _close(reference: 'weakref.ref[Generator[Any, None, None]]') -> None:
    if (generator := reference()) is not None:
        generator.close()


def _with_bar(items: Iterable[Any], total: int | None, summary: bool) -> Generator[Any, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    timing.on |= summary
    iterator: Any = iter(items)
    stats = getattr(iterator, 'stats', dict)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn('{task.fields[figures]}'), TimeElapsedColumn())
    start, waited = time.perf_counter(), 0.0
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task('', total=total, figures='')
            for item, seconds in _timed(iterator):
                waited += seconds
                bar.advance(task)
                elapsed = time.perf_counter() - start
                bar.update(task, figures=_figures(stats(), bar.tasks[0].completed, elapsed, waited))
                yield item
    finally:
        if summary:
            timing.on = False
            console.print(_summary(items))
            console.print('\n'.join(f'{name:<18} {value:,.6g}' for name, value in stats().items()), highlight=False)


def _timed(iterator: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each item with the seconds that it took to get it."""
    start = time.perf_counter()
    for item in iterator:
        yield item, time.perf_counter() - start
        start = time.perf_counter()


def _figures(stats: dict[str, float], count: float, seconds: float, waited: float) -> str:
    parts = [f'{count / max(seconds, 1e-9):,.1f}/s']
    if 'bytes' in stats:
        parts.append(f'{stats["bytes"] / 1e6 / max(seconds, 1e-9):,.1f} MB/s')
    parts.append(f'{waited / max(seconds, 1e-9):.0%} waiting')
    if 'ready' in stats:
        parts.append(f'{stats["ready"]:.0f} ready, {stats["in_flight"]:.0f} coming')
    counts = io_stats()
    parts.append(f'{counts["in_flight"]} requests, {counts["cached"]:,} hits')
    if stats.get('errors'):
        parts.append(f'{stats["errors"]:.0f} errors')
    return '  '.join(parts)


def _summary(items: Any) -> Any:
    """Return a table of the stages: the elements that each produced, and the time it took."""
    from rich.table import Table

    table = Table('stage', 'made', 'seconds', 'us each')
    stages: list[Any] = []
    core = getattr(items, 'aio', items)
    if isinstance(source := getattr(core, 'source', None), Source):
        stages = [source]
    elif (stream := getattr(getattr(items, '_dataset', items), '_stream', None)) is not None:
        stages = list(stream.roots()) if stream.merged() is None else [stream.merged()]
    for stage in stages:
        for description, count, seconds in times(stage):
            table.add_row(description, f'{count:,}', f'{seconds:,.3f}', f'{seconds / count * 1e6:,.1f}')
    return table
