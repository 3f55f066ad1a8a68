"""Uploads in small parts: what S3 refuses, and moto, fake-gcs-server and Azurite take. Large ones cost seconds."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Final
from unittest import mock

import granular

PART: Final = 256 << 10


def small_parts(config: granular.IOConfig) -> granular.IOConfig:
    """Return the config with parts of ``PART`` bytes, which ``IOConfig`` itself refuses."""
    config = dataclasses.replace(config)
    object.__setattr__(config, 'part_size', PART)
    return config


@contextlib.contextmanager
def taken_by_moto() -> Iterator[None]:
    """Have moto, which runs in this process, take small parts."""
    with mock.patch('moto.s3.models.S3_UPLOAD_PART_MIN_SIZE', PART):
        yield
