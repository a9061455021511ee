"""What the pages say of options, errors and names is what the source says; and the site builds without a warning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn import Embedding
from torch.optim import AdamW
from torch.utils.data import DataLoader

import ls_strategy
from ls_strategy import ZeROStrategy
from ls_strategy.hints import hints_of
from tests.docs import option_tables
from tests.docs.blocks import PAGES, ROOT

OPTIONS = ROOT / "docs" / "options.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
API = ROOT / "docs" / "api.rst"
_ENTRY = re.compile(r"^- ((?:`[^`]+`(?:\s+/\s+)?)+):\s", re.MULTILINE)
"""Messages of which there is more to say, at the beginning of an item of docs/troubleshooting.md."""
DOCUMENTS = (*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "recipes").glob("**/README.md")))

# --- options ----------------------------------------------------------------------------------------------------------


CONFIGS = [name for name in ls_strategy.__all__ if dataclasses.is_dataclass(getattr(ls_strategy, name))]


def test_every_option_is_listed_as_the_source_describes_it() -> None:
    """With its default; written by ``python -m tests.docs.option_tables``."""
    for page in option_tables.PAGES:
        text = page.read_text()
        assert option_tables.written(text) == text, page
    assert sorted(option_tables.classes(OPTIONS.read_text())) == sorted(["ZeROStrategy", *CONFIGS])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option_is_described(name: str) -> None:
    kind = getattr(ls_strategy, name)
    assert [field.name for field in dataclasses.fields(kind)] == list(option_tables.described(kind))


def test_environment_variables_are_those_of_the_source() -> None:
    listed = set(re.findall(r"^\| `(LS_STRATEGY_\w+)` \|", OPTIONS.read_text(), re.MULTILINE))
    used = {
        v
        for file in (ROOT / "ls_strategy").rglob("*.py")
        for v in re.findall(r"\bLS_STRATEGY_[A-Z_]+", file.read_text())
    }
    assert listed == used


ELSEWHERE = {
    # of the files and functions that a guide is about, and that no signature here has
    "ckpt_path", "sync_dist", "sync_dist_group", "weights_only", "modify", "strict_loading", "save_last", "devices",
    "num_nodes", "num_workers", "max_failures", "every_n_epochs", "every", "rank", "drop_last", "cache",
    "seed", "full_sequences", "synced_gpus", "tensor_parallel", "quant", "reshard_after_forward", "param_dtype",
    "use_reentrant", "save_distributed_checkpoint",
}  # fmt: skip


def taken() -> dict[str, list[Any]]:
    """Arguments of everything that pages call, with their annotations."""
    public = [getattr(ls_strategy, name) for name in ls_strategy.__all__]
    makers = [
        Trainer,
        AdamW,
        Embedding,
        DataLoader,
        Trainer.fit,
        Fabric.init_module,
        Fabric,
        TensorBoardLogger,
        ModelPruning,
        *(f for f in public if callable(f) and not _is_error(f)),
    ]
    found: dict[str, list[Any]] = {name: [] for name in ELSEWHERE}
    for make in makers:
        for name, parameter in inspect.signature(make).parameters.items():
            found.setdefault(name, []).append(parameter.annotation)
    return found


def _is_error(each: Any) -> bool:
    return isinstance(each, type) and issubclass(each, Exception)


def said() -> list[tuple[str, str, str]]:
    """Page, name and value of every ``name=value`` in code within text."""
    found = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```$|^### .*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        text = _ENTRY.sub("", text) if page == TROUBLES else text
        for code in re.findall(r"`([^`\n]+)`", text):
            if "--" not in code and not code.startswith("#SBATCH"):
                found += [(page.name, *pair) for pair in re.findall(r'\b([a-z]\w*)=("[^"]*"|[\w.]*)', code)]
    return found


def test_options_in_text_exist() -> None:
    known, found = taken(), said()
    assert len(found) > 100
    assert not [each for each in found if each[1] not in known]
    makers = [ZeROStrategy.__init__, *(getattr(ls_strategy, name) for name in CONFIGS)]
    options: dict[str, str] = {}
    for make in makers:
        for name, hint in hints_of(make).items():
            options[name] = f"{options.get(name, '')} {hint}"
    for page, name, value in found:
        choices = re.findall(r"Literal\[(.*?)\]", options.get(name, ""))
        words = {w for choice in choices for w in re.findall(r"[\"']([\w-]+)[\"']", choice)}
        if words and value.startswith('"') and value != '"..."':
            assert value.strip('"') in words, f"{page}: {name}={value}: there is {sorted(words)}"


# --- errors -----------------------------------------------------------------------------------------------------------

_ANY = "\0"
"""In place of what a message fills in."""


@cache
def messages() -> list[str]:
    """Every string of the source, with a mark where a value goes; strings that are added are one."""
    files = [file for package in ("ls_strategy", "recipes") for file in (ROOT / package).rglob("*.py")]
    found = {_text(node) for file in files for node in ast.walk(ast.parse(file.read_text()))}
    return [text for text in found if text is not None]


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or _ANY for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left) or _ANY) + (_text(node.right) or _ANY)
    return None


def explained(text: str) -> list[str]:
    """Beginnings of messages that have a cure: what an item begins with, or a heading of its own."""
    items = [message for item in _ENTRY.finditer(text) for message in re.findall(r"`([^`]+)`", item[1])]
    return [" ".join(each.split()) for each in (*items, *re.findall(r"^### `(.*)`$", text, re.MULTILINE))]


def headings() -> list[str]:
    return explained(TROUBLES.read_text())


def begins(heading: str) -> re.Pattern[str]:
    """Of a message; ``...`` is anything, but every other letter has to be in the source."""
    return re.compile(".*?".join(re.escape(part) for part in heading.split("...")), re.DOTALL)


@pytest.mark.wide
def test_every_message_that_is_explained_is_one_of_the_source() -> None:
    known = messages()
    assert len(headings()) > 40
    for heading in headings():
        words = heading.replace("...", "")
        assert len(words) >= 10, f"{heading!r} could be anything"
        pattern = begins(heading)
        # What varies at the beginning of a heading is a value, or ends with one.
        found = [
            m for m in known if pattern.match(m) and (not heading.startswith("...") or _ANY in m[: len(m) // 2 + 1])
        ]
        assert found, f"no message of the source begins with {heading!r}"


def test_every_message_is_explained_once_in_a_section_with_search_words() -> None:
    assert len(set(headings())) == len(headings())
    first, *sections = re.split(r"^## ", TROUBLES.read_text(), flags=re.MULTILINE)
    assert not explained(first)
    for section in sections:
        assert not explained(section) or "\n*Search words: " in section, section.splitlines()[0]


ACCIDENTS = (
    "SLURM and the Trainer do not agree:", "this rank stops because another one failed:",
    "Monitor: rank ... is slow since step", "out of memory:", "CorruptionCheck: before step ...",
    "CorruptionCheck: checkpoints may have wrong values",
    "LS_STRATEGY_OPS=1, but there is no kernel for", "saving ... failed: ...", "Got the checkpoint path ..., which",
    "the training data begin again inside an epoch",
)  # fmt: skip
"""Messages that say what happened, and cannot say all that may be done about it."""


def reports() -> list[str]:
    """What the watchdog says of ranks that wait: where they are, which has more than one cause."""
    tree = ast.parse((ROOT / "ls_strategy" / "distributed" / "watchdog" / "deadlock.py").read_text())
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("explain")]
    found = [
        _text(node.value) for f in functions for node in ast.walk(f) if isinstance(node, ast.Return) and node.value
    ]
    return [text for text in found if text is not None]


def test_messages_that_do_not_say_what_to_do_are_explained() -> None:
    """All others say it themselves (what was given, the rule, the cure), so the page need not repeat them."""
    assert set(ACCIDENTS) <= set(headings())
    assert len(reports()) > 1
    for message in reports():
        assert any(begins(heading).match(message) for heading in headings()), message


@pytest.mark.wide
def test_a_message_that_is_gone_is_noticed() -> None:
    """The test above can fail."""
    assert not any(begins("Got nvme_path=..., which is on a tier that does not exist").match(m) for m in messages())
    assert any(begins("Got nvme_path=..., which is on").match(m) for m in messages())


def test_lines_of_the_log_that_are_explained_are_printed() -> None:
    """By the table of docs/gpu.md, in which a number, or ``...``, is any value."""
    section = (ROOT / "docs" / "gpu.md").read_text().split("## The first lines of the log")[1].split("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(lines) > 4
    for line in lines:
        pattern = re.compile(".*".join(map(re.escape, re.split(r"\d+|\.\.\.", line))))
        assert any(pattern.search(message) for message in messages()), line


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As code hosts make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", t).lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}: there is {sorted(anchors(file))}"


def test_the_readme_leads_to_every_guide() -> None:
    text = (ROOT / "README.md").read_text()
    index = (ROOT / "docs" / "index.rst").read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text, page
        assert re.search(rf"^   {page.stem}$", index, re.MULTILINE), page


# --- reference --------------------------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name() -> None:
    documented = set(re.findall(r"^\.\. auto\w+:: ls_strategy\.(\w+)(?:\(\))?$", API.read_text(), re.MULTILINE))
    assert documented == set(ls_strategy.__all__)


def test_the_reference_has_every_method_of_the_strategy() -> None:
    """But for those of Lightning's, which it overrides, and the way to the engine."""

    def is_lightnings(member: Any) -> bool:
        functions = (member.fget,) if isinstance(member, property) else (getattr(member, "__func__", member),)
        return any(getattr(f, "__override__", False) for f in functions)

    classes = [kind for kind in ZeROStrategy.__mro__ if kind.__module__.startswith("ls_strategy.")]
    members = [pair for kind in classes for pair in vars(kind).items()]
    own = {name for name, m in members if not name.startswith("_") and not is_lightnings(m)}
    internal = {
        "require_engine",
        "raw_state_dict",
        "zero_precision",
        "on_all_ranks",
        "all_interrupted",
        "islands",
        "collection",
        # What the parts of the strategy share.
        "config",
        "engine",
        "virtual",
        "activations",
    }
    listed = re.search(r"autoclass:: ls_strategy\.ZeROStrategy\n   :members: (.*)\n", API.read_text())
    assert listed
    assert set(listed[1].split(", ")) == own - internal
    assert all(inspect.getdoc(getattr(ZeROStrategy, name)) for name in own)
