"""The web page in headless Chromium: chat, dashboard, keyboard, small screens, no outside requests."""

import shutil

import pytest

from conftest import DEMO_MODEL
from models import base  # noqa: F401 (a fixture)
from serving import serving

webdriver = pytest.importorskip("selenium.webdriver", reason="SKIP: selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER),
                                reason="SKIP: chromium and chromium-driver are not installed")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as driver:
        yield driver


@pytest.fixture(scope="module")
def demo(k3_bin):
    with serving(k3_bin, DEMO_MODEL, "--sample-every", 1) as server:
        yield server


@pytest.fixture
def page(browser, demo):
    browser.get(demo.url + "/")
    yield browser
    # Whatever a test did, the page had no error of its own and asked nobody else for anything.
    errors = [e for e in browser.get_log("browser")
              if e["level"] == "SEVERE" and "the server responded with" not in e["message"]]
    assert errors == []
    for entry in browser.get_log("performance"):
        if '"Network.requestWillBeSent"' in entry["message"]:
            assert f'"url":"{demo.url}' in entry["message"] or '"url":"data:' in entry["message"]


def find(page, selector):
    return page.find_element(By.CSS_SELECTOR, selector)


def wait(page, condition, seconds=60):
    return WebDriverWait(page, seconds, 0.1).until(condition)


def say(page, text, tokens=24):
    page.execute_script("document.getElementById('max_tokens').value = arguments[0]", tokens)
    find(page, "#prompt").send_keys(text, Keys.ENTER)


def last_reply(page):
    replies = page.find_elements(By.CSS_SELECTOR, ".message.assistant")
    return replies[-1].text if replies else ""


def idle(page):
    return find(page, "#send").is_enabled()


def test_a_conversation_by_keyboard_alone(page):
    wait(page, lambda p: find(p, "#model").text == "k3-books-27m")
    assert page.switch_to.active_element.get_attribute("id") == "prompt"
    say(page, "Once upon a time")
    wait(page, lambda p: len(last_reply(p)) > 10 and idle(p))
    assert "tokens/s" in find(page, "#timing").text and find(page, "#prompt").text == ""
    first = last_reply(page)
    find(page, "#prompt").send_keys(Keys.TAB, Keys.TAB)  # Send, then the next button that is on
    assert page.switch_to.active_element.get_attribute("id") == "again"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    wait(page, lambda p: idle(p) and last_reply(p) not in ("", first))
    assert len(page.find_elements(By.CSS_SELECTOR, ".message.user")) == 1
    find(page, "#clear").click()
    assert page.find_elements(By.CSS_SELECTOR, ".message") == []


def test_escape_stops_and_the_text_so_far_stays(page, demo):
    for _ in range(5):  # a sampled story may end by itself before the key is pressed
        say(page, "Tell me a long story", 3000)
        wait(page, lambda p: len(last_reply(p)) > 20)
        find(page, "#prompt").send_keys(Keys.ESCAPE)
        wait(page, idle, 5)
        if "(stopped)" in last_reply(page):
            break
    assert "(stopped)" in last_reply(page)
    wait(page, lambda p: demo.metric("k3_requests_running") == 0, 10)


def test_markup_is_shown_not_run(page):
    say(page, "<img src=x onerror=\"document.title='broken'\"> <b>bold</b>", 2)
    wait(page, idle)
    bubble = find(page, ".message.user")
    assert "<b>bold</b>" in bubble.text and page.title == "k3"
    assert bubble.find_elements(By.CSS_SELECTOR, "b, img") == []


def test_errors_of_the_server_are_shown(page):
    page.execute_script("document.getElementById('prompt').value = 'word '.repeat(6000)")
    say(page, "and one more")
    wait(page, lambda p: find(p, "#notice").is_displayed())
    assert "4096" in find(page, "#notice").text and idle(page)


def test_sampling_controls_are_sent(page):
    for name, value in (("temperature", "0"), ("seed", "7")):
        page.execute_script(f"document.getElementById('{name}').value = '{value}'")
    texts = []
    for _ in range(2):
        say(page, "The captain")
        wait(page, lambda p: idle(p) and last_reply(p))
        texts.append(last_reply(page))
        find(page, "#clear").click()
    assert texts[0] == texts[1]


def test_dashboard_fills(page):
    say(page, "Once upon a time")
    wait(page, lambda p: idle(p) and last_reply(p))
    find(page, "#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert find(page, "#dashboard").is_displayed() and not find(page, "#chat").is_displayed()
    wait(page, lambda p: "layers" in find(p, "#experts-text").text and
         "answer tokens/s" in find(p, "#cards").text)
    assert "first token" in find(page, "#latency").text
    assert "since the start" in find(page, "#h-latency").text
    assert int(find(page, "#latency tbody td:last-child").text) > 0, "what was before is counted"
    assert "prefix cache" in find(page, "#memory").text
    assert "bits" in find(page, "#entropy").text
    assert find(page, "#experts").get_attribute("aria-label") == find(page, "#experts-text").text
    painted = page.execute_script(
        "const c = document.getElementById('experts'), d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data;"
        "return new Set(new Uint32Array(d.buffer)).size")
    assert painted > 3, "the heat map shows different loads"


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_the_screen_in_both_schemes(page, width, scheme, tmp_path):
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600})
    try:
        for tab in ("chat", "dashboard"):
            find(page, f"#tab-{tab}").click()
            wait(page, lambda p, tab=tab: find(p, f"#{tab}").is_displayed())
            assert page.execute_script(
                "return document.documentElement.scrollWidth <= window.innerWidth"), tab
            ink, ground = page.execute_script(
                "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
            assert contrast(ink, ground) > 7
            page.save_screenshot(str(tmp_path / f"{tab}-{width}-{scheme}.png"))
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def contrast(a, b):
    """The ratio of WCAG 2 between two rgb(...) colours."""
    def luminance(text):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
                  for c in (int(v) / 255 for v in text[text.index("(") + 1:-1].split(",")[:3])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_key_is_asked_for(k3_bin, base, browser):  # noqa: F811
    with serving(k3_bin, base, "--api-key", "secret") as server:
        browser.get(server.url + "/")
        wait(browser, lambda p: find(p, "#key-box").is_displayed())
        find(browser, "#key").send_keys("secret", Keys.TAB)
        wait(browser, lambda p: find(p, "#model").text not in ("", "the server does not answer"))
    browser.get_log("browser"), browser.get_log("performance")
