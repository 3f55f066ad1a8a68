"""The commands of the command line, with typer and rich."""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import granular
from granular._support.lazy import import_extra
from granular._support.text import counted
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import ShardedDatasetReader
from granular.aio.datasources.indexed_files import MaskedFiles
from granular.aio.pipeline.loader.checkpoints import read_state
from granular.aio.runtime.portal import run
from granular.aio.stores.base import Entry
from granular.cli.describe import describe, describe_sizes, open_any, printable, readable, refuse_other_formats
from granular.cli.options import Address, Json, OpenPath, pairs, with_store_options
from granular.cli.others import Commands
from granular.errors import InvalidArgumentError, NotFoundError, UnknownKeyError, UnknownTypeError
from granular.sync.iteration import Iteration, listing
from granular.view.sources import as_record

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_MAX_FILES = 20  # that are listed of those that are taken, or left out
_KEY_WITH_RANGE = re.compile(r'([^\[]+)\[(\d{0,18}):(\d{0,18})\]')


app = typer.Typer(
    cls=Commands,
    help='Datasets in buckets and on disks.',
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f'granular {granular.__version__}')
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option('--version', help='Print the version.', is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Datasets in buckets and on disks."""


@app.command()
def demo(
    store: Annotated[
        str, typer.Option(help='The store of the dataset: s3 or gcs, each of a local server, or local.')
    ] = 's3',
    keep: Annotated[bool, typer.Option('--keep', help='Keep the dataset, and print how to inspect it.')] = False,
) -> None:
    """Write, stream and restore a dataset. Report the throughput and requests of two shuffled epochs."""
    from granular.cli.demo import run

    run(store, keep, Console(), Console(stderr=True))


@app.command()
@with_store_options
def info(
    open_path: OpenPath,
    url: Address,
    format: Annotated[str | None, typer.Option(help='The format of the files, if URL has files of several.')] = None,
    split: Annotated[str | None, typer.Option(help='The split, if URL has files of several.')] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar='KEY', help='Show the sizes of a key, and the padding of plans of them.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Describe a dataset, or files that granular.open reads. Show spec, layout, datapoints, bytes and index.

    Of a folder or pattern of other files, show those that are taken, those that are left out, and why.
    """
    description = describe(open_path(url), format, split)
    if sizes is not None:
        description['sizes'] = describe_sizes(open_path(url), sizes, format, split)
    if as_json:
        typer.echo(json.dumps(description))
        return
    _print_description(description)


@app.command()
@with_store_options
def ls(
    open_path: OpenPath,
    url: Address,
    long: Annotated[bool, typer.Option('--long', '-l', help='Show sizes.')] = False,
    as_json: Json = False,
) -> None:
    """List a folder, page by page."""
    root = open_path(url)
    found = []
    for entry in Iteration[Entry](listing(lambda: root.store.scan(root.key))):  # with sizes, which a path would request
        if as_json:
            url = str(granular.Path.of(root.store, entry.key))
            found.append({'name': entry.name, 'url': url, 'size': entry.size, 'is_dir': entry.is_dir})
        else:
            size = f'{"-" if entry.is_dir else entry.size:>14}  ' if long else ''
            typer.echo(f'{size}{printable(entry.name)}')
    if as_json:
        typer.echo(json.dumps(found))


@app.command(context_settings={'ignore_unknown_options': True})
@with_store_options
def cat(
    open_path: OpenPath,
    url: Address,
    index: Annotated[
        int, typer.Argument(metavar='INDEX', help='Its index; negative ones count from the end.', show_default=False)
    ],
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar='[KEY]...', help='The keys to show, all by default; frames[3:9] for a part of a sequence.'
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one datapoint."""
    if unknown := next((key for key in keys or () if key.startswith('-')), ''):  # which a negative index looks like
        raise InvalidArgumentError(f'{unknown}: no such option; keys follow the index: granular cat URL INDEX KEY')
    root = open_path(url)
    with _reader(root) as reader:
        spec = getattr(reader, 'spec', {})
        datapoint = _read(reader, index, keys or [])
    values = {key: readable(value, spec.get(key) or as_record(value)[0]) for key, value in datapoint.items()}
    if as_json:
        typer.echo(json.dumps(values))
        return
    for key, value in values.items():
        typer.echo(printable(f'{key}: {json.dumps(value, ensure_ascii=False)}'))


@app.command()
@with_store_options
def copy(
    open_path: OpenPath,
    source: Annotated[str, typer.Argument(metavar='SRC', help='The file or folder to copy.', show_default=False)],
    target: Annotated[str, typer.Argument(metavar='DST', help='The path of the copy.', show_default=False)],
    overwrite: Annotated[
        bool,
        typer.Option('--overwrite', help='Complete a partial copy: replace files that differ, and skip equal ones.'),
    ] = False,
) -> None:
    """Copy a file or folder and verify it. The specs of datasets come last, so that a partial copy looks incomplete."""
    source_path, target_path = open_path(source), open_path(target)
    if not overwrite and target_path.exists():
        raise InvalidArgumentError(
            f'{target_path}: exists already: pass --overwrite to resume an interrupted copy, or to replace files '
            f'that differ'
        )
    console = Console(stderr=True)
    with show_bytes(console, 'copy', source_path) as advance:
        source_path.copy(target_path, progress=advance)
    say(console, f'copied {source_path} to {target_path}')


@app.command()
@with_store_options
def verify(
    open_path: OpenPath,
    url: Address,
    decode: Annotated[bool, typer.Option('--decode', help='Decode all records, too.')] = False,
    as_json: Json = False,
) -> None:
    """Read all of a dataset and list its problems. Check structure, references, checksums, and values (--decode)."""
    path = open_path(url)
    refuse_other_formats(path)
    with show_bytes(Console(stderr=True), 'verify', path) as advance:
        report = granular.verify(path, advance, granular.decoders if decode else None)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
    else:
        for problem in report.problems:
            record = '' if problem.record is None else f': record {problem.record}'
            datapoint = '' if problem.datapoint is None else f', of datapoint {problem.datapoint} of the dataset'
            typer.echo(printable(f'{problem.path}{record}{datapoint}: {problem.message}'))
        typer.echo(
            f'{counted(len(report.problems), "problem") if report.problems else "no problems"}: '
            f'{counted(report.datapoints, "datapoint")}, {counted(report.records, "record")}, '
            f'{report.checked:,} compared with a checksum, {report.decoded:,} decoded, {counted(report.bytes, "byte")}'
        )
        if report.undecoded:
            why = 'no decoder of their types' if decode else 'pass --decode'
            typer.echo(printable(f'not looked at: the values of {", ".join(report.undecoded)} ({why})'))
        if unchecked := report.records - report.checked:
            typer.echo(f'not looked at: the bytes of {counted(unchecked, "record")} written without checksums')
    if report.problems:
        raise typer.Exit(1)


@app.command()
@with_store_options
def index(open_path: OpenPath, url: Address, as_json: Json = False) -> None:
    """Write a file that describes all shards of a dataset. Readers then open it in a handful of requests."""
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

    path = open_path(url)
    refuse_other_formats(path)
    columns = (TextColumn('{task.description}'), MofNCompleteColumn(), TimeElapsedColumn())
    with show_progress(Console(stderr=True), 'index', None, *columns) as advance:
        summary = granular.build_index(path, advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary)))
        return
    typer.echo(
        f'{printable(summary.path)}: {counted(summary.shards, "shard")}, {counted(summary.datapoints, "datapoint")}, '
        f'{counted(summary.records, "record")}, {counted(summary.bytes, "byte")}'
    )


@app.command()
@with_store_options
def state(open_path: OpenPath, url: Address, as_json: Json = False) -> None:
    """Describe a saved state: what of each source was taken. It is that of a file or directory of save_state."""
    path = open_path(url)
    description = granular.describe_state(run(read_state(path.aio)))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(description)))
        return
    for line in str(description).splitlines():
        typer.echo(printable(line))


@app.command()
@with_store_options
def clean(
    open_path: OpenPath,
    url: Address,
    remove: Annotated[bool, typer.Option('--remove', help='Remove the leftovers.')] = False,
    older: Annotated[
        float, typer.Option(help='The least age of a leftover, in seconds since the last write.')
    ] = 3600.0,
    bags: Annotated[
        bool, typer.Option('--bags', help='Include bags without a spec.json, which may be complete files of their own.')
    ] = False,
    as_json: Json = False,
) -> None:
    """List, or remove, the leftovers of killed writers.

    Leftovers are unfinished uploads, temporary files, claims, and bags and shards without a spec.json.
    """
    path = open_path(url)
    leftovers = granular.clean(path, remove, older, bags)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(leftover) for leftover in leftovers]))
        return
    for leftover in leftovers:
        typer.echo(f'{leftover.kind:<6}  {leftover.size:>14}  {leftover.age:>10.0f} s  {printable(leftover.path)}')
    action = 'removed' if remove else 'to be removed with --remove' if leftovers else 'found'
    total = sum(leftover.size for leftover in leftovers)
    typer.echo(f'{len(leftovers)} {action}, {counted(total, "byte")}' if leftovers else f'nothing {action}', err=True)
    known = {leftover.path for leftover in leftovers}
    left = [leftover for leftover in granular.clean(path, older=0, bags=True) if leftover.path not in known]
    for alone, reason in (
        (False, f'less than {older:g} s old, as a writer may be running: --older 0 includes them'),
        (True, 'which may be complete files of their own: --bags includes them'),
    ):
        if those := [x for x in left if (x.kind == 'bag' and x.age >= older and not bags) == alone]:
            more = f' and {len(those) - 1:,} more' if len(those) > 1 else ''
            path_and_age = f'{printable(those[0].path)} ({those[0].age:.0f} s old)'
            typer.echo(f'left alone: {path_and_age}{more}, {reason}', err=True)


@app.command()
@with_store_options
def view(
    open_path: OpenPath,
    url: Address,
    port: Annotated[int, typer.Option(help='A port of 127.0.0.1; 0 for one that is free.', min=0, max=65535)] = 0,
    classes: Annotated[
        list[str] | None,
        typer.Option(metavar='KEY=FILE', help='The names of the classes of a key, one in a line; may be repeated.'),
    ] = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar='KEY=MODULE:FUNCTION', help='What returns the text of a list of tokens of a key; may be repeated.'
        ),
    ] = None,
) -> None:
    """Show a bucket, folder or dataset in a local web page. Ctrl-C ends it."""
    import_extra('aiohttp', 'view', 'the web page needs its extra')
    from granular.view.names import Names
    from granular.view.server import run

    names = Names(
        pairs('--classes', 'FILE, such as label=classes.txt', classes),
        pairs('--tokenizer', 'MODULE:FUNCTION, such as tokens=tokens:decode', tokenizer),
    )

    def announce(link: str) -> None:
        typer.echo(link)
        typer.echo('serves this machine only; Ctrl-C ends it', err=True)

    run(open_path(url).aio, port, announce, names)


@app.command()
def cache(
    folder: Annotated[
        str, typer.Argument(metavar='DIR', help='The cache_dir.', envvar='GRANULAR_CACHE_DIR', show_default=False)
    ],
    trim: Annotated[
        int | None,
        typer.Option(min=0, help='Remove the least recently used blocks until this many bytes are left.'),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show, or trim, the block cache in a local folder."""
    from granular.aio.stores.block_cache.blocks import open_existing

    blocks = open_existing(os.path.expanduser(folder))
    removed = 0 if trim is None else blocks.packs.trim(trim)
    folders: dict[str, list[int]] = {}  # bytes cached, and bytes of the objects
    for url, size, cached in blocks.usage():
        row = folders.setdefault(url.rpartition('/')[0], [0, 0])
        row[0], row[1] = row[0] + cached, row[1] + size
    if as_json:
        typer.echo(json.dumps({'bytes': blocks.packs.size(), 'removed': removed, 'folders': folders}))
        return
    for url, (cached, size) in sorted(folders.items()):
        typer.echo(f'{cached:>14}  {cached / max(size, 1):>4.0%}  {printable(url)}')
    typer.echo(f'{blocks.packs.size():,} bytes, {removed:,} removed', err=True)


def say(console: Console, text: str) -> None:
    """Print a line that may contain names of files, which are untrusted."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _reader(root: granular.Path) -> Any:
    try:
        return open_any(root, granular.decoders)
    except UnknownTypeError:
        return open_any(root, None)  # show values of custom types as bytes


def _read(reader: Any, index: int, keys: list[str]) -> dict[str, Any]:
    if isinstance(reader.aio, DatasetReader | ShardedDatasetReader) and keys:
        mask = dict(map(_mask, keys))
        if len(mask) < len(keys):
            raise InvalidArgumentError(f'expected each key once, got {" ".join(keys)}')
        value = reader[index, mask]
    elif isinstance(reader.aio, MaskedFiles) and keys:
        value = reader[index, keys]
    elif keys in ([], ['record']):
        value = reader[index]
    else:
        raise UnknownKeyError(f'{reader!r}: expected no key but record, got {" ".join(keys)}')
    return value if isinstance(value, dict) else {'record': value}


def _mask(text: str) -> tuple[str, bool | slice]:
    match = _KEY_WITH_RANGE.fullmatch(text)
    if match is None:
        return text, True
    return match[1], slice(int(match[2] or 0), int(match[3]) if match[3] else None)


@contextlib.contextmanager
def show_progress(
    console: Console, task_name: str, total: int | None, *columns: 'ProgressColumn'
) -> Iterator[Callable[[int], None]]:
    """Show the progress of a task, on a terminal. Yields a function to call with the number of items done."""
    from rich.progress import Progress

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(task_name, total=total)
        yield lambda count: progress.update(task, advance=count)


def show_bytes(
    console: Console, task_name: str, path: granular.Path
) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """Show the progress of a task over a path's bytes."""
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    total = _total(path) if console.is_terminal else None
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return show_progress(console, task_name, total, *columns)


def _total(path: granular.Path) -> int | None:
    try:
        stat = path.stat()
    except NotFoundError:  # the command says so, unless it is the name of an archive without its suffix
        return None
    if not stat.is_dir:
        return stat.size
    return sum(entry.size for entry in Iteration[Entry](listing(lambda: path.store.scan_tree(path.key))))


def _print_sizes(console: Console, sizes: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print()
    console.print(Text(f'sizes of {printable(sizes["key"])}'))
    table = Table('size', 'elements', '', box=None, header_style='bold')
    most = max((row['elements'] for row in sizes['histogram']), default=1)
    for row in sizes['histogram']:
        bar = '#' * math.ceil(40 * row['elements'] / most)
        table.add_row(f'{row["from"]:,} to {row["below"] - 1:,}', f'{row["elements"]:,}', bar)
    table.add_row('empty', f'{sizes["empty"]:,}', '')
    console.print(table, highlight=False)
    table = Table('a plan', 'padding', box=None, header_style='bold')
    for plan, part in sizes['padding'].items():
        table.add_row(plan, f'{part:.1%}')
    console.print()
    console.print(table, highlight=False)


def _print_description(description: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text  # prints brackets literally, not as markup

    console = Console()
    head = Table.grid(padding=(0, 2))
    head.add_column()
    head.add_column(overflow='fold')  # an address is not cut off
    for name in ('url', 'kind', 'layout', 'versions', 'shards', 'datapoints', 'bytes', 'index'):
        value = description.get(name)
        if name == 'versions' and value:
            name, value = 'format', f'version {", ".join(map(str, value))}'
        elif isinstance(value, bool):
            value = 'yes' if value else 'no'
        if value is not None:
            head.add_row(name, f'{value:,}' if isinstance(value, int) else Text(printable(value)))
    console.print(head, highlight=False, soft_wrap=True)
    if description['keys']:
        table = Table('key', 'type', 'records', 'bytes', box=None, header_style='bold')
        for key, row in description['keys'].items():
            counts = [f'{row[name]:,}' if name in row else '' for name in ('records', 'bytes')]
            table.add_row(Text(printable(key)), Text(printable(row['type'])), *counts)
        console.print()
        console.print(table, highlight=False)
    if 'sizes' in description:
        _print_sizes(console, description['sizes'])
    if 'epoch' in description:
        table = Table('an epoch', 'requests', 'dollars', box=None, header_style='bold')
        for row in description['epoch']:
            dollars = '?' if row['dollars'] is None else f'{row["dollars"]:,.2f}'
            table.add_row(row['order'], f'≤ {row["requests"]:,}', dollars)
        console.print()
        console.print(table, highlight=False)
    if 'files' in description:
        taken, left_out = description['files']['taken'], description['files']['left_out']
        lines = [f'taken     {name}' for name in taken[:_MAX_FILES]]
        lines += [f'          and {len(taken) - _MAX_FILES:,} more'] if len(taken) > _MAX_FILES else []
        lines += [f'table     {name}' for name in description['files'].get('tables', ())]
        lines += [f'left out  {name}: {reason}' for name, reason in list(left_out.items())[:_MAX_FILES]]
        lines += [f'          and {len(left_out) - _MAX_FILES:,} more'] if len(left_out) > _MAX_FILES else []
        console.print()
        for line in lines:
            console.print(Text(printable(line)), highlight=False, soft_wrap=True)
