"""The documentation site: it builds strictly, has every page, and needs nothing from another host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.support import ROOT

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `./dev docs build` does, where a warning is an error: dead links, anchors, unlisted pages."""
    folder = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    run = subprocess.run(
        [mkdocs, "build", "--strict", "-f", "site/mkdocs.yml", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    return folder


def test_every_page_is_on_the_site_and_found_by_its_search(site: Path) -> None:
    """What a document says is found on the one site (OPS-4)."""
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in pages if not (site / page).is_file()]
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert pages <= {entry["location"].split("#")[0] for entry in index["docs"]}


def test_the_reference_has_every_public_name(site: Path) -> None:
    """The reference is made of the code: each name of `holdfast` has its signature and its docstring."""
    import holdfast

    page = (site / "reference" / "holdfast.html").read_text()
    assert not [name for name in holdfast.__all__ if f'id="holdfast.{name}"' not in page]
    assert "Publish thousands of events in few statements and return their ids." in page


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own: it can be read where there is no network."""
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+stylesheet[^>]+href=["']?(?:https?:)?//"""
    )
    assert not [page for page in site.rglob("*.html") if loaded.search(page.read_text())]


def test_every_picture_of_a_page_is_on_the_site(site: Path) -> None:
    """Also those that lie beside docs/, as the plots of the benchmarks do; each leads to a file (OPS-4)."""
    shown = {page: re.findall(r"^!\[", page.read_text(), re.MULTILINE) for page in (ROOT / "docs").rglob("*.md")}
    for page, pictures in shown.items():
        html = (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        found = re.findall(r'<img[^>]+src="([^"]+)"', html.read_text())
        assert len(found) == len(pictures), page
        assert not [source for source in found if not (html.parent / source).is_file()], page
    assert len(shown[ROOT / "docs" / "benchmarks.md"]) >= 5


def test_whoever_is_on_call_finds_every_runbook_in_one_place(site: Path) -> None:
    """Beside a runbook the navigation lists the others, whatever other lists name them too (OPS-4)."""
    html = (site / "runbooks" / "alerts.html").read_text()
    [section] = re.findall(r'data-md-level="1"[^>]+aria-expanded="true">(.*?)data-md-level="1"', html, re.DOTALL)
    linked = set(re.findall(r'href="([\w-]+\.html)"', section))
    assert linked == {page.with_suffix(".html").name for page in (ROOT / "docs" / "runbooks").glob("*.md")}


def test_assistants_find_every_page(site: Path) -> None:
    """llms.txt lists each page with a sentence, and each link leads to a page."""
    text = (site / "llms.txt").read_text()
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)(: .+)?$", text, re.MULTILINE)
    assert links
    assert not [link for link, _ in links if not (site / link).is_file()]
    listed = {link for link, _ in links}
    assert {"installation.html", "glossary.html", "runbooks/alerts.html"} <= listed
    assert "# Installation" in (site / "llms-full.txt").read_text()
