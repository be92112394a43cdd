"""A graph as plain values: what can be asked of it."""

from __future__ import annotations

from sits_dagster.models.graph.structure import Graph, Node


def _graph(*nodes: Node) -> Graph:
    return Graph(nodes=nodes, inputs={}, outputs={}, constants={})


def test_all_nodes_are_those_of_bodies_too() -> None:
    """However deep, each behind the call that runs it."""
    inner = Node(operator="If", name="inner", bodies={"then": _graph(Node(operator="Exp", name="deep"))})
    outer = Node(
        operator="Loop", name="outer", bodies={"body": _graph(inner, Node(operator="Neg", name="n"))}
    )
    graph = _graph(Node(operator="Relu", name="first"), outer, Node(operator="Tanh", name="last"))
    assert [node.name for node in graph.all_nodes()] == ["first", "outer", "inner", "deep", "n", "last"]
