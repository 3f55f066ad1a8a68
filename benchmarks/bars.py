"""Results of benchmarks: bars, which are ratios within one run, tables of their figures, and plots."""

import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / 'docs'
RECORD = ROOT / 'benchmarks' / 'bars.md'
CORE = 1  # the core of clients; the server has core 0


class Bar(NamedTuple):
    """A ratio that must reach a bound, or stay below it."""

    name: str
    value: float
    bound: float
    behind: str = ''
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """True if the ratio is within its bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = '<=' if self.at_most else '>='
        verdict = 'ok  ' if self.reached else 'MISS'
        return f'{verdict}  {self.name:<58} {self.value:>8.2f} {sign} {self.bound:<6.4g} {self.behind}'


class Table(NamedTuple):
    """The figures of a benchmark: a row is a name, an amount, and a remark."""

    name: str
    title: str
    unit: str
    rows: Sequence[tuple[str, float, str]]

    def __str__(self) -> str:
        width = max(len(who) for who, _, _ in self.rows)
        lines = [f'{who:<{width}}  {format_figure(value, 5):>12}  {note}' for who, value, note in self.rows]
        return '\n'.join([f'{self.title} ({self.unit})', *(f'  {line}' for line in lines)])


class Curves(NamedTuple):
    """Figures over a setting: a line for each condition."""

    name: str
    title: str
    unit: str
    knob: str
    points: Sequence[str]
    lines: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        head = [f'| {self.title}, {self.unit} | {" | ".join(self.points)} |', f'| --- |{" ---: |" * len(self.points)}']
        lines = {name: ' | '.join(format_figure(value, 4) for value in line) for name, line in self.lines.items()}
        return '\n'.join([*head, *(f'| {name} | {figures} |' for name, figures in lines.items())])


Figures = Table | Curves
Result = tuple[list[Bar], Sequence[Figures]]


def format_figure(value: float, digits: int) -> str:
    """Return a number with separators and at least this many significant digits, never in scientific notation."""
    return f'{value:,.0f}' if abs(value) >= 10 ** (digits - 1) else f'{value:,.{digits}g}'


def ratio(name: str, got: float, other: float, bound: float, note: str = '') -> Bar:
    """Return the bar of a rate divided by another one."""
    return Bar(name, got / other, bound, f'{got:,.0f}/s / {other:,.0f}/s{note}')


def medians(runs: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return the median of several runs by name."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def child(command: Sequence[str], core: int | None = CORE, **more: Any) -> dict[str, Any]:
    """Run a program, by default on the core for clients, and return the JSON that it prints last.

    The processes that it leaves are killed.
    """
    pinned = command if core is None else ['taskset', '-c', str(core), *command]
    with tempfile.TemporaryFile('w+') as output:
        process = subprocess.Popen(pinned, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **more)
        try:
            code = process.wait(600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code:
        raise RuntimeError(f'{" ".join(command)}\n{text}')
    results = [line for line in text.splitlines() if line.startswith('{')]
    result: dict[str, Any] = json.loads(results[-1]) if results else {}
    return result


def machine() -> str:
    """Describe the machine and the date."""
    day = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f'{day}, {os.cpu_count()} cores of {_model()}, Linux {platform.release()}, Python {platform.python_version()}'
    )


def _escaped(name: str) -> str:
    """Return a name such as ``__getitems__`` for Markdown, which it would print in bold."""
    return name.replace('__', r'\_\_')


def write(bars: Sequence[Bar], tables: Sequence[Figures]) -> None:
    """Write the record of bars, the missed bars of docs/performance.md, a plot for each table, and the README.

    Bars that were not measured stay, with the day on which they were.
    """
    page = DOCS / 'performance.md'
    record = RECORD.read_text()
    day = record[:10]
    rows = {
        name: line if re.search(r'\(\d{4}-\d\d-\d\d\) \|$', line) else f'{line[:-2]} ({day}) |'
        for name, line in _rows(record).items()
    }
    for bar in bars:
        start = f'| {_escaped(bar.name)}'
        rows[start] = (
            f'{start} | {bar.value:.2f} | {"≤" if bar.at_most else "≥"} {bar.bound:g} '
            f'| {"" if bar.reached else "**missed** "}{bar.behind} |'
        )
    head = [f'{machine()}.', '', '| bar | figure | bound | details |', '| --- | ---: | --- | --- |']
    RECORD.write_text('\n'.join([*head, *rows.values(), '']))
    missed = [_brief(row) for row in rows.values() if '**missed**' in row]
    shown = '\n'.join([*head[:2], '| missed bar | figure | bound |', '| --- | ---: | --- |', *missed])
    page.write_text(_between(page.read_text(), 'bars', shown))
    for table in tables:
        plot(table)
    readme = ROOT / 'README.md'
    readme.write_text(_between(readme.read_text(), 'figures', _headline(rows.values())))


def _rows(text: str) -> dict[str, str]:
    """Return the rows of a table of bars, by their beginnings."""
    return {line.split(' | ')[0]: line for line in text.splitlines() if re.search(' [|] [≤≥] ', line)}


def _brief(row: str) -> str:
    """Return the row of a missed bar for docs/performance.md: without details, but with the unit."""
    name, figure, bound, details = row.removesuffix(' |').split(' | ')
    unit = re.match(r'(s|ms)\b', details.removeprefix('**missed** '))
    return f'{name} | {figure}{" " + unit[1] if unit else ""} | {bound} |'


def _headline(rows: Iterable[str]) -> str:
    """Return the sentence of the README about the Loader, from the rows of its bars."""
    start = '| Loader, 100 kB, 25 ms server / '
    rivals = {}
    for row in rows:
        if row.startswith(start):
            name, figure, _, details = row.removeprefix(start).split(' | ')
            rivals[name.split(',')[0]] = float(figure)
            rate = details.removeprefix('**missed** ').split('/s')[0]
    return (
        f'From a server that answers after 25 ms, one process on {os.cpu_count()} cores of {_model()} reads {rate} '
        f'shuffled records of 100 kB\nper second from one shard: {rivals["wrk -t1 -c256"]:.2f} times the throughput of '
        f'wrk, a load generator in C, with 256 connections,\n{rivals["obstore"]:.2f} times that of obstore, '
        f'{rivals["granular 0.24.2 Loader"]:.0f} times that of granular 0.24 with 32 workers, '
        f'{rivals["webdataset"]:.1f} times that of webdataset with\nfour ([all figures](docs/performance.md)).'
    )


def _between(text: str, name: str, content: str) -> str:
    begin, end = f'<!-- {name} -->', f'<!-- /{name} -->'
    return text[: text.index(begin) + len(begin)] + f'\n{content}\n' + text[text.index(end) :]


@contextlib.contextmanager
def drawing(name: str, title: str, height: float = 3.2) -> Iterator[Any]:
    """Provide the axes of a plot, which is then saved in docs/plots."""
    import matplotlib as mpl

    mpl.use('svg')
    mpl.rcParams['svg.hashsalt'] = 'granular'
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, height))
    yield axes
    axes.set_title(title, fontsize=10, loc='left')
    axes.spines[['top', 'right']].set_visible(False)
    axes.tick_params(labelsize=9)
    (DOCS / 'plots').mkdir(exist_ok=True)
    figure.savefig(DOCS / 'plots' / f'{name}.svg', bbox_inches='tight', metadata={'Date': None})
    pyplot.close(figure)


def plot(figures: Figures) -> None:
    """Plot a table as horizontal bars, and curves as lines."""
    height = 3.2 if isinstance(figures, Curves) else 0.36 * len(figures.rows) + 1.1
    with drawing(figures.name, figures.title, height) as axes:
        _lines(figures, axes) if isinstance(figures, Curves) else _bars(figures, axes)


def _lines(curves: Curves, axes: Any) -> None:
    for name, line in curves.lines.items():
        axes.plot(curves.points, line, marker='o', markersize=3, label=name)
    axes.set_xlabel(curves.knob, fontsize=9)
    axes.set_ylabel(curves.unit, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)


def _bars(table: Table, axes: Any) -> None:
    names = [who for who, _, _ in table.rows][::-1]
    values = [value for _, value, _ in table.rows][::-1]
    colours = ['#1f6f8b' if 'granular' in name and '0.24' not in name else '#b9c4c9' for name in names]
    drawn = axes.barh(names, values, color=colours, height=0.7)
    axes.bar_label(drawn, [format_figure(value, 4) for value in values], padding=3, fontsize=8)
    axes.set_xlabel(table.unit, fontsize=9)
    axes.margins(x=0.14)


def _model() -> str:
    models = re.findall(r'model name\s*: (.*)', pathlib.Path('/proc/cpuinfo').read_text())
    return models[0] if models else platform.processor()
