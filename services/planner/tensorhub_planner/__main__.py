"""`python -m tensorhub_planner`: what the `tensorhub-planner` command runs."""

from tensorhub_planner.app.main import main

if __name__ == "__main__":
    main()
