"""Encoders and decoders: round trips, exact bytes, rejected values, and lazy imports."""

import contextlib
import datetime
import decimal
import fractions
import functools
import pathlib
import pickle
import struct
import subprocess
import sys

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from granular import decoders, encoders, formats
from granular.errors import DecodeError, EncodeError, InvalidArgumentError
from tests.support.tables import examples

JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=12,
)
ARRAYS = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes(endianness='?') | hnp.floating_dtypes(endianness='?')
    | hnp.complex_number_dtypes() | hnp.datetime64_dtypes() | hnp.timedelta64_dtypes() | hnp.unicode_string_dtypes(),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)  # fmt: skip


def through(kind, value):
    return decoders[kind](encoders[kind](value))


@given(st.binary())
def test_bytes_round_trip(value):
    assert through('bytes', value) == value
    assert decoders['bytes'](memoryview(value)) == value


@given(st.text())
def test_utf8_round_trips(value):
    assert through('utf8', value) == value


@given(st.integers(-(2**126), 2**126))
def test_int_round_trips(value):
    record = encoders['int'](value)
    assert decoders['int'](record) == value
    assert len(record) == 1 or not -(1 << (8 * len(record) - 9)) <= value < 1 << (8 * len(record) - 9)


@pytest.mark.parametrize(
    ('value', 'record'),
    [(0, '00'), (1, '01'), (127, '7f'), (128, '8000'), (255, 'ff00'), (256, '0001'), (-1, 'ff'), (-128, '80'),
     (32767, 'ff7f'), (32768, '008000'), (np.uint8(200), 'c800')],
)  # fmt: skip
def test_int_encoding(value, record):
    assert encoders['int'](value).hex() == record


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))
def test_fixed_size_ints_round_trip(signed, unsigned):
    assert through('i64', signed) == signed
    assert through('u64', unsigned) == unsigned
    assert len(encoders['i64'](signed)) == len(encoders['u64'](unsigned)) == 8


@given(JSONISH)
def test_msgpack_round_trips(value):
    assert through('msgpack', value) == value


@pytest.mark.parametrize('kind', ['msgpack', 'tree'])
def test_keys_may_be_tuples(kind):
    value = {(1, 'a'): [{((), 2): 3.5}, [4]], 'b': {None: 5, b'c': 6}}
    assert through(kind, value) == value


@given(st.floats() | st.integers(-(2**53), 2**53) | st.floats(width=32).map(np.float32))
def test_floats_round_trip(value):
    assert struct.pack('<d', through('float', value)) == struct.pack('<d', float(value))


def test_float_and_bool_encoding():
    assert encoders['float'](-2.5).hex() == '00000000000004c0'
    assert (encoders['bool'](True), encoders['bool'](np.False_)) == (b'\x01', b'\x00')
    assert through('bool', True) is True
    assert through('bool', np.False_) is False


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
def test_json_round_trips(value):
    assert through('json', value) == value


def test_json_encoding():
    assert encoders['json']({'é': [1, (2.5, None)]}) == '{"é":[1,[2.5,null]]}'.encode()
    assert np.isnan(decoders['json'](b'[NaN]')[0])  # as others write it


@pytest.mark.parametrize(
    ('kind', 'value', 'message'),
    [
        ('float', True, 'got bool'), ('float', '1.0', 'got str'), ('float', 2**53 + 1, 'not exactly a double'),
        ('float', 10**400, 'not exactly a double'), ('float', np.longdouble(1) / 3, 'not exactly a double'),
        ('float', np.int64(2**53 + 1), 'not exactly a double'), ('float', np.uint64(2**64 - 1), 'not exactly a double'),
        ('float', np.timedelta64(5, 'ns'), 'got timedelta64'), ('int', np.timedelta64(5, 'ns'), 'got timedelta64'),
        ('int', np.timedelta64(5, 'ms'), 'got timedelta64'), ('bool', 1, 'got int'),
        ('bool', None, 'got NoneType'), ('json', {1: 2}, 'keys of type str, got 1'),
        ('json', [{'a': {True: 0}}], 'keys of type str, got True'), ('json', float('nan'), 'JSON'),
        ('json', b'{}', 'JSON'), ('json', np.float32(1), 'JSON'), ('json', '\ud800', 'surrogates'),
        ('json', functools.reduce(lambda inner, _: [inner], range(100_000), 0), 'JSON'),
    ],
)  # fmt: skip
def test_values_that_are_not_exact_are_rejected(kind, value, message):
    with pytest.raises(EncodeError, match=message):
        encoders[kind](value)


@pytest.mark.parametrize(
    ('kind', 'record'),
    [('float', bytes(4)), ('float', b''), ('bool', b'\x02'), ('bool', b''), ('bool', b'\x00\x00'), ('json', b''),
     ('json', b'\xff'), ('json', b'{} {}'), ('json', '\ufeff1'.encode()), ('json', b'[' * 100_000)],
)  # fmt: skip
def test_records_of_other_types_are_rejected(kind, record):
    with pytest.raises(DecodeError):
        decoders[kind](record)


def test_unknown_images_are_named_by_their_first_bytes():
    with pytest.raises(DecodeError, match=r"^expected an image of JPEG, .*, got 7 bytes that begin with b'%PDF-1\.'$"):
        formats.decode_image(b'%PDF-1.')
    with pytest.raises(DecodeError, match='got an empty file$'):
        formats.decode_image(b'')
    for encode in (encoders['jpg'], encoders['png'], formats.encode_image_file):
        with pytest.raises(EncodeError, match='got an empty file$'):
            encode(b'')


def test_files_of_images_are_kept():
    image = np.arange(64, dtype=np.uint8).reshape(8, 8)
    jpg, png = encoders['jpg'](image), encoders['png'](image)
    assert encoders['jpg'](jpg) == encoders['jpg'](bytearray(jpg)) == jpg
    assert encoders['png'](memoryview(png)) == png
    for path in ('a.jpg', pathlib.Path('a.jpg')):
        with pytest.raises(EncodeError, match=r'jpg: expected an array or the bytes of a file, got the path .*a\.jpg'):
            encoders['jpg'](path)
    with pytest.raises(EncodeError, match='jpg: expected a JPEG file, got .* bytes that begin with .*PNG'):
        encoders['jpg'](png)
    with pytest.raises(EncodeError, match='png: expected a PNG, WebP, GIF or BMP file, got'):
        encoders['png'](jpg)
    with pytest.raises(EncodeError, match='got an empty file'):
        encoders['png'](b'')


def test_files_of_videos_are_kept():
    video = np.zeros((2, 16, 16, 3), np.uint8)
    mp4, webm = encoders['mp4'](video), encoders['webm'](video)
    assert encoders['mp4'](mp4) == mp4
    assert encoders['webm'](webm) == webm
    for kind, data in ('mp4', webm), ('webm', mp4), ('mp4', b'no video'):
        with pytest.raises(EncodeError, match=f'{kind}: expected a video file, got {len(data)} bytes'):
            encoders[kind](data)


@given(ARRAYS)
def test_arrays_round_trip(value):
    decoded = through('array', value)
    assert decoded.dtype == value.dtype
    assert decoded.shape == value.shape
    assert decoded.tobytes() == value.tobytes()


def test_non_contiguous_array_round_trips():
    value = np.arange(24).reshape(4, 6)[::2, ::3].T
    assert np.array_equal(through('array', value), value)


@pytest.mark.parametrize('kind', ['array', 'tree'])
@pytest.mark.parametrize('name', ['bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'int4', 'complex32'])
def test_arrays_of_ml_dtypes_round_trip(kind, name):
    values = np.arange(-3, 5).reshape(2, 4).astype(np.dtype(getattr(ml_dtypes, name)))
    for value in values, values.T[::2], values[0, 0], values[:0], values.astype(values.dtype.newbyteorder('>')):
        decoded = through(kind, value)
        assert decoded.dtype == values.dtype
        assert decoded.shape == value.shape
        assert np.array_equal(decoded.astype(complex), value.astype(complex))


def test_arrays_of_ml_dtypes_need_ml_dtypes(monkeypatch):
    record = encoders['msgpack'](['float8_e3m4', [1], b'1'])  # no other test uses it: dtypes are cached by name
    monkeypatch.setitem(sys.modules, 'ml_dtypes', None)
    with pytest.raises(DecodeError, match="its dtype is 'float8_e3m4': install ml_dtypes to read it"):
        decoders['array'](record)


@settings(max_examples=examples(50))
@given(
    st.recursive(
        JSONISH | ARRAYS | st.decimals() | st.times(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_trees_round_trip(value):
    def same(a, b):
        if isinstance(b, np.ndarray):
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        if isinstance(b, decimal.Decimal | datetime.time):
            return type(a) is type(b) and str(a) == str(b)
        if isinstance(b, list):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in b)
        return a == b

    try:
        record = encoders['tree'](value)
    except EncodeError as error:
        assert "begins with '_'" in str(error)  # noqa: PT017
        return
    assert same(decoders['tree'](record), value)


def gradient(*shape):
    return np.linspace(0, 255, int(np.prod(shape))).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize('shape', [(5, 7), (5, 7, 3), (5, 7, 4), (1, 1)])
def test_png_is_lossless(shape):
    decoded = formats.decode_image(encoders['png'](gradient(*shape)), mode='original')
    assert np.array_equal(decoded, gradient(*shape))


@pytest.mark.parametrize('shape', [(16, 24), (16, 24, 3)])
def test_jpg_is_close(shape):
    decoded = formats.decode_image(encoders['jpg'](gradient(*shape)), mode='original')
    assert decoded.shape == shape
    assert decoded.dtype == np.uint8
    assert abs(decoded.astype(int) - gradient(*shape)).mean() < 8


def test_jpg_quality_determines_size():
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    sizes = [len(formats.encode_image(noise, quality=quality)) for quality in (10, 50, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] / 3
    assert len(formats.encode_image(noise, quality=np.int64(50))) == sizes[1]
    for quality in (0, 101, -1, 50.0, '50', None, True):
        with pytest.raises(InvalidArgumentError, match='quality: expected an integer from 1 to 100, got '):
            formats.encode_image(noise, quality=quality)


@pytest.mark.parametrize('name', [None, 3, b'mp4', ['mp4']])
def test_names_of_formats_and_codecs_are_texts(name):
    image, samples = np.zeros((2, 16, 16, 3), np.uint8), np.zeros(10, np.int16)
    for encode in (
        lambda: formats.encode_image(image[0], format=name),
        lambda: formats.encode_audio((samples, 8000), format=name),
        lambda: formats.encode_video(image, format=name),
        lambda: formats.encode_video(image, codec=name),
    ):
        with pytest.raises((EncodeError, InvalidArgumentError), match='expected .*, got '):
            encode()
    with pytest.raises(EncodeError, match='aac is no codec of videos'):
        formats.encode_video(image, codec='aac')


@pytest.mark.parametrize('encode', [formats.encode_array, formats.encode_tree])
def test_array_of_4_gib_is_refused_before_it_is_copied(encode):
    with pytest.raises(EncodeError, match='expected an array of at most 4294967295 bytes, .* got 4294967296'):
        encode(np.broadcast_to(np.uint8(0), (1 << 32,)))


@pytest.mark.parametrize('kind', ['mp4', 'webm'])
@pytest.mark.parametrize('frames', [1, 5])
def test_videos_round_trip(kind, frames):
    value = np.stack([np.full((32, 48, 3), 40 * i, np.uint8) for i in range(frames)])
    decoded = through(kind, value)
    assert decoded.shape == value.shape
    assert decoded.dtype == np.uint8
    assert abs(decoded.astype(int) - value).mean() < 8


def test_rates_of_videos_are_integers_or_fractions():
    video = np.zeros((2, 16, 16, 3), np.uint8)
    for fps in (np.int64(30), fractions.Fraction(30000, 1001)):
        assert formats.decode_video(formats.encode_video(video, fps)).shape == video.shape
    for fps in (29.97, 0, -1, 'fast'):
        with pytest.raises(EncodeError, match='mp4: expected fps as an integer or a fraction > 0, got '):
            formats.encode_video(video, fps)
    with pytest.raises(EncodeError, match='as mp4 with h264 at 1000000000000 fps: .* too large'):
        formats.encode_video(video, 10**12)


@pytest.mark.parametrize('kind', ['mp4', 'webm'])
def test_truncated_videos_are_rejected(kind, tmp_path):
    """FFmpeg reads a file as far as it goes, if its index is at the beginning, and the cut between two frames."""
    import av

    with av.open(tmp_path / f'x.{kind}', 'w', options={'movflags': 'faststart'} if kind == 'mp4' else {}) as container:
        stream = container.add_stream({'mp4': 'h264', 'webm': 'vp9'}[kind], rate=20, width=16, height=16)
        for i in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 40 * i, np.uint8), format='rgb24')
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    video = (tmp_path / f'x.{kind}').read_bytes()
    assert len(decoders[kind](video)) == 5
    for size in range(len(video)):
        with pytest.raises(DecodeError):
            decoders[kind](video[:size])


FORK = """
import os, select, signal, threading
import numpy as np
from granular import decoders, encoders

video = encoders['mp4'](np.zeros((2, 64, 64, 3), np.uint8))
decoded, release = threading.Event(), threading.Event()

def decode():
    decoders['mp4'](video)
    decoded.set()
    release.wait()

thread = threading.Thread(target=decode)
thread.start()
decoded.wait()
pid = os.fork()
if not pid:
    os._exit(0)
ended, _, _ = select.select([os.pidfd_open(pid)], [], [], 30)
os.kill(pid, signal.SIGKILL)
release.set()
thread.join()
print('the child', 'ended' if ended else 'hangs')
"""


def test_processes_are_forked_after_another_thread_has_decoded_a_video():
    done = subprocess.run([sys.executable, '-c', FORK], check=False, capture_output=True, text=True, timeout=250)
    assert done.stdout == 'the child ended\n', done.stderr


@pytest.mark.parametrize(
    ('kind', 'value'),
    [('bytes', 'text'), ('utf8', b'bytes'), ('utf8', 'lone \ud800'), ('int', 1.0), ('int', True), ('int', 2**200),
     ('i64', 2**63), ('u64', -1), ('msgpack', object()), ('msgpack', 2**64), ('array', [1, 2]),
     ('array', np.array([object()])), ('array', np.zeros(2, [('a', 'i4')])), ('array', np.ma.array([1], mask=[1])),
     ('tree', {'a': object()}), ('tree', {'a': np.ma.array([1])}), ('tree', ['_', 1, 2, 3]),
     ('jpg', np.zeros((4, 4, 3), np.float32)), ('jpg', np.zeros((4, 4, 4), np.uint8)),
     ('png', np.zeros((0, 4), np.uint8)), ('png', np.zeros(4, np.uint8)), ('mp4', np.zeros((2, 5, 6, 3), np.uint8)),
     ('mp4', np.zeros((0, 4, 4, 3), np.uint8)), ('webm', np.zeros((4, 4, 3), np.uint8)),
     ('tree', functools.reduce(lambda value, _: [value], range(9999), []))],
)  # fmt: skip
def test_encoders_reject_unsupported_values(kind, value):
    with pytest.raises(EncodeError):
        encoders[kind](value)


def test_masks_are_refused():
    image = np.ma.array(np.ones((4, 4), np.uint8), mask=np.eye(4))
    video, sound = np.ma.zeros((2, 4, 4, 3), np.uint8), np.ma.zeros(9, np.int16)
    values = {'array': image, 'tree': [image], 'jpg': image, 'png': image, 'mp4': video, 'webm': video}
    values |= {'wav': (sound, 8000), 'flac': (sound, 8000)}
    for encode, value in [*((encoders[kind], value) for kind, value in values.items()), (formats.pack_image, image)]:
        with pytest.raises(EncodeError, match='expected an array without a mask'):
            encode(value)


@pytest.mark.parametrize(
    ('kind', 'record'),
    [('utf8', b'\xff'), ('int', bytes(17)), ('i64', bytes(7)), ('msgpack', b'\xc1'), ('msgpack', b''),
     ('array', b'\x01'), ('array', encoders['msgpack'](['<i8', [3], bytes(8)])),
     ('array', encoders['msgpack'](['O', [1], bytes(8)])), ('array', encoders['msgpack'](['int99', [1], b'1'])),
     ('array', encoders['msgpack'](['float64', [1], bytes(8)])), ('tree', encoders['msgpack'](['_', '<i8', [3], b'1'])),
     *[('tree', encoders['msgpack'](['_', kind, [], value]))
       for kind in ('decimal', 'time') for value in ('x', b'1', 1, None)],
     ('png', b'no image'), ('mp4', b'no video'), ('jpg', encoders['png'](np.zeros((4, 4), np.uint8))[:40])],
)  # fmt: skip
def test_decoders_reject_invalid_records(kind, record):
    with pytest.raises(DecodeError):
        decoders[kind](record)


def test_encoders_and_decoders_pickle():
    for table in (encoders, decoders):
        for fn in table.values():
            assert isinstance(pickle.loads(pickle.dumps(fn)), type(fn))


def test_only_cheap_decoders_run_on_the_loop():
    safe = {kind for kind, fn in decoders.items() if formats.inline_safe(fn)}
    assert safe == {'bool', 'bytes', 'float', 'json', 'utf8', 'int', 'i64', 'u64', 'msgpack', 'array', 'tree'}
    assert formats.inline_safe(functools.partial(functools.partial(formats.decode_int, size=2), signed=False))
    assert not formats.inline_safe(lambda record: record)


def test_optional_packages_are_imported_lazily():
    heavy = ('PIL', 'av', 'aiohttp', 's3fs', 'gcsfs', 'google.auth', 'requests', 'botocore', 'fsspec', 'uvloop')
    heavy += ('rich', 'typer')
    code = f'import sys, granular; print([name for name in {heavy} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'


# --- raw images -------------------------------------------------------------------------------------------------------

MODES = (
    '1',
    'L',
    'P',
    'LA',
    'PA',
    'RGB',
    'RGBA',
    'RGBa',
    'RGBX',
    'CMYK',
    'YCbCr',
    'LAB',
    'HSV',
    'I',
    'F',
    'I;16',
    'I;16B',
)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('size', [(1, 1), (9, 7), (16, 2)])
def test_raw_images_round_trip(mode, size):
    empty = Image.new(mode, size)
    data = np.random.default_rng(0).integers(0, 256, len(empty.tobytes()), np.uint8).tobytes()
    image = Image.frombytes(mode, size, np.zeros(len(data) // 4, '<f4').tobytes() if mode == 'F' else data)
    decoded = formats.unpack_image(formats.pack_image(image))
    assert (decoded.mode, decoded.size, decoded.tobytes()) == (image.mode, image.size, image.tobytes())
    assert len(formats.pack_image(image)) < len(image.tobytes()) + 64
    if mode not in ('PA', 'RGBa', 'LAB', 'HSV', 'RGBX'):
        assert np.array_equal(np.asarray(decoded), np.asarray(image))


@pytest.mark.parametrize('transparency', [None, 3, bytes([0, 128, 255])])
def test_raw_images_keep_palette_and_transparency(tmp_path, transparency):
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert('RGB').quantize(17)
    options = {} if transparency is None else {'transparency': transparency}
    image.save(tmp_path / 'image.png', **options)
    with Image.open(tmp_path / 'image.png') as opened:
        decoded = formats.unpack_image(formats.pack_image(opened))
        assert decoded.mode == opened.mode == 'P'
        assert decoded.getpalette() == opened.getpalette()
        assert decoded.convert('RGBA').tobytes() == opened.convert('RGBA').tobytes()
    image.putpalette(bytes(range(64)), 'RGBA')
    decoded = formats.unpack_image(formats.pack_image(image))
    assert decoded.convert('RGBA').tobytes() == image.convert('RGBA').tobytes()


@settings(max_examples=examples(40))
@given(
    hnp.arrays(
        st.sampled_from(['u1', '>u2', 'f4', '?', 'i8', 'c8']), hnp.array_shapes(min_dims=0, min_side=0, max_side=4)
    )
)
def test_raw_arrays_round_trip(value):
    decoded = formats.unpack_image(memoryview(formats.pack_image(value)))
    assert (decoded.dtype, decoded.shape, decoded.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert decoded.flags.writeable


@pytest.mark.parametrize('value', [b'bytes', [[1]], np.array(['a']), np.array([object()])])
def test_pack_image_rejects_other_values(value):
    with pytest.raises(EncodeError):
        formats.pack_image(value)


@settings(max_examples=examples(40))
@given(st.data())
def test_damaged_raw_images_are_decode_errors(data):
    image = Image.new('P', (3, 3))
    image.putpalette(bytes(range(30)))
    record = bytearray(formats.pack_image(data.draw(st.sampled_from([image, np.zeros((3, 3), 'u2')]))))
    cut = data.draw(st.integers(0, len(record) - 1))
    with pytest.raises(DecodeError):
        formats.unpack_image(bytes(record[:cut]))
    record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        formats.unpack_image(bytes(record))


@pytest.mark.parametrize(
    'head', [('image', 'RGB', (1 << 40, 1 << 40), None, b'', None), ('image', 'RGB', (-1, -3), None, b'', None),
             ('image', 'BGR;15', (1, 1), None, b'', None), ('array', '<f8', (1 << 40, 1 << 40)), ('array', 'O', (0,)),
             ('array', '<f8', (-1, 0)), ('image', 'P', (0, 0), 'RGB', bytes(1000), None), ('other',), ()],
)  # fmt: skip
def test_raw_images_with_invalid_headers_are_rejected(head):
    packed = msgpack.packb(head)
    with pytest.raises(DecodeError):
        formats.unpack_image(b'raw1' + len(packed).to_bytes(2, 'little') + packed)
