"""Chromium without a window."""

import contextlib

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service


@contextlib.contextmanager
def chromium(width=1280, height=800, dark=False):
    """Provide a driver of Chromium, with the log of the page's console and errors."""
    options = Options()
    for argument in (
        '--headless=new',
        '--no-sandbox',
        '--disable-dev-shm-usage',
        '--disable-gpu',
        '--no-first-run',
        '--disable-extensions',
        '--disable-background-networking',
        '--disable-sync',
        '--mute-audio',
        '--hide-scrollbars',
        '--disable-component-update',
        '--autoplay-policy=no-user-gesture-required',
        f'--window-size={width},{height}',
        '--force-device-scale-factor=1',
        *(['--force-dark-mode'] if dark else []),
    ):
        options.add_argument(argument)
    options.binary_location = '/usr/bin/chromium'
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.Chrome(options=options, service=Service('/usr/bin/chromedriver'))
    try:
        yield driver
    finally:
        driver.quit()
