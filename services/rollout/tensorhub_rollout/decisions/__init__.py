"""The policies of a leading manager, with what they remember from look to look, and what they have the leader do. Pure.

The policies themselves are functions, in `policy`. `jobs` and `app` import this, and the simulator drives it.

Seams: `decisions`, `fleet_size`, `seeding_watch`, `version_holds`.
"""
