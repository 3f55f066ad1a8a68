"""Facts in the names of files: format, hidden, split, generation. No I/O."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular.aio.paths.path import Path
from granular.aio.paths.pure import glob_regex
from granular.errors import InvalidArgumentError, NotFoundError


class Format(NamedTuple):
    """A format of files that hold datapoints.

    Attributes:
      source: the module and the name of its data source.
      endings: the ends of the names of its files.
      one_folder: True if its files have no schema to compare, so that several folders are refused.
    """

    source: str
    endings: tuple[str, ...]
    one_folder: bool = False


FORMATS: Final[Mapping[str, Format]] = {
    'parquet': Format('granular.aio.datasources.parquet.source.ParquetDataSource', ('.parquet', '.pq')),
    'arrayrecord': Format(
        'granular.aio.datasources.arrayrecord.source.ArrayRecordDataSource', ('.arrayrecord', '.array_record'), True
    ),
    'webdataset': Format('granular.aio.datasources.webdataset.source.WebDatasetDataSource', ('.tar',)),
    'tfrecord': Format(
        'granular.aio.datasources.tfrecord.source.TFRecordDataSource',
        ('.tfrecord', '.tfrecords', '.tfrecord.gz', '.tfrecord.zz'),
        True,
    ),
    'megatron': Format('granular.aio.datasources.megatron.source.MegatronDataSource', ('.idx',), True),
}
"""The formats of files that ``open`` reads, each declared here alone."""

ENDINGS: Final[Mapping[str, str]] = {ending: name for name, form in FORMATS.items() for ending in form.endings}
"""The formats of files by the ends of their names."""

IMAGE_SUFFIXES: Final = ('jpg', 'jpeg', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'ppm', 'pgm')
IMAGE_ENDINGS: Final = tuple(f'.{suffix}' for suffix in IMAGE_SUFFIXES)

_NUMBERED_END: Final = re.compile(r'-\d+-of-\d+$')  # after the suffix, as in file names of tfds and Beam
# A file of several, as tfds, Beam and Hugging Face name them: the rest may be a suffix, a hash, or both.
_NUMBERED: Final = re.compile(r'(.*)-([0-9]{1,6})-of-([0-9]{1,6})(?:-[0-9a-f]+)?(\..*)?', re.DOTALL)

# The files of Megatron: the index and the data.
_PAIR: Final = re.compile(r'\.(idx|bin)(-\d+-of-\d+)?$', re.IGNORECASE)

_HIDDEN_FOLDERS: Final = ('__MACOSX', '__pycache__', '@eaDir')
_TEMPORARY: Final = '_temporary'
# Files that describe a dataset, or that tools leave beside it.
_DOCUMENT: Final = re.compile(
    r'(readme|licen[cs]e|copying|notice|citation|changelog)([._-].*)?|_success|_metadata|_common_metadata|.*\.crc'
    r'|dataset_infos?\.json|features\.json|thumbs\.db|desktop\.ini',
    re.IGNORECASE | re.DOTALL,
)

SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    'train': ('train', 'training'),
    'validation': ('validation', 'valid', 'val', 'dev'),
    'test': ('test', 'testing', 'eval', 'evaluation'),
}
"""The words that name a split, as in Hugging Face datasets."""

_SPLIT_OF: Final = {word: split for split, words in SPLITS.items() for word in words}
_WORD: Final = re.compile(rf'(?<![a-z])({"|".join(sorted(_SPLIT_OF, key=len, reverse=True))})(?![a-z])', re.IGNORECASE)


def format_of(name: str) -> str:
    """Return the format of a file by the end of its name, in any case; empty if it is unknown."""
    base = _NUMBERED_END.sub('', name).lower()
    return next((ENDINGS[ending] for ending in ENDINGS if base.endswith(ending)), '')


def kind_of(name: str) -> str:
    """Return the format of a file, also one of which only ``convert`` reads folders; empty if it is unknown."""
    lower = name.lower()
    if lower.endswith('.arrow'):
        return 'huggingface'
    return 'images' if lower.endswith(IMAGE_ENDINGS) else format_of(name)


def pair_of(name: str) -> tuple[str, str]:
    """Return the names of the index and the data of a dataset of Megatron, by one of them or what they begin with."""
    if (match := _PAIR.search(name)) is None:
        return f'{name}.idx', f'{name}.bin'
    kind, stem, end = match[1], name[: match.start() + 1], match[2] or ''
    index, data = ('IDX', 'BIN') if kind.isupper() else ('idx', 'bin')
    return (name, f'{stem}{data}{end}') if kind.lower() == 'idx' else (f'{stem}{index}{end}', name)


def is_document(name: str) -> bool:
    """Return whether a file describes a dataset, such as a README, so that leaving it out needs no warning."""
    return _DOCUMENT.fullmatch(name) is not None


def hidden_part(relative: str, pattern: Sequence[str] = ()) -> str:
    """Return the part of a path that hides a file, relative to the folder that is opened; empty if none does.

    A part is not hidden if the user named it: by a component of the pattern that begins as it does.
    """
    *folders, name = relative.split('/')
    hidden = [part for part in folders if part[:1] == '.' or part in _HIDDEN_FOLDERS or part.startswith(_TEMPORARY)]
    hidden += [name] if name[:1] in ('.', '_') else []
    return next((part for part in hidden if not _is_named(part, pattern)), '')


def _is_named(part: str, pattern: Sequence[str]) -> bool:
    return any(own[:1] == part[0] and glob_regex(own).fullmatch(part) for own in pattern)


def split_in(text: str) -> set[str]:
    """Return the splits that a name or a pattern contains as words between other characters than letters."""
    return {_SPLIT_OF[word.lower()] for word in _WORD.findall(text)}


def split_of(relative: str) -> str:
    """Return the split that a file belongs to by its name, or by the nearest of its folders; empty for none.

    The values of partitions, such as in ``split=train``, are columns.
    """
    for part in reversed(relative.split('/')):
        if '=' not in part and len(found := split_in(part)) == 1:
            return found.pop()
    return ''


def check_split(split: Any) -> str:
    """Return the split of a word that names one."""
    if not isinstance(split, str) or (name := _SPLIT_OF.get(split.lower())) is None:
        raise InvalidArgumentError(f'split: expected one of {", ".join(map(repr, SPLITS))}, got {split!r:.100}')
    return name


def splits_of_classes(relatives: Sequence[str]) -> tuple[int, list[str]]:
    """Return how deep the folders are that name a split of every image, and the split of each; 0 if there are none.

    A folder named as a split among others is a class.
    """
    parts = [relative.split('/')[:-1] for relative in relatives]
    for depth in range(min(map(len, parts), default=0)):
        splits = [split_of(folders[depth]) for folders in parts]
        if all(splits):
            return depth + 1, splits
    return 0, []


def refuse_generations(paths: Iterable[Path], name: str) -> None:
    """Raise ``InvalidArgumentError`` if numbered files of one folder and name are of several totals, or twice there:
    those of an earlier upload were not removed. Errors begin with the name.
    """
    files: dict[tuple[Any, ...], dict[int, dict[int, str]]] = {}
    for path in paths:
        if (match := _NUMBERED.fullmatch(path.name)) is None:
            continue
        totals = files.setdefault((path.parent, *match.group(1, 4)), {})
        numbers = totals.setdefault(int(match[3]), {})
        other = numbers.setdefault(int(match[2]), path.name)
        first = next(iter(next(iter(totals.values())).values()))
        if other != path.name or len(totals) > 1:
            raise InvalidArgumentError(
                f'{name}: has several generations of the same files: {other if other != path.name else first} and '
                f'{path.name}: remove one, or pass a pattern or a list of the files to read'
            )


def refuse_gaps(paths: Iterable[Path], name: str, pattern: str = '*') -> None:
    """Raise ``NotFoundError`` if files that were found are named ``...-00000-of-00003``, and others of these are
    missing in their folder, unless they do not match the pattern by which they were found; errors begin with the name.
    """
    groups: dict[tuple[Any, ...], dict[int, re.Match[str]]] = {}
    for path in paths:
        if match := _NUMBERED.fullmatch(path.name):
            groups.setdefault((path.parent, *match.group(1, 3, 4)), {})[int(match[2])] = match
    regex = glob_regex(pattern)
    for files in groups.values():
        match = next(iter(files.values()))
        count, width = int(match[3]), len(match[2])
        first = 1 if count in files and 0 not in files else 0
        others = (number for number in range(first, first + count) if number not in files)
        names = (f'{match.string[: match.start(2)]}{n:0{width}}{match.string[match.end(2) :]}' for n in others)
        # The first few only, as there may be a million.
        if missing := list(itertools.islice(filter(regex.fullmatch, names), 4)):
            more = ' and more' if len(missing) > 3 else ''
            raise NotFoundError(
                f'{name}: has {len(files)} of {count} files: {", ".join(missing[:3])}{more} missing: copy all of them, '
                f'or pass a list of the files to read'
            )
