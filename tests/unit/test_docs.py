"""The documentation says what the code does: names, options, variables, messages, links."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import hvd_strategy
from hvd_strategy import errors
from hvd_strategy.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(*endings: str) -> Iterator[Path]:
    for folder in ("hvd_strategy", "csrc"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in endings:
                yield path


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


# ---- names ---------------------------------------------------------------------------------------


def test_options_are_those_of_the_code() -> None:
    reference = generator()
    written = reference.section_of(REFERENCE)
    assert written == reference.options_section(), (
        "docs/reference.md is not up to date: python scripts/reference.py --write"
    )
    for option in OPTIONS.values():
        assert f"`{option.env}`" in written


def test_the_generator_prints_the_section() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference.py")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert printed.stdout.strip() == generator().section_of(REFERENCE)


def test_options_that_are_arguments_are_found() -> None:
    assert "timeout" in generator().keyword_arguments("open_session")
    assert "self" not in generator().keyword_arguments("GradientReducer")
    with pytest.raises(LookupError, match="no function or class nobody"):
        generator().keyword_arguments("nobody")


@pytest.mark.parametrize("name", ["HvdStrategy", "open_session", "GradientReducer"])
def test_every_argument_is_documented(name: str) -> None:
    lacking = [
        argument
        for argument in generator().keyword_arguments(name)
        if argument not in OPTIONS and not re.search(rf"[`(]{argument}\b", REFERENCE)
    ]
    assert not lacking, f"docs/reference.md does not tell of these arguments of {name}: {lacking}"


@pytest.mark.parametrize("name", hvd_strategy.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert f"`{name}`" in REFERENCE


@pytest.mark.parametrize("name", ["Session", "GradientReducer"])
def test_every_public_member_is_documented(name: str) -> None:
    classes = getattr(hvd_strategy, name).__mro__[:-1]  # without object
    members = [member for class_ in classes for member in vars(class_) if member[0] != "_"]
    assert len(members) > 5
    section = REFERENCE.partition(f"### `{name}`")[2].partition("\n#")[0]
    lacking = [member for member in members if not re.search(rf"`{member}\b", section)]
    assert not lacking, f"docs/reference.md does not tell of these members of {name}: {lacking}"


# ---- environment variables -----------------------------------------------------------------------


def _is_export_list(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def variables_of_the_package() -> set[str]:
    """What looks like a variable's name in a string of the sources."""
    found = {option.env for option in OPTIONS.values()}
    for path in sources(".py"):
        tree = ast.parse(path.read_text())
        # What a module exports is a name of Python's.
        kept = [statement for statement in tree.body if not _is_export_list(statement)]
        for node in (node for statement in kept for node in ast.walk(statement)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {
                    name
                    for name in re.findall(r"^[A-Z][A-Z0-9_]+$", node.value)
                    if "_" in name or name == "RANK"
                }
    for path in sources(".cpp", ".h", ".cu"):
        found |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text()))
    return found


def test_every_variable_that_is_read_is_documented() -> None:
    read = variables_of_the_package()
    assert {"HVD_TIMEOUT", "HVD_ISA", "HVD_STRATEGY_AUTOREGISTER", "SLURM_PROCID", "RANK"} <= read
    lacking = {name for name in read if f"`{name}`" not in REFERENCE}
    assert not lacking, f"docs/reference.md does not tell of these variables: {sorted(lacking)}"


@each_page
def test_no_variable_is_made_up(page: Path) -> None:
    named = set(re.findall(r"\bHVD_[A-Z0-9_]*[A-Z0-9]", page.read_text()))
    makefile = set(re.findall(r"\bHVD_[A-Z_]+", (ROOT / "Makefile").read_text()))
    assert named <= variables_of_the_package() | makefile


# ---- messages ------------------------------------------------------------------------------------

# Values in the messages of docs/faults.md; everything else in them has to come from the sources.
EXAMPLES = (
    "Killed",
    "ValueError: ",
    "the disk is full",
    "shape",
    "torch.float32",
    "weight",
    "float32",
    "allreduce (sum)",
    "the end of backward",
    "barrier",
    "hvd_strategy",
    "mpich",
    "validation",
    "optimizer step",
    "training_step.loss_of_rank_0",
    "/nowhere/",
    # Python's and torch's own words
    "FileNotFoundError: [Errno 2] No such file or directory: ",
    "The client socket has timed out after 4000ms while trying to connect to ",
    "The server socket has failed to listen on any local network address. port: 29417, useIpv6: "
    "false, code: -98, name: EADDRINUSE, message: address already in use",
)


@cache
def texts_of_the_sources() -> list[str]:
    """Constant parts of the strings in Python and C++, if long enough to mean something."""
    found = set()
    for path in sources(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
                # What logging fills in.
                found |= set(re.split(r"%(?:\.\d+)?[dfgs]", node.value))
    for path in sources(".cpp", ".h"):
        joined = re.sub(r'(?<=[^\\])"\s*\n\s*"', "", path.read_text())
        found |= {text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)}
    return [text for text in found if 7 <= len(text) <= 400]


def foreign_words(message: str) -> list[str]:
    """Words of a message that no string of the sources contains in this place."""
    covered = bytearray(len(message))
    known = [*texts_of_the_sources(), *EXAMPLES]
    known += [option.env for option in OPTIONS.values()]
    known += [f"{name}: " for name in errors.__all__]
    for text in known:
        start = message.find(text)
        while start >= 0:
            covered[start : start + len(text)] = b"\1" * len(text)
            start = message.find(text, start + 1)
    words = re.finditer(r"[A-Za-z_]{5,}", message)
    return [word[0] for word in words if 0 in covered[word.start() : word.end()]]


def test_foreign_words_are_found() -> None:
    died = "rank 1 (pid 3) was killed by signal 9 (Killed) without leaving the job"
    assert foreign_words(died) == []
    assert foreign_words(died.replace("leaving", "quitting")) != []
    assert foreign_words("something else entirely") == ["something", "entirely"]


def test_messages_are_those_of_the_code() -> None:
    blocks = code_blocks(ROOT / "docs" / "faults.md", "text")
    messages = [line for block in blocks for line in block.splitlines()]
    assert len(messages) > 20
    # How the engine's own lines begin.
    assert any(message.startswith("hvd_strategy: [rank ") for message in messages)
    assert "hvd_strategy: [rank " in texts_of_the_sources()
    foreign = {message: words for message in messages if (words := foreign_words(message))}
    assert not foreign, f"docs/faults.md quotes words that no code says: {foreign}"


# ---- links and examples --------------------------------------------------------------------------


@each_page
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    # Paths in backticks, from the root of the repository or of the package.
    named = r"`((?:csrc|docs|examples|benchmarks|scripts|tests|hvd_strategy)/[\w./-]+)`"
    for path in re.findall(named, text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for path in re.findall(r"\bpython (?!-)([\w/]+\.py)\b", text):
        assert path in ("train.py", "script.py") or (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^ {4})make (\w+)", text, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"\bpython -m ((?:benchmarks|tests|hvd_strategy)[\w.]*)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_tests_that_are_named_exist() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    file, count = "", 0
    # A name without a file is in the file named before it.
    for path, test in re.findall(r"`(\w+/\w+\.(?:py|cpp))?(?:::(\w+))?`", text):
        file = path or file
        if path:
            assert (ROOT / "tests" / path).exists(), path
        if test:
            count += 1
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"{file} has no test {test}"
    assert count > 50


@each_page
def test_examples_compile(page: Path) -> None:
    for number, block in enumerate(code_blocks(page, "python")):
        compile(block, f"{page.name}, block {number}", "exec")


@each_page
def test_tables_have_as_many_cells_as_their_heads(page: Path) -> None:
    width = 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(re.sub(r"\\\||`[^`]*`", "", line).strip().strip("|").split("|"))
        width = width or cells
        assert cells == width, f"{page.name}:{number} has {cells} cells, not {width}"
