"""A hub on a Ray cluster: `start_hub` brings it up, `connect` finds the agent of a worker's node.

The actors keep the real processes running as children. NATS, registry, planner and rollout manager are on the head
node (`control`); each runner is beside an agent of its own in a placement group (`units`); each node whose workers ask
for it has one more agent for them, which stays when runners go.

Seams: `plan` (what a hub is to be), `node_process` (what a node's actor leaves and finds), this package itself.
"""

from tensorhub.integrations.ray.hub import RayHub, agent_here, connect, find_hub, start_hub

__all__ = ["RayHub", "agent_here", "connect", "find_hub", "start_hub"]
