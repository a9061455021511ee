"""``python -m ls_strategy.cli``: the ``ls-strategy`` command without an installed script."""

import sys

from ls_strategy.extras.cli import main

sys.exit(main())
