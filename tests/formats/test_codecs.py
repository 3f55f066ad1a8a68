"""Each type is one record, from which the tables of encoders, decoders, families and documentation follow."""

import pickle
import re

import numpy as np
import pytest

import granular
from granular.formats.codecs import CODECS
from granular.view.kinds import family_of
from tests import ROOT

PICTURE = np.zeros((4, 4, 3), np.uint8)
VALUES = {
    'bytes': b'a', 'utf8': 'a', 'int': 1, 'float': 1.5, 'bool': True, 'json': {'a': 1}, 'i64': -1, 'u64': 1,
    'msgpack': {'a': b''}, 'array': np.arange(3), 'tree': {'a': np.arange(3)}, 'jpg': PICTURE, 'png': PICTURE,
    'wav': (np.zeros((8, 1), np.int16), 8000), 'flac': (np.zeros((8, 1), np.int16), 8000), 'mp4': PICTURE[None],
    'webm': np.zeros((1, 16, 16, 3), np.uint8),
}  # fmt: skip


def outline(value):
    return [np.shape(part) for part in value] if isinstance(value, tuple) else np.shape(value)


@pytest.mark.parametrize('kind', CODECS)
def test_each_codec_is_in_all_tables_pickles_and_decodes_what_it_encodes(kind):
    encode, decode = pickle.loads(pickle.dumps((granular.encoders[kind], granular.decoders[kind])))
    assert outline(decode(encode(VALUES[kind]))) == outline(VALUES[kind])
    assert family_of(kind) == CODECS[kind].family
    assert granular.formats.inline_safe(granular.decoders[kind]) == CODECS[kind].light
    assert granular.formats.inline_safe(granular.encoders[kind]) == CODECS[kind].light


def test_documentation_has_a_row_for_each_codec():
    rows = re.findall(r'^\| (`[^|]*) \|', (ROOT / 'docs/format.md').read_text(), re.MULTILINE)
    assert {*CODECS} <= {kind for row in rows for kind in re.findall(r'`(\w+)`', row)}
