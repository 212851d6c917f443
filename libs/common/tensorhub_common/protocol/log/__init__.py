"""Events: what happened, as the registry's leader writes it into a job's log.

Each command has one group of k >= 1 events, numbered by (cmd, i of k), the first of which is its outcome. `by`
repeats the command's sender, so a lane finds its own outcomes in the stream of all.
"""
