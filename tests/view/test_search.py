"""Filters, sorts and counts of ``granular view``, asked over HTTP."""

import math
import signal
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import granular
from granular.view.names import Names
from tests.support.programs import INTERRUPTIBLE, program
from tests.view.serving import Served
from tests.view.test_server import ask

NUMBERS = [3.5, -2.0, math.inf, 0.0, -0.0, -math.inf, math.nan, 1e-300, 5e-324, -1e300, 0.1 + 0.2, 0.3]
INTEGERS = [7, -7, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63 - 2, -(2**63), 0, 1, -1, 2**60 + 7]
TEXTS = ['b', 'a', '', 'B', 'ab', '10', '9', 'é', 'z', 'aa', 'ba', '0']


def find(served, path, *conditions, **options):
    """Return what a search finds, in as many steps as it takes."""
    key, relation, text = zip(*conditions, strict=True) if conditions else ((), (), ())
    found, matches, at = {}, [], 0
    while not found or found['next'] < found['length']:
        found = ask(served, '/api/search', path=path, key=key, relation=relation, text=text, **{'from': at, **options})
        assert found.status == 200, found.body
        found = found.json
        matches += found['matches']
        at = found['next']
    return {**found, 'matches': matches}


@pytest.mark.parametrize(
    'conditions, expected',
    [
        ([('label', '=', '3'), ('caption', 'has', 'number 1')], [13, 103, 113]),
        (
            [('label', '>', '2'), ('label', '<', '5'), ('meta', 'has', 'unit 2')],
            [i for i in range(120) if 2 < i % 10 < 5 and i % 3 == 2],
        ),
        ([('frames', 'length>=', '5'), ('label', '=', '0')], [i for i in range(0, 120, 10) if i % 7 >= 5]),
        ([('words', 'length=', '3'), ('image', 'bytes<', '1')], []),
        ([('label', '=', '3'), ('', 'damaged', '')], []),
        ([('label', '=', '3'), ('label', '=', '4')], []),
    ],
)  # fmt: skip
def test_datapoints_meet_all_conditions(served, conditions, expected):
    assert find(served, 'train', *conditions)['matches'] == expected
    assert find(served, 'train', *reversed(conditions))['matches'] == expected


@pytest.mark.parametrize(
    'target',
    [
        'key=label&relation==',
        'key=frames&relation==&text=1',
        'key=label&relation=length=&text=1',
        'key=&relation==&text=1',
        'key=no&relation=damaged&text=',
        'key=label&relation=bytes&text=1',
        'key=damaged&relation=damaged&text=',
        'key=damaged&relation==&text=1',
        'sort=no',
        'sort=damaged',
        'count=damaged',
        'count=frames',
    ],
)
def test_bad_searches_say_why(served, target):
    reply = ask(served, f'/api/search?path=train&{target}')
    assert reply.status == 400 and len(reply.json['error']) > 10


def test_json_is_searched_as_the_page_shows_it_and_texts_are_sorted_whole(tmp_path):
    values = [{'ok': True, 'none': None}, {'ok': False, 'name': 'é "b"'}, ["it's", 1.5]]
    texts = ['x' * 500 + end for end in 'cab']
    with granular.DatasetWriter(tmp_path / 'd', {'meta': 'json', 'text': 'utf8'}) as writer:
        for value, text in zip(values, texts, strict=True):
            writer.append({'meta': value, 'text': text})
    with Served(granular.Path(tmp_path)) as served:
        for index in range(3):
            shown = ask(served, '/api/rows', path='d', start=index, count=1).json['columns']['meta'][0]['text']
            assert find(served, 'd', ('meta', 'has', shown))['matches'] == [index]
        assert find(served, 'd', ('meta', 'has', '"OK": true'))['matches'] == [0]
        assert find(served, 'd', ('meta', 'has', 'None'))['matches'] == [0]
        assert find(served, 'd', ('meta', 'has', "'ok'"))['matches'] == []
        order = find(served, 'd', sort='text')['order']
        assert sorted(range(3), key=lambda i: order[i]) == [1, 2, 0]


def test_search_looks_no_further_than_it_is_told(served):
    found = ask(served, '/api/search?path=train&from=10&to=25&sort=label').json
    assert (found['matches'], found['next']) == (list(range(10, 25)), 25)


def test_order_is_that_of_the_values(tmp_path):
    spec = {'float': 'float', 'int': 'int', 'utf8': 'utf8', 'list': 'int[]', 'bytes': 'bytes'}
    with granular.DatasetWriter(tmp_path / 'd', spec, granular.encoders) as writer:
        for i, values in enumerate(zip(NUMBERS, INTEGERS, TEXTS, strict=True)):
            sizes = {'list': [0] * (i * 5 % 12), 'bytes': bytes(i * 7 % 12)}
            writer.append({**dict(zip(spec, values, strict=False)), **sizes})
    # A column of another file has values of several kinds.
    pyarrow.parquet.write_table(pyarrow.table({'value': [2, None, 10, -1]}), tmp_path / 'p.parquet')
    columns = {'float': NUMBERS, 'int': INTEGERS, 'utf8': TEXTS}
    columns |= {'list': [i * 5 % 12 for i in range(12)], 'bytes': [i * 7 % 12 for i in range(12)]}
    with Served(granular.Path(tmp_path)) as served:
        for key, values in columns.items():
            order = find(served, 'd', sort=key)['order']
            missing = [i for i, value in enumerate(values) if value != value]
            assert [i for i, text in enumerate(order) if text is None] == missing
            there = [i for i in range(12) if i not in missing]
            assert sorted(there, key=lambda i: order[i]) == sorted(there, key=lambda i: values[i]), key
        order = find(served, 'p.parquet', sort='value')['order']
        assert sorted([0, 2, 3], key=lambda i: order[i]) == [3, 0, 2] and order[1] is None


def test_counts_name_the_classes_of_all_datapoints(tmp_path, example):
    (tmp_path / 'classes.txt').write_text('zero\none\ntwo\n')
    names = Names({'label': f'{tmp_path / "classes.txt"}'})
    with Served(example, names=names) as served:
        counts = find(served, 'labels', count='label')['counts']
        assert sorted(counts) == [['0', 'zero', 10], ['1', 'one', 10], ['2', 'two', 10]]
        # Classes without a name have a number.
        assert sorted(find(served, 'train', count='label')['counts'])[1:4] == [
            ['1', 'one', 12], ['2', 'two', 12], ['3', '', 12],
        ]  # fmt: skip
        assert find(served, 'labels', ('label', '=', 'two'))['matches'] == list(range(2, 30, 3))
        cells = ask(served, '/api/rows', path='labels', count=3).json['columns']['label']
        assert [(cell['text'], cell['name']) for cell in cells] == [('0', 'zero'), ('1', 'one'), ('2', 'two')]


def test_bar_of_a_histogram_counts_what_its_filter_finds(tmp_path):
    rng = np.random.default_rng(0)
    spec = {
        'float': 'float',
        'int': 'int',
        'few': 'int',
        'name': 'utf8',
        'list': 'int[]',
        'text': 'utf8',
        'bool': 'bool',
    }
    with granular.DatasetWriter(tmp_path / 'd', spec, granular.encoders) as writer:
        for i in range(300):
            number = float(rng.normal() * 10.0 ** rng.integers(-3, 3)) if i else math.nan
            name, text = str(rng.choice(['a', 'b c', ''])), 'x' * int(rng.integers(0, 400))
            values = (
                number,
                int(rng.integers(-(2**40), 2**40)),
                int(rng.integers(9)),
                name,
                [0] * (i % 5),
                text,
                i % 3 == 0,
            )
            writer.append(dict(zip(spec, values, strict=True)))
    names = ['x', None, 'y', 'x', None, 'x'] * 3
    numbers = [1, None, 2, 10, 3, 1] * 3
    pyarrow.parquet.write_table(pyarrow.table({'name': names, 'number': numbers}), tmp_path / 'p.parquet')
    measures = {'values': '', 'bytes': 'bytes', 'values per sequence': 'length'}
    with Served(granular.Path(tmp_path)) as served:
        checked = 0
        charts = [
            (path, row['key'], chart)
            for path in ('d', 'p.parquet')
            for row in ask(served, '/api/histograms', path=path).json['keys']
            for chart in row['charts']
        ]
        for path, key, chart in charts:
            if chart['title'] not in measures:  # of the first values of sequences
                continue
            for i, (low, high, number, _) in enumerate(chart['bars']):
                last = i == len(chart['bars']) - 1
                relations = [('=', low)] if chart.get('exact') else [('>=', low), ('<=' if last else '<', high)]
                conditions = [(key, measures[chart['title']] + relation, text) for relation, text in relations]
                assert len(find(served, path, *conditions)['matches']) == number, (path, key, chart['title'], low)
                checked += 1
        assert {chart['title'] for path, _, chart in charts if path == 'p.parquet'} == {'values'}
        assert checked > 90


def test_damaged_values_of_each_type_are_found(tmp_path):
    good = {
        'utf8': 'text', 'int': 1, 'float': 0.5, 'bool': True, 'json': [1], 'tree': {'a': 1}, 'array': np.arange(3),
        'jpg': np.zeros((8, 8, 3), np.uint8), 'png': np.zeros((8, 8, 3), np.uint8), 'bytes': b'\xff',
    }  # fmt: skip
    spec = {**{kind: kind for kind in good}, 'texts': 'utf8[]', 'images': 'jpg[]'}
    whole = {kind: granular.encoders[kind](value) for kind, value in good.items()}
    whole |= {'texts': [whole['utf8']] * 3, 'images': [whole['jpg']] * 2}
    bad = dict.fromkeys(good, b'\xff' * 40) | {'texts': [whole['utf8'], b'\xff'], 'images': [whole['jpg'][:200]]}
    with granular.DatasetWriter(tmp_path / 'd', spec, dict.fromkeys(good, bytes)) as writer:
        for damaged in [None, *spec]:
            writer.append({key: (bad if key == damaged else whole)[key] for key in spec})
    with Served(granular.Path(tmp_path)) as served:
        wrong = [i for i, key in enumerate(spec, 1) if key != 'bytes']  # any bytes are right
        assert find(served, 'd', ('', 'damaged', ''))['matches'] == wrong
        for i, key in enumerate(spec, 1):
            assert find(served, 'd', (key, 'damaged', ''))['matches'] == [i] * (key != 'bytes'), key


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A dataset of tokens, and a module with a function that returns their text."""
    monkeypatch.setattr(sys, 'path', sys.path[:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'letters.py').write_text(
        'def decode(tokens): return "".join(chr(97 + token) for token in tokens)\nother = 3\n'
    )
    with granular.DatasetWriter(tmp_path / 'd', {'tokens': 'array', 'n': 'int'}, granular.encoders) as writer:
        for i, array in enumerate((np.arange(3, dtype='u2'), np.full(2000, 1, 'i8'), np.ones(2), np.arange(4) - 200)):
            writer.append({'tokens': array, 'n': i})
    yield Names(tokenizers={'tokens': 'letters:decode'})
    sys.modules.pop('letters', None)


def test_tokens_are_shown_as_text(tmp_path, tokens):
    with Served(granular.Path(tmp_path), names=tokens) as served:
        assert [row['family'] for row in ask(served, '/api/dataset', path='d').json['keys'][-2:]] == ['number', 'text']
        cells = ask(served, '/api/rows', path='d').json['columns']['tokens']
        assert (cells[0]['text'], cells[1]['text']) == ('abc', 'b' * 126)  # of the first 1,024 bytes
        assert 'expected an array of integers, got float64' in cells[2]['error']
        assert 'chr() arg' in cells[3]['error']
        value = ask(served, '/api/datapoint', path='d', index=1).json['values'][-1]
        assert (value['full'], value['cut'], value['type']) == ('b' * 2000, False, 'array')
        found = find(served, 'd', ('tokens', 'has', 'BC'))
        assert (found['matches'], found['skipped']) == ([0], 2)


@pytest.mark.usefixtures('tokens')
def test_command_takes_names(tmp_path):
    (tmp_path / 'classes.txt').write_text('zero\none\n')
    options = ['--classes', 'n=classes.txt', '--tokenizer', 'tokens=letters:decode']
    code = f"{INTERRUPTIBLE}import runpy; runpy.run_module('granular', run_name='__main__')"
    with program([sys.executable, '-c', code, 'view', 'd', *options]) as process:
        origin, _, token = process.stdout.readline().strip().partition('/?token=')
        columns = ask(types.SimpleNamespace(origin=origin, token=token), '/api/rows', path='').json['columns']
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=250)
    assert (columns['n'][1]['name'], columns['tokens'][0]['text']) == ('one', 'abc')


def test_names_of_keys_that_a_dataset_does_not_have_are_errors(tmp_path, tokens):
    with granular.DatasetWriter(tmp_path / 'other', {'n': 'int'}) as writer:
        writer.append({'n': 1})
    with pytest.raises(
        granular.errors.UnknownKeyError, match=r"names were given for \['tokens'\], the keys are \['n'\]"
    ):
        Served(granular.Path(tmp_path / 'other'), names=tokens).__enter__()
    with Served(granular.Path(tmp_path), names=tokens) as served:  # one of the datasets of the folder has the key
        assert ask(served, '/api/dataset', path='other').json['length'] == 1


def test_names_of_classes_end_with_their_line(tmp_path):
    for content, names in (
        ('\ufeffcat\r\n\r\ndog', ['cat', '', 'dog']), ('a\u2028b\x0c\nc\n', ['a\u2028b\x0c', 'c']), ('', []),
    ):  # fmt: skip
        (tmp_path / 'classes.txt').write_bytes(content.encode())
        assert Names({'label': f'{tmp_path / "classes.txt"}'}).classes == {'label': names}


@pytest.mark.parametrize('option', ['--classes', '--tokenizer'])
def test_command_says_what_names_it_expects(option, granular_cli):
    code, _, error = granular_cli('view', '.', option, 'label')
    assert code == 1
    assert f'{option}: expected KEY=' in error


@pytest.mark.parametrize(
    'options, message',
    [
        ({'classes': {'label': 'missing.txt'}}, r'missing\.txt: expected a file with the name of a class in each line'),
        ({'tokenizers': {'tokens': 'missing:decode'}}, 'missing:decode: expected MODULE:FUNCTION'),
        ({'tokenizers': {'tokens': 'letters:missing'}}, 'letters:missing: expected MODULE:FUNCTION'),
        ({'tokenizers': {'tokens': 'letters:other'}}, 'letters:other: expected a function, got 3'),
        ({'tokenizers': {'tokens': 'letters'}}, 'letters: expected MODULE:FUNCTION'),
    ],
)
@pytest.mark.usefixtures('tokens')
def test_names_that_are_not_there_are_errors(options, message):
    with pytest.raises(granular.errors.InvalidArgumentError, match=message):
        Names(**options)
