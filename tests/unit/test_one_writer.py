"""A state of a flat buffer is changed in one file, so that a reader finds every change of it there."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import ls_strategy

PACKAGE = Path(ls_strategy.__file__).parent
OWNERS = {
    "FlatStates": PACKAGE / "zero" / "flat" / "flat_states.py",
    "FlatBuffer": PACKAGE / "zero" / "flat" / "flat_buffer.py",
}
SUBCLASSES = (*OWNERS, "QuantizedFlat", "CastFlat")


def states() -> set[str]:
    """The attributes of a flat buffer that have a value before any step: flags, and what is in flight."""
    found = set()
    trees = {name: ast.parse(file.read_text()) for name, file in OWNERS.items()}
    classes = [n for name, tree in trees.items() for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    assert len(classes) == len(OWNERS)
    for node in (node for each in classes for node in each.body):
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(t.id for t in node.targets if isinstance(t, ast.Name))
    return {name for name in found if not name.startswith("_")} - {"encodes"}  # which a subclass sets for good


def written(tree: ast.AST, own: tuple[str, ...]) -> set[str]:
    """Attributes that a file assigns: of what is called a flat, and of ``self`` in the classes ``own``."""
    inside = {
        id(node)
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and each.name not in own
        for node in ast.walk(each)
    }
    found = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ():
            for part in ast.walk(target):
                if not (isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)):
                    continue
                owner = ast.unparse(part.value)
                if owner.endswith("flat") or (owner == "self" and id(node) not in inside):
                    found.add(part.attr)
    return found


def writers() -> dict[str, list[str]]:
    found = defaultdict(list)
    files = [PACKAGE / "engine.py", *(f for d in ("zero", "access", "checkpoint") for f in (PACKAGE / d).rglob("*.py"))]
    for file in sorted(files):
        for name in written(ast.parse(file.read_text()), SUBCLASSES) & states():
            found[name].append(str(file.relative_to(PACKAGE)))
    return dict(found)


def test_every_state_of_a_flat_buffer_has_one_writer() -> None:
    found = writers()
    assert {"updating", "arriving", "publish_due", "gathering", "state", "update", "hold", "offloaded"} <= found.keys()
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_second_writer_would_be_found() -> None:
    code = (
        "class Other:\n    def f(self, flat):\n"
        "        flat.updating = None\n        self.job.flat.hidden = True\n        self.users = 1\n"
    )
    assert written(ast.parse(code), SUBCLASSES) == {"updating", "hidden"}


def test_no_part_of_a_strategy_writes_to_it() -> None:
    """They share a `RunState`, and get what else they need as arguments."""
    files = [f for each in ("lightning", "fabric") for f in (PACKAGE / each).rglob("*.py") if f.name != "strategy.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    stored = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assert stored
    assert [ast.unparse(n) for n in stored if ast.unparse(n.value).endswith("strategy")] == []
