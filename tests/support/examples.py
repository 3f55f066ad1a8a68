"""TFRecord files and Examples as TensorFlow writes them: by protobuf, and by a plain writer of records."""

import functools
import struct

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


@functools.cache
def example_class():
    """The message class of ``tf.train.Example``, from the fields of tensorflow/core/example/example.proto."""
    file = descriptor_pb2.FileDescriptorProto(name='example.proto', package='tf', syntax='proto3')
    kinds = descriptor_pb2.FieldDescriptorProto

    def field(message, name, number, kind, label=kinds.LABEL_OPTIONAL, **options):
        message.field.add(name=name, number=number, type=kind, label=label, **options)

    scalars = {'BytesList': kinds.TYPE_BYTES, 'FloatList': kinds.TYPE_FLOAT, 'Int64List': kinds.TYPE_INT64}
    for name, kind in scalars.items():
        field(file.message_type.add(name=name), 'value', 1, kind, kinds.LABEL_REPEATED)
    feature = file.message_type.add(name='Feature')
    feature.oneof_decl.add(name='kind')
    for number, (name, kind) in enumerate(
        [('bytes_list', 'BytesList'), ('float_list', 'FloatList'), ('int64_list', 'Int64List')], 1
    ):
        field(feature, name, number, kinds.TYPE_MESSAGE, type_name=f'.tf.{kind}', oneof_index=0)
    features = file.message_type.add(name='Features')
    entry = features.nested_type.add(name='FeatureEntry')
    entry.options.map_entry = True
    field(entry, 'key', 1, kinds.TYPE_STRING)
    field(entry, 'value', 2, kinds.TYPE_MESSAGE, type_name='.tf.Feature')
    repeated = kinds.LABEL_REPEATED
    field(features, 'feature', 1, kinds.TYPE_MESSAGE, repeated, type_name='.tf.Features.FeatureEntry')
    field(file.message_type.add(name='Example'), 'features', 1, kinds.TYPE_MESSAGE, type_name='.tf.Features')
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName('tf.Example'))


def encode(features):
    """An Example of some features: lists of bytes, floats or integers, or None."""
    example = example_class()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if values is None:
            continue
        kind = next((type(value) for value in values), int)
        target = {bytes: feature.bytes_list, float: feature.float_list, int: feature.int64_list}[kind]
        target.SetInParent()
        target.value.extend(values)
    return example.SerializeToString()


def decode(data):
    """The features of an Example as protobuf has them; None if it is none."""
    try:
        example = example_class().FromString(data)
    except Exception:
        return None
    out = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof('kind')
        out[name] = None if kind is None else (kind, list(getattr(feature, kind).value))
    return out


def frame(record):
    """A record with its length and both checksums."""
    length = struct.pack('<Q', len(record))
    return length + masked(length) + record + masked(record)


def masked(data):
    checksum = google_crc32c.value(data)
    return struct.pack('<I', (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
