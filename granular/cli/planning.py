"""The commands ``bench`` and ``plan``."""

import dataclasses
import json
import pathlib
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from granular.cli import plan as plans
from granular.cli.commands import app
from granular.cli.describe import printable
from granular.cli.options import Address, Json, OpenPath, with_store_options
from granular.config import GiB
from granular.errors import InvalidArgumentError


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
        typer.Option(help='full, blocks, blocks:BLOCK,WINDOW or cache; may be repeated. Several by default.'),
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help='A key that is read; may be repeated. All by default.')] = None,
    cached: Annotated[
        list[str] | None, typer.Option(help='A key that readers hold in memory (cache_keys), or refs.')
    ] = None,
    memory: Annotated[float, typer.Option(help='GiB of memory that data may take on a host.')] = 1.0,
    disk: Annotated[float, typer.Option(help='GiB of disk that a block cache may take on a host.')] = 10.0,
    bench: Annotated[
        pathlib.Path | None, typer.Option(help='The output of granular bench --json, for the time.', exists=True)
    ] = None,
    bytes_per_second: Annotated[float | None, typer.Option(help='Bytes a second that a host reads.')] = None,
    requests_per_second: Annotated[float | None, typer.Option(help='Requests a second that a host sends.')] = None,
    read_price: Annotated[float | None, typer.Option(help='Dollars for 1,000 reading requests.')] = None,
    egress_price: Annotated[
        float | None, typer.Option(help='Dollars for 10**9 bytes; 0 within the region of the bucket.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a training run: requests, bytes, dollars, time, memory and mixing of several orders, and which to choose.

    Reads the tables of the dataset, but no records.
    """
    path = open_path(url)
    measured = _rates(bench)
    rates = plans.Rates(
        bytes_per_second or measured.bytes_per_second, requests_per_second or measured.requests_per_second
    )
    run = plans.Run(batch, epochs, hosts, int(memory * GiB), int(disk * GiB))
    prices = plans.Prices.of(path.store.root.partition('://')[0], read_price, egress_price)
    report = plans.plan(path, run, order or (), key, cached or (), rates, prices)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    _print_plans(report, rates)


def _rates(file: pathlib.Path | None) -> plans.Rates:
    """Return the rates in the output of ``granular bench --json``."""
    if file is None:
        return plans.Rates()
    try:
        result: Any = json.loads(file.read_text())
        return plans.Rates(float(result['bytes_per_second']), float(result['requests_per_second']))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f'{file}: expected the output of granular bench --json, with bytes_per_second and requests_per_second: '
            f'{type(error).__name__}: {error}'
        ) from None


def _print_plans(report: plans.Report, rates: plans.Rates) -> None:
    console = Console()
    table = Table(box=None, header_style='bold')
    table.add_column('')
    table.add_column('order', no_wrap=True)
    for name in ('requests', 'bytes', 'dollars', 'time', 'memory', 'disk', 'mixing'):
        table.add_column(name, justify='right', no_wrap=True)
    for one in report.plans:
        bound = {'exact': '', 'estimate': '~', 'at most': '≤'}[one.exact]
        table.add_row(
            '*' if one.order == report.choice else '',
            Text(one.order),
            f'{bound}{one.requests:,}',
            f'{bound}{plans.readable_size(one.bytes)}',
            f'{one.dollars:,.2f}',
            '?' if one.seconds is None else _duration(one.seconds),
            plans.readable_size(one.memory),
            plans.readable_size(one.disk),
            f'{one.mixing:.2f}',
        )
    console.print(table, highlight=False, width=max(console.width, 120), soft_wrap=True)

    def say(text: str) -> None:
        console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    for one in report.plans:
        if one.obstacle:
            say(f'{one.order}: {one.obstacle}')
    say('')
    say(f'choose {report.choice}: {report.reason}' if report.choice else report.reason)
    prices = report.prices
    dated = f', of {prices.date} ({prices.source})' if prices.date else ''
    say(f'prices: {prices.name}: ${prices.read:g} for 1,000 reads, ${prices.egress:g} for 1 GB{dated}')
    if rates == plans.Rates():
        say('time: pass --bench with the output of granular bench --json, or --bytes-per-second')


def _duration(seconds: float) -> str:
    hours, rest = divmod(seconds, 3600)
    if hours:
        return f'{hours:,.0f} h {rest // 60:02.0f} min'
    return f'{rest / 60:,.1f} min' if rest >= 60 else f'{rest:.1f} s'
