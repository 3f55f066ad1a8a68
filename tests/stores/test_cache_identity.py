"""Cache identities include everything that selects an object, however its server is chosen."""

import itertools
import os
import pickle

import numpy as np
import pytest
from botocore.session import Session

import granular
from granular.aio.stores import endpoints
from granular.errors import InvalidArgumentError, ObjectChangedError
from tests.support.faults import FaultServer, md5_etag
from tests.support.files import FORMATS, files_of_numbers, numbers_in
from tests.support.tables import cover

SPEC = {'x': 'int', 'data': 'bytes'}
CACHES = {'block': ('cache_dir',), 'index': ('index_cache',), 'both': ('cache_dir', 'index_cache')}


def dataset(folder, seed):
    """Return the files of a dataset by key, and its datapoints; names and sizes do not depend on the seed."""
    points = [{'x': seed + i, 'data': bytes([seed]) * 30_000} for i in range(6)]
    with granular.DatasetWriter(folder, SPEC, granular.encoders) as writer:
        for point in points:
            writer.append(point)
    return {f'ds/{file.name}': file.read_bytes() for file in folder.iterdir()}, points


@pytest.fixture
def servers(tmp_path):
    """Two servers with the same bucket, keys and versions, and the datapoints of each."""
    pairs = []
    for seed in (1, 2):
        files, points = dataset(tmp_path / f'ds-{seed}', seed)
        pairs.append((FaultServer(files=files), points))
    with pairs[0][0], pairs[1][0]:
        yield pairs


def write_configuration(monkeypatch, tmp_path, text):
    """An AWS configuration file."""
    file = tmp_path / f'config-{abs(hash(text))}'
    file.write_text(text)
    monkeypatch.setenv('AWS_CONFIG_FILE', str(file))


CHOICES = {
    's3-option': lambda patch, tmp, url: {'endpoint_url': url},
    's3-client-kwargs': lambda patch, tmp, url: {'client_kwargs': {'endpoint_url': url}},
    's3-service-variable': lambda patch, tmp, url: patch.setenv('AWS_ENDPOINT_URL_S3', url),
    's3-variable': lambda patch, tmp, url: patch.setenv('AWS_ENDPOINT_URL', url),
    's3-default-profile': lambda patch, tmp, url: write_configuration(patch, tmp, f'[default]\nendpoint_url = {url}\n'),
    's3-services': lambda patch, tmp, url: write_configuration(
        patch, tmp, f'[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = {url}\n'
    ),
    's3-profile-variable': lambda patch, tmp, url: (
        write_configuration(patch, tmp, f'[profile p]\nendpoint_url = {url}\n'),
        patch.setenv('AWS_PROFILE', 'p'),
    ),
    's3-profile-option': lambda patch, tmp, url: (
        write_configuration(patch, tmp, f'[profile "my p"]\nendpoint_url = {url}\n') or {'profile': 'my p'}
    ),
    'gs-option': lambda patch, tmp, url: {'endpoint_url': url},
    'gs-variable': lambda patch, tmp, url: patch.setenv('STORAGE_EMULATOR_HOST', url),
    'gs-variable-without-scheme': lambda patch, tmp, url: patch.setenv('STORAGE_EMULATOR_HOST', url.split('//')[1]),
}


def path_maker(choice, config):
    """Return a path in the bucket of the server that the choice selects."""
    scheme = choice.partition('-')[0]
    options = {'anon': True} if scheme == 's3' else {}
    return lambda chosen: granular.Path(
        f'{scheme}://bucket/ds', config=config, **options, **(chosen if isinstance(chosen, dict) else {})
    )


def read(root):
    with granular.DatasetReader(root, granular.decoders) as reader:
        return list(reader)


@pytest.mark.parametrize(('choice', 'cache'), cover([list(CHOICES)], [list(CACHES)]))
def test_servers_with_equal_paths_do_not_share_blocks(servers, choice, cache, monkeypatch, tmp_path):
    config = granular.IOConfig(**{name: str(tmp_path / 'cache') for name in CACHES[cache]})
    make, places = path_maker(choice, config), []
    for server, points in servers:
        server.etag = '1' if choice.startswith('gs') else server.etag
        places.append(make(CHOICES[choice](monkeypatch, tmp_path, server.endpoint)))
        for _ in range(2):
            assert read(places[-1]) == points
    # A store keeps the server that it was constructed for, in other processes as well.
    assert read(places[0]) == read(pickle.loads(pickle.dumps(places[0]))) == servers[0][1]
    assert read(places[1]) == servers[1][1]
    assert pickle.loads(pickle.dumps(places[1])) == places[1] != places[0]


class ByHeader(FaultServer):
    """A server whose files depend on a request header, with the same ETags."""

    others: dict[str, bytes]

    def parse(self, method, path, lines):
        request = super().parse(method, path, lines)
        return request._replace(data=self.others.get(request.key)) if lines.get('x-tenant') == 'two' else request


@pytest.mark.parametrize('cache', CACHES)
def test_headers_that_select_content_separate_the_cache(cache, tmp_path):
    config = granular.IOConfig(**{name: str(tmp_path / 'cache') for name in CACHES[cache]})
    (files, one), (others, two) = (dataset(tmp_path / f'ds-{seed}', seed) for seed in (1, 2))
    with ByHeader(files=files) as server:
        server.others = others
        places = [granular.Path(f'{server.endpoint}/bucket/ds', config=config)]
        for tenant in ('one', 'two'):
            places.append(granular.Path(f'{server.endpoint}/bucket/ds', config=config, headers={'x-tenant': tenant}))
        for _ in range(2):
            assert [read(root) for root in places] == [one, one, two]


def test_stores_without_versions_are_not_cached(tmp_path):
    config = granular.IOConfig(cache_dir=str(tmp_path / 'blocks'), index_cache=str(tmp_path / 'indices'))
    root = granular.Path(f'memory://{tmp_path.name}/ds', config=config)
    for seed in (1, 2):
        with granular.DatasetWriter(root, SPEC, granular.encoders) as writer:
            writer.append({'x': seed, 'data': b'1234'})
        assert [point['x'] for point in read(root)] == [seed]
        root.rmtree()
    assert not any(file.is_file() and file.stat().st_blocks for file in tmp_path.rglob('*.index'))
    assert not (tmp_path / 'blocks').exists()


@pytest.mark.parametrize('cache', CACHES)
def test_objects_with_weak_etags_are_not_cached(servers, cache, tmp_path):
    config = granular.IOConfig(**{name: str(tmp_path / 'cache') for name in CACHES[cache]})
    (server, one), (other, two) = servers
    server.etag = 'W/"one"'
    root = granular.Path(f'{server.endpoint}/bucket/ds', config=config)
    assert read(root) == one
    server.files = other.files
    assert read(root) == two


@pytest.mark.parametrize('cache', ['block', 'both'])
def test_same_version_with_another_size_is_another_object(cache, tmp_path):
    config = granular.IOConfig(**{name: str(tmp_path / 'cache') for name in CACHES[cache]})
    with FaultServer(files={'file': b'a' * 100_000}) as server:
        root = granular.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        assert root.read_ranges([5], [10], version='"one"') == [b'aaaaa']
        server.files['file'] = b'b' * 99_999
        assert len(root.read_bytes()) == 99_999
        assert root.read_ranges([5], [10], version='"one"') == [b'bbbbb']


def test_replaced_dataset_is_detected_with_both_caches(moto, tmp_path):
    root = moto.place()
    config = granular.IOConfig(cache_dir=str(tmp_path), index_cache=str(tmp_path))
    cached = granular.Path(str(root), config=config, **root.aio.store.options)

    def write(seed):
        with granular.DatasetWriter(root, SPEC, granular.encoders) as writer:
            for i in range(4):
                writer.append({'x': seed + i, 'data': bytes([seed]) * 1000})

    def in_a_new_process():
        with granular.Loader(granular.DatasetReader(cached, granular.decoders), batch=4, workers=1) as loader:
            return next(loader)['x'].tolist()

    write(1)
    for _ in range(2):
        assert in_a_new_process() == [1, 2, 3, 4]
    root.rmtree()
    write(7)
    with pytest.raises(ObjectChangedError):
        read(cached)
    assert [point['x'] for point in read(cached)] == [7, 8, 9, 10]
    assert in_a_new_process() == [7, 8, 9, 10]


CONFIG = """
[default]
region = eu-west-1
endpoint_url = http://default

[profile plain]
region = eu-west-2

[profile global]
endpoint_url = http://global

[profile services]
services = mine
endpoint_url = http://global

[profile other]
services = other
endpoint_url = http://global

[profile ignoring]
ignore_configured_endpoint_urls = TRUE
endpoint_url = http://global

[profile "with spaces"]
endpoint_url = http://spaces

[services mine]
s3 =
  endpoint_url = http://service
  other = 1
dynamodb =
  endpoint_url = http://wrong

[services other]
dynamodb =
  endpoint_url = http://wrong
"""
CREDENTIALS = """
[both]
endpoint_url = http://credentials
[plain]
aws_access_key_id = one
"""
PROFILES = ('', 'plain', 'global', 'services', 'other', 'ignoring', 'with spaces', 'both')
ENVIRONMENTS = (
    {},
    {'AWS_ENDPOINT_URL': 'http://variable'},
    {'AWS_ENDPOINT_URL': 'http://variable', 'AWS_ENDPOINT_URL_S3': 'http://s3'},
    {'AWS_ENDPOINT_URL': 'http://variable', 'AWS_IGNORE_CONFIGURED_ENDPOINT_URLS': 'true'},
    {'AWS_IGNORE_CONFIGURED_ENDPOINT_URLS': 'false', 'AWS_DEFAULT_REGION': 'eu-north-1'},
)


def test_s3_endpoints_match_botocore(tmp_path, monkeypatch):
    (tmp_path / 'config').write_text(CONFIG)
    (tmp_path / 'credentials').write_text(CREDENTIALS)
    files = {'AWS_CONFIG_FILE': '$HERE/config', 'AWS_SHARED_CREDENTIALS_FILE': f'{tmp_path}/credentials'}
    keys = {'aws_access_key_id': 'a', 'aws_secret_access_key': 'b'}
    loader = Session().get_component('data_loader')  # keeps the descriptions that it has read
    for number, (environment, profile) in enumerate(itertools.product(ENVIRONMENTS, PROFILES)):
        by_variable = bool((number + number // len(PROFILES)) % 2)
        with monkeypatch.context() as patch:
            all_of_it = {**environment, **files, 'HERE': str(tmp_path)}
            if profile and by_variable:
                all_of_it['AWS_PROFILE'] = profile
            for name, value in all_of_it.items():
                patch.setenv(name, value)
            options = {'profile': profile} if profile and not by_variable else {}
            endpoint = endpoints.s3(options, os.environ)
            session = Session(profile=options.get('profile'))
            session.register_component('data_loader', loader)
            client = session.create_client('s3', **keys, region_name=endpoint.region)
            url = client.meta.endpoint_url
            assert endpoint.url == (None if url.endswith('.amazonaws.com') else url), (environment, profile)
            variable = environment.get('AWS_DEFAULT_REGION')
            assert endpoint.region == (variable or session.get_config_variable('region') or 'us-east-1')


@pytest.mark.parametrize(
    ('environment', 'endpoint'),
    [
        ({}, 'https://storage.googleapis.com'),
        ({'GOOGLE_CLOUD_UNIVERSE_DOMAIN': 'example.com'}, 'https://storage.example.com'),
        ({'STORAGE_EMULATOR_HOST': ''}, 'https://storage.googleapis.com'),
        ({'STORAGE_EMULATOR_HOST': 'default'}, 'https://storage.googleapis.com'),
        ({'STORAGE_EMULATOR_HOST': 'localhost:99'}, 'http://localhost:99'),
        ({'STORAGE_EMULATOR_HOST': 'https://two', 'GOOGLE_CLOUD_UNIVERSE_DOMAIN': 'example.com'}, 'https://two'),
    ],
)
def test_gcs_endpoint_comes_from_the_environment(environment, endpoint):
    assert endpoints.gcs({}, environment) == endpoint
    assert endpoints.gcs({'endpoint_url': 'http://given'}, environment) == 'http://given'


def test_namespaces_separate_caches():
    def identity(environment=None, **options):
        return endpoints.s3(options, {'AWS_CONFIG_FILE': '/none', **(environment or {})}).identity

    assert identity() == identity(region='eu-west-1') == identity(key='a', secret='b') == 'aws'
    assert identity(region='cn-north-1') == 'aws-cn'
    regions = 'us-gov-west-1', 'eusc-de-east-1', 'us-iso-east-1', 'us-isob-east-1', 'eu-isoe-west-1', 'us-isof-east-1'
    for region in regions:
        assert identity(region=region) == Session().get_partition_for_region(region)
    assert identity({'AWS_REGION': 'us-gov-west-1'}) == 'aws-us-gov'
    mine = {'endpoint_url': 'http://mine'}
    # A server of others may have a bucket of that name for each account.
    names = [identity(**mine), identity(**mine, key='a'), identity(**mine, key='b'), identity(**mine, anon=True)]
    assert len({*names, identity({'AWS_ACCESS_KEY_ID': 'a'}, **mine)}) == 5
    assert identity(**mine, key='secret-id') == identity(endpoint_url='http://mine/', key='secret-id')
    assert 'secret-id' not in identity(**mine, key='secret-id')


def test_invalid_configuration_file_is_an_error(tmp_path, monkeypatch):
    write_configuration(monkeypatch, tmp_path, 'no section, and a secret')
    with pytest.raises(InvalidArgumentError, match=r'config-\d+: is not an AWS configuration file') as failed:
        granular.Path('s3://bucket/key')
    assert 'secret' not in str(failed.value)


def test_cache_fingerprints_include_the_server(servers, redis_server, tmp_path):
    """Two readers of the same bucket, keys and versions, of different servers, and bags in memory of the same size."""
    sources = []
    for server, points in servers:
        root = granular.Path('s3://bucket/ds', endpoint_url=server.endpoint, anon=True)
        sources.append((granular.DatasetReader(root, granular.decoders), points))
        bag = root / 'data.bag'
        sources.append((granular.BagReader(bag), [point['data'] for point in points]))
        sources.append((granular.BagReader(bag.read_bytes()), [point['data'] for point in points]))
    for source, points in sources:
        with granular.RedisCache(source, redis_server.url, namespace=f'identity-{tmp_path.name}') as cache:
            for _ in range(2):
                assert cache.fetch(range(6)) == points
            assert cache.stats()['misses'] == cache.stats()['hits'] == 6
    for source, _ in sources:
        source.close()


NUMBERS = {f'file?id={first}': range(first, first + 3) for first in (200, 300)}


def numbers_files(suffix, key, numbers):
    """Return the files of a format, or a bag, with these numbers, of which the first has a key, by their keys."""
    if suffix != 'bag':
        name, _, query = key.partition('?')
        return {f'{file}?{query}': data for file, data in files_of_numbers(suffix, name, numbers).items()}
    records = [b'n %d' % number for number in numbers]
    return {key: b''.join(records) + np.cumsum([len(record) for record in records]).astype('<i8').tobytes()}


def all_numbers_files(suffix):
    return {
        name: data for key, numbers in NUMBERS.items() for name, data in numbers_files(suffix, key, numbers).items()
    }


@pytest.mark.parametrize('suffix', ['bag', *FORMATS])
def test_queries_that_select_content_separate_caches(suffix, redis_server, tmp_path):
    """Files of the same size and version, whose addresses differ in the query, which messages hide."""
    with FaultServer(files=all_numbers_files(suffix)) as server:
        for key, numbers in NUMBERS.items():
            path = granular.Path(f'{server.endpoint}/bucket/{key}')
            with granular.BagReader(path) if suffix == 'bag' else FORMATS[suffix].opener()(path) as source:
                with granular.RedisCache(source, redis_server.url, namespace=f'query-{tmp_path.name}') as cache:
                    assert numbers_in(cache) == [*numbers]


@pytest.mark.parametrize('suffix', FORMATS)
def test_queries_that_select_content_separate_the_files_of_a_pickled_source(suffix):
    files = all_numbers_files(suffix)
    with FaultServer(files=files) as server:
        server.etag_of = md5_etag
        paths = [granular.Path(f'{server.endpoint}/bucket/{key}') for key in NUMBERS]
        with FORMATS[suffix].opener()(paths) as source:
            pickled = pickle.dumps(source)
            before = dict(files)
            for key in NUMBERS:
                files.update(numbers_files(suffix, key, range(400, 403)))
                with pytest.raises(ObjectChangedError, match='was replaced') as failed:
                    pickle.loads(pickled).fetch(range(6))
                assert f'id={key[-3:]}' not in str(failed.value)
                files.update(before)
            assert numbers_in(pickle.loads(pickled)) == [*range(200, 203), *range(300, 303)]
