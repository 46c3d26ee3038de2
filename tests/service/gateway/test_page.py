"""The gateway's page in headless Chromium; `make screenshots` writes pictures of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.gateway.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
_ENDED = "document.querySelectorAll('.verdict')[{}]?.textContent || document.querySelector('.error')?.textContent"
_SHOW_LARGEST = """{
    const slider = document.querySelector('.turn .walk input'), sizes = [];
    const show = (step) => { slider.value = step; slider.dispatchEvent(new Event('input')); };
    for (let step = 1; step <= Number(slider.max); step++) {
        show(step);
        sizes.push(document.querySelectorAll('.turn:first-child .tree g').length);
    }
    show(sizes.indexOf(Math.max(...sizes)) + 1);
    document.querySelector('.turn .tree').scrollIntoView({block: 'start'});
}"""
_SCREENSHOTS = os.environ.get("PAGE_SCREENSHOTS")


@pytest.fixture
def page(gateway: str) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(f"{gateway}/")
        browser.wait_for("document.getElementById('model').textContent.includes('draftwood-demo')")
        yield browser


def ask(page: Browser, question: str, tenant: str, turn: int = 0) -> str:
    """Asks, waits for both answers, and returns the verdict."""
    page.run(f"at('tenant').value = {tenant!r}; at('question').value = {question!r}; at('form').requestSubmit()")
    page.wait_for(_ENDED.format(turn))
    verdict = page.run(_ENDED.format(turn))
    assert isinstance(verdict, str)
    return verdict


def test_a_question_is_answered_with_and_without_drafts(page: Browser) -> None:
    first = ask(page, "Where is my parcel?", "page-test")
    assert first.endswith("times the speed, the same text")
    page.run("document.querySelector('.again').click()")
    page.wait_for(_ENDED.format(1))
    texts = page.run("[...document.querySelectorAll('.text')].map((one) => one.textContent)")
    assert len(texts) == 4
    assert len(set(texts)) == 1
    assert len(texts[0]) > 100
    assert page.run("document.querySelectorAll('.plain mark').length") == 0
    assert page.run("document.querySelectorAll('.drafts .speed b').length") == 2
    assert " tokens a step in " in page.run("document.querySelectorAll('.drafts .figures')[1].textContent")


def test_the_tree_shows_what_was_accepted(page: Browser) -> None:
    for turn in range(10):  # until the memory knows the answer
        ask(page, "How do I cancel an order?", "page-tree", turn)
        page.run("history.length = 0")
        if page.run("document.querySelectorAll('.turn:last-child .drafts mark').length"):
            break
    page.run(
        "{ const slider = document.querySelector('.turn:last-child input[type=range]');"
        " const shown = () => document.querySelector('.turn:last-child .walk span').textContent;"
        " for (let step = 1; step <= Number(slider.max); step++) { slider.value = step;"
        " slider.dispatchEvent(new Event('input')); if (!shown().includes(', 0 accepted')) break; } }"
    )
    shown = page.run("document.querySelector('.turn:last-child .walk span').textContent")
    counts = [int(word) for word in shown.replace(":", "").split() if word.isdigit()]
    _, _, drafted, accepted = counts
    tree = "document.querySelector('.turn:last-child .tree svg')"
    assert accepted > 0
    assert page.run(f"{tree}.querySelectorAll('g.on').length") == accepted + 1  # with the text so far
    assert page.run(f"{tree}.querySelectorAll('g').length") in (drafted + 1, drafted + 2)  # and the model's own token
    assert page.run(f"{tree}.querySelectorAll('path.on').length") == accepted


def test_an_error_is_shown(page: Browser) -> None:
    page.run("at('tokens').value = 1000000; at('form').requestSubmit()")
    page.wait_for("document.querySelector('.error')")
    assert "max_tokens" in page.run("document.querySelector('.error').textContent")
    assert page.run("at('ask').disabled") is False


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1100, False), ("dark", 1100, True), ("narrow", 390, False)]
)
def test_nothing_is_wider_than_the_window(gateway: str, name: str, width: int, dark: bool) -> None:
    with Browser(width, 1250, dark) as browser:
        browser.open(f"{gateway}/")
        browser.wait_for("document.getElementById('model').textContent.includes('draftwood-demo')")
        for turn in range(2):
            ask(browser, "Where is my parcel, and who brings it?", f"page-{name}", turn)
            browser.run("history.length = 0")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 21, 27)") == dark
        browser.run(_SHOW_LARGEST)
        if _SCREENSHOTS:
            Path(_SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            Path(_SCREENSHOTS, f"page-{name}.png").write_bytes(browser.screenshot())
