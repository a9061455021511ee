"""Run programs one after the other in one pair of ranks: ``python tests/docs/run_pages.py page.py page.py ...``.

The first Trainer starts the second rank, which runs the same command; so Torch and Lightning are imported twice for all
pages, and not twice for each.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Run them; the exit status is 1 after an error, which is printed."""
    for path in sys.argv[1:]:
        print(f"=== {path}", flush=True)
        try:
            # Not by runpy, which changes sys.argv, from which the second rank is started.
            exec(compile(Path(path).read_text(), path, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo aborts a regular exit now and then, which is not what this is about
