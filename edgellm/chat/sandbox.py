"""A Jinja sandbox that a hostile template cannot hang or blow up.

Templates come inside files from strangers. Jinja's own sandbox keeps them from Python's internals
but not from a loop in a loop in a loop, from ``'x' * 10**10`` or from a list that contains itself
twice, forty times over. Here every loop, call, operator and filter draws on one budget of CPU
time and characters; what would compare or print a container weighs it first.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE_CHARS: Final = 1 << 20
# A conversation of 2,000 messages takes 0.03 s.
MAX_CPU_SECONDS = 1.0
# All characters that growing operations of one render may produce together.
MAX_CHARS = 256 << 20
# Values inside a container that is compared or printed, counted with repetition.
MAX_WEIGHT = 1_000_000
MAX_INT_BITS: Final = 256
MAX_WIDTH: Final = 10_000
# Cost in characters of one element of a new list.
ELEMENT_COST: Final = 16
# thread_time is a system call: read it once every so many steps.
STEPS_A_CHECK: Final = 32

_WIDE_FORMAT: Final = re.compile(r"\d{5,}|\*|\{[^{}]*\{")


class TemplateTooExpensiveError(jinja2.TemplateError):
    """The template used up its time, its characters or its nesting."""


class Budget:
    """What one render may still use. Time is this thread's, so a busy machine fails nothing; it is
    counted from the first check, because reading that clock costs as much as a short render."""

    __slots__ = ("chars", "deadline", "steps")

    def __init__(self) -> None:
        self.deadline = 0.0
        self.chars = MAX_CHARS
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % STEPS_A_CHECK:
            return
        now = time.thread_time()
        self.deadline = self.deadline or now + MAX_CPU_SECONDS
        if now > self.deadline:
            raise TemplateTooExpensiveError("the template takes too long")

    def charge(self, n_chars: int) -> None:
        self.chars -= n_chars
        if self.chars < 0:
            raise TemplateTooExpensiveError("the template produces too much text")


class _Local(threading.local):
    budget: Budget | None = None


_local = _Local()


class spending:  # noqa: N801  (reads as a statement: `with spending(budget):`)
    """Compile or render under ``budget`` on this thread."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def __enter__(self) -> Budget:
        _local.budget = self.budget
        return self.budget

    def __exit__(self, *exc: object) -> None:
        _local.budget = None


def _budget() -> Budget:
    budget = _local.budget
    if budget is None:
        budget = _local.budget = Budget()
    return budget


def _weigh(value: Any) -> None:
    """Refuse a container of more than MAX_WEIGHT values, repeated ones counted each time."""
    left = MAX_WEIGHT
    stack = [value]
    while stack:
        left -= 1
        if left < 0:
            raise TemplateTooExpensiveError("the template nests values too deeply")
        item = stack.pop()
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)


def plain(value: Any) -> Any:
    """``value``, weighed when it is a container: safe to compare or to print."""
    if isinstance(value, (str, int, float, type(None), Undefined)):
        return value
    _weigh(value)
    return value


def _loop(iterable: Any) -> Any:
    """The iterable of a ``for``: every pass over it is a step."""
    _budget().step()
    return _stepping(iterable) if not hasattr(iterable, "__len__") else iterable


def _stepping(iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget()
    for item in iterable:
        budget.step()
        yield item


def _concat(pieces: Iterable[str]) -> str:
    """Jinja's ``concat``, for macros, set blocks and the whole output, within the budget."""
    budget = _budget()
    parts: list[str] = []
    for piece in pieces:
        budget.charge(len(piece))
        parts.append(piece)
    return "".join(parts)


def _joinable(separator: str, items: Iterable[Any]) -> list[Any]:
    parts = list(items)
    _weigh(parts)
    size = sum(len(p) if isinstance(p, str) else 64 for p in parts)
    _budget().charge(size + len(separator) * len(parts))
    return parts


def _check_format(text: str, args: Iterable[Any]) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateTooExpensiveError("the template formats with too wide a field")
    size = len(text)
    for arg in args:
        plain(arg)
        size += len(arg) if isinstance(arg, str) else 64
    _budget().charge(size * (1 + text.count("%")))


def _charge_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Charge what ``text.name(*args)`` may produce, before it does."""
    budget = _budget()
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        width = args[0] if args and isinstance(args[0], int) else 8
        budget.charge(len(text) * width if name == "expandtabs" else width)
    elif name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        budget.charge(len(text) + text.count(args[0]) * len(args[1]))
    elif name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        pieces = text.count(separator) if separator else len(text) // 2
        budget.charge(len(text) + ELEMENT_COST * pieces)
    else:
        budget.charge(len(text))


class GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training: here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' ``tojson``: plain JSON, no HTML escapes, characters as they are."""
    if isinstance(value, Iterator):
        value = list(value)
    plain(value)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=_checked_width(indent),
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
    _budget().charge(len(text))
    return text


def _checked_width(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateTooExpensiveError(f"the template asks for a width of {value}")
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A stock filter that steps the budget and refuses huge numbers and heavy containers."""
    limit = 100 if name == "round" else MAX_WIDTH
    has_context = getattr(function, "jinja_pass_arg", None) is not None

    def filtered(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.step()
        own = args[1:] if has_context else args
        for arg in (*own[1:], *kwargs.values()):
            if isinstance(arg, int) and abs(arg) > limit:
                raise TemplateTooExpensiveError(f"the template calls {name} with {arg}")
        for arg in own:
            plain(arg)
        if own and isinstance(own[0], str):
            budget.charge(len(own[0]))
        return function(*args, **kwargs)

    if has_context:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered


def _weighing(test: Any) -> Callable[..., Any]:
    """A stock test (``is in``, ``is eq``) that compares no container it has not weighed."""

    def tested(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            plain(arg)
        return test(*args, **kwargs)

    if hasattr(test, "jinja_pass_arg"):
        tested.jinja_pass_arg = test.jinja_pass_arg  # type: ignore[attr-defined]
    return tested


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(plain(value)), str(plain(old)), str(plain(new))
    _charge_method(text, "replace", (old, new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = str(plain(value))
    pad = width if isinstance(width, str) else " " * int(_checked_width(width))
    _budget().charge(len(text) + (text.count("\n") + 1) * len(pad))
    lines = text.split("\n")
    rest = [pad + line if line or blank else line for line in lines[1:]]
    return "\n".join([pad + lines[0] if first else lines[0], *rest])


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text = str(plain(value))
    _check_format(text, (*args, *kwargs.values()))
    return text % (kwargs or args)


def _as_list(value: Any) -> list[Any]:
    items = list(value)
    _budget().charge(ELEMENT_COST * len(items))
    return items


def _from_json(text: Any) -> Any:
    return json.loads(str(text))


_STOCK_FILTERS: Final = frozenset(
    (
        *("abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e"),
        *("escape", "first", "float", "forceescape", "groupby", "int", "items", "last"),
        *("length", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round"),
        *("safe", "select", "selectattr", "slice", "sort", "string", "sum", "title", "trim"),
        *("truncate", "unique", "upper", "wordcount"),
    )
)
_OWN_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "tojson": tojson,
    "from_json": _from_json,
    "fromjson": _from_json,
    "replace": _replace,
    "indent": _indent,
    "format": _format,
    "list": _as_list,
    "_plain": plain,
    "_loop": _loop,
}


class _Guards(jinja2.visitor.NodeTransformer):
    """Puts the budget's checks into a parsed template."""

    def _wrap(self, node: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._wrap(node.iter, "_loop")  # type: ignore[arg-type]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.expr, nodes.Const) or all(
            isinstance(op.expr, nodes.Const) for op in node.ops
        ):
            return node
        node.expr = self._wrap(node.expr, "_plain")
        for op in node.ops:
            op.expr = self._wrap(op.expr, "_plain")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            n if isinstance(n, nodes.Const) else self._wrap(n, "_plain") for n in node.nodes
        ]
        return self._wrap_concat(node)

    def _wrap_concat(self, node: nodes.Concat) -> nodes.Node:
        # `a ~ b` grows text without being an operator that the sandbox intercepts.
        return nodes.Filter(node, "_grown", [], [], None, None, lineno=node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """A tuple that is read becomes a list: hashing nested tuples can take for ever."""
        self.generic_visit(node)
        return node if node.ctx != "load" else nodes.List(node.items, lineno=node.lineno)


def _grown(value: str) -> str:
    budget = _budget()
    budget.step()
    budget.charge(len(value))
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment transformers renders chat templates in, with bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=plain,
            optimized=False,
            cache_size=0,
        )
        stock = self.filters
        join = stock["join"]
        self.filters = {name: _guarded(name, stock[name]) for name in _STOCK_FILTERS}
        self.filters.update(_OWN_FILTERS, join=_bounded_join(join), _grown=_grown)
        self.tests = {name: _weighing(test) for name, test in self.tests.items()}
        self.globals.pop("lipsum", None)
        self.concat = _concat  # type: ignore[method-assign]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        guarded = _Guards().visit(tree)
        guarded.set_environment(self)
        return guarded  # type: ignore[no-any-return]

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, list, tuple, dict)):
            # They compare their arguments, or print them in an error.
            for arg in args:
                plain(arg)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name == "join" and args:
                args = (_joinable(owner, args[0]), *args[1:])
            _charge_method(owner, name, args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return inner(*args, **kwargs)

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        # What is not found is printed in the error.
        return super().getitem(obj, plain(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget().step()
        _check_operands(operator, left, right)
        if operator == "%" and isinstance(left, str) and isinstance(right, list):
            right = tuple(right)  # written as a tuple in the template
        return super().call_binop(context, operator, left, right)


def _bounded_join(join: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def bounded(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        return join(eval_ctx, _joinable(d, value), d, attribute)

    return bounded


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Charge what ``left operator right`` produces; refuse numbers that grow without end."""
    if operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, list) else (right,))
        return
    if operator == "**":
        _check_exponent(right)
    if operator == "*":
        _charge_repeat(left, right)
        _charge_repeat(right, left)
    sizes = [
        len(v) * (1 if isinstance(v, str) else ELEMENT_COST) for v in (left, right) if _sized(v)
    ]
    _budget().charge(sum(sizes))
    for value in (left, right):
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateTooExpensiveError("the template computes with too large a number")


def _sized(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


def _charge_repeat(value: Any, times: Any) -> None:
    if _sized(value) and isinstance(times, int):
        _budget().charge(len(value) * max(times, 0) * ELEMENT_COST)


def _check_exponent(exponent: Any) -> None:
    if isinstance(exponent, (int, float)) and abs(exponent) > MAX_INT_BITS:
        raise TemplateTooExpensiveError(f"the template computes a power of {exponent}")
