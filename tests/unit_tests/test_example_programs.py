"""House rules of `examples/`: each is listed, says how it runs, and names one line, or an option, for a real model."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.example_files import EXAMPLES, LINE, example, with_provider
from tests.loopback_provider import provider
from tests.notebooks import NOTEBOOKS

README = (EXAMPLES / "README.md").read_text()
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
ROWS = {
    found[1]: found[0] for found in re.finditer(r"^\| \[`([\w.]+)`\]\((?:notebooks/)?\1\) \|.*$", README, re.MULTILINE)
}
BY_LINE = [path for path in PROGRAMS if "the line in `make_model`" in ROWS.get(path.name, "")]
SEES_RECORDS = {"pate_labelling", "rag_voting", "ray_workers", "retrieval_voting", "web_application"}


def test_the_readme_lists_every_program_and_notebook_and_nothing_else() -> None:
    assert len(PROGRAMS) >= 11
    assert sorted(ROWS) == sorted(path.name for path in [*PROGRAMS, *NOTEBOOKS])


def test_links_of_the_readme_resolve() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(targets) > 12
    assert [target for target in targets if not (EXAMPLES / target).exists()] == []


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_it_is_run_and_how_with_a_model_of_ones_own(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in said or f"make {path.stem}" in said
    if path in BY_LINE:
        assert len(LINE.findall(path.read_text())) == 1
        assert "one line" not in said  # the readme says it once for all
    elif path.stem != "demo":
        (options,) = re.findall(r"\| `(--[^|]*)` \|", ROWS[path.name])
        assert all(f'"{option}"' in path.read_text() for option in re.findall(r"--[\w-]+", options))


@pytest.mark.loopback  # the client of a model looks at a socket of its own when it is made; an engine asks its server
@pytest.mark.parametrize("path", BY_LINE, ids=lambda path: path.stem)
def test_changing_the_line_changes_the_model_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    writes_tokens = path.stem == "ray_workers"
    before, after = path.read_text().splitlines(), with_provider(path.read_text()).splitlines()
    assert len(before) == len(after)
    changed = [line for line, old in zip(after, before, strict=True) if line != old]
    assert changed[0].strip() == "#"
    assert len(changed) == 2 + writes_tokens
    with example(path.stem, provider=True) as module, provider() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        model = module.make_model()
        assert type(model).__name__ == ("LangChainBackend" if writes_tokens else "ChatOpenAI")
        assert "gpt-4.1-mini" in {getattr(model, "model_name", None), getattr(model, "name", None)}
        assert bool(server.received) == writes_tokens
        sees = "SEES" in (module.make_model.__doc__ or "")
    assert sees == (path.stem in SEES_RECORDS) == ("**yes**" in ROWS[path.name])


def test_the_readme_shows_the_line_as_the_files_have_it() -> None:
    (shown,) = re.findall(r"^ +# With a provider: (.*)$", README, re.MULTILINE)
    lines = [found["code"] for path in BY_LINE for found in LINE.finditer(path.read_text())]
    assert shown in lines
    assert len(lines) == len(BY_LINE) >= 7


@pytest.mark.parametrize(
    ("name", "given", "extra"),
    [("own_server", ["--base-url", "http://127.0.0.1:9/v1"], "openai"), ("ray_workers", [], "ray")],
)
def test_an_example_without_its_extra_says_what_to_install(
    name: str, given: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with example(name) as module:
        monkeypatch.setattr(module, "find_spec", lambda _: None)
        with pytest.raises(SystemExit, match=rf'This example needs .*: pip install "langchain-dpicl\[{extra}\]"'):
            module.main(given)
