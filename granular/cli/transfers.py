"""The commands ``copy-to-local`` and ``convert``."""

import dataclasses
import json
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

import granular
from granular._support.text import counted
from granular.aio.conversion.convert import Conversion, Engine
from granular.aio.conversion.record_source import CONVERTED
from granular.cli.commands import app, show_bytes, show_progress
from granular.cli.describe import printable
from granular.cli.options import Json, OpenPath, pairs, with_store_options
from granular.errors import InvalidArgumentError
from granular.formats.layout import Layout


@app.command('copy-to-local')
@with_store_options
def copy_to_local(
    open_path: OpenPath,
    source: Annotated[str, typer.Argument(metavar='SRC', help='The file, folder or archive.', show_default=False)],
    target: Annotated[str, typer.Argument(metavar='DST', help='The path of the copy on the disk.', show_default=False)],
    relative: Annotated[str | None, typer.Argument(help='A path that is appended to SRC and DST.')] = None,
    keep: Annotated[bool, typer.Option('--keep-archives', help='Copy archives as they are.')] = False,
    as_json: Json = False,
) -> None:
    """Copy to the disk, unless a complete copy exists. Zip and tar archives are unpacked."""
    root, target_path = open_path(source), open_path(target)
    with show_bytes(Console(stderr=True), 'copy', root / relative if relative else root) as advance:
        copy = granular.copy_to_local(root, target_path, relative, unpack=not keep, progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(copy)))
        return
    notes = ', '.join(name for name, was in (('cleared', copy.was_deleted), ('unpacked', copy.was_unpacked)) if was)
    copied = f'{counted(copy.files, "file")}, {counted(copy.bytes, "byte")}, {copy.seconds:,.1f} s'
    summary = copied if copy.was_copied else 'was there, and is left as it is'
    typer.echo(printable(f'{copy.path}: {summary}{f" ({notes})" if notes else ""}'))


@app.command()
@with_store_options
def convert(
    open_path: OpenPath,
    source: Annotated[
        str, typer.Argument(metavar='SRC', help='A file, a pattern such as "data/*.parquet", or a folder.')
    ],
    target: Annotated[str, typer.Argument(metavar='DST', help='The folder of the dataset.', show_default=False)],
    format: Annotated[str | None, typer.Option(help=f'The format of SRC: {", ".join(CONVERTED)}.')] = None,
    split: Annotated[
        str | None, typer.Option(help='The split of SRC, if it has files of several: train, validation or test.')
    ] = None,
    hive: Annotated[bool, typer.Option(help='Make columns of names of folders such as day=3.')] = True,
    spec: Annotated[
        list[str] | None, typer.Option(metavar='KEY=TYPE', help='The type of a key; may be repeated.')
    ] = None,
    sizes: Annotated[
        list[str] | None, typer.Option(metavar='KEY', help='Store the sizes of audio or lists; may be repeated.')
    ] = None,
    shardlen: Annotated[int, typer.Option(help='Datapoints in a shard; 0 for a dataset without shards.')] = 10_000,
    layout: Annotated[str, typer.Option(help=f'{" or ".join(get_args(Layout))}.')] = 'refs',
    checksums: Annotated[bool, typer.Option(help='Store a checksum of each record.')] = True,
    parallel: Annotated[
        int | None,
        typer.Option(help='Shards that are written concurrently.', show_default='8, with Ray as many as fit'),
    ] = None,
    engine: Annotated[
        str, typer.Option(help=f'The engine that writes the shards: {" or ".join(get_args(Engine))}.')
    ] = 'local',
    on_error: Annotated[
        str, typer.Option(help='stop at a record that does not fit the types, or skip it, and list all of them.')
    ] = 'stop',
    decode: Annotated[
        bool, typer.Option('--decode', help='Decode all values as a check, which finds damaged images.')
    ] = False,
    dry_run: Annotated[bool, typer.Option('--dry-run', help='Show what would be written.')] = False,
    as_json: Json = False,
) -> None:
    """Convert other files, or a dataset, into a dataset.

    Other files: Parquet, ArrayRecord, TFRecord, WebDataset, Megatron, Hugging Face, images in folders by class.
    A target that ends in .idx is a dataset of Megatron, of records that are tokens.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    if on_error not in ('stop', 'skip'):
        raise InvalidArgumentError(f"--on-error: expected 'stop' or 'skip', got {on_error!r}")
    options: Any = {
        'format': format, 'split': split, 'hive': hive,
        'sizes': sizes or (), 'spec': pairs('--spec', 'TYPE, such as label=int', spec, str.rpartition),
        'shardlen': shardlen or None, 'layout': layout, 'checksums': checksums, 'parallel': parallel, 'engine': engine,
        'on_error': 'raise' if on_error == 'stop' else on_error, 'decoders': granular.decoders if decode else None,
    }  # fmt: skip
    source_path, target_path = open_path(source), open_path(target)
    console = Console(stderr=True)
    if dry_run or console.is_terminal:
        done = granular.convert(source_path, target_path, **options, dry_run=True)
    if not dry_run:
        total = done.datapoints if console.is_terminal else None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn('datapoints'), TimeElapsedColumn())
        with show_progress(console, 'convert', total, *columns, TimeRemainingColumn()) as advance:
            done = granular.convert(source_path, target_path, **options, progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
    else:
        _print(done, target_path, dry_run, decode)


def _print(done: Conversion, target: granular.Path, dry_run: bool, decode: bool) -> None:
    names = {key: field for field, key in done.renamed.items()}
    for key, kind in done.spec.items():
        field = f' (from {names[key]!r})' if key in names else ''
        typer.echo(printable(f'{key}: {kind}{field} ({done.reasons[key]})'))
    for name, reason in done.skipped.items():
        typer.echo(printable(f'skipped {name}: {reason.removeprefix(f"{name}: ")}'), err=True)
    datapoints = 'an unknown number of datapoints' if done.datapoints is None else counted(done.datapoints, 'datapoint')
    shards = 'shards' if done.shards is None else counted(done.shards, 'shard')
    summary = f'{datapoints} of {done.source} ({done.format}) in {shards}'
    if dry_run:
        typer.echo(printable(f'would write {summary} to {target}'))
    else:
        existing = f', {done.found:,} of them there before' if done.found else ''
        earlier = done.missing - len(done.skipped)
        skipped = f', {counted(done.missing, "record")} skipped' if done.missing else ''
        skipped += f' ({earlier:,} of them by earlier runs)' if done.found and earlier else ''
        written = counted(done.bytes, 'byte')
        typer.echo(printable(f'{summary} in {target}{existing}{skipped}: {written} written, {done.seconds:,.1f} s'))
        images = [key for key, kind in done.spec.items() if kind in ('jpg', 'png')]
        if images and not decode:
            typer.echo(
                printable(f'not looked at: the images of {", ".join(images)} beyond their first bytes (pass --decode)')
            )
