"""Datasets for the tests and screenshots of ``granular view``."""

import io
import json
import wave

import numpy as np

import granular

SPEC = {
    'image': 'jpg',
    'label': 'int',
    'caption': 'utf8',
    'score': 'float',
    'clip': 'mp4',
    'sound': 'bytes',
    'depth': 'array',
    'frames': 'jpg[]',
    'meta': 'json',
    'words': 'utf8[]',
    'box': 'tree',
}
ADJECTIVES = ('amber', 'calm', 'distant', 'folded', 'hollow', 'quiet', 'restless', 'silver')
NOUNS = ('dunes', 'harbour', 'lichen', 'mesa', 'ripples', 'strata', 'tide', 'weather')


def field(rng, height, width):
    """Return smooth random numbers from 0 to 1."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [
        rng.normal()
        / (1 + i)
        * np.sin(rng.normal() * 4 * (1 + i) * x + rng.normal() * 4 * (1 + i) * y + rng.random() * 7)
        for i in range(6)
    ]
    total = np.sum(waves, axis=0)
    return (total - total.min()) / (np.ptp(total) or 1)


def picture(rng, height=240, width=320):
    """Return a picture of layers in a few colours."""
    palette = np.array([rng.integers(20, 90, 3), rng.integers(70, 200, 3), rng.integers(150, 255, 3)])
    levels = field(rng, height, width) * 1.98
    low = levels.astype(int)
    part = (levels - low)[..., None]
    return (palette[low] * (1 - part) + palette[low + 1] * part).astype(np.uint8)


def tone(frequency, seconds=0.4, rate=8000):
    """Return a tone as a WAV file."""
    stream = io.BytesIO()
    with wave.open(stream, 'wb') as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(
            (np.sin(np.arange(int(seconds * rate)) * 6.283 * frequency / rate) * 9000).astype('<i2').tobytes()
        )
    return stream.getvalue()


def movie(rng, frames=24, side=128):
    """Return a video of a disc that moves over a picture."""
    ground = picture(rng, side, side)
    y, x = np.mgrid[0:side, 0:side]
    video = np.stack([ground] * frames)
    for i in range(frames):
        video[i][(x - 10 - 4 * i) ** 2 + (y - side // 2) ** 2 < 120] = 255
    return granular.formats.encode_video(video, format='mp4', codec='h264')


def datapoints(count, seed=0, distinct=24):
    """Yield datapoints of ``SPEC``; pictures and videos repeat, as they take long to make."""
    rng = np.random.default_rng(seed)
    pictures = [granular.formats.encode_image(picture(rng)) for _ in range(distinct)]
    movies = [movie(rng) for _ in range(2)]
    for i in range(count):
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        yield {
            'image': pictures[i % distinct],
            'label': i % 10,
            'caption': f'{adjective} {noun}, seen from number {i}',
            'score': float(np.round(rng.normal(0.6, 0.15), 4)),
            'clip': movies[i % len(movies)],
            'sound': tone(200 + 10 * i),
            'depth': field(rng, 48, 64).astype(np.float32),
            'frames': [pictures[(i + j) % distinct] for j in range(i % 7)],
            'meta': {
                'camera': {'name': f'unit {i % 3}', 'iso': 100 * (1 + i % 4)},
                'tags': [str(adjective), str(noun)],
            },
            'words': [str(adjective), str(noun), f'{i}'],
            'box': {'corners': np.array([[i, 0], [i + 4, 9]]), 'id': 2**60 + i},
        }


def write(path, count=250, shardlen=100, distinct=24):
    """Write a sharded dataset and files of other kinds below a path."""
    path.mkdir(exist_ok=True)
    with granular.ShardedDatasetWriter(path / 'train', SPEC, granular.encoders, shardlen) as writer:
        for datapoint in datapoints(count, distinct=distinct):
            writer.append(datapoint)
    with granular.DatasetWriter(
        path / 'labels', {'label': 'int', 'name': 'utf8'}, granular.encoders, layout='columns'
    ) as writer:
        for i in range(30):
            writer.append({'label': i % 3, 'name': f'name {i}'})
    (path / 'notes').mkdir()
    (path / 'notes' / 'readme.json').write_text(json.dumps({'by': 'nobody'}))
    return path


HOSTILE = (
    '<script>document.title="owned"</script>',
    '<img src=x onerror="document.title=\'owned\'">',
    '"><svg onload=document.title="owned">',
    "javascript:document.title='owned'",
    '{{constructor.constructor("document.title=1")()}}',
)
HOSTILE_SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" onload="document.title=\'owned\'">'
    b'<script>document.title="owned"</script></svg>'
)
HOSTILE_HTML = b'<!doctype html><script>document.title="owned"</script>'


def write_hostile(path):
    """Write a dataset of markup and damaged media, and files with markup in their names."""
    spec = {
        'image': 'jpg',
        'text': 'utf8',
        'page': 'bytes',
        'vector': 'svg',
        'data': 'json',
        'tree': 'tree',
        'clip': 'mp4',
    }
    encoders = {**granular.encoders, 'svg': bytes, 'jpg': bytes, 'mp4': bytes}
    with granular.DatasetWriter(path / 'hostile', spec, encoders) as writer:
        for text in HOSTILE:
            writer.append(
                {
                    'image': b'\xff\xd8\xff' + text.encode(),
                    'text': text,
                    'page': HOSTILE_HTML,
                    'vector': HOSTILE_SVG,
                    'data': {text: [text]},
                    'tree': {text: text},
                    'clip': HOSTILE_HTML,
                }
            )
    names = ['<img src=x onerror=document.title=1>', '"onmouseover="document.title=1', "a'b&amp;c"]
    for name in names:
        (path / 'files' / name).mkdir(parents=True)
        (path / 'files' / name / 'empty.txt').write_text('')
    return names
