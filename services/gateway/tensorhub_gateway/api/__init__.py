"""What OpenAI's interface says: bodies that come, checked whole, and bodies that go. Pure.

`app` imports it. It imports `sessions`.

Seams: `answers`, `calls`, `refusals`.
"""
