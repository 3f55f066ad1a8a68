"""Screenshots of the page of ``granular view`` for the documentation.

::

    python -m tests.view.screenshots    # writes docs/screenshots/*.png
"""

import io
import pathlib
import time

import PIL.Image

import granular
from tests import ROOT
from tests.support.servers import MotoServer
from tests.view.chromium import chromium
from tests.view.example import write
from tests.view.serving import Served

FOLDER = ROOT / 'docs' / 'screenshots'
MOST = 200_000  # bytes of a file

# The page is complete when there are so many elements, and each video has its first frame.
COMPLETE = """
return document.querySelectorAll(arguments[0]).length >= arguments[1]
  && [...document.querySelectorAll('#detail video')].every((video) => video.readyState >= 2)
"""
# Name, address, colours, width, height, and the elements of a complete page.
PAGES = (
    ('tiles', '#/train?cover=image&at=3', 'light', 1280, 860, '.item canvas', 20),
    ('detail', '#/train?look=table&at=5&open', 'dark', 1440, 900, '.item canvas, #detail canvas', 45),
    ('about', '#/train?tab=about', 'light', 1280, 1480, '.chart', 12),
)


def shrink(data: bytes) -> bytes:
    """Return a PNG with a palette, which is smaller by far."""
    image = PIL.Image.open(io.BytesIO(data)).convert('RGB')
    stream = io.BytesIO()
    image.quantize(256, method=PIL.Image.Quantize.MEDIANCUT).save(stream, 'PNG', optimize=True)
    return stream.getvalue()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with MotoServer() as server, Served(write(granular.Path('s3://my-bucket', **server.options))) as served:
        for name, address, scheme, width, height, selector, count in PAGES:
            with chromium(width, height) as driver:
                driver.execute_cdp_cmd(
                    'Emulation.setEmulatedMedia', {'features': [{'name': 'prefers-color-scheme', 'value': scheme}]}
                )
                driver.execute_cdp_cmd(
                    'Emulation.setDeviceMetricsOverride',
                    {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': False},
                )
                driver.get(served.link)
                driver.get(f'{served.origin}/{address}')
                until = time.monotonic() + 60
                while not driver.execute_script(COMPLETE, selector, count):
                    if time.monotonic() > until:
                        raise TimeoutError(f'{name}: the page is not complete after 60 s')
                    time.sleep(0.1)
                data = shrink(driver.get_screenshot_as_png())
            if len(data) > MOST:
                raise ValueError(f'{name}: expected at most {MOST:,} bytes, got {len(data):,}')
            pathlib.Path(FOLDER / f'{name}.png').write_bytes(data)
            print(f'{name}.png: {len(data):,} bytes')


if __name__ == '__main__':
    main()
