"""Encoders and decoders: conversion of values to bytes and back.

::

    record = granular.formats.encode_array(np.arange(3))
    array = granular.formats.decode_array(record)
"""

from granular.formats.plain import (
    decode_array,
    decode_bool,
    decode_bytes,
    decode_float,
    decode_image,
    decode_int,
    decode_json,
    decode_msgpack,
    decode_tree,
    decode_utf8,
    decode_video,
    decoders,
    encode_array,
    encode_bool,
    encode_bytes,
    encode_float,
    encode_image,
    encode_image_file,
    encode_int,
    encode_json,
    encode_msgpack,
    encode_tree,
    encode_utf8,
    encode_video,
    encoders,
    inline_safe,
    pack_image,
    unpack_image,
)

__all__ = [
    'decode_array',
    'decode_bool',
    'decode_bytes',
    'decode_float',
    'decode_image',
    'decode_int',
    'decode_json',
    'decode_msgpack',
    'decode_tree',
    'decode_utf8',
    'decode_video',
    'decoders',
    'encode_array',
    'encode_bool',
    'encode_bytes',
    'encode_float',
    'encode_image',
    'encode_image_file',
    'encode_int',
    'encode_json',
    'encode_msgpack',
    'encode_tree',
    'encode_utf8',
    'encode_video',
    'encoders',
    'inline_safe',
    'pack_image',
    'unpack_image',
]
