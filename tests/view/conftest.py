import pytest

import granular
from tests.view.chromium import chromium
from tests.view.example import write
from tests.view.serving import Served


@pytest.fixture(scope='session')
def example(tmp_path_factory):
    return write(granular.Path(tmp_path_factory.mktemp('view')), count=120, shardlen=50, distinct=6)


@pytest.fixture(scope='module')
def served(example):
    with Served(example) as served:
        yield served


@pytest.fixture(scope='package')
def driver():
    with chromium() as driver:
        yield driver
