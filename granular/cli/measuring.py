"""The command ``bench``."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from granular._support.text import counted
from granular.cli import bench as benches
from granular.cli.commands import app, say
from granular.cli.options import Address, Json, OpenPath, with_store_options
from granular.config import MiB

_WIDTH: Final = 120


@app.command()
@with_store_options
def bench(
    open_path: OpenPath,
    url: Address,
    seconds: Annotated[float, typer.Option(help='The time that it takes, at most.')] = 20.0,
    mebibytes: Annotated[float, typer.Option('--mib', help='MiB that are requested, at most.')] = 1024.0,
    as_json: Json = False,
) -> None:
    """Measure a bucket or web server.

    It reads random ranges of files, shows latency, throughput and what limits them, and writes nothing.
    """
    result = benches.bench(open_path(url), seconds, mebibytes * MiB)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    _print_result(result)


def _print_result(result: benches.Result) -> None:
    console = _console()
    note = '' if result.complete else ', ended early: allow more --seconds for all measurements'
    read = f'{counted(result.requests, "request")}, {_readable_size(result.bytes)} in {result.seconds:.1f} s'
    say(console, f'{result.url}: {counted(result.objects, "file")}, {"TLS" if result.tls else "no TLS"}, {read}{note}')
    if result.first_byte_p50 is not None and result.first_byte_p99 is not None:
        say(console, f'first byte: p50 {result.first_byte_p50 * 1e3:.3g} ms, p99 {result.first_byte_p99 * 1e3:.3g} ms')
    if result.connection_bytes_per_second:
        say(console, f'one connection: {_readable_size(result.connection_bytes_per_second)}/s')
    table = _table((), ('in flight', 'size', 'requests/s', 'bytes/s', 'CPU', 'us CPU/request'))
    table.add_column('', no_wrap=True)
    for measurements in (result.by_in_flight, result.by_size):
        highest = max((one.bytes_per_second for one in measurements), default=0.0)
        for one in measurements:
            cells = ['?'] * 4
            if one.requests:
                cells = [
                    f'{one.requests_per_second:,.0f}', f'{_readable_size(one.bytes_per_second)}/s', f'{one.cpu:.0%}',
                    f'{one.cpu_per_request * 1e6:,.0f}', '█' * round(30 * one.bytes_per_second / max(highest, 1.0)),
                ]  # fmt: skip
            table.add_row(f'{one.in_flight}', _readable_size(one.size), *cells)
        table.add_section()
    console.print(table, highlight=False)
    say(console, f'throttled {result.throttled}, retried {result.retries}')
    say(console, '')
    say(console, f'limit: {result.limit}')
    for sentence in result.advice:
        say(console, f'- {sentence}')
    say(console, f'IOConfig({", ".join(f"{name}={value}" for name, value in result.settings.items())})')


def _console() -> Console:
    """Return a console on which no column of a table is cut off, however narrow the terminal."""
    console = Console()
    return console if console.width >= _WIDTH else Console(width=_WIDTH)


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, header_style='bold')
    for name in (*left, *right):
        table.add_column(name, justify='right' if name in right else 'left', no_wrap=True)
    return table


def _readable_size(nbytes: float) -> str:
    """Return a number of bytes for people, such as 1.5 GB (10**9 bytes)."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if nbytes >= size:
            return f'{nbytes / size:,.1f} {unit}'
    return f'{nbytes:,.0f} B'
