"""`python -m tensorhub_registry` is `tensorhub-registry`."""

from tensorhub_registry.app.main import main

if __name__ == "__main__":
    main()
