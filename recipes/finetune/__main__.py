"""``python -m recipes.finetune``."""

import sys

from recipes.finetune import base_model, export
from recipes.finetune.main import main

if __name__ == "__main__":
    if sys.argv[1:2] == ["make-base"]:
        sys.exit(base_model.main(sys.argv[2:]))
    if sys.argv[1:2] == ["export"]:
        sys.exit(export.main(sys.argv[2:]))
    main()
