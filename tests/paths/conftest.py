"""Fixtures: stores that include moto, the S3 server of `granular.testing`."""

import os

import pytest

import granular
from tests.conftest import BUCKETS, STORES, empty_folder


@pytest.fixture(params=[*STORES, 'moto'])
def root(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> granular.Path:
    """An empty folder in every kind of store."""
    return empty_folder(request, tmp_path)


@pytest.fixture(params=[*BUCKETS, 'moto'])
def bucket(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> granular.Path:
    """An empty folder in a bucket of every kind of object store."""
    return empty_folder(request, tmp_path)
