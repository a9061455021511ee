"""``python -m recipes.gpt``."""

import sys

from recipes.gpt.main import main
from recipes.gpt.model import GPTModule

if __name__ == "__main__":
    if sys.argv[1:2] == ["generate"]:
        from recipes.gpt import generate

        sys.exit(generate.main(GPTModule, sys.argv[2:], "python -m recipes.gpt generate"))
    main()
