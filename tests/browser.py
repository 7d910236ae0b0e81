""" Open pages in a real browser, by its own command line """
import functools
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable', 'chrome')


@functools.cache
def find_browser():
    """Return the browser and '', or None and the reason why tests in a browser are skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        return None, f'no browser is installed ({", ".join(NAMES)}); .ci/run installs chromium where it may'
    try:
        done = subprocess.run([found, '--version'], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f'{found} does not start: {error}'
    return (found, '') if done.returncode == 0 else (None, f'{found} does not start: {done.stderr[-200:]}')


def dump_dom(address):
    """Return the document as HTML, after its scripts."""
    browser, reason = find_browser()
    if browser is None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [browser, '--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage',
             '--virtual-time-budget=10000', '--dump-dom', f'--user-data-dir={profile}', address],
            capture_output=True, text=True, timeout=120)
    return done.stdout


def run_in_page(page, width, script, folder: Path):
    """ Show a page in a frame of a given width, and run a script on it.

    A frame can be narrower than a window; the outer page may run the script, which the report forbids.

    Args:
        page: The HTML of the page.
        width: Width of the frame in pixels.
        script: Body of an asynchronous function of `page`, the document, and `frame`, that returns what to check.
        folder: Folder for a temporary file.
    """
    text = json.dumps(page).replace('</', '<\\/').replace('<!--', '<\\!--')
    outer = folder / f'outer-{width}.html'
    outer.write_text(
        f'<!DOCTYPE html><iframe id="frame" width="{width}" height="900" frameborder="0"></iframe><script>\n'
        'const frame = document.getElementById("frame");\n'
        f'const check = async page => {{ {script} }};\n'
        'frame.onload = () => check(frame.contentDocument)\n'
        '  .then(seen => ({seen}), error => ({error: String(error)}))\n'
        '  .then(outcome => { document.title = JSON.stringify(outcome); });\n'
        f'frame.srcdoc = {text};</script>', encoding='utf-8')
    found = re.search(r'<title>(.*?)</title>', dump_dom(outer.as_uri()), re.DOTALL)
    assert found, 'the script did not finish'
    outcome = json.loads(html.unescape(found.group(1)))
    assert 'seen' in outcome, outcome
    return outcome['seen']
