"""From the bytes of a request body to a checked request.

Requests are pydantic models: strict, closed and finite. Fields that the OpenAI API defines and that change nothing here
are dropped; those that would change the answer and cannot be honoured are refused by name. Knows nothing of HTTP,
models or tokens.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from penstock.errors import InvalidParameter, MalformedBody, RequestError, UnsupportedParameter, as_json

# A few bytes of JSON become an object of a hundred in memory, and each wrong one a report; and while they are read no
# other thread runs. So their number is bounded before anything is read. Counted as bytes, also within texts, which is
# why the limits are generous.
MAX_ENTRIES = 2**18  # of lists and objects; twice the longest context, where that is more
_NODE_ENTRIES = 4  # what a list, an object or the name of a field costs, in entries
_ESCAPES_AN_ENTRY = 2  # characters that are written as escapes
_COUNTED_BYTES = 2**19  # at once
_SPARE_FIELDS = 32  # unknown fields of an object that are worth a look at which they are


class WireModel(BaseModel):
    """A request or a part of one: no conversion between types, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    # Defined by the API, accepted where they have this type, without effect here.
    IGNORED: ClassVar[Mapping[str, type]] = MappingProxyType({})
    # Where it is said which fields there are.
    GUIDE: ClassVar[str] = "the server's /docs"
    # Defined by the API and not supported: only these values, which ask for nothing, are accepted.
    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({})

    @classmethod
    def has_required_fields(cls) -> bool:
        return any(field.is_required() for field in cls.model_fields.values())

    @model_validator(mode="before")
    @classmethod
    def _refuse_crowds(cls, fields: Any) -> Any:
        """Refuse an object of far too many fields as one mistake, not as thousands."""
        if isinstance(fields, dict) and len(fields) > len(cls.model_fields) + _SPARE_FIELDS:
            raise ValueError(
                f"give an object of at most {len(cls.model_fields)} fields; see {cls.GUIDE} for those that exist"
            )
        return fields


def at_most(num_entries: int) -> BeforeValidator:
    """Bound a mapping before its entries are looked at, each of which may be wrong. Lists have `fail_fast` for that."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            raise ValueError(f"give at most {num_entries} entries")
        return value

    return BeforeValidator(check)


_ADVICE: Mapping[type, str] = MappingProxyType(
    {str: "give a string", bool: "give true or false", dict: "give an object"}
)


Request = TypeVar("Request", bound=WireModel)


def most_entries(longest_context: int) -> int:
    """Return how many entries a body may have for a model: a list of token ids must fit, and leave room for others."""
    return max(MAX_ENTRIES, 2 * longest_context)


def parse_request(kind: type[Request], body: bytes, *, max_entries: int = MAX_ENTRIES) -> Request:
    """Return the request in `body`. Raises RequestError naming the parameter, the value and what would be right."""
    _check_number_of_parts(body, max_entries)
    try:
        # NaN and Infinity are no JSON, but many clients write them: the check of their field says more than a parser.
        document = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise MalformedBody(f"the request body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedBody("the request body must be a JSON object")
    if _count(body, b"\\u0000"):
        refuse_nul(document, ())
    for name, harmless in kind.REFUSED.items():
        value = document.pop(name, None)
        if value is not None and value not in harmless:
            right = " or give ".join(("leave it out", *map(as_json, harmless)))
            raise UnsupportedParameter(name, value, right)
    for name, type_ in kind.IGNORED.items():
        value = document.pop(name, None)
        if value is not None and not isinstance(value, type_):
            raise InvalidParameter(name, value, _ADVICE[type_])
    unknown = next((name for name in document if name not in kind.model_fields), None)
    if unknown is not None:
        raise _unknown_parameter(_dotted((unknown,)), kind.GUIDE)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise request_error(error, kind.GUIDE) from None


def request_error(error: ValidationError, guide: str, within: tuple[str, ...] = ()) -> RequestError:
    """Return what to raise for the first mistake; `within` is where what was checked lies in the request."""
    details = error.errors(include_url=False)[0]
    param = _dotted((*within, *details["loc"]))
    if details["type"] == "missing":
        return RequestError(f"{param} is required", param=param)
    if details["type"] == "extra_forbidden":
        return _unknown_parameter(param, guide)
    return InvalidParameter(param, details["input"], _advice(details))


def _check_number_of_parts(body: bytes, max_entries: int) -> None:
    max_nodes, max_escapes = max_entries // _NODE_ENTRIES, max_entries * _ESCAPES_AN_ENTRY
    if len(body) < max_nodes:
        return
    num_nodes = sum(_count(body, mark) for mark in (b"[", b"{", b'":'))
    if num_nodes > max_nodes or _count(body, b",") > max_entries or _count(body, b"\\") > max_escapes:
        limits = f"{max_entries} entries, {max_nodes} lists, objects and fields, and {max_escapes} escaped characters"
        raise RequestError(f"the request body has too many parts; send one of at most {limits}")


def _count(body: bytes, mark: bytes) -> int:
    """Count a mark in pieces: between two of them others' streams go on."""
    beyond = len(mark) - 1
    starts = range(0, len(body), _COUNTED_BYTES)
    return sum(body.count(mark, start, start + _COUNTED_BYTES + beyond) for start in starts)


def refuse_nul(value: object, location: tuple[int | str, ...]) -> None:
    """Refuse the character that ends texts elsewhere: tokenizers, templates and logs read it each in its own way."""
    found = _find_nul(value)
    if found is not None:
        place, text = found
        raise InvalidParameter(_dotted((*location, *place)), text, "send texts without NUL characters")


def _find_nul(value: object) -> tuple[tuple[int | str, ...], str] | None:
    """Return the place and the text of the first NUL. The place is put together on the way back, for that one alone."""
    if isinstance(value, str):
        return ((), value) if "\0" in value else None
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        if isinstance(name, str) and "\0" in name:
            return (), name
        # Of what holds no text, token ids may be many.
        if type(part) is not int and (found := _find_nul(part)) is not None:
            place, text = found
            return (name, *place), text
    return None


def _unknown_parameter(param: str, guide: str) -> RequestError:
    return RequestError(f"unknown parameter {param!r}; see {guide} for those that exist", param=param)


def _dotted(location: tuple[int | str, ...]) -> str:
    """Return `messages[0].content` for ("messages", 0, "content")."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part[:100]}" if text else part[:100]
    return text


def _advice(details: ErrorDetails) -> str:
    plain = {
        "int_type": "give a whole number",
        "float_type": "give a number",
        "finite_number": "give a finite number",
        "string_type": _ADVICE[str],
        "bool_type": _ADVICE[bool],
        "list_type": "give a list",
        "dict_type": _ADVICE[dict],
        "model_type": _ADVICE[dict],
    }
    kind, limits = details["type"], details.get("ctx", {})
    if kind in plain:
        return plain[kind]
    templates: dict[str, str] = {
        "literal_error": "give one of: {expected}",
        "greater_than_equal": "give a number of at least {ge:.15g}",
        "greater_than": "give a number over {gt:.15g}",
        "less_than_equal": "give a number of at most {le:.15g}",
        "too_short": f"give at least {_counted(limits.get('min_length'), 'entry', 'entries')}",
        "too_long": f"give at most {_counted(limits.get('max_length'), 'entry', 'entries')}",
        "string_too_short": f"give at least {_counted(limits.get('min_length'), 'character', 'characters')}",
        "string_too_long": f"give at most {_counted(limits.get('max_length'), 'character', 'characters')}",
        "value_error": "{error}",
    }
    if kind in templates:
        return templates[kind].format(**limits)
    return details["msg"][:1].lower() + details["msg"][1:]


def _counted(number: int | None, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a closed object whose properties are all required."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
