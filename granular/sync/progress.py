"""A progress bar for loaders and streams that shows whether input or training is the bottleneck."""

import atexit
import contextlib
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final, TypeVar

from granular._support.lazy import import_extra
from granular._support.other_names import answering
from granular._support.text import counted
from granular.aio.pipeline.blocking_iterator import flows_of
from granular.aio.pipeline.loader.loader import LoaderHandle, remaining_batches, running_part
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.summary import ExecutionSummary, StageSummary, Times
from granular.errors import InvalidArgumentError
from granular.metrics import io_stats, timing

T = TypeVar('T')
_PERIOD: Final = 0.25  # seconds between two lines in a notebook


@answering()
def progress(items: Iterable[T], total: int | None = None, summary: bool = False) -> Iterator[T]:
    """Yield the items unchanged, with a bar that shows their rate.

    ::

        for batch in granular.progress(loader, total=1000):
            train_step(batch)

    The bar shows the number of items, items and megabytes per second, the share of the time in which the consumer
    waited for input (below a few percent, input does not limit training), prefetched items, requests in flight, and
    datapoints that failed to load. It is written to stderr; notebooks show it as a line of text.

    Args:
      items: a Loader, a DataLoader, an IterDataset or its iterator, or any iterable.
      total: the number of items, if known; by default the batches that follow of a Loader over a finite source. Without
        it, only the number of items so far is shown.
      summary: time the stages, also in worker processes, and print the table of ``execution_summary``, and the totals,
        at the end.

    Raises:
      MissingExtraError: if rich is not installed.
    """
    if not hasattr(items, '__iter__') and not hasattr(items, '__getitem__'):
        raise InvalidArgumentError(f'progress: expected items to iterate over, got {items!r:.100}')
    import_extra('rich.progress', 'cli', 'progress needs rich')
    generator = _with_bar(items, total, summary)
    _begun.add(generator)
    return generator


_begun: Final[weakref.WeakSet[Generator[Any, None, None]]] = weakref.WeakSet()


@atexit.register
def _close() -> None:
    """Close the generators that loops which ended early left open, while the modules that they use are there."""
    for generator in list(_begun):
        if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:  # as in a daemon thread that waits for an item
            generator.close()


def _sources_of(flows: Iterable[Flow]) -> list[Source]:
    return [source for flow in flows for source in flow.sources()]


def _with_bar(items: Iterable[T], total: int | None, summary: bool) -> Generator[T, None, None]:
    from rich.console import Console

    with contextlib.ExitStack() as stack:
        if summary:
            stack.enter_context(_timed())
        iterator: Any = iter(items)  # begins the next epoch of a Loader
        if total is None and isinstance(items, LoaderHandle):
            total = remaining_batches(items)
        # Another iterator may have an attribute of this name for purposes of its own.
        own = str(getattr(getattr(type(iterator), 'stats', None), '__module__', '')).startswith('granular.')
        stats: Callable[[], dict[str, float]] = iterator.stats if own else dict
        console = Console(stderr=True)
        flows = [running_part(iterator).flow] if isinstance(iterator, LoaderHandle) else flows_of(iterator)
        times = Times(_sources_of(flows))
        start, waited, count = time.perf_counter(), 0.0, 0
        try:
            with (_line if console.is_jupyter else _bar)(console, total) as show:
                asked = time.perf_counter()
                for item in iterator:
                    now = time.perf_counter()
                    waited += now - asked
                    count += 1
                    show(count, _figures(stats(), count, max(now - start, 1e-9), waited))
                    yield item
                    asked = time.perf_counter()
        finally:
            if summary:
                consumer = StageSummary('consumer', count, time.perf_counter() - start - waited, waited)
                table = ExecutionSummary([*times.parts(), *times.stages(_sources_of(flows))], [consumer])
                console.print(str(table), highlight=False, soft_wrap=True)
                totals = '\n'.join(f'{name:<18} {value:,.6g}' for name, value in stats().items())
                console.print(totals, highlight=False)


_before: Final[list[bool]] = []  # whether stages were timed before each of the summaries that run


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    """Time the stages; summaries may end in another order than that in which they began."""
    _before.append(timing.on)  # which the program, or a stream with stage_timing, sets as well
    timing.on = True
    try:
        yield
    finally:
        timing.on = _before.pop()


@contextlib.contextmanager
def _bar(console: Any, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Show a bar in a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn('{task.description}'), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task('', total=total)
        yield lambda count, figures: bar.update(task, completed=count, description=f'{_share(count, total)}  {figures}')


@contextlib.contextmanager
def _line(console: Any, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Show a line of text in a notebook, whose output has no cursor and, without ipywidgets, no bars of rich."""
    text, length, shown = '', 0, 0.0

    def write(end: str) -> None:
        nonlocal length, shown
        sys.stderr.write(f'\r{text:<{length}}{end}')
        sys.stderr.flush()
        length, shown = len(text), time.monotonic()

    def show(count: int, figures: str) -> None:
        nonlocal text
        text = f'{_share(count, total)}  {figures}'
        if time.monotonic() - shown >= _PERIOD:
            write('')

    try:
        yield show
    finally:
        write('\n')


def _share(count: int, total: int | None) -> str:
    return f'{count:,}' if total is None else f'{count:,}/{total:,}'


def _figures(stats: dict[str, float], count: int, seconds: float, waited: float) -> str:
    parts = [f'{count / seconds:,.1f}/s']
    if 'bytes' in stats:
        parts.append(f'{stats["bytes"] / 1e6 / seconds:,.1f} MB/s')
    parts.append(f'{waited / seconds:.0%} waiting')
    if 'ready' in stats:
        parts.append(f'{stats["ready"]:.0f} ready, {stats["in_flight"]:.0f} loading')
    counts = io_stats()
    parts.append(f'{counted(counts["in_flight"], "request")}, {counted(counts["cached"], "hit")}')
    if stats.get('errors'):
        parts.append(counted(int(stats['errors']), 'error'))
    return '  '.join(parts)
