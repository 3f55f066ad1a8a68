"""Check the built site: `python docs/_site/check.py build/docs`.

Each link leads to a file and an anchor, nothing is loaded from elsewhere, and the search, in a headless Chromium, finds
messages as users paste them.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

# What users search for, and one of the first three results.
SEARCHES = {
    'granular.errors.StateError: the state was saved with seed 3, this source has 5': 'troubleshooting.html#stateerror',
    's3://my-bucket/train: has no shards: expected folders such as 000000': 'troubleshooting.html#notfounderror',
    's3://b/train/image.bag: access denied (status 403, Forbidden)': 'troubleshooting.html#accessdeniederror',
    'worker process 3 (pid 8123) was killed by SIGKILL before it computed item 17': 'troubleshooting.html#workererror',
    'attempt 3 failed, retrying in 0.41 s: s3://b/x.bag': 'troubleshooting.html#log-lines',
    'OSError: [Errno 24] Too many open files': 'troubleshooting.html#too-many-open-files',
    'CorruptBagError': 'reference/errors.html#granular.errors.CorruptBagError',
    'DatasetReader': 'reference/datasets.html#granular.DatasetReader',
    'max_gap': 'reference/paths.html#granular.config.IOConfig',
    'second epoch': 'recipes/epochs.html#each-epoch-in-another-order',
    'segmentation masks': 'images-clips-episodes.html#crops-flips-and-masks-of-classes',
    'uint16 tokens': 'pretraining.html#tokens-as-tensors',
    'skip corrupt images': 'recipes/bad-images.html#skip-corrupt-images',
    'grayscale': 'recipes/bad-images.html#grayscale-transparency-16-bits-cmyk',
    'exif rotation': 'recipes/bad-images.html#exif-rotation',
    'resume after crash': 'pretraining.html#resume-after-a-crash',
    'wav files': 'images-clips-episodes.html#audio-windows',
    'corpora ratio': 'pretraining.html',
    'backpressure': 'recipes/asyncio.html#backpressure-timeout-and-cancellation',
    'class imbalance': 'recipes/class-balance.html',
    'audio window': 'images-clips-episodes.html#audio-windows',
    'change mixing weights': 'pretraining.html#change-weights-batch-size-or-hosts',
    'multi node training': 'recipes/several-hosts.html',
    'fips endpoint': 'recipes/credentials.html#settings-of-aws',
    'access point arn': 'recipes/credentials.html#settings-of-aws',
    's3 express': 'recipes/credentials.html#settings-of-aws',
    'proxy': 'recipes/credentials.html#a-bucket-behind-a-proxy',
    'google credentials': 'recipes/credentials.html',
    'mds': 'recipes/moving.html#mds',
    'megatron': 'sources.html#megatron',
    'moto': 'recipes/testing.html',
    'asyncio': 'recipes/asyncio.html',
    'relabel': 'change-a-dataset.html#relabel',
    'concatenate': 'change-a-dataset.html#concatenate',
    'batch_size': 'reference/pipelines.html#granular.IterDataset.batch',
    'num_workers': 'coming-from/others.html#pytorch',
}
SHOWN = 3
RESULTS = 'id="search-results"'
BROWSER = next(filter(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')), 'chromium')


class Page(HTMLParser):
    """The anchors of a page, and what it links to and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the attributes of a tag."""
        values = {name: value or '' for name, value in attrs}
        self.anchors.add(values.get('id', ''))
        if tag == 'a' and 'href' in values:
            self.links.append(values['href'])
        elif tag == 'link' and 'href' in values:
            self.loads.append(values['href'])
        self.loads += [values[name] for name in ('src', 'data', 'srcset') if name in values and tag != 'object']


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links of a site, and what it loads from elsewhere."""
    pages = {path: Page(path) for path in sorted(site.rglob('*.html'))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f'{name}: loads {url}' for url in page.loads if urlsplit(url).scheme not in ('', 'data')]
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f'{name}: there is no {url}')
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors | {''}:
                found.append(f'{name}: {url} has no such anchor')
    for path in site.rglob('*.css'):
        found += [f'{path.name}: loads {url}' for url in re.findall(r'url\(["\']?(https?:[^)]*)', path.read_text())]
    return found


# Runs many queries in one browser, whose start takes longer than all of them.
QUERIES = """<html data-content_root="./"><meta charset="utf-8"><div id="search-results"></div><pre></pre>
<script>const Search = {{_parseQuery() {{}}}};</script>
<script src="{static}/entries.js"></script><script src="{static}/search.js"></script>
<script>
  const out = document.getElementById('search-results');
  const found = {queries}.map((query) => {{
    out.replaceChildren();
    Search.performSearch(query);
    return [...out.querySelectorAll('li > a')].map((link) => link.getAttribute('href'));
  }});
  document.querySelector('pre').textContent = JSON.stringify(found);
</script></html>"""


def load(address: str) -> str:
    """Return a page as a browser has it once its scripts have run."""
    command = [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=10000', '--dump-dom']
    return subprocess.run([*command, address], check=True, capture_output=True, text=True, timeout=300).stdout


def search(site: Path, queries: list[str]) -> list[list[str]]:
    """Return the addresses that the search shows for each query."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / 'queries.html'
        page.write_text(QUERIES.format(static=(site / '_static').as_uri(), queries=json.dumps(queries)))
        result = re.search('<pre>(.*)</pre>', load(page.as_uri()))
    if result is None or not result[1]:
        sys.exit('the search did not run')
    found: list[list[str]] = json.loads(html.unescape(result[1]))
    # The page of the site runs the same.
    shown = re.findall(
        r'<li><a href="([^"]*)"', load(f'{(site / "search.html").as_uri()}?q={quote(queries[0])}').partition(RESULTS)[2]
    )
    if shown[:SHOWN] != found[0][:SHOWN]:
        sys.exit(f'search.html shows {shown}')
    return found


def main(site: Path) -> None:
    """Print the problems of a site, and exit with status 1 if there are any."""
    found = problems(site)
    for (query, expected), urls in zip(SEARCHES.items(), search(site, list(SEARCHES)), strict=True):
        results = [url.removeprefix('./') for url in urls[:SHOWN]]
        if expected not in results:
            found.append(f'search for {query!r}: expected {expected}, got {results}')
    print('\n'.join(found) or f'{site}: links and search are sound')
    sys.exit(bool(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]).resolve())
