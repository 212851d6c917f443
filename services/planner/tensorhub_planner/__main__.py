"""`tensorhub-planner`, which is also `python -m tensorhub_planner`."""

from tensorhub_common.runtime.extras import run_main


def main() -> None:
    """Run the program, or say which extra is missing."""
    run_main("tensorhub_planner.app.main", "tensorhub-planner", "server")


if __name__ == "__main__":
    main()
