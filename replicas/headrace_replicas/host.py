"""What Ray says of the node that this process runs on."""

import socket

import ray


def host_label() -> str:
    """The Ray label `host` of this node, or the hostname."""
    labels = ray.get_runtime_context().get_node_labels()
    return str(labels.get("host") or socket.gethostname())


def device_count() -> int:
    """How many engines this node may hold: its `metal` resource, 1 when it names none."""
    own = node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
    node = next(node for node in nodes if node["NodeID"] == own)
    return max(1, int(node["Resources"].get("metal", 1)))


def node_id() -> str:
    """Ray's id of this node; a node that is started again has another one."""
    return str(ray.get_runtime_context().get_node_id())
