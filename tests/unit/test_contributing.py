"""What CONTRIBUTING.md says of the files: they exist, and the walks enter none twice."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ls_strategy"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

QUESTIONS = {
    "stage 2 shards": "zero_stages.py",
    "loss scale halves": "loss_scale.py",
    "NVMe reads start": "tiers/nvme.py",
    "1F1B": "parallel/pipeline/schedules.py",
    "re-cut": "checkpoint/reshard.py",
    "new tier": "tiers/__init__.py",
    "norm becomes global": "zero/step/global_norm.py",
    "aliases": "autoload.py",
    "AdamW's fast path": "zero/step/fused_optimizers.py",
    "expert reduces": "distributed/mesh.py",
    "unit is gathered and released": "zero/passes/gather.py",
    "owns the memory": "distributed/buffer_pool.py",
    "thread updates offloaded states": "tiers/stream.py",
    "kind of parallelism": "lightning/parallel_kinds.py",
    "changes of gradients": "zero/user_code/user_gradients.py",
    "gradients of virtual ranks": "distributed/tree_sum.py",
}


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def files_in(text: str) -> list[str]:
    return re.findall(r"`([a-z0-9_/]+\.py)`", text)


@pytest.mark.parametrize(("question", "file"), QUESTIONS.items(), ids=str)
def test_a_reading_question_has_one_answer_and_the_file_exists(question: str, file: str) -> None:
    rows = [row for row in section("Where is it").splitlines() if question in row]
    assert [files_in(row) for row in rows] == [[file]]
    assert (PACKAGE / file).is_file()


@pytest.mark.parametrize("title", ["The walk of a gradient", "The walk of a parameter"])
def test_a_walk_enters_files_that_exist_and_none_twice(title: str) -> None:
    steps = [line for line in section(title).splitlines() if re.match(r"\d+\. ", line)]
    files = [files_in(step)[:1] for step in steps]
    assert all(files), "each step names its file first"
    names = [name for (name,) in files]
    assert [name for name in names if not (PACKAGE / name).is_file()] == []
    assert len(set(names)) == len(names)
    assert files_in(section(title)) == names, "a walk names no file but those that it enters"


def test_every_named_class_and_function_of_the_questions_is_in_its_file() -> None:
    for row in section("Where is it").splitlines():
        files = files_in(row)
        if not files:
            continue
        source = ast.parse((PACKAGE / files[0]).read_text())
        defined = {n.name for n in ast.walk(source) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        assigned = [n for n in source.body if isinstance(n, ast.Assign | ast.AnnAssign)]
        targets = [t for n in assigned for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
        defined |= {t.id for t in targets if isinstance(t, ast.Name)}
        named = re.findall(r"`([A-Za-z_][A-Za-z0-9_.]*)`", row.replace(f"`{files[0]}`", ""))
        assert named, row
        assert [name for name in named if name.split(".")[-1] not in defined] == []
