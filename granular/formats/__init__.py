"""Encoders and decoders: conversion of values to bytes and back.

::

    record = granular.formats.encode_array(np.arange(3))
    array = granular.formats.decode_array(record)
"""

from granular.formats.codecs import decoders, encoders, inline_safe
from granular.formats.codecs.arrays import (
    decode_array,
    decode_msgpack,
    decode_tree,
    encode_array,
    encode_msgpack,
    encode_tree,
)
from granular.formats.codecs.audio import Audio, decode_audio, encode_audio
from granular.formats.codecs.images import decode_image, encode_image, encode_image_file, pack_image, unpack_image
from granular.formats.codecs.values import (
    decode_bool,
    decode_bytes,
    decode_float,
    decode_int,
    decode_json,
    decode_utf8,
    encode_bool,
    encode_bytes,
    encode_float,
    encode_int,
    encode_json,
    encode_utf8,
)
from granular.formats.codecs.videos import decode_video, encode_video
from granular.formats.frames import decode_frames, frame_times
from granular.formats.tfrecord import decode_example, decode_sequence_example

__all__ = [
    'Audio', 'decode_array', 'decode_audio', 'decode_bool', 'decode_bytes', 'decode_example', 'decode_float',
    'decode_frames', 'decode_image', 'decode_int', 'decode_json', 'decode_msgpack', 'decode_sequence_example',
    'decode_tree', 'decode_utf8', 'decode_video', 'decoders', 'encode_array', 'encode_audio', 'encode_bool',
    'encode_bytes', 'encode_float', 'encode_image', 'encode_image_file', 'encode_int', 'encode_json',
    'encode_msgpack', 'encode_tree', 'encode_utf8', 'encode_video', 'encoders', 'frame_times', 'inline_safe',
    'pack_image', 'unpack_image',
]  # fmt: skip
