"""``python -m recipes.gpt``."""

from recipes.gpt.main import main

if __name__ == "__main__":
    main()
