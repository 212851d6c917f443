"""What a leading manager says to those who ask: the SDK, users, and traces. Pure; nothing is decided here.

`decisions`, `jobs` and `app` import it, and the simulator drives it. It reads `core` and `log`.

Seams: `following`, `response_story`, `sdk`, `status`, `why`.
"""
