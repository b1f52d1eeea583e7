"""Hooks of mkdocs that make a site of pages written for GitHub. See mkdocs.yml.

The README is the first page, files outside of docs/ that pages link to come along, and headings have GitHub's anchors.
What stands in a comment that begins with `site` is in the site only.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
MOVED = {  # pages that are elsewhere in the site
    ROOT / "README.md": "index.md",
    DOCS / "README.md": "pages.md",
    ROOT / "CONTRIBUTING.md": "internals/contributing.md",
    ROOT / "CHANGELOG.md": "internals/changelog.md",
}
LINK = re.compile(r"\]\(([^)\s#]+)")
COMMENT = re.compile(r"^<!-- (site\n)?(.*?)-->\n?", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def anchor(heading: str, separator: str) -> str:
    """GitHub's, which keeps several separators in a row."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are moved, and what pages link to outside of docs/."""
    for path, name in MOVED.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    linked = {path for page in files.documentation_pages() for path in linked_files(page)}
    for path in sorted(linked - MOVED.keys()):
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def linked_files(page: File) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for link in LINK.findall(page.content_string):
        path = target(page, link)
        if path.is_file():
            yield path


def target(page: File, link: str) -> Path:
    return (Path(str(page.abs_src_path)).parent / link).resolve()


def place(path: Path) -> str:
    """Where a file of the repository is in the site."""
    inside = path.is_relative_to(DOCS)
    return MOVED.get(path) or str(path.relative_to(DOCS) if inside else "files" / path.relative_to(ROOT))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with links as they are in the site, and with what stands in comments for it.

    A page without neighbours in the menu has its room.
    """
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    here = posixpath.dirname(page.file.src_uri) or "."

    def linked(found: re.Match[str]) -> str:
        path = target(page.file, found[1])
        return f"]({posixpath.relpath(place(path), here)}" if path.is_file() else found[0]

    return LINK.sub(linked, COMMENT.sub(lambda found: found[2] if found[1] else "", markdown))
