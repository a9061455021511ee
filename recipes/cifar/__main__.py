"""``python -m recipes.cifar``."""

from recipes.cifar.main import main

if __name__ == "__main__":
    main()
