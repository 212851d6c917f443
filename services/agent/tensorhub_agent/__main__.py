"""`python -m tensorhub_agent`."""

from tensorhub_agent.app.main import main

main()
