"""`python -m tensorhub_registry` is `tensorhub-registry`."""

from tensorhub_registry.main import main

if __name__ == "__main__":
    main()
