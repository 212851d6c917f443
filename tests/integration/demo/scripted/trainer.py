"""Ten versions, whose loss falls."""

from tests.integration.demo.scripted import WRONG, end_when_told, tell

for version in range(1, 11):
    tell("published", version=version, loss=float(version if WRONG == "loss" else -version))
tell("trained", version=10)
end_when_told(10, [])
