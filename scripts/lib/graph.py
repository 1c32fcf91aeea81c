"""Nodes of a `graph.json`."""


def builder():
    """An empty list of nodes, and a function that appends a node and returns its name."""
    nodes = []

    def node(name, op, *inputs):
        nodes.append({"name": name, "op": op, "inputs": list(inputs)})
        return name

    return nodes, node
