"""Images of every mode and format: as they are in the file, by both decoders alike, or three channels of uint8."""

import functools
import io
import re
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import Image

import granular
from granular import formats
from granular.errors import DecodeError, EncodeError, InvalidArgumentError
from tests.formats.test_jpeg import assert_alike, without_simplejpeg

HEIGHT, WIDTH = 16, 24
COLOUR = (200, 100, 50)
CMYK = (20, 90, 160, 40)
IN_RGB = tuple((255 - part) * (255 - CMYK[3]) // 255 for part in CMYK[:3])


def saved(mode, colour, format, **options):
    stream = io.BytesIO()
    Image.new(mode, (WIDTH, HEIGHT), colour).save(stream, format, **options)
    return stream.getvalue()


def turned(format):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    return saved('RGB', COLOUR, format, exif=exif, **({'lossless': True} if format == 'WEBP' else {}))


def palette(format, **options):
    stream = io.BytesIO()
    image = Image.new('P', (WIDTH, HEIGHT), 1)
    image.putpalette([0, 0, 0, *COLOUR])
    image.save(stream, format, **options)
    return stream.getvalue()


def sixteen_bits():
    stream = io.BytesIO()
    Image.fromarray(np.full((HEIGHT, WIDTH), 0xC8FF, np.uint16)).save(stream, 'PNG')
    return stream.getvalue()


def ycck():
    inverted = np.full((HEIGHT, WIDTH, 4), [255 - part for part in CMYK], np.uint8)  # as Adobe's programs store it
    return simplejpeg.encode_jpeg(inverted, 100, 'CMYK')


# The file; a pixel in RGB; the channels and the dtype in the file.
IMAGES = {
    'jpeg gray': (saved('L', 77, 'JPEG'), (77, 77, 77), (), 'uint8'),
    'jpeg': (saved('RGB', COLOUR, 'JPEG'), COLOUR, (3,), 'uint8'),
    'jpeg progressive': (saved('RGB', COLOUR, 'JPEG', progressive=True), COLOUR, (3,), 'uint8'),
    'jpeg in RGB': (saved('RGB', COLOUR, 'JPEG', keep_rgb=True), COLOUR, (3,), 'uint8'),
    'jpeg CMYK': (saved('CMYK', CMYK, 'JPEG'), IN_RGB, (4,), 'uint8'),
    'jpeg YCCK': (ycck(), IN_RGB, (4,), 'uint8'),
    'jpeg with orientation': (turned('JPEG'), COLOUR, (3,), 'uint8'),
    'png mask': (saved('1', 1, 'PNG'), (255, 255, 255), (), 'bool'),
    'png gray': (saved('L', 77, 'PNG'), (77, 77, 77), (), 'uint8'),
    'png gray, a colour transparent': (saved('L', 77, 'PNG', transparency=77), (77, 77, 77), (), 'uint8'),
    'png gray alpha': (saved('LA', (77, 30), 'PNG'), (77, 77, 77), (2,), 'uint8'),
    'png 16 bits': (sixteen_bits(), (200, 200, 200), (), 'uint16'),
    'png palette': (palette('PNG'), COLOUR, (), 'uint8'),
    'png palette alpha': (palette('PNG', transparency=bytes([255, 30])), COLOUR, (), 'uint8'),
    'png': (saved('RGB', COLOUR, 'PNG'), COLOUR, (3,), 'uint8'),
    'png, a colour transparent': (saved('RGB', COLOUR, 'PNG', transparency=COLOUR), COLOUR, (3,), 'uint8'),
    'png alpha': (saved('RGBA', (*COLOUR, 30), 'PNG'), COLOUR, (4,), 'uint8'),
    'png with orientation': (turned('PNG'), COLOUR, (3,), 'uint8'),
    'webp': (saved('RGB', COLOUR, 'WEBP', lossless=True), COLOUR, (3,), 'uint8'),
    'webp alpha': (saved('RGBA', (*COLOUR, 30), 'WEBP', lossless=True), COLOUR, (4,), 'uint8'),
    'webp with orientation': (turned('WEBP'), COLOUR, (3,), 'uint8'),
    'gif': (palette('GIF'), COLOUR, (), 'uint8'),
    'gif alpha': (palette('GIF', transparency=1), COLOUR, (), 'uint8'),
    'bmp mask': (saved('1', 1, 'BMP'), (255, 255, 255), (), 'bool'),
    'bmp gray': (saved('L', 77, 'BMP'), (77, 77, 77), (), 'uint8'),
    'bmp palette': (palette('BMP'), COLOUR, (), 'uint8'),
    'bmp': (saved('RGB', COLOUR, 'BMP'), COLOUR, (3,), 'uint8'),
}


@pytest.mark.parametrize('name', IMAGES)
def test_every_image_has_the_channels_of_its_file_or_three(name):
    data, pixel, channels, dtype = IMAGES[name]
    decoded = formats.decode_image(data, mode='RGB')
    assert_alike(decoded, np.broadcast_to(np.uint8(pixel), (HEIGHT, WIDTH, 3)), within=3)
    original = formats.decode_image(data)
    assert original.flags.writeable and decoded.flags.writeable
    assert (original.shape, original.dtype) == ((HEIGHT, WIDTH, *channels), dtype)
    with Image.open(io.BytesIO(data)) as image:
        assert_alike(original, np.array(image))


def test_every_image_is_decoded_alike_without_simplejpeg():
    cases = [
        (data, size, mode)
        for data, *_ in IMAGES.values()
        for size in (None, (HEIGHT // 2, WIDTH // 2))
        for mode in ('RGB', 'original')
    ]
    for case, expected in zip(cases, without_simplejpeg(cases), strict=True):
        assert_alike(formats.decode_image(*case), expected)


def test_images_of_every_mode_are_one_batch(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'jpg': 'jpg', 'png': 'png'}) as writer:
        for data, *_ in IMAGES.values():
            kind = 'jpg' if data.startswith(b'\xff\xd8') else 'png'
            writer.append({'jpg': IMAGES['jpeg'][0], 'png': IMAGES['png'][0], kind: data})
    decode = functools.partial(formats.decode_image, mode='RGB')
    reader = granular.DatasetReader(tmp_path / 'ds', {'jpg': decode, 'png': decode})
    with reader, granular.Loader(reader, batch=len(reader)) as loader:
        assert {array.shape for array in next(loader).values()} == {(len(IMAGES), HEIGHT, WIDTH, 3)}


@pytest.mark.parametrize('size', [0, 1, 0xFFFFFFFF])
def test_bmp_files_with_a_wrong_size_in_them_are_images(size, tmp_path):
    data = bytearray(IMAGES['bmp'][0])
    data[2:6] = size.to_bytes(4, 'little')
    assert granular.convert([{'x': bytes(data)}], tmp_path / 'ds').spec == {'x': 'png'}
    assert granular.open(tmp_path / 'ds')[0]['x'].tolist() == formats.decode_image(IMAGES['bmp'][0]).tolist()
    for other in (b'BM', b'BM' + bytes(40), bytes(data[:20])):
        assert granular.convert([{'x': other}], tmp_path / f'{len(other)}').spec == {'x': 'bytes'}


@pytest.mark.parametrize('kind', ['png', 'jpg'])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.bool_, np.int32, np.float32])
@pytest.mark.parametrize('shape', [(5, 7, 1), (3, 5, 7), (5, 7), (5, 7, 3), (7,), (5, 7, 5), (0, 7)])
def test_remedies_for_an_array_that_is_no_image_work(kind, dtype, shape):
    array, types = np.zeros(shape, dtype), granular.encoders
    for _ in range(3):  # one may be followed by another one
        try:
            types[kind](array)
            return
        except EncodeError as error:
            reason, _, remedy = str(error).rpartition(': ')
            assert reason.startswith(f'{kind}: expected an image of uint8')
            assert ('uint16' in reason.partition('got')[0]) == (kind == 'png')
            if match := re.match(r"the type '(\w+)' stores", remedy):
                kind = match[1]
            else:
                code = re.match(r'(\S.*\)|array\[.*\]) ', remedy)[1]
                array = eval(code, {'array': array, 'numpy': np})
    raise AssertionError(f'no remedy helps with {dtype} of shape {shape}')


WRITTEN = [
    *[np.uint8(np.arange(5 * 7 * n).reshape(5, 7, n)) for n in (2, 3, 4)],
    np.uint8(np.arange(35).reshape(5, 7)), np.uint16(np.arange(35).reshape(5, 7) * 1871), np.eye(5, 7) > 0,
]  # fmt: skip


@pytest.mark.parametrize('value', WRITTEN, ids=lambda value: f'{value.dtype}-{value.shape}')
def test_png_is_read_as_it_was_written(value):
    found = granular.decoders['png'](granular.encoders['png'](value))
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)


def png_of_16_bits(pixels, kind):
    def chunk(name, data):
        return struct.pack('>I', len(data)) + name + data + struct.pack('>I', zlib.crc32(name + data))

    height, width = pixels.shape[:2]
    rows = b''.join(b'\0' + row.astype('>u2').tobytes() for row in pixels)
    head = struct.pack('>IIBBBBB', width, height, 16, kind, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')


@pytest.mark.parametrize(('kind', 'channels'), [(2, 3), (4, 2), (6, 4)])
def test_sixteen_bits_of_several_channels_are_kept(kind, channels):
    pixels = np.random.default_rng(kind).integers(0, 1 << 16, (13, 17, channels), np.uint16)
    data = png_of_16_bits(pixels, kind)
    found = formats.decode_image(data)
    assert found.dtype == np.uint16
    assert np.array_equal(found, pixels)
    assert formats.decode_image(data, mode='RGB').shape == (13, 17, 3)
    with pytest.raises(DecodeError, match='PyAV cannot decode the image of'):
        formats.decode_image(data[:60])


def test_unknown_mode_is_refused():
    with pytest.raises(InvalidArgumentError, match="mode: expected 'RGB' or 'original', got 'L'"):
        formats.decode_image(IMAGES['png'][0], mode='L')
