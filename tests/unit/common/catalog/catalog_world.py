"""The driver of the catalog's fold, by the names of these tests."""

from tensorhub_simulator.drivers.catalog import *  # noqa: F403
from tensorhub_simulator.drivers.catalog import CatalogDriver

World = CatalogDriver
