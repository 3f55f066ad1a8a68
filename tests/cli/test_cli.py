"""The commands of the command line, their output and their errors."""

import json
import math
import os
import pathlib
import re
import ssl
import subprocess
import sys
import tomllib
import zipfile

import numpy as np
import pyarrow
import pytest
import trustme
from pyarrow import parquet

import granular
from granular.errors import GranularError
from tests.datasources.test_lerobot import LEFT, write_v3
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import FaultServer
from tests.support.files import FORMATS, write_numbers

SPEC = {'image': 'png', 'label': 'int', 'text': 'utf8', 'times': 'int[]', 'array': 'array', 'raw': 'bytes'}


@pytest.fixture
def path(tmp_path):
    with granular.ShardedDatasetWriter(tmp_path / 'ds', SPEC, granular.encoders, shardlen=3) as writer:
        for i in range(5):
            writer.append(
                {
                    'image': np.full((4, 6), i, np.uint8), 'label': i, 'text': f'nümber {i}',
                    'times': [i, i + 1, i + 2],
                    'array': np.arange(3.0), 'raw': b'123',
                }
            )  # fmt: skip
    return tmp_path / 'ds'


def test_info_describes_datasets_shards_and_bags(granular_cli, path):
    code, out, err = granular_cli('info', path, '--json')
    info = json.loads(out)
    assert (code, err) == (0, '')
    assert info['kind'] == 'sharded dataset'
    assert (info['shards'], info['datapoints'], info['layout'], info['versions']) == (2, 5, 'refs', [2])
    assert info['index'] is False
    assert info['spec'] == dict(sorted(SPEC.items()))
    assert info['keys']['times']['records'] == 15
    assert sum(key['bytes'] for key in info['keys'].values()) == info['bytes']
    code, out, err = granular_cli('info', path)
    assert code == 0
    assert 'sharded dataset' in out
    assert 'utf8' in out
    assert json.loads(granular_cli('info', path / '000001', '--json')[1])['datapoints'] == 2
    bag = json.loads(granular_cli('info', path / '000000' / 'times.bag', '--json')[1])
    assert (bag['kind'], bag['datapoints'], bag['versions']) == ('bag', 9, [2])


def test_ls_lists_names_and_entries(granular_cli, path):
    assert granular_cli('ls', path) == (0, '000000\n000001\n', '')
    names = [entry['name'] for entry in json.loads(granular_cli('ls', path / '000000', '--json')[1])]
    assert 'spec.json' in names
    assert '000001' in granular_cli('ls', '-l', path)[1]


def test_sizes_of_files_come_with_their_listing(granular_cli, path, fakegcs, monkeypatch):
    bucket = granular.Path(path).copy(fakegcs.place())
    files = len(list((bucket / '000000').iterdir()))
    with FaultProxy(fakegcs.endpoint) as proxy:

        def requests(*command):
            before = proxy.count
            assert granular_cli(*command, '--endpoint-url', proxy.endpoint, '--anon')[0] == 0
            return proxy.count - before

        assert requests('ls', '-l', bucket / '000000') < files
        assert requests('ls', '--json', bucket / '000000') < files
        quiet = requests('verify', bucket)
        monkeypatch.setenv('FORCE_COLOR', '1')  # a terminal, on which progress is drawn
        assert requests('verify', bucket) - quiet < files


def test_info_describes_episodes_of_lerobot(granular_cli, tmp_path):
    write_v3(tmp_path / 'robots')
    info = json.loads(granular_cli('info', tmp_path / 'robots', '--json')[1])
    assert (info['kind'], info['datapoints'], info['keys'][LEFT]) == ('LeRobot', 3, {'type': 'mp4'})
    code, out, err = granular_cli('convert', tmp_path / 'robots', tmp_path / 'ds', '--dry-run')
    assert (code, 'lerobot' in out) == (0, True), err


@pytest.mark.parametrize('command', ['info', 'ls', 'clean'])
def test_names_are_printed_without_control_characters(granular_cli, tmp_path, command):
    name = 'red\x1b[31m'
    (tmp_path / name / '000000').mkdir(parents=True)
    (tmp_path / name / '000000' / 'refs.bag').touch()
    parquet.write_table(pyarrow.table({name: [1, 2]}), tmp_path / 'x.parquet')
    arguments = {'info': [tmp_path / 'x.parquet'], 'ls': [tmp_path], 'clean': [tmp_path, '--older', 0]}[command]
    code, out, _ = granular_cli(command, *arguments)
    assert (code, 'red\\x1b[31m' in out, '\x1b' in out) == (0, True, False)


def test_cat_prints_datapoints_and_keys(granular_cli, path):
    code, out, _ = granular_cli('cat', path, 4, '--json')
    assert code == 0
    info = json.loads(out)
    assert (info['label'], info['text'], info['times']) == (4, 'nümber 4', [4, 5, 6])
    assert info['image'] == {'type': 'png', 'dtype': 'uint8', 'shape': [4, 6], 'head': [4] * 8}
    assert info['raw'] == {'type': 'bytes', 'bytes': 3}
    assert granular_cli('cat', path, -1, 'label', 'times[1:]') == (0, 'label: 4\ntimes: [5, 6]\n', '')


def test_json_of_cat_is_json_whatever_the_numbers(granular_cli, tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'float', 'y': 'tree'}, granular.encoders) as writer:
        writer.append({'x': math.nan, 'y': [math.inf, np.array([1, -math.inf])]})
    out = granular_cli('cat', tmp_path / 'ds', 0, '--json')[1]
    values = json.loads(out, parse_constant=pytest.fail)
    assert (values['x'], values['y'][0], values['y'][1]['head']) == ('nan', 'inf', [1, '-inf'])


@pytest.mark.parametrize('indexed', [False, True])
def test_info_tells_the_requests_of_an_epoch(granular_cli, tmp_path, moto, monkeypatch, indexed):
    path = granular.Path(f'{moto.place()}', **moto.options, config=granular.IOConfig(max_gap=0, hedge=0))
    with granular.ShardedDatasetWriter(path, {'a': 'bytes', 'b': 'bytes'}, shardlen=20) as writer:
        for i in range(40):
            writer.append({'a': bytes(600_000), 'b': bytes(i)}, flush=False)
    if indexed:
        granular.build_index(path)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'test')
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'test')
    command = ('info', path, '--endpoint-url', moto.endpoint)
    [shuffled, blocks] = json.loads(granular_cli(*command, '--json')[1])['epoch']
    block = int(re.search(r'\d+', blocks['order'])[0])
    for row, size in ((shuffled, 1), (blocks, block)):
        with granular.open(path, None) as reader:
            before = granular.metrics.snapshot()
            for start in range(0, 40, size):
                reader.fetch(range(start, min(40, start + size)))
            requests = granular.metrics.snapshot().total('requests') - before.total('requests')
        assert row['requests'] * 0.7 <= requests <= row['requests']
        assert row['dollars'] == pytest.approx(row['requests'] * 4e-7)
    assert re.search(r'shuffle\.Index\(\) +≤ +(80|120) +0\.00', granular_cli(*command)[1])


def test_cat_shows_custom_types_as_bytes(granular_cli, tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'mine'}, None) as writer:
        writer.append({'x': b'1234'})
    assert granular_cli('cat', tmp_path / 'ds', 0) == (0, 'x: {"type": "mine", "bytes": 4}\n', '')


@pytest.mark.parametrize('command', [('verify',), ('index',)])
def test_commands_of_datasets_name_those_of_other_files(granular_cli, tmp_path, command):
    (tmp_path / 'rows.parquet').write_bytes(b'PAR1')
    code, _, err = granular_cli(command[0], tmp_path / 'rows.parquet', *command[1:])
    assert (code, 'rows.parquet: is a file of the format parquet' in err, 'granular convert' in err) == (1, True, True)


@pytest.mark.parametrize('suffix', FORMATS)
def test_info_and_cat_take_what_open_takes(granular_cli, tmp_path, suffix):
    for number, start in enumerate((0, 3)):
        write_numbers(tmp_path / f'{number}.{suffix}', suffix, range(start, start + 3))
    for path, count in ((tmp_path / f'*.{suffix}', 6), (tmp_path / f'1.{suffix}', 3), (tmp_path, 6)):
        facts = json.loads(granular_cli('info', path, '--json')[1])
        assert (f'{facts["kind"]}DataSource', facts['datapoints']) == (FORMATS[suffix].source, count)
        assert granular_cli('info', path)[0] == 0
        code, out, _ = granular_cli('cat', path, -1, '--json')
        assert (code, list(facts['keys'])) == (0, list(json.loads(out)))
        assert granular_cli('cat', path, -1, '--json', *facts['keys']) == (0, out, '')
        code, out, err = granular_cli('cat', path, -1, 'nothing')
        assert (code, out, 'nothing' in err, 'expected' in err) == (1, '', True, True)
    code, _, err = granular_cli('info', tmp_path / 'nope')
    assert (code, f'{tmp_path}/nope: no such file or folder' in err) == (1, True)


def test_keys_of_files_of_other_formats_have_no_ranges(granular_cli, tmp_path):
    parquet.write_table(pyarrow.table({'x': [[1, 2, 3]], 'y[0:1]': [4]}), tmp_path / 'x.parquet')
    assert granular_cli('cat', tmp_path / 'x.parquet', 0, 'y[0:1]') == (0, 'y[0:1]: 4\n', '')
    code, out, err = granular_cli('cat', tmp_path / 'x.parquet', 0, 'x[0:1]')
    assert (code, out) == (1, '')
    assert "unknown columns ['x[0:1]']" in err


def test_copy_refuses_to_overwrite_by_default(granular_cli, path, tmp_path):
    code, out, err = granular_cli('copy', path, tmp_path / 'copy')
    assert (code, out) == (0, '')
    assert 'copied' in err
    with granular.ShardedDatasetReader(tmp_path / 'copy', granular.decoders) as reader:
        assert len(reader) == 5
    code, _, err = granular_cli('copy', path, tmp_path / 'copy')
    assert code == 1
    assert '--overwrite' in err
    assert granular_cli('copy', '--overwrite', path, tmp_path / 'copy')[0] == 0


def test_copy_and_info_of_a_bucket(granular_cli, path, fakegcs):
    target = str(fakegcs.place())
    assert granular_cli('copy', path, target, '--endpoint-url', fakegcs.endpoint, '--anon')[0] == 0
    code, out, _ = granular_cli('info', target, '--endpoint-url', fakegcs.endpoint, '--anon', '--json')
    assert code == 0
    assert json.loads(out)['datapoints'] == 5


@pytest.mark.parametrize(
    ('args', 'match'),
    [(('info', '/nowhere/x'), 'no such file or folder'),
     (('cat', '/nowhere/x', '0'), 'nowhere'), (('ls', '/nowhere/x'), 'nowhere'),
     (('ls', __file__), 'this, or a part of its path, is a file'), (('verify', '/nowhere/x'), 'no such file or folder'),
     (('copy', '/nowhere/x', '/tmp/y'), 'nowhere'), (('info', 'nosuch://x'), 'nosuch'),
     (('demo', '--store', 'x'), 'store')],
)  # fmt: skip
def test_errors_are_one_line(granular_cli, args, match):
    code, out, err = granular_cli(*args)
    assert (code, out) == (1, '')
    assert err.startswith('error: ')
    assert match in err
    assert err.count('\n') == 1


def test_list_of_commands_cuts_no_sentence(granular_cli, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    code, out, _ = granular_cli('--help')
    assert code == 0
    assert '...' not in out.partition('Commands:')[2]


def test_command_runs_as_a_module(path):
    command = [sys.executable, '-W', 'error', '-m', 'granular', 'cat', path, '0', 'label']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('label: 0\n', '')


@pytest.mark.parametrize(
    ('output', 'message'), [('/dev/full', 'error: [Errno 28] No space left on device\n'), ('a closed pipe', '')]
)
def test_output_that_cannot_be_written_is_no_traceback(output, message, tmp_path):
    (tmp_path / 'file').touch()
    command = [sys.executable, '-m', 'granular', 'ls', tmp_path]
    if output == 'a closed pipe':
        reader, output = os.pipe()
        os.close(reader)
    with open(output, 'wb') as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1'])
def test_characters_that_the_output_cannot_have_are_escaped(tmp_path, encoding):
    with granular.DatasetWriter(tmp_path / '\u2264', {'x': 'int'}) as writer:
        writer.append({'x': 1})
    command = [sys.executable, '-m', 'granular', 'info', tmp_path / '\u2264']
    environment = {**os.environ, 'PYTHONIOENCODING': encoding}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    assert '\\u2264' in done.stdout


def test_interrupt_while_modules_are_imported_is_no_traceback():
    code = (
        'import sys\n'
        'class Finder:\n'
        '    def find_spec(name, path, target=None):\n'
        "        if name == 'granular.cli.measuring':\n"
        '            raise KeyboardInterrupt\n'
        'sys.meta_path.insert(0, Finder)\n'
        'import runpy\n'
        "runpy.run_module('granular', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, '')


def test_missing_extra_is_named(interpreter):
    code = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('granular', run_name='__main__')"
    done = interpreter.run(code)
    assert done.returncode == 2
    assert "[cli]'" in done.stderr
    assert not issubclass(GranularError, SystemExit)


def test_info_shows_sizes_and_the_padding_of_plans(granular_cli, tmp_path):
    sizes = [*range(100), 400]
    with granular.DatasetWriter(tmp_path / 'ds', {'tokens': 'array'}, granular.encoders) as writer:
        for size in sizes:
            writer.append({'tokens': np.zeros(size, np.int32)})
    code, out, _ = granular_cli('info', tmp_path / 'ds', '--sizes', 'tokens', '--json')
    found = json.loads(out)['sizes']
    assert (code, found['elements'], found['empty'], found['sum'], found['largest']) == (0, 101, 1, 5350, 400)
    assert sum(row['elements'] for row in found['histogram']) == 100
    dataset = granular.MapDataset.source([np.zeros(size) for size in sizes]).map(lambda array: {'a': array})
    rows = dataset.pack({'a': 2048}, sizes=sizes, classes=64)
    assert found['padding']['rows of 2048'] == round(1 - 5350 / 2048 / len(rows), 4)
    batches = dataset.batch_by_size('a', 2048, sizes=sizes)
    tops = np.array([top for _, top in batches.shapes])
    padded = tops[np.searchsorted(tops, sizes[1:])].sum()
    assert found['padding']['8 buckets'] == round(1 - 5350 / int(padded), 4)
    code, out, _ = granular_cli('info', tmp_path / 'ds', '--sizes', 'tokens')
    assert (code, 'sizes of tokens' in out, '8 buckets' in out) == (0, True, True)
    code, _, err = granular_cli('info', tmp_path / 'ds', '--sizes', 'words')
    assert (code, 'words' in err) == (1, True)


def test_convert_writes_and_reports_shards(granular_cli, tmp_path):
    for name in ('a/1.png', 'b/2.png', 'b/3.png'):
        (tmp_path / 'images' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'images' / name).write_bytes(granular.encoders['png'](np.zeros((2, 3), np.uint8)))
    args = ('convert', tmp_path / 'images', tmp_path / 'ds', '--shardlen', 2, '--spec', 'label=i64')
    code, out, err = granular_cli(*args, '--dry-run')
    assert (code, err) == (0, '')
    reason = '(of 3 sampled: 3'
    assert out.splitlines()[:3] == [f'class: utf8 {reason} utf8)', f'image: png {reason} png)', 'label: i64 (given)']
    assert f'would write 3 datapoints of {tmp_path}/images (images) in 2 shards to {tmp_path}/ds' in out
    assert not (tmp_path / 'ds').exists()
    code, out, err = granular_cli(*args)
    assert (code, err) == (0, '')
    assert f'3 datapoints of {tmp_path}/images (images) in 2 shards in {tmp_path}/ds: ' in out
    info = json.loads(granular_cli(*args, '--json')[1])
    assert (info['found'], info['bytes'], info['spec']['label']) == (3, 0, 'i64')
    assert json.loads(granular_cli('cat', tmp_path / 'ds', 2, '--json')[1])['class'] == 'b'
    code, out, err = granular_cli(*args[:3], '--spec', 'label')
    assert (code, out) == (1, '')
    assert '--spec: expected KEY=TYPE, such as label=int, got label' in err
    assert 'expected one of parquet' in granular_cli(*args[:3], '--format', 'csv')[2]


def test_single_things_are_counted_in_the_singular(granular_cli, tmp_path):
    with granular.ShardedDatasetWriter(tmp_path / 'one', {'a': 'bytes'}, shardlen=1, checksums=False) as writer:
        writer.append({'a': b'1'})
    (tmp_path / 'left').mkdir()
    (tmp_path / 'left' / 'refs.bag').write_bytes(b'1')
    (tmp_path / 'file').write_bytes(b'1')
    for command in (
        ['verify', tmp_path / 'one'],
        ['index', tmp_path / 'one'],
        ['clean', tmp_path / 'left', '--older', 0],
        ['copy-to-local', tmp_path / 'file', tmp_path / 'copied'],
    ):
        text = ''.join(granular_cli(*command)[1:])
        assert not re.findall(r'\b1 [a-z]+s\b(?! *\d)', text)


def test_clean_names_what_it_left_alone(granular_cli, tmp_path):
    names = ['own/a.bag', 'own/a.idx', 'killed/refs.bag', 'killed/.a.bag.01234567.part']
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    err = granular_cli('clean', tmp_path)[2].splitlines()
    assert len(err) == 2
    assert err[0] == 'nothing found'
    expected = (
        r'left alone: .*/killed/\.a\.bag\..*\.part \(\d+ s old\) and 3 more, less than 3600 s old, .* --older 0 incl'
    )
    assert re.match(expected, err[1])
    out, err = granular_cli('clean', tmp_path, '--older', 0)[1:]
    assert len(out.splitlines()) == 2
    assert re.search(r'left alone: .*/own/a\.bag \(\d+ s old\) and 1 more, .*: --bags includes them', err)
    err = granular_cli('clean', tmp_path, '--older', 0, '--bags', '--remove')[2]
    assert err.startswith('4 removed')
    assert 'left alone' not in err


def test_copy_to_local_copies_and_unpacks(granular_cli, path, tmp_path):
    with zipfile.ZipFile(tmp_path / 'train.zip', 'w') as file:
        file.writestr('a/b', b'123')
    code, out, err = granular_cli('copy-to-local', tmp_path, tmp_path / 'local', 'train')
    assert (code, err) == (0, '')
    assert out.startswith(f'{tmp_path}/local/train: 1 file, 3 bytes, ')
    assert out.endswith(' s (unpacked)\n')
    again = granular_cli('copy-to-local', tmp_path, tmp_path / 'local', 'train')[1]
    assert again == f'{tmp_path}/local/train: was there, and is left as it is\n'
    done = json.loads(granular_cli('copy-to-local', path, tmp_path / 'ds2', '--json')[1])
    assert (done['was_copied'], done['source_format']) == (True, 'folder')
    assert json.loads(granular_cli('info', tmp_path / 'ds2', '--json')[1])['datapoints'] == 5
    granular_cli('copy-to-local', tmp_path / 'train.zip', tmp_path / 'kept.zip', '--keep-archives')
    assert (tmp_path / 'kept.zip').read_bytes() == (tmp_path / 'train.zip').read_bytes()


def test_verify_decodes_or_says_that_it_did_not(granular_cli, tmp_path):
    file = granular.encoders['jpg'](np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    spec = {'image': 'jpg', 'label': 'int', 'mine': 'mine'}
    with granular.ShardedDatasetWriter(
        tmp_path / 'x', spec, {**granular.encoders, 'mine': bytes}, shardlen=4
    ) as writer:
        for i in range(10):
            writer.append({'image': file[: len(file) // 2] if i in (2, 7) else file, 'label': i, 'mine': b'?'})
    code, out, _ = granular_cli('verify', tmp_path / 'x')
    assert (code, 'no problems' in out, '40 compared with a checksum, 0 decoded' in out) == (0, True, True)
    assert 'not looked at: the values of image, label, mine (pass --decode)\n' in out
    code, out, _ = granular_cli('verify', tmp_path / 'x', '--decode')
    lines = out.splitlines()
    assert (code, len(lines)) == (1, 4)
    for line, (shard, record, index) in zip(lines, [('000000', 2, 2), ('000001', 3, 7)], strict=False):
        place = f'{tmp_path}/x/{shard}/image.bag: record {record}, of datapoint {index} of the dataset'
        assert line.startswith(f'{place}: is not decoded: ')
    assert lines[2].startswith('2 problems: 10 datapoints, 40 records, 40 compared with a checksum, 20 decoded')
    assert lines[3] == 'not looked at: the values of mine (no decoder of their types)'
    with granular.DatasetWriter(tmp_path / 'bare', {'n': 'int'}, checksums=False) as writer:
        writer.append({'n': 1})
    out = granular_cli('verify', tmp_path / 'bare', '--decode')[1]
    assert 'not looked at: the bytes of 2 records written without checksums' in out


@pytest.mark.parametrize(
    ('origin', 'command'),
    [
        (None, "'granular-stream[view]'"),
        ({'url': 'file:///a%20b/granular', 'dir_info': {}}, "'/a b/granular[view]'"),
        ({'url': 'file:///granular', 'dir_info': {'editable': True}}, "-e '/granular[view]'"),
        (
            {'url': 'https://host/granular.git', 'vcs_info': {'vcs': 'git', 'commit_id': '12ab'}},
            "'granular-stream[view] @ git+https://host/granular.git@12ab'",
        ),
        (
            {'url': 'https://host/granular.whl', 'archive_info': {}},
            "'granular-stream[view] @ https://host/granular.whl'",
        ),
    ],
)
def test_missing_extra_is_installed_from_where_the_package_came_from(origin, command, tmp_path, interpreter):
    info = tmp_path / 'granular_stream-9.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: granular-stream\nVersion: 9\n')
    if origin is not None:
        (info / 'direct_url.json').write_text(json.dumps(origin))
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['aiohttp'] = None; "
        "sys.argv[1:] = ['view', '.']; runpy.run_module('granular', run_name='__main__')"
    )
    done = interpreter.run(code)
    assert (done.returncode, done.stderr) == (1, f'error: the web page needs its extra: pip install {command}\n')


def test_all_has_what_demo_and_view_need():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']['all'][0]
    assert {'view', 'demo', 'cli', 'formats'} <= set(extras.partition('[')[2].rstrip(']').split(','))


MISTAKES = {
    'unknown option of cat': (['cat', 'ds', 1, '--keys', 'label'], '--keys: no such option; keys follow the index'),
    'key twice': (['cat', 'ds', 1, 'times[0:1]', 'times[2:]'], 'expected each key once, got times[0:1] times[2:]'),
    'type twice': (['convert', 'x', 'y', '--spec', 'a=int', '--spec', 'a=float'], 'one value for a, got int and float'),
    'file with a sign': (
        ['view', 'ds', '--classes', 'a=/day=1/x'],
        '/day=1/x: expected a file with the name of a class',
    ),
    'no address': (['info', ''], 'expected a path or an address, got an empty text'),
    'no folder to clean': (['clean', '', '--remove'], 'expected a path or an address, got an empty text'),
    'no target': (['copy', 'ds', ''], 'expected a path or an address, got an empty text'),
    'no target of a local copy': (['copy-to-local', 'ds', ''], 'expected a path or an address, got an empty text'),
    'unfinished dataset to show': (
        ['info', 'killed'],
        'killed: has no spec.json: a writer is writing this dataset, or',
    ),
    'unfinished dataset to verify': (
        ['verify', 'killed'],
        'killed: has no spec.json: a writer is writing this dataset,',
    ),
    'unfinished dataset to convert': (['convert', 'killed', 'x'], 'write it again, or remove it with `granular clean'),
    'bags to verify': (['verify', 'bags'], 'bags: has bags but no spec.json: open one of them, such as a.bag; if'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_mistakes_are_answered_with_the_remedy(name, granular_cli, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    for file in ('killed/.a.bag.01234567.part', 'bags/a.bag'):
        pathlib.Path(file).parent.mkdir(exist_ok=True)
        pathlib.Path(file).touch()
    command, message = MISTAKES[name]
    code, out, err = granular_cli(*command)
    assert (code, out) == (1, '')
    assert message in err


def test_options_of_stores_reach_the_requests(granular_cli):
    with FaultServer(files={'a': b'1'}) as server:
        options = '--endpoint-url', server.endpoint, '--anon'
        assert granular_cli('ls', 's3://bucket', *options, '--requester-pays', '--addressing-style', 'path')[:2] == (
            0,
            'a\n',
        )
        assert server.heads[0]['x-amz-request-payer'] == 'requester'
        assert server.targets[0].startswith('/bucket?')
        code, _, err = granular_cli('ls', 's3://bucket', *options, '--addressing-style', 'odd')
        assert code
        assert 'addressing style odd' in err
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert('127.0.0.1').configure_cert(context)
    with FaultServer(context, files={'a': b'1'}) as server:
        options = '--endpoint-url', server.endpoint, '--anon'
        assert granular_cli('ls', 's3://bucket', *options)[0]
        with pytest.warns(RuntimeWarning, match='certificates are not verified'):
            assert granular_cli('ls', 's3://bucket', *options, '--no-verify')[:2] == (0, 'a\n')
