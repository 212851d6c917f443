"""The hub on two hosts of the tests with a server."""

from tests.integrations.servers import hub_of_two_hosts

hub = hub_of_two_hosts
