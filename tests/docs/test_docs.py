"""Checks the documentation: its Python runs, and its links have targets.

Every ```python block of README.md and docs/**/*.md is executed, page by page, from top to bottom in one namespace per page. A
block with `<!-- not run -->` on the line before it is only compiled: it needs something that tests lack, such as a server. A
block of any language with `<!-- file: shop/settings.py -->` before it is written to that file, for the blocks below it to use.
"""

from __future__ import annotations

import pkgutil
import re
import textwrap
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import limitkeeper

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINKED = sorted([*PAGES, *(path for path in ROOT.glob("*.md") if path not in PAGES)])

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})[ \t]*(?P<words>[^\n`]*)$")
FILE = re.compile(r"<!-- file: (\S+) -->$")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s+\"[^\"]*\")?\s*$", re.M)
IN_HTML = re.compile(r"<(?:a|img|source|link)\b[^>]*?\b(?:href|src|srcset)=[\"']([^\"'\s]+)[\"']", re.I)


@dataclass(frozen=True)
class Block:
    """A fenced block: what it is, where its first line of code is, and whether it is to be run."""

    language: str
    code: str
    line: int
    run: bool
    file: str = ""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        before = next((line.strip() for line in reversed(lines[: number - 1]) if line.strip()), "")
        start = number
        while number < len(lines) and not re.match(rf"\s*{opening['ticks']}\s*$", lines[number]):
            number += 1
        words = opening["words"].replace("{", " ").replace("}", " ").replace(".", "").split()
        code = textwrap.dedent("\n".join(line.expandtabs() for line in lines[start:number])) + "\n"
        named = FILE.match(before)
        run = before != "<!-- not run -->" and named is None
        found.append(Block(words[0].lower() if words else "", code, start + 1, run, named[1] if named else ""))
        number += 1
    return found


def prose(text: str) -> str:
    """A page without its code, in which brackets mean other things."""
    kept, fence = [], None
    for line in text.splitlines():
        found = FENCE.match(line)
        if fence is None and found is not None:
            fence = found["ticks"]
        elif fence is not None:
            if line.strip() == fence:
                fence = None
        else:
            kept.append(re.sub(r"`[^`]*`", "", line))
    return "\n".join(kept)


def slug(heading: str) -> str:
    """The anchor of a heading, as Markdown's table of contents makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(path: Path) -> set[str]:
    """Every place in a page that a link may point at."""
    text = path.read_text()
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.sub(r"(?ms)^\s*(```+|~~~+).*?^\s*\1\s*$", "", text), re.M):
        explicit = re.search(r"\{[^}]*#([\w-]+)[^}]*\}\s*$", heading)
        name = explicit[1] if explicit else slug(heading)
        count, unique = 0, name
        while unique in found:
            count += 1
            unique = f"{name}_{count}"
        found |= {unique, unique.replace("_", "-")}
    return found | set(re.findall(r"\b(?:id|name)=[\"']([\w-]+)[\"']", text))


def links(path: Path) -> list[str]:
    """Everything that a page points at."""
    text = prose(path.read_text())
    return [*LINK.findall(text), *REFERENCE.findall(text), *IN_HTML.findall(text)]


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_the_python_of_a_page_runs(path, tmp_path, monkeypatch):
    """Every Python block of a page runs after those above it, with its own line numbers, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(limitkeeper.__path__[0]).parent))  # processes of a page run the same build
    namespace = {"__name__": "__main__", "__file__": str(path)}
    for block in blocks(path.read_text()):
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.code)
        if block.language in ("python", "py"):
            code = compile("\n" * (block.line - 1) + block.code, page_name(path), "exec")
            if block.run:
                exec(code, namespace)


@pytest.mark.parametrize("path", LINKED, ids=page_name)
def test_what_a_page_points_at_is_there(path):
    """Every link and picture inside the project exists, and so does the heading that a link names."""
    broken = []
    for target in links(path):
        if re.match(r"[a-z][a-z0-9+.-]*:", target, re.I) or target.startswith("//"):
            continue
        name, _, anchor = unquote(target).partition("#")
        there = path if not name else (path.parent / name)
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def test_pages_of_the_site_point_at_pages_of_the_site():
    """The site is made of docs/ alone: its pages do not point at files outside by a path."""
    outside = []
    for path in (ROOT / "docs").rglob("*.md"):
        for target in links(path):
            if not re.match(r"[a-z][a-z0-9+.-]*:|#|//", target, re.I):
                there = (path.parent / unquote(target).partition("#")[0]).resolve()
                if not there.is_relative_to(ROOT / "docs"):
                    outside.append(f"{page_name(path)}: {target}")
    assert outside == []


SAMPLE = """
# A page with `code` and *stress*

See [the end](#the-end) and ![a picture](pictures/one.png "title"), but not `[this](nowhere.md)`.

```python
first = 1
```

<!-- not run -->

```python
second = first / 0
```

- in a list

    ```python
    third = first + 2
    ```

```text
[not a link](nowhere.md)
# no heading
```

<!-- file: shop/settings.py -->
```python
DEBUG = first
```

## The end
"""


def test_blocks_are_found_as_they_are_written():
    """The reader of pages sees every block with its language, line, whether it is run, and the file that it is."""
    found = blocks(SAMPLE)
    assert [(block.language, block.line, block.run, block.file) for block in found] == [
        ("python", 7, True, ""),
        ("python", 13, False, ""),
        ("python", 19, True, ""),
        ("text", 23, True, ""),
        ("python", 29, False, "shop/settings.py"),
    ]
    assert found[2].code == "third = first + 2\n"


def test_links_are_found_outside_of_code(tmp_path):
    """The reader of links sees links and pictures, and nothing that is code."""
    page = tmp_path / "page.md"
    page.write_text(SAMPLE)
    assert links(page) == ["#the-end", "pictures/one.png"]
    assert anchors(page) == {"a-page-with-code-and-stress", "the-end"}


SOURCES = (ROOT / "docs" / "source-documents.md").read_text()
NAMED = re.compile(r"`((?:\w+/)+test_\w+\.py)(?:::(test_\w+))?`")


def test_the_tests_named_by_the_source_documents_page_exist():
    """Every test file and every test that docs/source-documents.md names exists under tests/."""
    named = set(NAMED.findall(SOURCES))
    assert len(named) > 80
    missing = []
    for file, test in named:
        path = ROOT / "tests" / file
        if not path.exists() or (test and not re.search(rf"^(async )?def {test}\(", path.read_text(), re.M)):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_every_row_of_the_source_documents_page_names_a_test():
    """Each row of its tables has four cells; the third names a test, but for headings without text."""
    rows = [line.split("|")[1:-1] for line in SOURCES.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {4}
    assert len(rows) > 70
    silent = {row[0].strip() for row in rows if not NAMED.search(row[2])}
    assert silent == {"in the document", "5, 6, 7: headings without text"}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_quoted_figures_are_those_of_the_last_bench(path, monkeypatch):
    """`make bench` and `make docs` write them from RESULTS.md; one at the start of a line would end its paragraph."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quoted_figures

    text = path.read_text()
    assert text == quoted_figures.quoted(text, quoted_figures.RESULTS.read_text())
    assert re.findall(r"^ {0,3}<!-- figure: .*", text, re.M) == []


REFERENCE_PAGES = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
REFERENCED = re.findall(r"^::: (\S+)$", REFERENCE_PAGES, re.M)
PACKAGES = ["", ".client", ".client.aiohttp", ".client.httpx", ".client.requests", ".concurrency", ".observe", ".plan", ".policy"]
PACKAGES += [".registry", ".sharing", ".simulate", ".stores", ".testing", ".web.degrade", ".web.django", ".web.grpc"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_reference_has_every_public_name(package):
    """Each name of a package's `__all__` has an entry in docs/api, under this name and maybe in another package."""
    names = [name for name in REFERENCED if ".tasks." not in name]  # arq is not installed
    entries = {(name.rpartition(".")[2], id(pkgutil.resolve_name(name))) for name in names}
    module = import_module(f"limitkeeper{package}")
    assert [name for name in module.__all__ if (name, id(getattr(module, name))) not in entries] == []


def test_the_install_page_has_every_extra_for_users():
    """docs/install.md has every extra but those for work on limitkeeper itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "install.md").read_text(), re.M)
    described = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    assert described == set(extras) - {"bench", "docs", "example", "lint", "test"}


def test_the_readme_and_the_landing_page_agree():
    """They begin with the same sentences, and show the same figures and the same first program."""
    readme, landing = [(ROOT / name).read_text() for name in ("README.md", "docs/index.md")]
    parts = [readme.partition("# limitkeeper\n\n")[2].partition("\n\n")[0], blocks(readme)[0].code]
    parts += re.findall(r"<!-- figures: .*?<!-- end -->", readme, re.S)
    assert len(parts) == 4
    assert [part for part in parts if part not in landing] == []


SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_the_navigation_has_every_page_once():
    """`nav` of mkdocs.yml names each page of docs/, and no other."""

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    assert sorted(pages(SITE["nav"])) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_the_site_loads_nothing_from_other_hosts():
    """No fonts are fetched, and the script that the offline search needs is our own."""
    scripts = SITE["extra"]["polyfills"]
    assert SITE["theme"]["font"] is False
    assert [script for script in scripts if "iframe-worker" in script]
    assert [script for script in scripts if not (ROOT / "docs" / script).exists()] == []
