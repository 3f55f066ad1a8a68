"""JPEG: simplejpeg and Pillow decode alike, at all scales, and reject the same files."""

import functools
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import granular
from granular import formats
from granular.errors import DecodeError, InvalidArgumentError
from tests.support.tables import examples

SIDES = st.integers(1, 70)
COLOURS = {'L': (), 'RGB': (3,), 'CMYK': (4,)}
# Decodes pickled cases without simplejpeg: the arguments of decode_image.
WITHOUT_SIMPLEJPEG = """
import pickle, sys
sys.modules['simplejpeg'] = None
from granular import formats
from granular.errors import DecodeError
def decode(*arguments):
    try:
        return formats.decode_image(*arguments)
    except DecodeError as error:
        return str(error)
cases = pickle.load(sys.stdin.buffer)
pickle.dump([decode(*case) for case in cases], sys.stdout.buffer)
"""


def jpeg(height, width, mode='RGB', seed=0, **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *COLOURS[mode]), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, 'JPEG', **options)
    return stream.getvalue()


def by_pillow(data, scale=1):
    with Image.open(io.BytesIO(data)) as image:
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        return np.array(image.convert('RGB'))


def without_simplejpeg(cases):
    """Decode images in a process without simplejpeg; an error is its message."""
    command = [sys.executable, '-W', 'ignore', '-c', WITHOUT_SIMPLEJPEG]
    run = subprocess.run(command, input=pickle.dumps(cases), capture_output=True, check=True)
    return pickle.loads(run.stdout)


def assert_alike(decoded, expected, within=1):
    assert (decoded.shape, decoded.dtype) == (expected.shape, expected.dtype)
    assert abs(decoded.astype(int) - expected).max() <= within


@st.composite
def jpegs(draw):
    options = {
        'quality': draw(st.integers(1, 100)),
        'subsampling': draw(st.sampled_from(['4:4:4', '4:2:2', '4:2:0'])),
        'progressive': draw(st.booleans()),
    }
    if draw(st.booleans()):
        exif = Image.Exif()
        exif[0x0112] = 6  # orientation: applied by neither
        options['exif'] = exif
    if draw(st.booleans()):
        options['restart_marker_blocks'] = 1
    return jpeg(draw(SIDES), draw(SIDES), draw(st.sampled_from(list(COLOURS))), draw(st.integers(0, 99)), **options)


@settings(max_examples=examples(80))
@given(data=jpegs(), kind=st.sampled_from([bytes, bytearray, memoryview]))
def test_pixels_are_those_of_pillow(data, kind):
    decoded = formats.decode_image(kind(data), mode='RGB')
    assert_alike(decoded, by_pillow(data))
    assert decoded.flags.writeable


@settings(max_examples=examples(80))
@given(data=jpegs(), height=SIDES, width=SIDES)
def test_reduced_pixels_are_those_of_pillow(data, height, width):
    full = by_pillow(data)
    decoded = formats.decode_image(data, min_size=(height, width), mode='RGB')
    fits = [scale for scale in (1, 2, 4, 8) if min(full.shape[0] // height, full.shape[1] // width) >= scale]
    assert_alike(decoded, by_pillow(data, max(fits, default=1)))
    assert all(
        side >= min(least, old)
        for side, least, old in zip(decoded.shape[:2], (height, width), full.shape[:2], strict=True)
    )


@pytest.mark.parametrize(
    ('size', 'min_size', 'expected'),
    [((480, 640), (224, 224), (240, 320)), ((480, 640), (60, 80), (60, 80)), ((480, 640), (61, 80), (120, 160)),
     ((480, 640), (1, 1), (60, 80)), ((100, 100), (224, 224), (100, 100)), ((101, 203), (50, 50), (51, 102)),
     ((480, 640), [224, np.int64(1)], (240, 320))],
)  # fmt: skip
def test_both_sides_are_divided_by_one_power_of_two(size, min_size, expected):
    assert formats.decode_image(jpeg(*size), min_size=min_size).shape == (*expected, 3)


@pytest.mark.parametrize('min_size', [224, (224,), (0, 1), (1, -1), (1.5, 1), 'ab', (1, 2, 3)])
def test_invalid_min_size_is_rejected(min_size):
    with pytest.raises(InvalidArgumentError, match='min_size'):
        formats.decode_image(jpeg(9, 9), min_size=min_size)


def test_other_formats_keep_their_size():
    pixels = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    assert np.array_equal(formats.decode_image(formats.encode_image(pixels, format='png'), (8, 8)), pixels)


def test_pillow_decodes_only_what_simplejpeg_does_not(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError('Pillow was called')

    monkeypatch.setattr(Image, 'open', fail)
    for mode in ('L', 'RGB'):
        for options in ({}, {'progressive': True}, {'subsampling': '4:2:2'}):
            assert formats.decode_image(jpeg(8, 24, mode, **options)).shape[:2] == (8, 24)
    for data in (
        jpeg(8, 24, 'CMYK'),
        jpeg(8, 24)[:300],
        formats.encode_image(np.zeros((2, 2), np.uint8), format='png'),
    ):
        with pytest.raises(DecodeError, match='Pillow was called'):
            formats.decode_image(data)


def test_pixels_are_limited_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 64 * 63)
    for min_size in (None, (8, 8)):
        assert formats.decode_image(jpeg(63, 64), min_size) is not None
        with pytest.raises(DecodeError, match=r'(?i)pixels'), pytest.warns(Image.DecompressionBombWarning):
            formats.decode_image(jpeg(64, 64), min_size)


def damaged(count):
    """Yield JPEG files with bytes that are changed, deleted or cut off."""
    rng = np.random.default_rng(0)
    for seed in range(count):
        mode = ('L', 'RGB', 'CMYK')[seed % 3]
        data = bytearray(jpeg(*rng.integers(1, 50, 2), mode, seed, progressive=bool(seed % 2)))
        for _ in range(rng.integers(1, 4)):
            start = rng.integers(2, len(data) if rng.integers(2) else min(len(data), 650))
            if (kind := rng.integers(3)) == 0:
                data[start] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                del data[start : start + rng.integers(1, 20)]
            else:
                data = data[: max(start, 4)]
        yield bytes(data)


@pytest.mark.filterwarnings('ignore:Image size:PIL.Image.DecompressionBombWarning')
def test_without_simplejpeg_the_results_and_errors_are_the_same():
    cases = [(data, size) for data in [*damaged(150), jpeg(480, 640), jpeg(99, 99, 'L')] for size in (None, (9, 12))]
    results = without_simplejpeg(cases)
    for (data, size), expected in zip(cases, results, strict=True):
        if isinstance(expected, str):
            with pytest.raises(DecodeError) as raised:
                formats.decode_image(data, size)
            assert str(raised.value).split('0x')[0] == expected.split('0x')[0]  # errors of Pillow show an address
        else:
            assert_alike(formats.decode_image(data, size), expected)
    failed = sum(isinstance(result, str) for result in results)
    assert 50 < failed < len(results) - 50


def test_reduced_images_through_worker_processes(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'image': 'jpg'}, granular.encoders) as writer:
        for value in range(4):
            writer.append({'image': np.full((100, 150, 3), 60 * value, np.uint8)})
    decode = functools.partial(formats.decode_image, min_size=(40, 40))
    source = granular.DatasetReader(tmp_path / 'ds', {'jpg': decode})
    with granular.Loader(source, batch=4, workers=1, mp='spawn') as loader:
        images = next(loader)['image']
    assert images.shape == (4, 50, 75, 3)
    assert abs(images[:, 25, 25, 0].astype(int) - [0, 60, 120, 180]).max() <= 2
