"""A progress bar for loaders and streams, which shows who waits for whom."""

import atexit
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from granular.aio.http.reply import io_stats
from granular.aio.pipeline.describe import times
from granular.aio.pipeline.nodes.source import Source, timing
from granular.errors import MissingExtraError


def progress(items: Iterable[Any], total: int | None = None, summary: bool = False) -> Iterator[Any]:
    """The same items, with a bar that shows how fast they come.

    Beside the number of items it shows items and megabytes a second, which part of the time the consumer waited for
    input (below a few percent, the input is not what limits training), what is read ahead, requests in flight, and
    datapoints that could not be made.

    Args:
      items: a Loader, a DataLoader, an IterDataset or its iterator, or any iterable.
      total: how many there are, if that is known.
      summary: whether to time the stages, and print a table of them and the totals at the end. What runs in worker
        processes is not seen.

    Raises:
      MissingExtraError: if rich is not installed.
    """
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        raise MissingExtraError("progress needs rich: pip install 'granular[cli]'") from None
    shown = _shown(items, total, summary)
    # A loop that was left early leaves it open, and what it draws with is gone when the interpreter collects it.
    atexit.register(_close, weakref.ref(shown))
    return shown


def _close(shown: 'weakref.ref[Generator[Any, None, None]]') -> None:
    if (generator := shown()) is not None:
        generator.close()


def _shown(items: Iterable[Any], total: int | None, summary: bool) -> Generator[Any, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    timing.on |= summary
    source: Any = iter(items)
    stats = getattr(source, 'stats', dict)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn('{task.fields[said]}'), TimeElapsedColumn())
    began, waited = time.perf_counter(), 0.0
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task('', total=total, said='')
            while True:
                asked = time.perf_counter()
                try:
                    item = next(source)
                except StopIteration:
                    break
                now = time.perf_counter()
                waited += now - asked
                bar.advance(task)
                bar.update(task, said=_line(stats(), bar.tasks[0].completed, now - began, waited))
                yield item
    finally:
        if summary:
            timing.on = False
            console.print(_summary(items))
            console.print('\n'.join(f'{name:<18} {value:,.6g}' for name, value in stats().items()), highlight=False)


def _line(stats: dict[str, float], count: float, seconds: float, waited: float) -> str:
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
    """The stages, what each made, and how long that took."""
    from rich.table import Table

    table = Table('stage', 'made', 'seconds', 'us each')
    stages: list[Any] = []
    core = getattr(items, 'aio', items)
    if isinstance(source := getattr(core, 'source', None), Source):
        stages = [source]
    elif (stream := getattr(getattr(items, '_dataset', items), '_stream', None)) is not None:
        stages = list(stream.roots()) if stream.merged() is None else [stream.merged()]
    for stage in stages:
        for said, made, spent in times(stage):
            table.add_row(said, f'{made:,}', f'{spent:,.3f}', f'{spent / made * 1e6:,.1f}')
    return table
