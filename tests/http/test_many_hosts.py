"""Many hosts that share a bucket, in virtual time: the limits, retries and hedged requests of loaders."""

import numpy as np
import pytest

import granular
from tests.support.simulation.bucket import Model
from tests.support.simulation.hosts import Program, Run, write

SHARE = 5.5  # requests a second for a host: that of one of a thousand


@pytest.fixture(scope='module')
def bucket(tmp_path_factory):
    root = tmp_path_factory.mktemp('hosts') / 'bucket'
    write(root / 'data', shards=4, records=64, size=64)
    return root


def read(bucket, hosts, model, seconds, seed=0, batch=8):
    config = granular.IOConfig(max_gap=0)
    return Run(bucket, hosts, model, Program('data', batch=batch, config=config), seed).run(seconds)


@pytest.mark.parametrize('seed', range(2))
def test_hosts_share_the_rate_of_a_bucket_that_throttles(bucket, seed):
    run = read(bucket, 6, Model(rate=6 * SHARE), 60, seed)
    figures = run.share(20, 60)
    assert figures['goodput / limit'] > 0.9
    assert figures['wasted requests'] < 0.12
    assert figures['Jain'] > 0.8
    assert figures['failed hosts'] == 0


@pytest.mark.parametrize('seed', range(2))
def test_hosts_that_start_together_send_few_requests_in_vain(bucket, seed):
    run = read(bucket, 6, Model(rate=6 * SHARE), 10, seed, batch=64)
    assert run.share(0, 10)['goodput / limit'] > 0.95
    assert run.share(0, 10)['wasted requests'] < 0.35


@pytest.mark.parametrize('how', ['503', 'refused', 'silent'])
def test_rate_returns_after_an_outage_without_a_burst(bucket, how):
    rate, peaks = 4 * SHARE, []
    for seed in range(3):
        run = read(bucket, 4, Model(rate=rate, outage=(20.0, 40.0, how)), 70, seed)
        assert sum(run.line('done')[22:40]) == 0
        assert np.mean(run.line('done')[60:]) > 0.9 * rate
        assert run.share(0, 70)['failed hosts'] == 0
        peaks.append(max(run.line('requests')[22:]) / rate)
    assert np.mean(peaks) < 1.75  # most are 1.2; a host that waited for long may send more for a second


def test_large_host_returns_after_a_short_outage_although_some_requests_fail(bucket):
    run = read(bucket, 1, Model(rate=1000, outage=(4.0, 7.0, '503'), faults=0.002), 18, batch=32)
    assert np.mean(run.line('done')[14:]) > 100


@pytest.mark.parametrize('seed', range(3))
def test_batch_does_not_wait_for_those_that_are_read_ahead(bucket, seed):
    run = read(bucket, 1, Model(rate=SHARE), 40, seed, batch=16)
    ideal = 16 / SHARE
    assert max(run.waits[0]) < 4 * ideal  # behind the retries of eight batches, one took nine times as long
    assert len(run.waits[0]) > 0.6 * 40 / ideal


def test_higher_limit_is_used(bucket):
    run = read(bucket, 4, Model(rate=4 * SHARE, change=(20.0, 2.0)), 60)
    assert np.mean(run.line('done')[-10:]) > 1.8 * 4 * SHARE


@pytest.mark.parametrize(('hosts', 'share', 'seconds'), [(3, SHARE, 15), (1, 2000, 2)])
def test_same_seed_gives_the_same_requests(bucket, hosts, share, seconds):
    first, second, other = (read(bucket, hosts, Model(rate=hosts * share), seconds, seed, 64) for seed in (1, 1, 2))
    assert first.line('requests') == second.line('requests')
    assert first.waits == second.waits
    assert first.line('requests') != other.line('requests')
