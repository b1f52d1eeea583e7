"""Links lead somewhere, generated parts are up to date, and a reader of the README reaches a run early."""

import re
from dataclasses import dataclass

import pytest
from support.processes import python
from support.runs import IS_0_3, ROOT

from torchtitan_magi.planning.plan import MAX_STAGES
from torchtitan_magi.sizing import command
from torchtitan_magi.training.settings.options import Magi

import docs_reference  # isort: skip

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_anchors_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in anchors(target), link


def test_the_readme_is_short_and_its_first_block_installs_and_runs():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    begin = lines.index("```bash", 0, 39) + 1
    block = lines[begin : lines.index("```", begin)]
    assert block[0].startswith("pip install")
    assert block[-1].startswith("torchtitan-magi train")


@pytest.mark.skipif(not IS_0_3, reason="the pages' options are those of torchtitan 0.3")
def test_generated_parts_are_up_to_date():
    ended = python(ROOT / "docs" / "_build" / "write_docs.py", "--check")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_speeds_stand_in_generated_tables_only():
    for page in (ROOT / "docs" / "performance").glob("*.md"):
        typed = re.sub(r"<!-- generated: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        rows = [
            line for line in typed.splitlines() if line.startswith("|") and re.search(r"\d (ms|x|GiB|tokens/s)\b", line)
        ]
        assert not rows, f"{page.name}: {rows}"


def typed_commits(text):
    """Hashes of commits outside of generated parts and code."""
    typed = re.sub(r"<!-- generated: .*?<!-- end -->|^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        word
        for word in re.findall(r"\b[0-9a-f]{7,40}\b", typed)
        if re.search(r"[a-f]", word) and re.search(r"\d", word)
    ]


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/how-to/size.md"])
def test_the_answer_of_size_is_that_of_the_shipped_file(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without data and weights
    command.main([str(ROOT / "train_configs" / "llama3_8b_sft_128k.toml")])
    (block,) = re.findall(r"```text\n([^`]*H100\.\n[^`]*)```", (ROOT / page).read_text())
    assert block in capsys.readouterr().out


def test_no_commit_is_typed_by_hand():
    assert typed_commits("at 7adc6a3\n<!-- generated: x -->\n863e2df\n<!-- end -->\n`ab12cd3`") == ["7adc6a3"]
    for page in (ROOT / "docs").rglob("*.md"):
        assert not typed_commits(re.sub(r"\]\([^)]*\)", "", page.read_text())), page.name


def test_files_that_a_page_names_are_there():
    """From the root or from the package; what is generated has commands as they were run."""
    for page in PAGES:
        typed = re.sub(r"<!-- generated: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        for name in re.findall(r"`(?:\./|python )?((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|cuh?))\b", typed):
            folders = [folder for folder in (ROOT, ROOT / "torchtitan_magi") if (folder / name.split("/")[0]).is_dir()]
            assert not folders or any((folder / name).is_file() for folder in folders), f"{page.name}: {name}"


def test_every_result_is_used_by_a_page_a_script_or_a_test():
    texts = [page.read_text() for page in PAGES] + [
        script.read_text()
        for folder in ("benchmarks", "docs/_build", "tests/long", "tests/planning")
        for script in (ROOT / folder).glob("*.py")
    ]
    for result in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert any(result.stem in text for text in texts), result.name


def test_an_option_without_a_text_is_named():
    @dataclass
    class Options:
        told: int = 1
        """A text
        of two lines."""
        untold: int = 2

    with pytest.raises(ValueError, match=r"Options.untold has no text; write a docstring under it"):
        docs_reference.option_docs(Options)


def test_values_and_names_of_options_are_code():
    text = docs_reference.in_code('"": ``a b`` in $HOME/x; training.steps, seq_len or "x|y" and K/V, e.g. 3')
    assert text == '`""`: `a b` in `$HOME`/x; `training.steps`, `seq_len` or `"x\\|y"` and K/V, e.g. 3'


def test_the_text_on_stages_has_their_greatest_number():
    assert f"0 to {MAX_STAGES};" in docs_reference.option_docs(Magi)["overlap_stages"]


@pytest.mark.parametrize("page", (ROOT / "docs").rglob("*.md"), ids=lambda page: page.name)
def test_a_page_begins_with_a_title_and_a_sentence_that_says_what_it_gives(page):
    title, paragraph = page.read_text().split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"[A-Z[`]", paragraph)
    assert not re.match(r"(After|On|In)? ?[Tt]his page", paragraph)


def test_the_table_of_contents_has_every_page():
    folder = ROOT / "docs"
    listed = set(re.findall(r"\]\(([^)\s]+\.md)\)", (folder / "README.md").read_text()))
    assert {str(page.relative_to(folder)) for page in folder.rglob("*.md")} - listed == {"README.md"}
