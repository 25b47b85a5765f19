"""The report's page in a real browser: both widths, both colour schemes, print; nothing runs, nothing is fetched."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser
from build import CACHE, CONTEXT, boots, registration, response
from d3.certificate import build, load, write
from d3.report.files import write_reports
from d3.store import root

pytestmark = [pytest.mark.slow]
RESULTS = root() / "results"
COMMITTED = ("d3_determinism_2x2", "h200_vllm_0_24")
SCRIPT = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
WIDTHS = (1400, 400)
READ = "document.body.innerText"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study whose question, prompt and responses hold a script."""
    study = registration(("on/0", "off/0"), boots=2, prompts=("short", SCRIPT)).model_copy(update={"question": SCRIPT})
    letters = {x: response(x, text=f"{x} {SCRIPT}") for x in "ab"}
    found = boots(study, {"on/0": {"short": CACHE, SCRIPT: CACHE}}, letters=letters)
    path = write(build(study, found, CONTEXT), found, tmp_path_factory.mktemp("hostile") / "c.json")
    return write_reports(path)[1]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_page(browser: Browser, tmp_path: Path, *, name: str, width: int, dark: bool) -> None:
    browser.open(RESULTS / f"{name}.html", width, dark=dark)
    # Nothing sticks out of the page, also when all is unfolded, and no text is too small to read.
    check_nothing_sticks_out(browser, width)
    small = "Math.min(...[...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && e.innerText && "
    small += "e.children.length == 0).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    assert browser.value(small) >= 10
    drawn = "Math.min(...[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect())"
    drawn += ".filter(r => r.width).map(r => Math.min(r.width, r.height)))"
    assert browser.value(drawn) >= 6
    assert browser.requested() == [(RESULTS / f"{name}.html").as_uri()]
    assert browser.value("document.scripts.length") == 0
    picture = browser.picture()
    picture.save(tmp_path / f"{name}-{width}{'-dark' if dark else ''}.png")
    assert picture.size == (width, 3000)
    paper = (20, 23, 26) if dark else (255, 255, 255)
    assert picture.getpixel((2, 2)) == paper
    inked = sum(n for n, colour in picture.getcolors(1 << 24) or [] if colour != paper) / (width * 3000)
    assert 0.05 < inked < 0.7
    browser.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    check_nothing_sticks_out(browser, width)


def check_nothing_sticks_out(browser: Browser, width: int) -> None:
    """Fail where the page scrolls sideways, or an element (that does not scroll by itself) ends right of it."""
    assert browser.value("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .seen, .hidden, svg') && "
    wide += f"e.getBoundingClientRect().right > {width}).map(e => e.outerHTML.slice(0, 80))"
    assert browser.value(wide) == []


@pytest.mark.parametrize("name", COMMITTED)
def test_what_a_reader_reads(browser: Browser, name: str) -> None:
    certificate = load(RESULTS / f"{name}.json")
    browser.open(RESULTS / f"{name}.html", 1400)
    words = re.sub(r"\s+", " ", browser.value(READ))
    for said in (
        certificate.registration.question,
        *certificate.limits,
        "the first answer after a cold cache can differ",
    ):
        assert said in words
    assert browser.value("document.querySelector('h1').getBoundingClientRect().bottom") < 200
    assert browser.value("document.querySelector('table').getBoundingClientRect().top") < 700
    strips = browser.value("[...document.querySelectorAll('.strip.differs tbody tr')].map(r => r.innerText)")
    assert "0 A B B B B B A B" in {re.sub(r"\s+", " ", row).strip() for row in strips}
    pictures = "[...document.querySelectorAll('figure [role=img]')]"
    assert browser.value(f"{pictures}.length") >= 3
    assert browser.value(f"{pictures}.every(e => e.ariaLabel.length > 20 && e.querySelector('svg'))")


@pytest.mark.parametrize("name", COMMITTED)
def test_print_shows_the_evidence_on_white(browser: Browser, name: str) -> None:
    browser.open(RESULTS / f"{name}.html", 1400, dark=True)
    browser("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.value("getComputedStyle(document.body).backgroundColor") in {
        "rgb(255, 255, 255)",
        "rgba(0, 0, 0, 0)",
    }
    assert "readings" in browser.value("document.querySelector('details:not(.calm)').innerText").lower()
    assert browser.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_script_in_a_record_is_text_and_does_not_run(browser: Browser, hostile: Path, width: int) -> None:
    browser.open(hostile, width)
    assert browser.value("document.title") == "D3: test"
    assert browser.value("document.querySelectorAll('script, img').length") == 0
    assert browser.requested() == [hostile.as_uri()]
    assert browser.value("document.querySelector('h1').innerText") == SCRIPT
    assert browser.value(READ).count("<script>document.title = 'ran'</script>") > 5
    assert browser.value("document.documentElement.scrollWidth") <= width
