"""What the site adds to docs/: the navigation of docs/index.md, the reference of the code, llms.txt.

Links that leave docs/ are made for a checkout. On the site the README is a page, pictures are copied, and other files
are named.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
ROOT = HERE.parent
README = "readme.md"

# The modules with public names, and the page of each.
MODULES = {
    "holdfast": "reference/holdfast.md",
    "holdfast.embedded": "reference/embedded.md",
    "holdfast.testing": "reference/testing.md",
    "holdfast.errors": "reference/errors.md",
    "holdfast.telemetry": "reference/telemetry.md",
}

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ENTRY = re.compile(
    r"^(?:- |\d+\. )\[([^\]]+)\]\(([\w/.-]+\.md)\)(?::\s+(.*?))?$(?=\n(?:- |\d+\. |\n|\Z))", re.M | re.S
)
_CODE = re.compile(r"<code>[^<\n]+</code>")  # in a sentence: blocks have elements or lines in them
_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)#]*)(?P<anchor>#[^)]*)?\)")


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """The lists of docs/index.md by heading: title, page and sentence of each entry."""
    parts = _SECTION.split((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    return {
        heading: [(title, page, " ".join((said or "").split())) for title, page, said in _ENTRY.findall(body)]
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/index.md; a page that is not listed there fails the strict build.

    A page has one place: the last in which it is listed, since the first hour names some of others' before.
    """
    place = {page: heading for heading, entries in sections().items() for _, page, _ in entries}
    nav: list[dict[str, Any]] = [{"Start": ["index.md", {"README": README}]}]
    for heading, entries in sections().items():
        nav.append({heading: [{title: page} for title, page, _ in entries if place[page] == heading]})
        if heading == "Reference":
            nav[-1]["Reference"].append({"Reference of the code": [{name: page} for name, page in MODULES.items()]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, the reference pages and the style sheet."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, README, content=readme))
    for module, page in MODULES.items():
        files.append(File.generated(config, page, content=reference(module)))
    files.append(File.generated(config, "assets/site.css", abs_src_path=str(HERE / "site.css")))
    for picture in sorted(outside_pictures()):
        files.append(File.generated(config, copied(picture), abs_src_path=str(picture)))
    return files


def outside_pictures() -> set[Path]:
    """The pictures that pages show and that lie beside docs/, as the plots of the benchmarks do."""
    docs = ROOT / "docs"
    found = {
        (page.parent / link["target"]).resolve()
        for page in docs.rglob("*.md")
        for link in _LINK.finditer(page.read_text(encoding="utf-8"))
        if link["picture"]
    }
    return {path for path in found if not path.is_relative_to(docs)}


def copied(picture: Path) -> str:
    """Where the site has a picture that lies beside docs/."""
    return f"images/{picture.relative_to(ROOT).as_posix()}"


def reference(module: str) -> str:
    """The page of a module: each public name, documented by its docstring and signature."""
    entries = "\n\n".join(f"::: {module}.{name}" for name in public_names(module))
    return (
        f"# {module}\n\nExamples are in [Python API](../api.md), defaults in [Settings](../settings.md).\n\n{entries}\n"
    )


def public_names(module: str) -> list[str]:
    """What a module exports: its `__all__`, or the classes that it defines."""
    path = ROOT / "src" / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return list(ast.literal_eval(node.value))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the checkout into their names, and links to the README and to pictures into the site's."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    up = "../" * (page.file.src_uri.count("/"))

    def rewritten(link: re.Match[str]) -> str:
        target, text = (folder / link["target"]).resolve(), link["text"]
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if link["picture"]:
            return f"![{text}]({up}{copied(target)})"
        path = target.relative_to(ROOT)
        if path == Path("README.md"):
            return f"[{text}]({up}{README}{link['anchor'] or ''})"
        return f"`{path}`" if text in str(path) else f"{text} (`{path}`)" if str(path) not in text else text

    if page.file.src_uri == README:
        return re.sub(r"\[([^\]]+)\]\((?!https?:)([A-Z]+(?:\.md)?)\)", r"\1 (`\2`)", markdown)
    return _LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the options of commands in one piece: browsers cut `--dry-run` behind each of its hyphens."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, an index for assistants, and llms-full.txt, all pages as text."""
    lines = ["# Holdfast", "", f"> {config.site_description}.", ""]
    texts: list[str] = []
    seen: set[str] = set()
    for heading, entries in sections().items():
        lines += [f"## {heading}", ""]
        for title, page, said in entries:
            said = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", said)
            lines.append(f"- [{title}]({Path(page).with_suffix('.html')})" + (f": {said}" if said else ""))
            if page not in seen:
                texts.append((ROOT / "docs" / page).read_text(encoding="utf-8"))
                seen.add(page)
        lines.append("")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")
