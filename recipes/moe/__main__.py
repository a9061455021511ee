"""``python -m recipes.moe``."""

import sys

from recipes.moe.main import main
from recipes.moe.model import MoEGPTModule

if __name__ == "__main__":
    if sys.argv[1:2] == ["generate"]:
        from recipes.gpt import generate

        sys.exit(generate.main(MoEGPTModule, sys.argv[2:], "python -m recipes.moe generate"))
    main()
