"""Datasets whose objects may be read but not listed: the store denies access to objects that do not exist, too."""

import contextlib

import pytest

import granular
from granular.errors import AccessDeniedError, CorruptBagError, NotFoundError
from tests.support.faults import FaultServer, md5_etag
from tests.support.s3_faults import Answer, S3Proxy

DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
SPEC = {'x': 'int', 'y': 'utf8'}


class Policy(S3Proxy):
    """A bucket that may be read, but for some objects, and not listed."""

    denied = ()
    lists = False

    async def forward(self, request):
        answer = await super().forward(request)
        listing = request.kind == 'list' or answer.status == 404
        denied = request.target.partition('?')[0].endswith(tuple(self.denied)) and self.denied
        return Answer(403, {}, DENIED) if denied or (listing and not self.lists) else answer


class Web(FaultServer):
    """The same, as a web server."""

    denied = ()

    async def good(self, writer, request, cut=None):
        if request.data is None or (self.denied and request.key.endswith(tuple(self.denied))):
            await self.status(writer, request, 403, 'AccessDenied')
        else:
            await super().good(writer, request, cut)


@pytest.fixture(scope='module')
def written(moto):
    """A folder with datasets of each kind, and bags."""
    root = moto.place()
    for layout in ('refs', 'columns'):
        shards = {'shardlen': 4, 'layout': layout}
        for writer in (
            granular.DatasetWriter(root / f'one-{layout}', SPEC, layout=layout),
            granular.ShardedDatasetWriter(root / f'many-{layout}', SPEC, index=True, **shards),
            granular.ShardedDatasetWriter(root / f'bare-{layout}', SPEC, **shards),
        ):
            with writer:
                for i in range(10):
                    writer.append({'x': i, 'y': f'{i}'})
    for version in (1, 2, 3):
        with granular.BagWriter(root / f'v{version}.bag', version=version) as bag:
            bag.append(b'a')
            bag.append(b'bc')
    with granular.BagWriter(root / 'empty.bag', version=3) as bag:
        bag.append(b'')
    return root


@pytest.fixture(params=['s3', 'http'])
def policy(request, moto, written):
    """Return the folder under the policy, and its server."""
    if request.param == 's3':
        with Policy(moto.endpoint) as server:
            options = {**written.store.options, 'endpoint_url': server.endpoint}
            yield granular.Path(str(written), **options), server
        return
    files = {path.key: path.read_bytes() for path in written.rglob('*') if path.is_file()}
    with Web(files=files) as server:
        server.etag_of = md5_etag
        server.modified = {'': 'Fri, 21 Nov 2025 20:00:00 GMT'}
        yield granular.Path(f'{server.endpoint}/{written.store.root.partition("://")[2]}/{written.key}'), server


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_datasets_open_and_read_without_a_listing(policy, layout):
    root, _ = policy
    for opened in (
        lambda: granular.open(root / f'one-{layout}'),
        lambda: granular.open(root / f'many-{layout}'),
        lambda: granular.DatasetReader(root / f'one-{layout}', granular.decoders),
        lambda: granular.ShardedDatasetReader(root / f'many-{layout}', granular.decoders),
        lambda: granular.DatasetReader(root / f'bare-{layout}/000000', granular.decoders),
    ):
        with opened() as reader:
            assert len(reader) in (4, 10)
            assert reader.fetch([3, 1]) == [{'x': 3, 'y': '3'}, {'x': 1, 'y': '1'}]


@pytest.mark.parametrize('version', [1, 2, 3])
def test_bags_open_without_a_listing(policy, version):
    root, _ = policy
    for opened in (granular.open, granular.BagReader):
        with opened(root / f'v{version}.bag') as bag:
            assert list(bag) == [b'a', b'bc']


def test_bag_whose_version_is_unknown_is_not_taken_for_empty(policy):
    root, server = policy
    server.denied = ['.idx']
    with pytest.raises(AccessDeniedError):
        granular.BagReader(root / 'empty.bag')
    with pytest.raises((AccessDeniedError, CorruptBagError)):
        granular.BagReader(root / 'v3.bag')


@pytest.mark.parametrize('lists', [False, True])
@pytest.mark.parametrize('name', ['one-refs', 'bare-refs/000000', 'many-refs'])
def test_references_that_may_not_be_read_are_not_taken_for_columns(policy, name, lists):
    root, server = policy
    server.denied, server.lists = ['refs.bag', '.granular-index'], lists
    for opened in (granular.open, granular.DatasetReader, granular.ShardedDatasetReader):
        with pytest.raises((AccessDeniedError, NotFoundError)) as caught:
            opened(root / name)
        sharded = (opened is granular.ShardedDatasetReader) != name.startswith('many')
        assert isinstance(caught.value, AccessDeniedError) or sharded


@pytest.mark.parametrize('denied', ['spec.json', '.bag'])
def test_denied_files_are_not_taken_for_absent_ones(policy, denied):
    root, server = policy
    server.denied = [denied]
    sharded = ('many-refs', 'many-columns') if denied == '.bag' else ()  # an index has the spec
    for name in ('one-refs', 'one-columns', *sharded):
        with pytest.raises(AccessDeniedError), contextlib.closing(granular.open(root / name)) as reader:
            reader.fetch([0])


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_shards_without_an_index_name_the_remedy(policy, layout):
    root, _ = policy
    if root.store.read_only:
        with pytest.raises(AccessDeniedError, match='may not be listed'):
            granular.open(root / f'bare-{layout}')
    with pytest.raises(AccessDeniedError, match='granular index'):
        granular.ShardedDatasetReader(root / f'bare-{layout}', granular.decoders)


def test_shards_behind_the_index_are_not_left_out(policy, written, moto):
    root, server = policy
    if not root.store.read_only:
        with granular.ShardedDatasetWriter(written / 'grown', SPEC, shardlen=4, index=True) as writer:
            for i in range(8):
                writer.append({'x': i, 'y': f'{i}'})
        (written / 'many-refs/000002').copy(written / 'grown/000002')
        with pytest.raises(AccessDeniedError):
            granular.open(root / 'grown')


def test_wrong_credentials_are_not_absent_files(policy):
    root, server = policy
    server.denied = ['']
    server.lists = False
    for name in ('one-refs', 'many-refs', 'v2.bag'):
        with pytest.raises(AccessDeniedError):
            granular.open(root / name)
