"""docs/architecture.md lists the functions between the Loader and the socket as they are."""

import collections
import re
import traceback

import numpy as np
import pytest

import granular
from granular.aio.http.connection import Connection
from tests import ROOT
from tests.support.faults import FaultServer

PAGE = ROOT / 'docs' / 'architecture.md'


@pytest.fixture
def path(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'image': 'array', 'label': 'int'}, granular.encoders) as writer:
        for i in range(640):
            writer.append({'image': np.full((8, 8), i % 256, np.uint8), 'label': i})
    files = {f'data/{file.name}': file.read_bytes() for file in (tmp_path / 'data').iterdir()}
    with FaultServer(files=files) as server:
        config = granular.IOConfig(max_gap=0)
        yield granular.Path('s3://bucket/data', endpoint_url=server.endpoint, anon=True, config=config)


def frames_of_a_request(path, monkeypatch):
    """Return the functions that were running when most requests of records were sent, outermost first."""
    stacks, send = [], Connection.send

    def recorded(connection, exchange):
        stacks.append(traceback.extract_stack()[:-1])
        send(connection, exchange)

    monkeypatch.setattr(Connection, 'send', recorded)
    with granular.DatasetReader(path, granular.decoders) as reader:
        source = granular.sources.Transform(granular.sources.Epochs(reader, seed=0), lambda datapoint, seed: datapoint)
        with granular.Loader(source, 64, prefetch=0) as loader:
            for _ in range(8):
                next(loader)
    folder = f'{ROOT / "granular"}/'
    own = [[f for f in stack if f.filename.startswith(folder)] for stack in stacks]
    between = {'compute', '_read_columns'}  # the Loader, and the reading of records, but not of references to them
    from_loader = [stack for stack in own if stack[-1].name == 'start' and between <= {frame.name for frame in stack}]
    paths = collections.Counter(
        tuple((frame.filename.removeprefix(folder), frame.name) for frame in stack) for stack in from_loader
    )
    return [*paths.most_common(1)[0][0], ('aio/http/connection.py', 'send')]


def test_documented_frames_are_those_of_a_request(path, monkeypatch):
    frames = frames_of_a_request(path, monkeypatch)
    page = PAGE.read_text()
    block = re.search(r'<!-- frames -->\n```text\n(.*?)```\n<!-- /frames -->', page, re.DOTALL)
    assert block is not None
    assert block[1].splitlines() == [f'{file:<36} {name}' for file, name in frames]
    assert f'{len(frames)} in {len({file for file, _ in frames})} files' in page
