"""The commands ``bench`` and ``plan``."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from granular._words import counted
from granular.cli import bench as benches
from granular.cli import plan as plans
from granular.cli.commands import app, say
from granular.cli.model import UNKNOWN, Limit, Prices, Rates, readable_size
from granular.cli.options import Address, Json, OpenPath, with_store_options
from granular.config import GiB, MiB
from granular.errors import InvalidArgumentError
from granular.formats.base import parse_json

_WIDTH: Final = 120


@app.command()
@with_store_options
def plan(
    open_path: OpenPath,
    url: Address,
    batch: Annotated[int, typer.Option(min=1, help='Datapoints in a batch of one host.')] = 256,
    epochs: Annotated[int, typer.Option(min=1, help='Passes over the dataset.')] = 1,
    hosts: Annotated[int, typer.Option(min=1, help='Machines that share each epoch.')] = 1,
    order: Annotated[
        list[str] | None,
        typer.Option(
            help='full, sequential, blocks, blocks:BLOCK,WINDOW or cache; may be repeated. Several by default.'
        ),
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help='A key that is read; may be repeated. All by default.')] = None,
    cached: Annotated[
        list[str] | None, typer.Option(help='A key that readers hold in memory (cache_keys), or refs.')
    ] = None,
    memory: Annotated[float, typer.Option(help='GiB of memory that data may take on a host.')] = 1.0,
    disk: Annotated[float, typer.Option(help='GiB of disk that a block cache may take on a host.')] = 10.0,
    prefetch: Annotated[int, typer.Option(min=0, help='Batches that a Loader reads ahead.')] = 8,
    bench: Annotated[
        pathlib.Path | None,
        typer.Option(help='The output of granular bench --json, for the time.', exists=True, dir_okay=False),
    ] = None,
    bytes_per_second: Annotated[float | None, typer.Option(help='Bytes a second that a host reads.')] = None,
    requests_per_second: Annotated[float | None, typer.Option(help='Requests a second that a host sends.')] = None,
    latency: Annotated[float | None, typer.Option(help='Seconds until a small reply is complete.')] = None,
    prefixes: Annotated[int, typer.Option(min=1, help='Prefixes (of GCS: buckets) over which data is spread.')] = 1,
    prefix_rate: Annotated[
        float | None, typer.Option(help='Requests a second that the store answers for each of them.')
    ] = None,
    read_price: Annotated[float | None, typer.Option(help='Dollars for 1,000 reading requests.')] = None,
    egress_price: Annotated[
        float | None, typer.Option(help='Dollars for 10**9 bytes; 0 within the region of the bucket.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare orders for a training run, and choose one.

    Show their requests, bytes, dollars, time, memory and mixing. The tables of the dataset are read, but no records.
    """
    path = open_path(url)
    given = {'bytes_per_second': bytes_per_second, 'requests_per_second': requests_per_second, 'latency': latency}
    rates = dataclasses.replace(_rates(bench), **{name: rate for name, rate in given.items() if rate is not None})
    run = plans.Run(batch, epochs, hosts, memory * GiB, disk * GiB, prefetch)
    scheme = path.store.root.partition('://')[0]
    prices, limit = Prices.of(scheme, read_price, egress_price), Limit.of(scheme, prefix_rate, prefixes)
    report = plans.plan(path, run, order or (), key, cached or (), rates, prices, limit)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    _print_plans(report, rates)


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

    It reads random ranges of files, shows latency, throughput and what limits them, and writes nothing. The output of
    --json is what granular plan --bench reads.
    """
    result = benches.bench(open_path(url), seconds, mebibytes * MiB)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    _print_result(result)


def _print_result(result: benches.Result) -> None:
    console = _console()
    note = '' if result.complete else ', ended early: allow more --seconds for all measurements'
    read = f'{counted(result.requests, "request")}, {readable_size(result.bytes)} in {result.seconds:.1f} s'
    say(console, f'{result.url}: {counted(result.objects, "file")}, {"TLS" if result.tls else "no TLS"}, {read}{note}')
    if result.first_byte_p50 is not None and result.first_byte_p99 is not None:
        say(console, f'first byte: p50 {result.first_byte_p50 * 1e3:.3g} ms, p99 {result.first_byte_p99 * 1e3:.3g} ms')
    if result.connection_bytes_per_second:
        say(console, f'one connection: {readable_size(result.connection_bytes_per_second)}/s')
    table = _table((), ('in flight', 'size', 'requests/s', 'bytes/s', 'CPU', 'us CPU/request'))
    table.add_column('', no_wrap=True)
    for measurements in (result.by_in_flight, result.by_size):
        highest = max((one.bytes_per_second for one in measurements), default=0.0)
        for one in measurements:
            cells = ['?'] * 4
            if one.requests:
                cells = [
                    f'{one.requests_per_second:,.0f}', f'{readable_size(one.bytes_per_second)}/s', f'{one.cpu:.0%}',
                    f'{one.cpu_per_request * 1e6:,.0f}', '█' * round(30 * one.bytes_per_second / max(highest, 1.0)),
                ]  # fmt: skip
            table.add_row(f'{one.in_flight}', readable_size(one.size), *cells)
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


def _rates(file: pathlib.Path | None) -> Rates:
    if file is None:
        return UNKNOWN
    names = ('bytes_per_second', 'requests_per_second', 'first_byte_p50')
    try:
        result: Any = parse_json(file.read_bytes())
        return Rates(*(float(result[name] or 0.0) or None for name in names))  # null and 0 if it was not measured
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f'{file}: expected the output of granular bench --json, with {", ".join(names)}: '
            f'{type(error).__name__}: {error}'
        ) from None


def _print_plans(report: plans.Report, rates: Rates) -> None:
    console = _console()
    table = _table(('', 'order'), ('requests', 'bytes', 'dollars', 'time', 'memory', 'disk', 'mixing'))
    for one in report.plans:
        bound = {'exact': '', 'estimate': '~', 'at most': '≤'}[one.exact]
        table.add_row(
            '*' if one.order == report.choice else '',
            Text(one.order),
            f'{bound}{one.requests:,}',
            f'{bound}{readable_size(one.bytes)}',
            f'{one.dollars:,.2f}',
            '?' if one.seconds is None else _duration(one.seconds),
            readable_size(one.memory),
            readable_size(one.disk),
            f'{one.mixing:.2f}',
        )
    console.print(table, highlight=False)

    _print_shares(console, report)
    for one in report.plans:
        if one.obstacle:
            say(console, f'{one.order}: {one.obstacle}')
    say(console, '')
    say(console, f'choose {report.choice}: {report.reason}' if report.choice else report.reason)
    for sentence in report.advice:
        say(console, f'- {sentence}')
    prices = report.prices
    dated = f', of {prices.date} ({prices.source})' if prices.date else ''
    say(console, f'prices: {prices.name}: ${prices.read:g} for 1,000 reads, ${prices.egress:g} for 1 GB{dated}')
    if rates == UNKNOWN:
        say(console, 'time: pass --bench with the output of granular bench --json, or --latency and --bytes-per-second')


def _print_shares(console: Console, report: plans.Report) -> None:
    """Print what the hosts ask of the store, and what they get."""
    limit, shares = report.limit, [(one.order, one.share) for one in report.plans if one.share is not None]
    if limit.rate is None or not shares:
        return
    say(console, '')
    known = [(order, share) for order, share in shares if share.wanted is not None]
    if known:
        names = ('requests/s of all hosts', 'refused', 'answered/s for a host', f'{limit.parts} needed')
        table = _table(('', 'order'), names)
        for order, share in known:
            table.add_row(
                '*' if order == report.choice else '',
                Text(order),
                f'{share.wanted:,.0f}',
                f'≤{share.refused:,}' if share.refused else '0',
                f'{share.goodput:,.1f}',
                f'{share.prefixes:,}',
            )
        console.print(table, highlight=False)
    source = f' ({limit.source})' if limit.source else ''
    rate = f'{limit.rate:,.0f} requests/s per {limit.per}{source}'
    say(console, f'limit: {rate}; {limit.parts} of the data: {limit.prefixes:,}')


def _duration(seconds: float) -> str:
    hours, rest = divmod(seconds, 3600)
    if hours:
        return f'{hours:,.0f} h {rest // 60:02.0f} min'
    return f'{rest / 60:,.1f} min' if rest >= 60 else f'{rest:.1f} s'
