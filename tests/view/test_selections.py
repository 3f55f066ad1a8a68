"""Filters, sorts, classes, tokens and saved indices on the page of ``granular view``, in Chromium."""

import json
import re

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import granular
from granular.view.names import Names
from tests import ROOT
from tests.support.pages import blocks
from tests.view.example import picture
from tests.view.serving import Served
from tests.view.test_page import Page, at_the_root

CLASSES = ('cat', 'dog', 'horse')
COUNT = 60
MANY = 120_000


def size_of(i):
    return 3 if i % 10_000 == 9_999 else 1 + i % 2


@pytest.fixture(scope='module')
def animals(tmp_path_factory):
    """Pictures of classes, of which two are damaged, and numbers in files of their own."""
    root = tmp_path_factory.mktemp('animals')
    (root / 'classes.txt').write_text('\n'.join(CLASSES))
    (root / 'alphabet.py').write_text('def decode(tokens): return "".join(chr(97 + token) for token in tokens)\n')
    image = granular.formats.encode_image(picture(np.random.default_rng(0), 32, 48))
    spec = {'image': 'jpg', 'label': 'int', 'score': 'float', 'tokens': 'array'}
    with granular.DatasetWriter(root / 'data' / 'animals', spec, {**granular.encoders, 'jpg': bytes}) as writer:
        for i in range(COUNT):
            data = {7: b'\xff\xd8\xff', 40: image[:-40]}.get(i, image)
            tokens = np.array([i % 26, 1, 2], 'u2')
            writer.append({'image': data, 'label': i % 3, 'score': i * 7 % COUNT / 2, 'tokens': tokens})
    with granular.BagWriter(root / 'data' / 'many.bag') as writer:
        for i in range(MANY):
            writer.append(b'y' * size_of(i))
    with granular.DatasetWriter(
        root / 'data' / 'numbers', {'label': 'int'}, granular.encoders, layout='columns'
    ) as writer:
        for i in range(3000):
            writer.append({'label': i % 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        names = Names({'label': f'{root / "classes.txt"}'}, {'tokens': 'alphabet:decode'})
        with Served(granular.Path(root / 'data'), names=names) as served:
            yield served


@pytest.fixture
def page(driver, animals):
    page = at_the_root(driver, animals)
    yield page
    assert page.complaints() == []


def indices(page):
    """Return the indices of the elements of the list, in the order in which they are seen."""
    return page.run(
        """
        const items = [...document.querySelectorAll('.item[aria-label]')];
        return items.sort((a, b) => a.dataset.position - b.dataset.position)
          .map((item) => Number(item.ariaLabel.split(' ')[1]));
        """
    )


def shows(page, expected):
    expected = list(expected)
    page.wait(lambda: expected and indices(page)[: len(expected)] == expected[: len(indices(page))])


def by_score(i):
    return i * 7 % COUNT


def test_head_of_a_column_sorts_by_it(page):
    page.open('#/animals?look=table')
    shows(page, range(COUNT))
    page.click('.head button', 'score')
    page.see('.found', 'sorted: all 60 datapoints')
    shows(page, sorted(range(COUNT), key=by_score))
    page.press(Keys.HOME, Keys.ARROW_DOWN)
    page.selects(sorted(range(COUNT), key=by_score)[1])
    page.see('#item-1 .cell.number', '0.5')
    page.click('.head button', 'score')
    shows(page, sorted(range(COUNT), key=by_score, reverse=True))
    page.selects(last := max(range(COUNT), key=by_score))
    page.press(Keys.ENTER)
    page.see('#detail h1', f'#{last}')
    page.driver.refresh()
    shows(page, sorted(range(COUNT), key=by_score, reverse=True))
    page.click('.head button', 'score')
    shows(page, range(COUNT))
    page.gone('.found')
    page.open('#/animals?sort=score&down&at=0')
    page.selects(0)
    page.open('#/animals?sort=image')
    shows(page, [7, 40, 0, 1])


def test_conditions_are_combined_and_removed(page):
    page.open('#/animals?look=table')
    page.see('.item')
    for key, relation, text in (('label', '=', 'dog'), ('score', '>=', '20')):
        page.run(
            """
            for (const [name, value] of [['key', arguments[0]], ['is', arguments[1]]]) {
              const field = document.querySelector(`.filter [name=${name}]`);
              field.value = value;
              field.dispatchEvent(new Event('change'));
            }
            """,
            key,
            relation,
        )
        page.press('/', text, Keys.ENTER)
    expected = [i for i in range(COUNT) if i % 3 == 1 and by_score(i) >= 40]
    page.see('.found', f'{len(expected)} found in all 60 datapoints')
    shows(page, expected)
    page.click('button[aria-label="Remove score ≥ 20"]')
    page.see('.found', '20 found in all 60 datapoints')
    shows(page, range(1, COUNT, 3))
    # A condition that is clicked can be changed.
    page.click('.condition button', 'label = dog')
    page.gone('.found')
    page.press(Keys.BACKSPACE, Keys.BACKSPACE, Keys.BACKSPACE, 'cat', Keys.ENTER)
    shows(page, range(0, COUNT, 3))


def test_bar_of_a_histogram_filters(page):
    page.open('#/animals?tab=about')
    page.see('.counts li', 'horse')
    assert [re.split(r'\s+', text) for text in page.texts('.chart[data-key=label] li')] == [
        [name, f'{i}', '20'] for i, name in enumerate(CLASSES)
    ]
    page.click('.chart[data-key=label] button', 'horse')
    page.see('.condition', 'label = 2 horse')
    shows(page, range(2, COUNT, 3))
    page.press('a')
    page.wait(lambda: page.count('.chart[data-key=score] .column'))
    number = page.run(
        """
        const bar = document.querySelectorAll('.chart[data-key=score] .column')[3];
        bar.dispatchEvent(new MouseEvent('click', { bubbles: true }));
        return Number(bar.ariaLabel.split(': ')[1]);
        """
    )
    page.see('.found', f'{number} found in all 60 datapoints')
    assert len(page.texts('.condition')) == 2


def test_classes_of_all_datapoints_are_counted(page):
    page.open('#/numbers?tab=about')
    page.see('.sampled', 'A sample of 2,048 of 3,000 datapoints')
    page.click('button.count', 'Count all 3,000')
    page.see('.chart .note', 'Counted in all 3,000 datapoints')
    assert [text.split() for text in page.texts('.counts li')] == [
        [name, f'{i}', '1,000'] for i, name in enumerate(CLASSES)
    ]


def test_captions_have_the_class_the_text_and_the_numbers(page):
    page.open('#/animals')
    assert re.split(r'\s*\n\s*', page.see('#item-4 .caption', 'dog').strip()) == ['dog', '4 · score 14.0 · tokens ebc']


def test_tokens_are_text(page):
    page.open('#/animals?look=table&at=4&open')
    page.see('#item-4', 'ebc')
    page.see('#detail [data-key=tokens] .prose', 'ebc')
    page.see('#detail [data-key=tokens]', 'uint16 3: 4, 1, 2')
    page.see('#detail [data-key=label]', 'dog')


def test_damaged_datapoints_alone_are_shown(page):
    page.open('#/animals')
    page.click('button[aria-pressed]', 'Damaged')
    page.see('.found', '2 found in all 60 datapoints')
    shows(page, [7, 40])
    page.see('#item-0 .bad', 'cannot decode the image')
    page.click('button[aria-pressed=true]', 'Damaged')
    page.gone('.found')
    shows(page, range(20))


def test_damaged_image_of_which_a_browser_shows_a_part_is_marked(page):
    page.open('#/animals?at=40&open')
    page.see('#detail [data-key=image] .note .bad', 'damaged: decoders refuse it')
    page.open('#/animals?at=41&open')
    page.gone('#detail .note .bad')
    page.see('#detail [data-key=image] .note', '48 × 32')
    assert page.texts('#detail .note .bad') == []


def test_tile_names_the_damaged_values_beside_its_picture(driver, tmp_path):
    with granular.DatasetWriter(
        tmp_path / 'd', {'image': 'png', 'caption': 'utf8'}, {**granular.encoders, 'utf8': bytes}
    ) as writer:
        for caption in (b'a cat', b'\xff'):
            writer.append({'image': np.zeros((8, 8), np.uint8), 'caption': caption})
    with Served(granular.Path(tmp_path)) as served:
        page = Page(driver, served)
        page.open('#/d')
        assert page.see('#item-1 .caption .bad') == ' · caption cannot be shown '
        assert page.texts('#item-0 .bad') == []


def test_saved_indices_are_used_as_the_documentation_says(page, tmp_path, monkeypatch):
    page.driver.execute_cdp_cmd('Browser.setDownloadBehavior', {'behavior': 'allow', 'downloadPath': f'{tmp_path}'})
    page.open('#/animals?key=label&is=%3D&text=1&sort=score&down')
    page.click('button.save', 'Save 20 indices')
    file = tmp_path / 'indices.json'
    saved = json.loads(page.wait(lambda: file.exists() and file.read_text()))
    assert saved == sorted(range(1, COUNT, 3), key=by_score, reverse=True)
    (block,) = (
        block.text for block in blocks(ROOT / 'docs/view.md') if 'json.load' in block.text and block.tag == 'python'
    )
    monkeypatch.chdir(tmp_path)
    names = {'dataset': granular.MapDataset.range(COUNT)}
    exec(block, names)
    assert list(names['selection']) == saved


@pytest.mark.parametrize(
    'address, selector', [('#/animals', '.filter'), ('#/animals?tab=about', '.about'), ('#/', '.listing')]
)
def test_slash_focuses_the_filter_of_each_page(page, address, selector):
    page.open(address)
    page.see(selector)
    page.press('/', 'ani')
    assert page.run("return document.activeElement.matches('.filter input')")
    assert page.run('return document.activeElement.value') == 'ani'
    if selector == '.listing':
        page.wait(lambda: page.texts('.listing td:first-child') == ['animals/'])
        page.see('.page', '1 of the')


# Actions, each of which makes the message before it wrong.
LEAVING = {
    'remove the filter': lambda page: page.click('button[aria-label="Remove label = 1 dog"]'),
    'add a condition': lambda page: page.open('#/animals?key=label&is=%3D&text=1&key=score&is=<&text=0'),
    'turn to about': lambda page: page.press('a'),
    'open a folder': lambda page: page.open('#/'),
    'open another dataset': lambda page: page.open('#/numbers'),
}


@pytest.mark.parametrize('action', LEAVING)
def test_messages_end_with_what_they_are_about(page, action):
    page.open('#/animals?key=label&is=%3D&text=1')
    page.see('.found', '20 found')
    page.wait(lambda: '20 found' in page.run("return document.querySelector('#status').textContent"))
    LEAVING[action](page)
    page.wait(lambda: '20 found' not in page.run('return document.body.textContent'))


def test_error_of_a_filter_ends_with_the_filter(page):
    page.open('#/animals?look=table&key=label&is=%3D&text=zebra&at=5&open')
    page.see('.found .bad', "expected a number or one of the classes cat, dog, horse, got 'zebra'")
    assert page.texts('.found > button') == []
    page.click('button[aria-label="Remove label = zebra"]')
    page.gone('.bad')
    shows(page, range(10))
    assert [text for text in page.complaints() if '400' in text]


def test_search_goes_on_after_an_error_of_the_store(page):
    page.open('#/')
    page.see('.listing')
    page.run(
        """
        const { fetch } = window;
        window.fetch = (address, ...rest) => (address.includes('/api/search')
          ? Promise.resolve(new Response('the store is busy', { status: 502 }))
          : fetch(address, ...rest));
        window.mend = () => { window.fetch = fetch; };
        """
    )
    page.open('#/animals?look=table&sort=score')
    page.see('.found .bad', 'the store is busy')
    page.run('mend()')
    page.click('.found button', 'Try again')
    page.see('.found', 'sorted: all 60 datapoints')
    assert 'busy' not in page.run('return document.body.textContent')
    shows(page, sorted(range(COUNT), key=by_score))


def test_wrong_index_says_which_there_are(page):
    page.open('#/animals')
    page.see('.item')
    message = "return document.querySelector('.jump').validationMessage"
    page.press('g', '60', Keys.ENTER)
    assert page.wait(lambda: page.run(message)) == 'expected an index from 0 to 59'
    page.press(Keys.BACKSPACE, Keys.BACKSPACE)
    assert page.run(message) == ''
    page.press('-1', Keys.ENTER)
    page.selects(59)


def test_open_datapoint_is_among_those_that_are_found(page):
    page.open('#/animals?at=5&open&key=label&is=%3D&text=1')
    page.see('#detail h1', '#7')
    page.selects(7)
    page.open('#/animals?at=5&open&key=label&is=%3D&text=9')
    page.see('.found', '0 found')
    page.gone('#detail')


@pytest.mark.parametrize('query', ['sort=record&down', 'key=record&is=bytes%3D&text=3'])
def test_large_column_is_read_in_rounds_that_the_user_decides_on(page, tmp_path, query):
    page.driver.execute_cdp_cmd('Browser.setDownloadBehavior', {'behavior': 'allow', 'downloadPath': f'{tmp_path}'})
    page.run('performance.clearResourceTimings()')
    page.open(f'#/many.bag?look=table&{query}')
    page.see('.found', f'the first 100,000 of {MANY:,} datapoints')
    expected = sorted(range(MANY), key=size_of, reverse=True)[: None if query.startswith('sort') else 12]
    requests = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert {match[1] for match in (re.search(r'/api/search.*&to=(\d+)', one) for one in requests) if match} == {
        '100000'
    }
    if query.startswith('key'):
        page.click('.found button', 'Look at all and save the indices')
    else:
        page.click('.found button', f'Look at all {MANY:,}')
        page.see('.found', f'sorted: all {MANY:,} datapoints')
        shows(page, expected[:20])
        page.click('.found button', f'Save {MANY:,} indices')
    file = tmp_path / 'indices.json'
    saved = json.loads(page.wait(lambda: file.exists() and file.read_text()))
    assert saved == expected
