"""The command ``edit``."""

import dataclasses
import json
import pathlib
from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.console import Console

import granular
from granular._support.text import counted
from granular.cli.commands import app, show_progress
from granular.cli.describe import printable
from granular.cli.options import Json, OpenPath, pairs, with_store_options
from granular.errors import InvalidArgumentError
from granular.formats.layout import Layout

_INDICES = 'such as 3,17, or the name of a file: .npy, .json, or text with an index a line'


@app.command()
@with_store_options
def edit(
    open_path: OpenPath,
    sources: Annotated[
        list[str], typer.Argument(metavar='SRC... DST', help='Datasets, and the folder of the new one.')
    ],
    keep: Annotated[str | None, typer.Option(metavar='INDICES', help=f'What is kept: indices, {_INDICES}.')] = None,
    exclude: Annotated[str | None, typer.Option(metavar='INDICES', help='What is left out, likewise.')] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            '--set',
            metavar='KEY=FILE',
            help='New values of a key: .npy, or .json with a list, or a mapping from indices; may be repeated.',
        ),
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar='KEY', help='Leave out a key; may be repeated.')] = None,
    rename: Annotated[list[str] | None, typer.Option(metavar='OLD=NEW', help='Rename a key; may be repeated.')] = None,
    spec: Annotated[
        list[str] | None, typer.Option(metavar='KEY=TYPE', help='The type of a key that is set; may be repeated.')
    ] = None,
    shards: Annotated[int | None, typer.Option(help='The number of shards.')] = None,
    shardlen: Annotated[int | None, typer.Option(help='Datapoints in a shard.')] = None,
    layout: Annotated[
        str | None, typer.Option(help=f'{" or ".join(get_args(Layout))}.', show_default='that of SRC')
    ] = None,
    checksums: Annotated[
        bool | None, typer.Option(help='Store a checksum of each record.', show_default='as SRC does')
    ] = None,
    parallel: Annotated[int, typer.Option(help='Shards that are written concurrently.')] = 8,
    as_json: Json = False,
) -> None:
    """Write a changed copy of a dataset.

    Several datasets are put behind each other. Indices and keys are those of SRC. Records are copied as they are
    stored; killed and run again, it continues.
    """  # fmt: skip
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    if len(sources) < 2:
        raise InvalidArgumentError(f'expected SRC... and DST, got {sources[0]} alone')
    *places, target = map(open_path, sources)
    options: dict[str, Any] = {
        'keep': None if keep is None else _indices('--keep', keep),
        'exclude': None if exclude is None else _indices('--exclude', exclude),
        'values': {key: _table(key, file) for key, file in pairs('--set', 'FILE', values).items()},
        'drop': drop or (), 'rename': pairs('--rename', 'NEW', rename), 'spec': pairs('--spec', 'TYPE', spec),
        'shards': shards, 'shardlen': shardlen, 'layout': layout, 'checksums': checksums, 'parallel': parallel,
    }  # fmt: skip
    columns = (BarColumn(), TextColumn('{task.completed:,.0f} datapoints'), TimeElapsedColumn())
    with show_progress(Console(stderr=True), 'edit', None, *columns) as advance:
        done = granular.rewrite(places, target, progress=advance, **options)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    for key, kind in done.spec.items():
        typer.echo(printable(f'{key}: {kind}'))
    existing = f', {done.found:,} of them there before' if done.found else ''
    typer.echo(
        printable(
            f'{counted(done.datapoints, "datapoint")} in {counted(done.shards, "shard")} in {target}{existing}: '
            f'{counted(done.bytes, "byte")} written, {done.copied:,} of them as whole files, {done.seconds:,.1f} s'
        )
    )


def _indices(option: str, text: str) -> Any:
    """Return the indices of an option: its own, or those of a file."""
    if not text.strip('0123456789,- '):
        return [int(part) for part in text.split(',') if part.strip()]
    file = pathlib.Path(text)
    key, equals, value = text.partition('=')
    if equals and not file.exists():
        condition = f'lambda {key}: {key} == {value if value.isdecimal() else repr(value)}'
        raise InvalidArgumentError(
            f'{option}: {text}: expected indices, or the name of a file of indices: values are compared in Python: '
            f'granular.rewrite(SRC, DST, {option.removeprefix("--")}={condition})'
        )
    if file.suffix in ('.npy', '.json'):
        return _content(file)
    lines = _content(file).split()
    if bad := [line for line in lines if not line.removeprefix('-').isdecimal()]:
        raise InvalidArgumentError(f'{option}: {file}: expected an index a line, got {bad[0]!r:.60}')
    return np.array(lines, np.int64)


def _table(key: str, name: str) -> Any:
    """Return the new values of a key: an array, a list, or a mapping from indices."""
    file = pathlib.Path(name)
    if file.suffix not in ('.npy', '.json'):
        raise InvalidArgumentError(f'--set: {key}={file}: expected a file that ends in .npy or .json')
    content = _content(file)
    if not isinstance(content, dict):
        return content
    if bad := [index for index in content if not index.isdecimal()]:
        raise InvalidArgumentError(f'{file}: expected indices as keys of the mapping, got {bad[0]!r:.60}')
    return {int(index): value for index, value in content.items()}


def _content(file: pathlib.Path) -> Any:
    """Return the content of a file, by the end of its name: an array, JSON, or text."""
    try:
        if file.suffix == '.npy':
            return np.load(file, mmap_mode='r')
        return json.loads(file.read_bytes()) if file.suffix == '.json' else file.read_text()
    except (ValueError, OSError) as error:
        raise InvalidArgumentError(f'{file}: cannot be read: {error}') from error
