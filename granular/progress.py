"""A progress bar for loaders and streams, which shows who waits for whom."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from granular.aio.reply import io_stats
from granular.errors import MissingExtraError


def progress(items: Iterable[Any], total: int | None = None, summary: bool = False) -> Iterator[Any]:
    """The same items, with a bar that shows how fast they come.

    Beside the number of items it shows items and megabytes a second, which part of the time the consumer waited for
    input (below a few percent, the input is not what limits training), what is read ahead, requests in flight, and
    datapoints that could not be made.

    Args:
      items: a Loader, a DataLoader, an IterDataset or its iterator, or any iterable.
      total: how many there are, if that is known.
      summary: whether to print the stages of the pipeline and the totals at the end.

    Raises:
      MissingExtraError: if rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        raise MissingExtraError("progress needs rich: pip install 'granular[cli]'") from None
    source: Any = iter(items)
    stats = getattr(source, 'stats', dict)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn('{task.fields[said]}'), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task('', total=total, said='')
        began, waited = time.perf_counter(), 0.0
        while True:
            asked = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                break
            now = time.perf_counter()
            waited += now - asked
            bar.advance(task)
            count = bar.tasks[0].completed
            bar.update(task, said=_line(stats(), count, now - began, waited))
            yield item
    if summary:
        console.print(_summary(items, stats()), highlight=False)


def _line(stats: dict[str, float], count: float, seconds: float, waited: float) -> str:
    parts = [f'{count / max(seconds, 1e-9):,.1f}/s']
    if 'bytes' in stats:
        parts.append(f'{stats["bytes"] / 1e6 / max(seconds, 1e-9):,.1f} MB/s')
    parts.append(f'{waited / max(seconds, 1e-9):.0%} waiting')
    if 'ready' in stats:
        parts.append(f'{stats["ready"]:.0f} ready, {stats["in_flight"]:.0f} coming')
    parts.append(f'{io_stats()["in_flight"]} requests')
    if stats.get('errors'):
        parts.append(f'{stats["errors"]:.0f} errors')
    return '  '.join(parts)


def _summary(items: Any, stats: dict[str, float]) -> str:
    source = getattr(items, 'aio', items)
    stages = '\n'.join(source.fingerprint()) if hasattr(source, 'fingerprint') else str(items)
    return '\n'.join([stages, *(f'{name:<18} {value:,.6g}' for name, value in stats.items())])
