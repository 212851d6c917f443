"""`tensorhub-registry`, which is also `python -m tensorhub_registry`."""

from tensorhub_common.runtime.extras import run_main


def main() -> None:
    """Run the program, or say which extra is missing."""
    run_main("tensorhub_registry.app.main", "tensorhub-registry", "server")


if __name__ == "__main__":
    main()
