"""The documentation: it builds, links lead somewhere, pages load nothing from elsewhere, commands are valid."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from hydra.core.global_hydra import GlobalHydra

from d3 import reference
from d3.errors import D3Error
from documents import (
    ROOT,
    code,
    command_lines,
    composed,
    files_of_the_reader,
    parsers,
    problem,
    settings,
    study_of,
)

DOCS = ROOT / "docs"
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Where a page sends a reader who clicks. Nothing is fetched from there, neither by a page nor by this test.
OUTSIDE = {"https://properdocs.org/"}


class Page(NamedTuple):
    """What a built page points to: what it loads by itself, what a reader may follow, and its anchors."""

    loads: list[str]
    links: list[str]
    anchors: set[str]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page([], [], set())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.page.anchors.add(value)
            if tag == "a" and name == "href":
                self.page.links.append(value)
            elif name in {"href", "src", "srcset", "poster", "data", "action", "background"}:
                self.page.loads.append(value)
            elif name == "style":
                self.page.loads.extend(re.findall(r"url\(([^)]*)\)", value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, in strict mode: a page that nobody links or a link into nothing fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "properdocs",
        "build",
        "--strict",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def read(path: Path) -> Page:
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.page


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":  # its links are absolute, for a server
            yield path, read(path)


def test_every_page_is_built_and_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    wanted = {p.relative_to(DOCS).with_suffix(".html") for p in DOCS.rglob("*.md")}
    built = {p.relative_to(site): page for p, page in pages(site)}
    assert wanted == built.keys()
    anchors = {(site / p).resolve(): page.anchors for p, page in built.items()}
    dead = []
    for path, page in built.items():
        for link in [*page.links, *page.loads]:
            url = urlsplit(link)
            target = ((site / path).parent / unquote(url.path)).resolve() if url.path else (site / path).resolve()
            if url.scheme or link in {"#", ""}:
                continue
            if not target.is_file() or (url.fragment and url.fragment not in anchors.get(target, ())):
                dead.append(f"{path}: {link}")
    assert not dead


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {f"{p.name}: {x}" for p, page in pages(site) for x in page.loads if urlsplit(x).netloc or "://" in x}
    for style in site.rglob("*.css"):
        text = style.read_text()
        assert "@import" not in text
        loaded |= {f"{style.name}: {x}" for x in re.findall(r"url\(['\"]?((?:https?:)?//[^)]*)\)", text)}
    for script in site.rglob("*.js"):
        loaded |= {f"{script.name}: {x}" for x in re.findall(r"['\"`]((?:https?:)?//\w[^'\"`]*)", script.read_text())}
    assert not loaded


def test_links_that_leave_are_known_and_encrypted(site: Path) -> None:
    assert {x for _, page in pages(site) for x in page.links if urlsplit(x).netloc} == OUTSIDE
    assert all(x.startswith("https://") for x in OUTSIDE)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_files_at_the_root_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        url = urlsplit(link)
        assert url.scheme or not url.path or (ROOT / url.path).exists(), f"{name}: {link}"


@pytest.fixture(scope="module")
def own_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's own configuration folder, with every file that the documents show."""
    folder = tmp_path_factory.mktemp("conf")
    files_of_the_reader(MARKDOWN, folder)
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*.yaml")} == {
        "prompts/mine.yaml",
        "engine/my_vllm.yaml",
    }
    return folder


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_of_a_document_is_valid(path: Path, own_conf: Path) -> None:
    wrong = [f"{' '.join(c)}: {why}" for c in dict.fromkeys(command_lines(path)) if (why := problem(c, own_conf))]
    assert not wrong


def test_commands_are_found_at_all() -> None:
    every = {" ".join(c) for path in MARKDOWN for c in command_lines(path)}
    assert "make study" in every
    assert "python -m d3.certify" in every
    assert "python -m d3 study=pilot apc=on" in every
    assert "... temperature=0.0,0.7" in every
    assert ".venv/bin/python -m d3.verify FILE" not in every
    assert len(every) > 40
    assert len([c for c in parsers() if any(e.startswith(c) for e in every)]) > 6


def test_every_setting_that_a_document_names_is_one() -> None:
    named = {word for path in MARKDOWN if path.parent.name != "reference" for word in settings(path)}
    assert {"plan_only=true", "protocol=seed", "eager=true,false"} <= named
    waiting = [(k, v) for k, _, values in (w.partition("=") for w in sorted(named)) for v in values.split(",") if v]
    while waiting:  # as few compositions as it takes to give every key each of its values
        together = dict(waiting)
        if "start" in together:  # a way to start that engines of other transports and devices refuse
            together = {k: v for k, v in together.items() if k.partition(".")[0] != "engine"}
        study_of([composed(tuple(f"{k}={v}" for k, v in together.items()))], [])
        waiting = [(k, v) for k, v in waiting if together.get(k) != v]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python -m d3.nothing FILE", "there is no python -m d3.nothing"),
        ("python -m d3.record FILE", "there is no python -m d3.record"),
        ("python -m d3.certify --ruin ID", "unrecognized arguments: --ruin ID"),
        ("python -m d3.host PLANS", "the following arguments are required: --model"),
        ("python -m d3.engine uninstall vllm_cpu", "invalid choice: 'uninstall'"),
        ("python -m d3 apc=on invariants=0", "no configuration key is called invariants; did you mean invariant?"),
        ("python -m d3 apc=on,off", "a sweep over apc without -m"),
        ("python -m d3 -m apc=on,off invariant=0,2", "invariant=2 is not a level"),
        ("python -m d3 -m boots=1,2", "boots holds for a whole study"),
        ("python -m d3 engine=nothing", "there is no engine/nothing"),
        ("python -m d3 -m engine=vllm attention=default,NONE", "engine vllm has no setting for attention=NONE"),
        ("... temperature=-1", "temperature=-1.0 is negative"),
        ("make nothing", "No rule to make target"),
        ("make study BOTS=1", "the Makefile has no variable BOTS"),
        ("mlflow run . -e nothing", "MLproject has no entry point nothing"),
        ("mlflow run . -P boot=1", "entry point main has no parameter boot"),
    ],
)
def test_a_wrong_command_is_found(command: str, why: str, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"Text with `{command}` in it.\n\n```\nX=1 {command} && make test\n```\n")
    if command.startswith("..."):
        document.write_text(f"Text with `{command}` in it, and\n\n    make test\n")
    found = dict.fromkeys(command_lines(document))
    assert list(found) == [tuple(command.split()), ("make", "test")]
    assert why in problem(tuple(command.split()), tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "mlflow run . -P boots=1",
        "mlflow run . -e verify -P certificate=FILE",
        "make study BOOTS=1",
        "python -m d3.schema",
        "python -m d3.certify [--run ID] [--out FILE]",
        "python -m d3.host --help",
    ],
)
def test_a_right_command_is_taken(command: str, tmp_path: Path) -> None:
    assert problem(tuple(command.split()), tmp_path) == ""


def test_of_output_only_the_advice_counts(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("```text\nmake nothing\nnext: python -m d3.certify\n```\nand `python -m d3.verify`\n")
    assert list(code(document)) == ["python -m d3.certify", "python -m d3.verify --help"]


def test_the_reference_pages_are_what_the_code_gives() -> None:
    GlobalHydra.instance().clear()
    written = reference.pages()
    assert set(written) == {p.name for p in (DOCS / "reference").glob("*.md")}
    for name, text in written.items():
        assert (DOCS / "reference" / name).read_text() == text, "run: make reference"
        assert str(reference.root()) not in text


def test_the_reference_command_writes_its_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GlobalHydra.instance().clear()
    assert reference.main([str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["certificate.md", "commands.md", "config.md", "record.md"]
    assert capsys.readouterr().out.startswith("wrote config.md")


def test_a_field_without_a_description_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = reference.descriptions()
    del said["Timings"]["boot_s"]
    monkeypatch.setattr(reference, "descriptions", lambda: said)
    with pytest.raises(D3Error, match=r"Timings\.boot_s has no description; add a line to docs/reference/fields\.yaml"):
        reference.pages()


@pytest.mark.parametrize(("cls", "field"), [("Timings", "reboot_s"), ("Nothing", "boot_s"), ("BootRecord", "cell")])
def test_a_description_without_a_field_is_named(cls: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = reference.descriptions()
    said.setdefault(cls, {})[field] = "something"
    monkeypatch.setattr(reference, "descriptions", lambda: said)
    with pytest.raises(D3Error, match=rf"fields\.yaml explains {cls}\.{field}, which does not exist"):
        reference.pages()


def test_a_key_is_described_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_comments", lambda _text: {"allow_large": "a second description"})
    with pytest.raises(D3Error, match=r"fields\.yaml explains Config\.allow_large as conf/config\.yaml does"):
        reference.descriptions()
