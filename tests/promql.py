"""Reads PromQL and tells what is wrong with it, given which metrics and labels there are."""

import re
from collections.abc import Iterator, Mapping

import promql_parser as promql
from promql_parser import AggModifierType, LabelModifierType, MatchOp

# What Prometheus itself adds: to every series it scrapes, and as a series.
TARGET_LABELS = frozenset({"job", "instance"})
OWN_SERIES = {"up": frozenset[str]()}
_WITHOUT_LABELS = frozenset({"vector", "scalar", "time", "pi"})
_SETS = frozenset({"and", "or", "unless"})


class UnknownName(Exception):
    """A metric or label that does not exist."""


def plain(expression: str) -> str:
    """Return an expression of a dashboard with Grafana's variables as Prometheus would get them."""
    return expression.replace("$__rate_interval", "5m")


def result_labels(expression: str, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the labels that the result's series have.

    `metrics` are the series that exist, and their labels. Raises UnknownName for any other, and for labels that are
    matched or grouped by and that the series do not have.
    """
    return _labels(promql.parse(plain(expression)), {**OWN_SERIES, **metrics})


def selectors(expression: str) -> Iterator[promql.VectorSelector]:
    """Yield every series that an expression selects."""
    return _selectors(promql.parse(plain(expression)))


def _selectors(node: object) -> Iterator[promql.VectorSelector]:
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if getattr(node, name, None) is not None:
            yield from _selectors(getattr(node, name))
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)


def _labels(node: object, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    match node:
        case promql.VectorSelector():
            return _selected(node, metrics)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, metrics)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(node.expr, metrics)
        case promql.AggregateExpr():
            return _aggregated(node, metrics)
        case promql.Call():
            return _called(node, metrics)
        case promql.BinaryExpr():
            return _combined(node, metrics)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
    raise AssertionError(f"this kind of expression is not known here: {node!r}")


def _selected(selector: promql.VectorSelector, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    if selector.name not in metrics:
        raise UnknownName(f"there is no metric {selector.name}")
    labels = metrics[selector.name] | TARGET_LABELS
    _check({matcher.name for matcher in selector.matchers.matchers}, labels, selector)
    return labels


def _check(wanted: set[str], labels: frozenset[str], node: object) -> None:
    missing = wanted - labels
    if missing:
        raise UnknownName(f"{', '.join(sorted(missing))} is no label of {node}")


def _aggregated(node: promql.AggregateExpr, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    inner = _labels(node.expr, metrics)
    if node.modifier is None:
        return frozenset()
    named = set(node.modifier.labels)
    _check(named, inner, node)
    return frozenset(named) if node.modifier.type == AggModifierType.By else inner - named


def _called(node: promql.Call, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    of_arguments = [_labels(argument, metrics) for argument in node.args]
    if node.func.name in _WITHOUT_LABELS:
        return frozenset()
    if node.func.name == "absent":
        (selector,) = node.args
        return frozenset(item.name for item in selector.matchers.matchers if item.op == MatchOp.Equal)
    if node.func.name == "histogram_quantile":
        _check({"le"}, of_arguments[1], node)
        return of_arguments[1] - {"le"}
    return frozenset().union(*of_arguments)


def _combined(node: promql.BinaryExpr, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    left, right = _labels(node.lhs, metrics), _labels(node.rhs, metrics)
    matching = node.modifier.matching if node.modifier is not None else None
    if matching is not None and matching.labels:
        _check(set(matching.labels), left, node)
        _check(set(matching.labels), right, node)
    is_alike = left == right or _is_number(node.lhs) or _is_number(node.rhs) or str(node.op) == "or"
    if not is_alike and (matching is None or matching.type != LabelModifierType.Include):
        raise UnknownName(f"no series of both sides are alike: {sorted(left)} and {sorted(right)} in {node}")
    if str(node.op) in _SETS or _is_number(node.rhs):
        return left
    return right if _is_number(node.lhs) else left & right


def _is_number(node: object) -> bool:
    if isinstance(node, promql.ParenExpr):
        return _is_number(node.expr)
    return isinstance(node, promql.NumberLiteral) or (isinstance(node, promql.Call) and node.func.name == "scalar")


def legend_labels(text: str) -> set[str]:
    """Return the labels named in a legend ({{instance}}) or in an annotation ({{ $labels.instance }})."""
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
