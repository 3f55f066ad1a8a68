"""``granular plan``: the requests that it predicts, compared with those that a run sends."""

import json
import pathlib
import re

import pytest

import granular
from granular import MapDataset, shuffle
from granular.cli import plan as plans
from granular.cli.model import Limit, Prices, Rates, share, stores
from granular.cli.plan import Plan, Run, plan
from granular.errors import InvalidArgumentError, NotFoundError
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import HTTPServer

CALM = granular.IOConfig(max_gap=0, hedge=0)


def write(path, length=600, layout='refs'):
    spec = (
        {'data': 'bytes', 'times': 'int[]', 'label': 'int'} if layout == 'refs' else {'data': 'bytes', 'label': 'int'}
    )
    with granular.ShardedDatasetWriter(path, spec, granular.encoders, shardlen=150, layout=layout) as writer:
        for i in range(length):
            datapoint = {'data': bytes(500 + i % 7 * 100), 'times': list(range(i % 3)), 'label': i}
            writer.append({key: datapoint[key] for key in spec})
    return path


@pytest.fixture
def counter(fakegcs):
    """A proxy that counts its requests, and no others of this process."""
    with FaultProxy(fakegcs.endpoint) as proxy:
        yield proxy


def counted(counter, server, path):
    """Return the same path, reached through the counter."""
    return granular.Path(str(path), config=CALM, **{**server.options, 'endpoint_url': counter.endpoint})


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp('plan')
    write(folder / 'refs')
    write(folder / 'columns', layout='columns')
    with HTTPServer(folder) as server:
        yield server


def only_label(datapoint):
    return {'label': datapoint['label']}


def requests_of(server, path, order, batch, epochs=1, cached=()):
    """Return the requests that open a dataset and read all batches of an order."""
    before = len(server.requests)
    decoders = granular.decoders
    with granular.ShardedDatasetReader(path, decoders, cache_keys=cached) as reader:
        dataset = MapDataset.source(reader).shuffle(seed=0, order=order).repeat(epochs).map(only_label)
        with granular.Loader(dataset, batch) as loader:
            assert len(list(loader)) == len(reader) * epochs // batch
    return len(server.requests) - before


@pytest.mark.parametrize(('order', 'name'), [(shuffle.Index(), 'full'), (shuffle.Sequential(), 'sequential')])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('cached', [(), ('label',)])
@pytest.mark.parametrize('max_gap', [0, 3000])
def test_plan_of_batches_is_exact(server, order, name, layout, cached, max_gap):
    path = granular.Path(f'{server.endpoint}/{layout}', config=granular.IOConfig(max_gap=max_gap, hedge=0))
    report = plan(path, Run(batch=50, epochs=2), [name], cached=cached)
    (full,) = report.plans
    assert full.exact == 'exact'
    # Opening may need fewer requests, and a connection that gives the same reply twice costs one more.
    real = requests_of(server, path, order, 50, 2, cached)
    assert full.requests - full.opening <= real <= full.requests + full.opening + 3


def check_requests(full, counter, path, batch, **options):
    """Compare the requests of a plan with those of four batches."""
    before = counter.count
    with (
        granular.ShardedDatasetReader(path, **options) as reader,
        granular.Loader(MapDataset.source(reader).shuffle(seed=0).map(only_label), batch) as loader,
    ):
        assert len(list(loader)) == 4
    real = counter.count - before
    assert full.requests - full.opening <= real <= full.requests + full.opening + 3


@pytest.mark.parametrize('cached', [(), ('label', 'refs')])
def test_plan_of_an_indexed_dataset_is_exact(fakegcs, counter, cached):
    path = counted(counter, fakegcs, write(fakegcs.place() / 'data', 160))
    (plain,) = plan(path, Run(batch=40), ['full'], cached=cached).plans
    granular.build_index(path)
    (full,) = plan(path, Run(batch=40), ['full'], cached=cached).plans
    assert full.exact == 'exact'
    assert full.requests < plain.requests or cached
    check_requests(full, counter, path, 40, cache_keys=cached)


def test_bytes_of_a_plan_are_those_of_the_records(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    report = plan(path, Run(batch=50), ['full'], ['data'])
    assert report.plans[0].bytes == report.bytes == sum(500 + i % 7 * 100 for i in range(600))
    assert report.plans[0].requests == pytest.approx(600, rel=0.1)  # neighbours share a request


@pytest.mark.parametrize(('block', 'window'), [(8, 5), (16, 4), (3, 64)])
def test_plan_of_blocks_bounds_the_requests(server, block, window):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    (one,) = plan(path, Run(batch=50, epochs=2), [f'blocks:{block},{window}']).plans
    assert one.exact == 'at most'
    real = requests_of(server, path, shuffle.Blocks(block, window), 50, 2)
    assert one.requests * 0.7 <= real <= one.requests + one.opening


def test_plan_of_blocks_longer_than_the_dataset(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    whole, longer = plan(path, Run(50), ['blocks:600,1', f'blocks:{10**12},{10**12}']).plans
    assert (whole.requests, whole.bytes) == (longer.requests, longer.bytes)


def test_plan_of_a_block_cache_bounds_the_requests(server, tmp_path):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    (one,) = plan(path, Run(batch=50, epochs=3), ['cache']).plans
    config = granular.IOConfig(max_gap=0, hedge=0, cache_dir=str(tmp_path / 'cache'))
    cached = granular.Path(f'{server.endpoint}/columns', config=config)
    assert requests_of(server, cached, shuffle.Index(), 50, 3) <= one.requests + one.opening


def test_sampled_plans_are_close(server, monkeypatch):
    path = granular.Path(f'{server.endpoint}/refs', config=CALM)
    exact = plan(path, Run(batch=10), ['full']).plans[0]
    monkeypatch.setattr(plans, '_SAMPLES', 12)
    sampled = plan(path, Run(batch=10), ['full']).plans[0]
    assert (exact.exact, sampled.exact) == ('exact', 'estimate')
    assert sampled.requests == pytest.approx(exact.requests, rel=0.05)


def test_plan_of_a_bucket_counts_what_the_store_is_sent(fakegcs, counter):
    path = counted(counter, fakegcs, write(fakegcs.place() / 'data', 200, 'columns'))
    (full,) = plan(path, Run(batch=50), ['full']).plans
    check_requests(full, counter, path, 50)


def test_hosts_share_an_epoch_of_a_full_shuffle_and_each_read_all_blocks(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    one, four = (
        {each.order: each for each in plan(path, Run(25, hosts=hosts), ['full', 'blocks:15,40']).plans}
        for hosts in (1, 4)
    )
    name = 'shuffle.Blocks(15, 40)'
    assert four['shuffle.Index()'].requests == one['shuffle.Index()'].requests
    assert four[name].requests == 4 * one[name].requests
    assert four[f'{name}, own shards'].requests == one[name].requests
    assert four[f'{name}, own shards'].mixing < 0.8 < 0.95 < four[name].mixing
    assert four[name].opening == 4 * one[name].opening


def test_more_batches_ahead_are_advised_where_latency_limits(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    report = plan(path, Run(10), ['full'], rates=Rates(1e6, None, 0.2))
    ahead = report.plans[0].prefetch
    assert report.plans[0].limits == 'latency'
    assert f'Loader(prefetch={ahead})' in report.advice[0]
    (more,) = plan(path, Run(10, prefetch=ahead), ['full'], rates=Rates(1e6, None, 0.2)).plans
    assert more.limits == 'bandwidth'
    assert more.seconds < report.plans[0].seconds
    report = plan(path, Run(10, memory=80_000), ['full'], rates=Rates(1e6, None, 0.2))
    assert not report.plans[0].obstacle
    assert not any('prefetch' in sentence for sentence in report.advice[:1])


@pytest.mark.parametrize(
    ('hosts', 'prefixes', 'seconds', 'wanted', 'needed', 'goodput'),
    [
        (1, 1, 1000.0, 1000, 1, 1000.0),
        (10, 1, 100.0, 10_000, 2, 550.0),
        (10, 2, 100.0, 10_000, 2, 1000.0),
        (1000, 4, 10.0, 100_000, 19, 22.0),
        (1000, 4, None, None, None, 22.0),
    ],
)
def test_hosts_share_the_limit_of_a_store(hosts, prefixes, seconds, wanted, needed, goodput):
    found = share(Limit.of('s3', prefixes=prefixes), hosts, 1e6, seconds)
    assert (found.wanted, found.prefixes) == (wanted, needed)
    assert found.goodput == pytest.approx(goodput)
    assert (found.refused > 0) == (needed is not None and needed > prefixes)
    assert found.seconds == pytest.approx(1e6 / (5500 * prefixes))
    assert share(Limit(), hosts, 1e6, seconds) is None


def test_hosts_that_send_more_than_the_store_answers_take_longer_and_are_told_what_to_do(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    plans_of = {
        rate: plan(path, Run(10, hosts=10), ['full', 'blocks:15,40'], rates=Rates(1e9, 1000, 0.01), limit=limit)
        for rate, limit in ((None, None), (100, Limit(100)), (1e6, Limit(1e6)))
    }
    free, tight, wide = (plans_of[rate].plans[0] for rate in (None, 100, 1e6))
    assert free.share is None
    assert wide.share.refused == 0 < tight.share.refused
    assert wide.seconds == free.seconds < tight.seconds
    assert tight.limits == 'the store'
    assert tight.seconds == pytest.approx((tight.requests + tight.opening) / 100)
    assert tight.share.goodput == pytest.approx(10)
    assert tight.dollars == free.dollars  # refused requests are not billed
    (chosen,) = (one for one in plans_of[100].plans if one.order == plans_of[100].choice)
    assert f'--prefixes {chosen.share.prefixes}' in ' '.join(plans_of[100].advice)
    assert 'refuses' not in ' '.join(plans_of[1e6].advice)


@pytest.mark.parametrize('indexed', [False, True])
def test_opening_is_counted_in_the_time_and_with_own_shards_of_these_alone(fakegcs, counter, indexed):
    folder, hosts = fakegcs.place() / 'data', 4
    with granular.ShardedDatasetWriter(folder, {'n': 'int'}, granular.encoders, shardlen=8) as writer:
        for n in range(160):
            writer.append({'n': n})
    if indexed:
        granular.build_index(folder)
    path, rates = counted(counter, fakegcs, folder), Rates(1e9, 100, 0.001)
    report = plan(path, Run(8, hosts=hosts), ['blocks:4,4'], rates=rates, limit=Limit(100))
    for one, shards in zip(report.plans, ({}, {'shardstep': hosts}), strict=True):
        before = counter.count
        for host in range(hosts):
            options = shards and {'shardstart': host, **shards}
            with granular.ShardedDatasetReader(path, granular.decoders, **options) as reader:
                assert reader[0]['n'] == 8 * host * bool(shards)
        assert one.opening == pytest.approx(counter.count - before, rel=0.2)
        assert one.seconds == pytest.approx((one.opening + one.requests) / 100, rel=0.2)
    assert any('granular index' in sentence for sentence in report.advice) != indexed


def test_limits_of_stores_name_their_source_and_measured_shares_those_of_the_docs():
    for scheme, rate, parts in (('s3', 5500, 'prefixes'), ('gs', 5000, 'buckets')):
        limit = Limit.of(scheme)
        assert (limit.rate, limit.parts) == (rate, parts)
        assert limit.source.startswith('https://')
    assert Limit.of('http').rate is None
    assert Limit.of('http', 7).rate == 7
    measured = stores()['shared_limit']
    page = (pathlib.Path(__file__).parents[2] / measured['source']).read_text()
    row = re.search(r'^\| 1,000 at 5,500/s.*?\| ([\d.]+) \| (\d+) %', page, re.MULTILINE)
    assert (float(row[1]), int(row[2]) / 100) == (measured['goodput'], measured['wasted'])


def test_dollars_and_seconds_follow_from_prices_and_rates(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    prices = Prices('mine', '2025-01-01', 0.5, 2.0, '')
    (one,) = plan(path, Run(50, epochs=100, hosts=2), ['full'], rates=Rates(1e5, 100), prices=prices).plans
    assert one.dollars == pytest.approx((one.requests + one.opening) / 1000 * 0.5 + one.bytes / 1e9 * 2.0)
    assert one.seconds == pytest.approx(max(one.bytes / 2 / 1e5, one.requests / 2 / 100), rel=0.02)  # beside opening it


def test_prices_of_buckets_are_dated():
    for scheme in ('s3', 'gs'):
        prices = Prices.of(scheme)
        assert prices.read > 0 == prices.egress
        assert prices.date.count('-') == 2
        assert prices.source.startswith('https://')
    assert Prices.of('s3', 1.0, 2.0).read == 1.0
    assert Prices.of('http').read == 0.0
    for scheme, read, is_unknown in (('az', None, True), ('az', 0.0, False), ('', None, False)):
        assert ('unknown' in Prices.of(scheme, read).name) == is_unknown


def made(order, dollars, seconds, mixing, obstacle=''):
    return Plan(order, 1, 1, 1, dollars, seconds, '', None, None, 1, 1, mixing, 'exact', obstacle)


@pytest.mark.parametrize(
    ('orders', 'choice', 'reason'),
    [
        ([made('a', 2, None, 1.0), made('b', 1, None, 0.98), made('c', 0, None, 0.5)], 'b', 'lowest price'),
        ([made('a', 1, 90, 1.0), made('b', 2, 10, 0.98), made('c', 1, 10.4, 0.98)], 'c', 'shortest time'),
        ([made('a', 1, 9, 1.0, 'too large'), made('b', 2, 9, 1.0)], 'b', 'lowest price'),
        ([made('a', 1, 9, 0.4), made('b', 2, 9, 0.6)], 'b', 'mixes best'),
        ([made('a', 1, 9, 1.0, 'too large')], None, 'obstacle'),
    ],
)
def test_choice_mixes_fits_and_is_fast_or_cheap(orders, choice, reason):
    chosen, why = plans.choose(orders)
    assert chosen == choice
    assert reason in why


def test_orders_that_do_not_fit_are_not_chosen(server):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    report = plan(path, Run(50, memory=1000, disk=1000), ['full', 'cache'])
    assert report.choice is None
    assert all('memory' in one.obstacle for one in report.plans)
    report = plan(path, Run(50, disk=1000), ['full', 'cache'])
    assert 'disk' in report.plans[1].obstacle
    assert report.choice == 'shuffle.Index()'


def test_invalid_plans_are_errors(server, tmp_path):
    path = granular.Path(f'{server.endpoint}/columns', config=CALM)
    for order in ('half', 'blocks:1', 'blocks:1,2,3', 'full:3', 'blocks:0,4'):
        with pytest.raises(InvalidArgumentError):
            plan(path, Run(50), [order])
    for name in ('batch', 'epochs', 'hosts', 'prefetch'):
        with pytest.raises(InvalidArgumentError, match=f'{name}: expected an integer from'):
            Run(**{'batch': 50, name: 10**23})
    with pytest.raises(InvalidArgumentError, match='expected 1,000 datapoints or more .* got 600'):
        plan(path, Run(100, hosts=10))
    with pytest.raises(NotFoundError, match=r'expected a dataset \(a folder with a spec.json'):
        plan(granular.Path(tmp_path), Run(1))
    with pytest.raises(NotFoundError, match=f'^{tmp_path}/none: no such file or folder'):
        plan(granular.Path(tmp_path / 'none'), Run(1))


@pytest.mark.parametrize(
    ('option', 'value'),
    [('memory', '-1'), ('memory', 'nan'), ('disk', '-1'), ('disk', 'inf'), ('bytes-per-second', '0'),
     ('latency', '0'), ('prefix-rate', '0'), ('requests-per-second', '-5'),
     ('requests-per-second', 'nan'), ('read-price', '-1'), ('egress-price', 'nan'),
     ('latency', '1e300'), ('prefix-rate', '1e-320')],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_errors(granular_cli, server, option, value):
    code, out, err = granular_cli('plan', f'{server.endpoint}/columns', '--batch', 50, f'--{option}', value)
    assert (code, out) == (1, '')
    assert 'expected a number, ' in err


def test_command_prints_a_table_and_json(granular_cli, server, tmp_path):
    url, rates = f'{server.endpoint}/columns', tmp_path / 'bench.json'
    rates.write_text(json.dumps({'bytes_per_second': 1e6, 'requests_per_second': 1e3, 'first_byte_p50': 0.01}))
    code, out, err = granular_cli('plan', url, '--batch', 50, '--epochs', 90, '--hosts', 2, '--bench', rates, '--json')
    report = json.loads(out)
    assert (code, err) == (0, '')
    assert report['choice'] in {one['order'] for one in report['plans']}
    assert all(one['seconds'] > 0 for one in report['plans'])
    code, out, _ = granular_cli(
        'plan', url, '--batch', 10, '--hosts', 9, '--bench', rates, '--prefix-rate', 5, '--order', 'full'
    )
    assert code == 0
    for word in ('requests/s of all hosts', 'prefixes needed', 'limit: 5 requests/s per prefix', '--prefixes '):
        assert word in out
    code, out, _ = granular_cli('plan', url, '--batch', 50, '--read-price', 0.25, '--prefix-rate', 5)
    assert code == 0
    for word in ('shuffle.Index()', 'choose ', '$0.25 for 1,000 reads', 'time: pass --bench', 'limit: 5 requests/s'):
        assert word in out
    assert 'requests/s of all hosts' not in out  # unknown without rates
    rates.write_text('{}')
    code, _, err = granular_cli('plan', url, '--bench', rates)
    assert code == 1
    assert 'expected the output of granular bench --json' in err


def test_no_cache_is_planned_for_local_data(tmp_path):
    write(tmp_path / 'data')
    report = plan(granular.Path(tmp_path / 'data'), Run(batch=50))
    assert not any('cache_dir' in one.order for one in report.plans)
    assert any('cache_dir' in one.order for one in plan(granular.Path(tmp_path / 'data'), Run(50), ['cache']).plans)
