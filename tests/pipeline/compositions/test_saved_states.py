"""States of earlier releases: each is continued exactly, or refused with the name of a stage or of the release."""

import collections
import itertools
import json
import pathlib
import re

import pytest

import granular
from granular import ShardOptions
from granular.errors import StateError
from tests.pipeline.compositions.atoms import atoms, read
from tests.pipeline.compositions.saved_states import cases, pipelines

FOLDER = pathlib.Path(__file__).parent / 'saved_states'
RELEASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0].isdigit())

pytestmark = pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')  # forked workers


def saved(kind):
    return [case for release in RELEASES for case in json.loads((FOLDER / release / f'{kind}.json').read_text())]


def restored(dataset, state, changes=()):
    """Return the elements that follow a state, or None if it is refused; the refusal must name a stage or release."""
    with iter(dataset) as iterator:
        try:
            iterator.set_state(state, changes)
            return list(itertools.islice(iterator, 500))
        except StateError as error:
            assert names_of(dataset) & set(re.findall(r'[\w.]+', str(error))), (str(dataset), str(error))
            return None


def names_of(dataset):
    """Return the names of all stages of a pipeline, and those of the releases."""
    return {*re.findall(r'\w+', str(dataset)), *RELEASES, granular.__version__}


def counts(names):
    return collections.Counter(names)


def named(elements):
    return [read(name) for element in elements for name in atoms(element)]


def test_all_pipelines_have_states_of_a_release():
    for kind, made in cases.all_cases().items():
        have = {case['pipeline'] for case in saved(kind)}
        assert have == {case['pipeline'] for case in made}, kind


@pytest.mark.parametrize('kind', ['maps', 'streams', 'data_loaders'])
def test_states_of_streams_continue_exactly_or_are_refused(kind):
    wrong = []
    makers = {**pipelines.MAPS, **pipelines.STREAMS, **pipelines.DATA_LOADERS}
    for case in saved(kind):
        dataset = makers[case['pipeline']]()
        elements = restored(dataset, case['state'])
        # An endless pipeline was saved with some of its elements.
        if elements is not None and cases.digest(elements[: case['following'][0]]) != case['following']:
            wrong.append((case['pipeline'], case['taken'], named(elements)))
    assert not wrong


def test_states_of_loaders_continue_exactly_or_are_refused():
    wrong = []
    for case in saved('loaders'):
        with granular.Loader(pipelines.LOADERS[case['pipeline']](), cases.BATCH) as loader:
            try:
                loader.load(case['state'])
            except StateError as error:
                assert any(release in str(error) for release in RELEASES), error
                continue
            batches = list(itertools.islice(loader, case['following'][0]))
        if cases.digest(batches) != case['following']:
            wrong.append((case['pipeline'], case['taken'], named(batches)))
    assert not wrong


@pytest.mark.parametrize('weights', [pipelines.WEIGHTS, *cases.OTHERS], ids=['same', 'others', 'one less'])
def test_states_of_mixes_continue_each_stream_or_are_refused(weights):
    wrong = []
    for case in saved('weights'):
        make = pipelines.OTHER_WEIGHTS[case['pipeline']]
        changes = [granular.changes.Removed(name) for name in pipelines.WEIGHTS if name not in weights]
        elements = restored(make(weights), case['state'], changes)
        if elements is None:
            continue
        given = counts(case['before'] + named(elements))
        for number, name in enumerate(pipelines.WEIGHTS):
            own = [given[text] for text in stream_of_mix(case['pipeline'], name)]
            # What a stream that is mixed no longer had in the window is given out or dropped.
            holes = [] if name not in weights else own[: max((i for i, n in enumerate(own) if n), default=-1) + 1]
            if max(own, default=0) > 1 or 0 in holes:
                wrong.append((case['pipeline'], case['taken'], number, own))
    assert not wrong


def stream_of_mix(pipeline, name):
    """Return the atoms of a stream of a mix in their order."""
    make = pipelines.texts if 'pack' in pipeline else pipelines.mixed
    return named(make({name: 1.0}))


@pytest.mark.parametrize('hosts', [1, 2, 3, 4])
def test_states_of_shards_are_continued_by_other_hosts_or_are_refused(hosts):
    wrong = []
    groups = collections.defaultdict(list)
    for case in saved('hosts'):
        groups[case['pipeline'], case['hosts'], case['taken']].append(case)
    for (name, before, taken), group in groups.items():
        if len(group) != before:
            continue  # one host had fewer elements
        make = pipelines.OTHER_HOSTS[name]
        expected = counts(named(make(ShardOptions(0, 1))))
        elements = [restored(make(ShardOptions(i, hosts)), group[i % before]['state']) for i in range(hosts)]
        if any(part is None for part in elements):
            assert hosts != before or all(part is None for part in elements), (name, before, taken)
            continue
        if hosts == before and not all(
            cases.digest(part) == case['following'] for part, case in zip(elements, group, strict=True)
        ):
            wrong.append((name, before, taken, 'other elements follow'))
        given = counts(text for case in group for text in case['before'])
        given.update(text for part in elements for text in named(part))
        if name == 'hosts, mix':  # ends with the first of its streams, and so leaves out the last elements of others
            expected = counts(set(given))
        if given != expected:
            wrong.append((name, before, taken, dict(given - expected), dict(expected - given)))
    assert not wrong
