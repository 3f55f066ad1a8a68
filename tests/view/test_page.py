"""The page of ``granular view`` in Chromium: what is seen, the keyboard, and data that tries to run."""

import contextlib
import json

import pytest
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import granular
from tests.view.example import HOSTILE, write_hostile
from tests.view.serving import Served


class Page:
    """A page of a server, in a browser. Elements are looked up in the browser: those of a list come and go."""

    def __init__(self, driver, served, load=True):
        self.driver, self.served = driver, served
        if not load:
            return
        driver.delete_all_cookies()
        driver.get('about:blank')
        driver.get_log('browser')
        driver.get(served.link)
        self.see('#tree li')

    def open(self, hash):
        """Follow a link to another hash."""
        self.run('location.hash = arguments[0]', hash)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition, seconds=60):
        """Wait until a function returns something true, and return it."""
        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: condition())

    def texts(self, selector):
        """Return the texts of the visible elements."""
        return self.run(
            """
            return [...document.querySelectorAll(arguments[0])]
              .filter((element) => element.checkVisibility({ visibilityProperty: true }))
              .map((element) => element.innerText);
            """,
            selector,
        )

    def see(self, selector, text=''):
        """Wait for a visible element with a text, and return its whole text."""
        return self.wait(lambda: next((f'{found} ' for found in self.texts(selector) if text in found), None))

    def gone(self, selector):
        self.wait(lambda: not self.texts(selector))

    def count(self, selector):
        return self.run('return document.querySelectorAll(arguments[0]).length', selector)

    def click(self, selector, text=''):
        """Click on a visible element with the mouse."""
        self.see(selector, text)
        self.wait(lambda: self._clicked(selector, text))

    def _clicked(self, selector, text):
        elements = self.driver.find_elements(By.CSS_SELECTOR, selector)
        try:
            next(element for element in elements if text in element.text).click()
        except (StaleElementReferenceException, StopIteration):  # the page is drawing it anew
            return False
        return True

    def press(self, *keys):
        """Press keys, wherever the focus is."""
        for key in keys:
            ActionChains(self.driver, duration=0).send_keys(key).perform()

    def selected(self):
        return self.run("return document.querySelector('.item[aria-selected=true]')?.getAttribute('aria-label') ?? ''")

    def selects(self, index):
        self.wait(lambda: self.selected() == f'datapoint {index}')

    def hash(self):
        return self.run('return location.hash')

    def colour(self, selector):
        """Return the mean colour of a canvas that is painted; None before."""
        return self.run(
            """
            const canvas = document.querySelector(arguments[0]);
            if (!canvas?.width) return null;
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            const sums = [0, 0, 0];
            data.forEach((value, i) => { if (i % 4 < 3) sums[i % 4] += value; });
            return sums.map((sum) => sum / (data.length / 4));
            """,
            selector,
        )

    def complaints(self):
        """Return the errors in the console: among them what the policy of the page has blocked."""
        return [entry['message'] for entry in self.driver.get_log('browser') if entry['level'] == 'SEVERE']


def at_the_root(driver, served):
    """Return the page of a server, at the root: it is loaded unless it is the one that is shown."""
    shown = driver.current_url.startswith(served.origin)
    page = Page(driver, served, load=not shown)
    if shown:
        page.open('#/')
        page.complaints()
    page.see('.listing')
    return page


@pytest.fixture
def page(driver, served):
    page = at_the_root(driver, served)
    yield page
    assert page.complaints() == []


def mean(datapoint):
    return datapoint['image'].mean((0, 1))


def test_token_leaves_the_address(page):
    page.see('.listing')
    assert page.driver.current_url.rstrip('#/') == page.served.origin
    assert page.run('return document.cookie') == ''
    assert page.served.token not in page.driver.page_source


def test_folders_lead_to_the_pictures_of_a_dataset(page, example):
    page.click('.listing a', 'train/')
    page.see('.facts', '120 datapoints')
    assert page.hash() == '#/train'
    with granular.ShardedDatasetReader(example / 'train') as reader:
        first = mean(reader[0])
    page.wait(lambda: page.colour('#item-0 canvas'))
    assert abs(first - page.colour('#item-0 canvas')).max() < 4
    assert page.see('#item-0 .caption', 'seen from number 0')
    # The tree is opened, and marks the dataset.
    page.see('#tree a[aria-current=page]', 'train')
    assert page.see('#tree li[data-path="train/000002"]')
    # Only what is seen is an element.
    assert page.count('.item') < 60


def test_table_shows_a_row_for_each_datapoint(page):
    page.open('#/train?look=table&at=7')
    page.selects(7)
    page.see('#item-7', 'seen from number 7')
    assert page.see('.head', 'caption')
    page.wait(lambda: page.count('#item-6 canvas') == 4)


def test_keyboard_moves_opens_and_closes(page):
    page.open('#/train?look=table')
    page.selects(0)
    page.press(Keys.ARROW_DOWN, 'j', Keys.ARROW_RIGHT)
    page.selects(3)
    page.press('k')
    page.selects(2)
    page.press(Keys.ENTER)
    page.see('#detail h1', '#2')
    page.see('#detail [data-key=caption]', 'seen from number 2')
    page.press(Keys.ARROW_DOWN)
    page.see('#detail [data-key=caption]', 'seen from number 3')
    page.press(Keys.ESCAPE)
    page.gone('#detail')
    page.press(Keys.END)
    page.selects(119)
    page.press(Keys.HOME)
    page.selects(0)
    page.press('t')
    page.see('.scroller.tiles')
    page.selects(0)
    page.press('g', '45', Keys.ENTER)
    page.selects(45)
    page.press(Keys.ARROW_DOWN)
    page.wait(lambda: page.selected() not in ('', 'datapoint 45'))
    page.press('?')
    page.see('#help', 'go to an index')
    page.press(Keys.ESCAPE)
    page.gone('#help')
    page.press('a')
    page.see('.about')
    page.press('d')
    page.see('.scroller')
    page.press('b')
    page.gone('#tree')
    page.press('b')
    page.see('#tree')


def test_link_shows_the_same(page):
    page.open('#/train?look=table&at=51&open')
    page.see('#detail h1', '#51')
    page.see('#detail', 'shard 000001, 1')
    page.selects(51)
    page.driver.back()
    page.see('.listing')
    page.driver.forward()
    page.see('#detail h1', '#51')
    page.driver.refresh()
    page.see('#detail h1', '#51')
    page.selects(51)


def test_detail_shows_each_type(page):
    page.open('#/train?at=5&open')
    section = '#detail [data-key={}]'.format
    page.wait(lambda: page.run("return document.querySelector('#detail [data-key=image] img')?.naturalWidth") == 320)
    page.see(section('sound') + ' .note', '0.40 s')
    page.see(section('meta'), 'camera')
    page.see(section('box'), str(2**60 + 5))
    page.see(section('words') + ' li')
    assert page.count(section('words') + ' li') == 3
    page.see(section('depth') + ' .note', 'float32, 48 × 64')
    page.wait(lambda: page.colour(section('depth') + ' canvas'))


def test_video_seeks(page):
    page.open('#/train?at=5&open')
    video = "const video = document.querySelector('#detail video');"
    page.wait(lambda: page.run(f'{video} return video?.readyState >= 1'))
    assert 1.1 < page.run(f'{video} return video.duration') < 1.3
    page.run(f'{video} video.currentTime = 0.9')
    page.wait(lambda: page.run(f'{video} return !video.seeking && video.readyState >= 2'))
    assert abs(page.run(f'{video} return video.currentTime') - 0.9) < 0.05


def test_sequence_scrubs(page, example):
    page.open('#/train?at=6&open')
    canvas = '#detail [data-key=frames] canvas'
    page.wait(lambda: page.colour(canvas))
    page.run(
        """
        const slider = document.querySelector('#detail [data-key=frames] input');
        slider.value = 4;
        slider.dispatchEvent(new Event('input'));
        """
    )
    page.wait(lambda: page.run('return document.querySelector(arguments[0]).dataset.position', canvas) == '4')
    with granular.ShardedDatasetReader(example / 'train') as reader:
        frame = reader[6]['frames'][4]
    assert abs(frame.mean((0, 1)) - page.colour(canvas)).max() < 4


def test_filter_shows_what_it_finds(page):
    page.open('#/train?look=table&key=label&is=%3D&text=3')
    page.see('.found', '12 found in all 120 datapoints')
    page.selects(3)
    page.press(Keys.ARROW_DOWN)
    page.selects(13)
    page.click('button[aria-label="Remove label = 3"]')
    page.selects(13)
    page.press(Keys.ARROW_DOWN)
    page.selects(14)
    page.press('/', 'nowhere', Keys.ENTER)
    page.see('.found', '0 found in all 120 datapoints')


def test_indices_of_a_filter_are_saved_for_a_map_dataset(page):
    page.open('#/train?look=table&key=label&is=%3D&text=3')
    page.see('.found', '12 found in all 120 datapoints')
    page.run('URL.createObjectURL = (file) => { file.text().then((text) => { window.saved = text; }); return "#"; }')
    page.click('button.save')
    saved = json.loads(page.wait(lambda: page.run('return window.saved')))
    assert saved == list(range(3, 120, 10))
    assert list(granular.MapDataset.range(120).subset(saved)) == saved


def test_about_shows_spec_shards_and_histograms(page):
    page.open('#/train?tab=about')
    page.see('.sampled', 'All 120 datapoints.')
    assert page.see('.cards', 'sharded dataset')
    rows = [text.split()[:2] for text in page.texts('.shares tbody tr')]
    assert ['image', 'jpg'] in rows and ['frames', 'jpg[]'] in rows
    assert page.count('.shards rect') == 3
    assert page.count('.chart[data-key=label] li') == 10


def test_windows_of_any_size(page):
    size = page.driver.get_window_size()
    try:
        page.driver.set_window_size(520, 800)
        page.open('#/train?at=5&open')
        page.see('#detail h1', '#5')
        assert page.run("return document.querySelector('#detail').getBoundingClientRect().left") >= 0
        assert page.run('return document.documentElement.scrollWidth <= innerWidth')
        page.press(Keys.ESCAPE)
        page.gone('#detail')
        page.see('.item')
        page.gone('#tree')
    finally:
        page.driver.set_window_size(size['width'], size['height'])


@pytest.mark.parametrize('scheme', ['dark', 'light'])
def test_colours_follow_the_system(page, scheme):
    features = [{'name': 'prefers-color-scheme', 'value': scheme}]
    page.driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': features})
    channels = page.run('return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)')
    assert (max(map(int, channels)) < 60) == (scheme == 'dark')


def test_wrong_addresses_say_so(page):
    page.open('#/missing')
    page.see('.message.bad', 'missing')
    page.open('#/train/%zz')
    page.see('.listing')
    page.open('#/..')
    page.see('.message.bad', 'expected a path below')
    # The browser reports each reply that is an error.
    assert len([text for text in page.complaints() if '400' in text or '404' in text]) == 2


# --- hostile data


@pytest.fixture(scope='module')
def hostile(tmp_path_factory):
    root = granular.Path(tmp_path_factory.mktemp('hostile'))
    write_hostile(root)
    with Served(root) as served:
        yield served


@pytest.mark.parametrize('look', ['tiles', 'table'])
def test_markup_in_values_is_text(driver, hostile, look):
    page = Page(driver, hostile)
    for cover in ('text', 'data', 'tree', 'page', 'vector', 'image'):
        page.open(f'#/hostile?look={look}&cover={cover}')
        page.selects(0)
        if look == 'table':
            page.see('#item-0', HOSTILE[0])
            break
        if cover == 'text':
            page.see('#item-0', HOSTILE[0])
    page.see('#item-0 .bad', 'cannot decode the image')
    assert untouched(page)


def test_markup_in_details_is_text(driver, hostile):
    page = Page(driver, hostile)
    page.open('#/hostile?open')
    for index, text in enumerate(HOSTILE):
        page.see('#detail h1', f'#{index}')
        page.see('#detail [data-key=text]', text)
        page.see('#detail [data-key=tree]', text)
        page.see('#detail [data-key=vector] .dump', 'svg')
        page.see('#detail [data-key=image] .broken', 'cannot show this image')
        page.see('#detail [data-key=clip] .broken', 'cannot play this video')
        page.press(Keys.ARROW_RIGHT)
    assert untouched(page)


def test_markup_in_names_is_text(driver, hostile):
    page = Page(driver, hostile)
    page.open('#/files')
    page.see('.listing', '<img src=x onerror=document.title=1>/')
    for link in page.run("return [...document.querySelectorAll('.listing a')].map((link) => link.hash)"):
        page.open(link)
        page.see('.listing', 'empty.txt')
    assert untouched(page)


def test_values_do_not_run_in_a_window_of_their_own(driver, hostile):
    page = Page(driver, hostile)
    for key in ('page', 'vector', 'text', 'image'):
        with contextlib.suppress(WebDriverException):  # a download is no page
            driver.get(f'{hostile.origin}/api/media?path=hostile&key={key}&index=0')
        assert 'owned' not in driver.title
        assert page.run('return document.scripts.length + document.querySelectorAll("svg").length') == 0 or (
            driver.current_url == f'{hostile.origin}/'
        )


def test_without_the_token_nothing_is_shown(driver, served):
    driver.delete_all_cookies()
    driver.get(f'{served.origin}/')
    assert 'open the link that granular view has printed' in driver.page_source
    driver.get(f'{served.origin}/?token=wrong')
    assert 'open the link that granular view has printed' in driver.page_source
    driver.get('about:blank')


def untouched(page):
    """Return whether no markup of the dataset became an element, and nothing ran."""
    strange = page.run(
        """
        return [...document.querySelectorAll('body *')].filter((element) =>
          element.tagName === 'SCRIPT' || [...element.attributes].some((one) => one.name.startsWith('on'))).length;
        """
    )
    assert strange == 0 and page.run('return document.title').endswith('· granular')
    # Nothing was even tried that the policy of the page had to block.
    assert [text for text in page.complaints() if 'Content Security Policy' in text] == []
    return True
