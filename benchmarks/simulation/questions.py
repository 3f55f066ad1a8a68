"""The questions: each runs hosts against a model of a bucket, and returns figures and lines over time."""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import granular
from granular import aio
from tests.support.simulation.bucket import Bucket, Model
from tests.support.simulation.hosts import Program, Run, address, indexed, write
from tests.support.simulation.world import Host, World

Lines = dict[str, list[float]]
RATE = 5500.0
READING = granular.IOConfig(max_gap=0)  # each record is a request


@dataclasses.dataclass
class Answer:
    """Answer to a question.

    Attributes:
      figures: by case, the figures by name.
      lines: what happened in each second, by name, for a plot.
      unit: of the lines.
    """

    figures: dict[str, dict[str, float]]
    lines: Lines = dataclasses.field(default_factory=dict)
    unit: str = 'requests/s'


def steady(run: Run) -> float:
    """Return the second from which on 5 s have at least 0.9 of the limit, and at most 10 % refused; inf for none."""
    limit = run.bucket.model.rate * run.bucket.model.partitions
    done, requests = np.array(run.line('done')), np.array(run.line('requests'))
    for second in range(len(done) - 5):
        window = slice(second, second + 5)
        if done[window].mean() >= 0.9 * limit and done[window].sum() >= 0.9 * requests[window].sum():
            return second
    return float('inf')


def dataset(folder: pathlib.Path, name: str = 'data', **options: Any) -> pathlib.Path:
    """Return a bucket with a dataset, which is written on first use."""
    root = folder / name / 'bucket'
    if not root.exists():
        write(root / 'data', **options)
    return root


def crowd(folder: pathlib.Path, scale: float) -> Answer:
    """1 to 1,000 hosts that read one prefix of 5,500/s."""
    answer = Answer({}, unit='share of the limit')
    for hosts, share, seconds in ((1, RATE, 20), (10, RATE / 10, 60), (100, RATE / 100, 60), (1000, RATE / 1000, 120)):
        # Fewer hosts of the same share, each of which sees the same refusals.
        count = max(min(hosts, 4), int(hosts * scale))
        run = Run(dataset(folder), count, Model(rate=share * count), Program('data'))
        run.run(seconds)
        first = np.quantile([waits[0] for waits in run.waits], [0.5, 0.9])
        figures = {
            **run.share(seconds // 2, seconds),
            'steady after s': steady(run),
            'wasted in the first 10 s': run.share(0, 10)['wasted requests'],
            'first batch after s, median': first[0],
            'first batch after s, nine of ten': first[1],
        }
        name = f'{hosts:,} hosts' if count == hosts else f'{hosts:,} hosts ({count} at {share * count:,.0f}/s)'
        answer.figures[name] = figures
        answer.lines[f'{hosts:,} hosts, answered'] = [done / count / share for done in run.line('done')]
        answer.lines[f'{hosts:,} hosts, requests'] = [sent / count / share for sent in run.line('requests')]
    return answer


def start(folder: pathlib.Path, scale: float) -> Answer:
    """All hosts open a dataset of 10,000 shards at once, with its index and without."""
    shards = int(10_000 * scale)
    root = dataset(folder, f'shards-{shards}', shards=shards, records=4, size=64)
    objects, config = indexed(root), granular.IOConfig()
    answer = Answer({}, unit='requests/s')

    async def opening(host: Host, index: bool) -> None:
        reader = await aio.ShardedDatasetReader.open(address('data', config), granular.decoders, index=index)
        opened.append(host.time() - began)
        await reader.aclose()

    for name, count, index in (('index', int(1000 * scale), True), ('no index', max(1, int(10 * scale)), False)):
        world, opened = World(), list[float]()
        bucket = Bucket(world, objects, Model(rate=RATE * scale))
        with world.begun():
            began = world.now
            hosts = [world.host() for _ in range(count)]
            for host in hosts:
                host.start(opening(host, index))
            while len(opened) < count and world.now - began < 3600:
                world.run(1)
        requests = sum(host.requests for host in hosts)
        answer.figures[f'{count:,} hosts, {shards:,} shards, {name}'] = {
            'requests a host': requests / count,
            'refused': sum(host.refused for host in hosts) / requests,
            'opened after s': max(opened) if len(opened) == count else float('inf'),
        }
        seconds = range(min(60, int(world.now - began)))
        answer.lines[f'{count:,} hosts, {name}'] = [float(bucket.seconds[second].requests) for second in seconds]
    return answer


def outage(folder: pathlib.Path, scale: float) -> Answer:
    """An outage of 60 s: refusals, refused connections, or silence."""
    answer = Answer({})
    count, rate = int(1000 * scale), RATE * scale
    for how in ('503', 'refused', 'silent'):
        model = Model(rate=rate, outage=(40.0, 100.0, how))
        run = Run(dataset(folder), count, model, Program('data')).run(170)
        done, requests = np.array(run.line('done')), np.array(run.line('requests'))
        former = done[25:40].mean()
        back = [second - 100 for second in range(100, 167) if done[second : second + 3].mean() >= 0.95 * former]
        answer.figures[f'{count} hosts, {how}'] = {
            'former rate / limit': former / rate,
            '95 % after s': back[0] if back else float('inf'),
            'peak of requests / limit, during': requests[40:100].max() / rate,
            'peak of requests / limit, after': requests[100:].max() / rate,
        }
        answer.lines[f'{how}, answered'], answer.lines[f'{how}, requests'] = run.line('done'), run.line('requests')
    return answer


def slow(folder: pathlib.Path, scale: float) -> Answer:
    """One of 16 partitions is slow by 10: for all of its requests, half of them, or a tenth."""
    answer = Answer({})
    for share in (1.0, 0.5, 0.1):
        found = {}
        for name, hedge in (('off', 0.0), ('on', granular.IOConfig().hedge)):
            config = dataclasses.replace(READING, hedge=hedge, concurrency=256)
            model = Model(partitions=16, slow=(1, 10.0, share), tail=(0.0, 1.0))
            run = Run(dataset(folder), 2, model, Program('data', prefetch=0, config=config))
            run.run(max(30, int(120 * scale)))
            times = np.concatenate([waits[10:] for waits in run.waits])
            found[name] = np.quantile(times, 0.99), np.mean(times), sum(run.line('requests')), sum(map(len, run.waits))
        (off, off_mean, requests, batches), (on, on_mean, more, others) = found['off'], found['on']
        added = (more / others) / (requests / batches) - 1
        answer.figures[f'{share:.0%} of its requests'] = {
            'p99 of a batch, off, ms': 1e3 * off, 'p99 of a batch, on, ms': 1e3 * on, 'p99, on / off': on / off,
            'mean, on / off': on_mean / off_mean, 'added load': added,
        }  # fmt: skip
    return answer


def doubled(folder: pathlib.Path, scale: float) -> Answer:
    """The limit doubles after ten minutes."""
    count, rate, after = int(1000 * scale), RATE * scale, 600
    run = Run(dataset(folder), count, Model(rate=rate, change=(after, 2.0)), Program('data')).run(after + 90)
    done = np.array(run.line('done'))
    used = [second - after for second in range(after, len(done) - 5) if done[second : second + 5].mean() >= 1.8 * rate]
    figures = {'90 % used after s': used[0] if used else float('inf'), 'share in the end': done[-20:].mean() / 2 / rate}
    return Answer({f'{count} hosts': figures}, {'answered': run.line('done'), 'requests': run.line('requests')})


def killed(folder: pathlib.Path, scale: float) -> Answer:
    """5 % of the hosts are killed and restarted each minute."""
    count, rate, seconds = int(1000 * scale), RATE * scale, 180
    run = Run(dataset(folder), count, Model(rate=rate), Program('data'))
    turn = iter(range(count))
    pause = max(1, int(60 / (0.05 * count)))

    def kill(second: int) -> None:
        if second % pause == 0:
            run.world.hosts[next(turn)].end()
            run.start(run.world.host())

    run.run(seconds, kill)
    before = run.done[59]
    each = np.array([run.done[-1][n] - before[n] for n in range(seconds // pause, count)], float)
    figures = run.share(60, seconds)
    figures['Jain'] = each.sum() ** 2 / len(each) / (each**2).sum()
    return Answer({f'{count} hosts': figures}, {'answered': run.line('done'), 'requests': run.line('requests')})


def unequal(folder: pathlib.Path, scale: float) -> Answer:
    """Half of the hosts need less than half of their share; the others take what there is."""
    count, rate, seconds = int(1000 * scale), RATE * scale, 360  # before the last minute, all have read ahead
    run = Run(dataset(folder), count, Model(rate=rate), Program('data'))
    quick, patient = Program('data'), Program('data', step=32.0)

    def begin(host: Host) -> None:
        run.waits.append([])
        host.start((patient if host.number % 2 else quick).run(host, run.waits[-1]))

    run.start = begin  # type: ignore[method-assign]
    run.run(seconds)
    each = np.array(run.done[-1], float) - np.array(run.done[-61], float)
    fast = each[::2]
    return Answer(
        {
            f'{count} hosts': {
                'goodput / limit': each.sum() / 60 / rate,
                'wasted requests': run.share(seconds - 60, seconds)['wasted requests'],
                'Jain of the fast': fast.sum() ** 2 / len(fast) / (fast**2).sum(),
                'the patient, of what they need': each[1::2].mean() / 60 / 2,
            }
        },
        {'answered': run.line('done'), 'requests': run.line('requests')},
    )


QUESTIONS = {fn.__name__: fn for fn in (crowd, start, outage, slow, doubled, killed, unequal)}


def ask(names: list[str], folder: pathlib.Path, scale: float) -> Iterator[tuple[str, Answer, float]]:
    """Yield each question's name, answer, and seconds of processor time."""
    logging.getLogger('granular').setLevel(logging.CRITICAL)
    for name in names:
        began = time.process_time()
        yield name, QUESTIONS[name](folder, scale), time.process_time() - began
