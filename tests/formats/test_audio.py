"""Audio: lossless round trips, the files of other programs, and rejected values and files."""

import hashlib
import io
import struct
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import decoders, encoders, formats
from granular.errors import DecodeError, EncodeError
from tests.support.tables import examples

DTYPES = {'wav': ('uint8', 'int16', 'int32', 'float32', 'float64'), 'flac': ('int16', 'int32')}


def noise(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == 'f':
        return rng.normal(size=shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def of_24_bits(samples):
    return samples & ~0xFF if samples.dtype == np.int32 else samples


def check(kind, samples, rate):
    audio = decoders[kind](encoders[kind]((samples, rate)))
    assert isinstance(audio, formats.Audio)
    assert audio.rate == rate
    assert audio.samples.dtype == samples.dtype
    assert np.array_equal(audio.samples, samples)


@pytest.mark.parametrize(('kind', 'dtype'), [(kind, dtype) for kind, dtypes in DTYPES.items() for dtype in dtypes])
@pytest.mark.parametrize('channels', [1, 2, 3, 6, 8])
def test_samples_round_trip(kind, dtype, channels):
    samples = noise(dtype, (5001, channels))
    check(kind, of_24_bits(samples) if kind == 'flac' else samples, 16000)


@settings(max_examples=examples(40))
@given(st.integers(1, 3000), st.integers(1, 200000), st.integers(1, 8), st.integers(0, 9))
def test_any_length_rate_and_number_of_channels_round_trips(length, rate, channels, seed):
    samples = noise('int16', (length, channels), seed)
    check('flac', samples, rate)
    check('wav', samples, rate)


def test_long_audio_of_many_channels_round_trips():
    check('wav', noise('int16', (70_000, 40)), 48000)
    check('flac', noise('int16', (200_000, 1)), 48000)


@pytest.mark.parametrize('dtype', ['uint8', 'int16'])
def test_other_programs_read_what_is_written(dtype):
    samples = noise(dtype, (4000, 2))
    with wave.open(io.BytesIO(encoders['wav']((samples, 22050)))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 22050, 4000)
        assert file.getsampwidth() == samples.itemsize
        assert file.readframes(4000) == samples.tobytes()


@pytest.mark.parametrize('dtype', ['int16', 'int32'])
def test_flac_files_have_the_digest_of_their_samples(dtype):
    samples = of_24_bits(noise(dtype, (4000, 2)))
    raw = samples.tobytes() if dtype == 'int16' else samples.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    assert hashlib.md5(raw).digest() == encoders['flac']((samples, 22050))[26:42]


@pytest.mark.parametrize(('width', 'dtype'), [(1, 'uint8'), (2, 'int16'), (3, 'int32'), (4, 'int32')])
def test_files_of_other_programs_are_read(width, dtype):
    samples = noise('uint8', (500, 2, width))
    stream = io.BytesIO()
    with wave.open(stream, 'wb') as file:
        file.setparams((2, width, 8000, 0, 'NONE', ''))
        file.writeframes(samples.tobytes())
    audio = decoders['wav'](stream.getvalue())
    assert (audio.rate, audio.samples.shape, audio.samples.dtype) == (8000, (500, 2), dtype)
    padded = np.concatenate([np.zeros((500, 2, audio.samples.itemsize - width), np.uint8), samples], axis=-1)
    assert audio.samples.tobytes() == padded.tobytes()


def test_a_file_of_unknown_length_is_read_to_its_end():
    data = bytearray(encoders['wav']((noise('int16', (100, 1)), 8000)))
    at = data.index(b'data') + 4
    data[at : at + 4] = b'\xff' * 4
    assert len(decoders['wav'](bytes(data)).samples) == 100


def test_files_are_kept():
    audio = noise('int16', (100, 1)), 8000
    wav, flac = encoders['wav'](audio), encoders['flac'](audio)
    assert encoders['wav'](wav) == encoders['wav'](bytearray(wav)) == wav
    assert encoders['flac'](memoryview(flac)) == flac
    for kind, data in ('wav', flac), ('flac', wav), ('wav', b'RIFF....WEBP'), ('flac', b''):
        found = f'{len(data)} bytes' if data else 'an empty file'
        with pytest.raises(EncodeError, match=f'{kind}: expected a {kind.upper()} file, got {found}'):
            encoders[kind](data)


def test_samples_of_one_channel_may_have_one_dimension():
    samples = noise('int16', 100)
    audio = decoders['wav'](encoders['wav'](formats.Audio(samples, 8000)))
    assert np.array_equal(audio.samples, samples[:, None])


def test_samples_of_any_byte_order_and_strides_round_trip():
    samples = noise('int16', (100, 4))
    other = samples.astype('>i2')[::-2, ::2]
    audio = decoders['flac'](encoders['flac']((other, 8000)))
    assert np.array_equal(audio.samples, samples[::-2, ::2])


SAMPLES = np.zeros((10, 1), np.int16)


@pytest.mark.parametrize(
    ('kind', 'value', 'message'),
    [('wav', SAMPLES, 'expected a pair of samples and rate, or the bytes of a WAV file, got ndarray'),
     ('wav', (SAMPLES, 8000, 1), 'the bytes of a WAV file, got tuple'),
     ('wav', (SAMPLES.astype(np.int64), 8000), r'expected samples of .*, got int64 of shape \(10, 1\)'),
     ('flac', (SAMPLES.astype(np.float32), 8000), 'expected samples of int16 or int32 .*, got float32'),
     ('wav', (SAMPLES[:0], 8000), r'got int16 of shape \(0, 1\)'),
     ('wav', (np.zeros((2, 2, 2), np.int16), 8000), r'got int16 of shape \(2, 2, 2\)'),
     ('flac', (np.zeros((2, 9), np.int16), 8000), r'at most 8 channels, got shape \(2, 9\): transpose'),
     ('flac', (np.ones((2, 1), np.int32), 8000), 'int32 samples of 24 bits'),
     ('wav', (SAMPLES, 0), 'rate'), ('wav', (SAMPLES, 8000.5), 'rate'), ('flac', (SAMPLES, 10**7), 'rate'),
     ('wav', (SAMPLES, 2**40), 'rate')],
)  # fmt: skip
def test_other_values_are_rejected(kind, value, message):
    with pytest.raises(EncodeError, match=message):
        encoders[kind](value)


def test_other_formats_are_rejected():
    with pytest.raises(EncodeError, match="expected the format wav or flac, got 'mp3'"):
        formats.encode_audio((SAMPLES, 8000), 'mp3')


@pytest.mark.parametrize('kind', ['wav', 'flac'])
def test_files_that_are_not_audio_are_rejected(kind):
    for data in b'', b'no audio', b'RIFF\x04\0\0\0WAVE', b'fLaC', b'RIFF\x24\0\0\0WAVEdata\0\0\0\0':
        with pytest.raises(DecodeError):
            decoders[kind](data)


@pytest.mark.parametrize('kind', ['wav', 'flac'])
@pytest.mark.parametrize('part', [0.1, 0.5, 0.99])
def test_truncated_files_are_rejected(kind, part):
    data = encoders[kind]((noise('int16', (20_000, 2)), 16000))
    with pytest.raises(DecodeError):
        decoders[kind](data[: int(part * len(data))])


def test_a_flac_file_that_ends_between_two_frames_is_rejected():
    data = encoders['flac']((noise('int16', (20_000, 1)), 16000))
    last = data.rindex(b'\xff\xf8')
    with pytest.raises(DecodeError, match='expected 20000 samples, got'):
        decoders['flac'](data[:last])


def test_damaged_flac_files_are_rejected():
    data = encoders['flac']((noise('int16', (20_000, 2)), 16000))
    for position in range(data.index(b'\xff\xf8'), len(data), len(data) // 40):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(DecodeError):
            decoders['flac'](bytes(damaged))


def test_oversized_audio_is_refused():
    data = encoders['flac']((np.zeros((100_000, 2), np.int16), 16000))
    assert len(data) < 20_000
    assert len(formats.decode_audio(data, max_bytes=400_000).samples) == 100_000
    with pytest.raises(DecodeError, match='expected at most 399999 bytes, got audio of more than'):
        formats.decode_audio(data, max_bytes=399_999)


def test_files_of_other_codecs_are_read():
    """A-law has 8 bits per sample, which decode to 16."""
    head = struct.pack('<HHIIHH', 6, 1, 8000, 8000, 1, 8)
    body = b'WAVEfmt ' + struct.pack('<I', len(head)) + head + b'data' + struct.pack('<I', 4) + b'\xd5\x55\xd5\x55'
    audio = decoders['wav'](b'RIFF' + struct.pack('<I', len(body)) + body)
    assert audio.samples.ravel().tolist() == [8, -8, 8, -8]


def test_datasets_of_audio(tmp_path):
    samples = noise('int16', (8, 50, 1))
    spec = {'sound': 'flac', 'words': 'wav[]'}
    with granular.DatasetWriter(tmp_path / 'data', spec) as writer:
        for i in range(8):
            writer.append({'sound': (samples[i], 8000), 'words': [(samples[j], 8000) for j in range(i)]})
    with granular.DatasetReader(tmp_path / 'data') as reader:
        datapoint = reader[5]
        assert datapoint['sound'].rate == 8000
        assert np.array_equal(datapoint['sound'].samples, samples[5])
        assert [np.array_equal(audio.samples, samples[j]) for j, audio in enumerate(datapoint['words'])] == [True] * 5
        batch = granular.MapDataset.source(reader).select(['sound']).batch(4)[1]
        assert batch['sound'].samples.shape == (4, 50, 1)
        assert batch['sound'].rate.tolist() == [8000] * 4
