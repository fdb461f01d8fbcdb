"""What Ray says of the node that this process runs on."""

import socket

import ray


def host_label() -> str:
    """The Ray label `host` of this node, or the hostname."""
    labels = ray.get_runtime_context().get_node_labels()
    return str(labels.get("host") or socket.gethostname())


def device_count() -> int:
    """How many engines this node may hold: its `metal` resource, 1 when it names none."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
    node = next(node for node in nodes if node["NodeID"] == node_id)
    return max(1, int(node["Resources"].get("metal", 1)))
