"""``python -m recipes.moe``."""

from recipes.moe.main import main

if __name__ == "__main__":
    main()
